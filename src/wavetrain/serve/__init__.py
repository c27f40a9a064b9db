"""Generation: prompts in, text out, on one rank or several.

llm          LLM: what a user calls
sampling     SamplingParams, and the draw of a token
sequences    a prompt and what was generated for it; text as it comes
engine       which sequences run; one step after the other
runner       a step on this rank's part of the model
steps        what rank 0 tells the others, one small message a step
cache        keys and values of the tokens so far, and attention over them
ranks        sums over ranks, started and waited for; how much of them was hidden
workers      the other ranks of this machine
checkpoints  models from checkpoints of wavetrain and of Hugging Face
tokenizers   bytes, or a ``tokenizer.json``
"""
