"""Generation on one rank: the text of a plain loop over the whole model, whatever runs beside it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wavetrain import LLM, SamplingParams
from wavetrain.errors import CheckpointError, InputError
from wavetrain.models import BERT, GPT, Kraken, Ladder, LayeredModel, Parallel
from wavetrain.models.folders import save_folder

SMALL: dict[str, Any] = {"num_layers": 3, "hidden": 32, "num_heads": 4, "vocab": 256, "max_length": 48}
MODERN: dict[str, Any] = {"positions": "rotary", "norm": "rms", "mlp": "swiglu"}
MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(**SMALL),
    "gpt, grouped": lambda: GPT(**SMALL, **MODERN, kv_heads=2, bias=False),
    "parallel": lambda: Parallel(**SMALL),
    "ladder": lambda: Ladder(**SMALL, **MODERN),
    "kraken": lambda: Kraken(**SMALL, degree=4),
    "kraken, grouped": lambda: Kraken(**SMALL, **MODERN, degree=2, kv_heads=2),
}
PROMPTS = ["wave", "a longer prompt than the first", "x", "train of waves"]
GREEDY = SamplingParams(temperature=0, max_tokens=9)


def scattered(name: str) -> LayeredModel:
    torch.manual_seed(1)
    model: LayeredModel = MODELS[name]()
    for key, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in key), std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_folder(scattered(name), base / name)
    return base


@torch.no_grad()
def plainly(model: Any, prompt: str, num: int) -> list[int]:
    """The likeliest tokens, one whole pass each."""
    tokens = list(prompt.encode())
    for _ in range(num):
        logits: Tensor = model(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_a_plain_loop(name: str, folders: Path) -> None:
    model = scattered(name)
    with LLM(folders / name) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == list(prompt.encode())
        assert output.outputs[0].token_ids == plainly(model, prompt, 9)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_sequences_come_and_go(at_once: int, folders: Path) -> None:
    """More prompts than places, of unlike lengths: nobody's text depends on the others."""
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5, 7)]
    with LLM(folders / "kraken, grouped", max_num_seqs=at_once) as llm:
        together = llm.generate(PROMPTS, params)
    with LLM(folders / "kraken, grouped") as llm:
        alone = [llm.generate(p, how)[0] for p, how in zip(PROMPTS, params, strict=True)]
        assert llm.stats()["new_tokens"] == 22
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_seeds(folders: Path) -> None:
    with LLM(folders / "gpt", seed=3) as llm:
        params = SamplingParams(max_tokens=8, seed=5)
        first, again = (llm.generate(PROMPTS, params) for _ in range(2))
        assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
        assert llm.generate(PROMPTS[0], params)[0].outputs == first[0].outputs
        other = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=6))
        assert other[0].outputs[0].token_ids != first[0].outputs[0].token_ids
        free = [llm.generate(PROMPTS[0], SamplingParams(max_tokens=8))[0].outputs[0].token_ids for _ in range(2)]
        assert free[0] != free[1]


def test_log_probabilities(folders: Path) -> None:
    model = scattered("gpt")
    with LLM(folders / "gpt") as llm, torch.no_grad():
        found = llm.generate("wave", SamplingParams(max_tokens=3, temperature=0, logprobs=2))[0].outputs[0]
        expected = model(torch.tensor([[*b"wave", *found.token_ids]]))[0].log_softmax(-1)[3:-1]
    assert found.logprobs is not None
    for row, token, kept in zip(expected, found.token_ids, found.logprobs, strict=True):
        assert kept[token] == pytest.approx(float(row[token]), abs=1e-4)
        assert set(kept) == set(row.topk(2).indices.tolist())
    assert found.cumulative_logprob == pytest.approx(sum(k[t] for k, t in zip(found.logprobs, found.token_ids, strict=True)))


def test_stopping(folders: Path) -> None:
    with LLM(folders / "gpt") as llm:
        whole = llm.generate("wave", GREEDY)[0].outputs[0]
        third = whole.token_ids[2]
        at = whole.token_ids.index(third)
        stopped = llm.generate("wave", SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[third]))[0].outputs[0]
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == whole.token_ids[: at + 1]
        text = whole.text
        cut = next((c for c in text[1:] if c != "\ufffd" and ord(c) > 32), None)
        if cut is not None:
            short = llm.generate("wave", SamplingParams(temperature=0, max_tokens=9, stop=cut))[0].outputs[0]
            assert short.finish_reason == "stop"
            assert short.text == text[: text.index(cut)]
        pieces = list(llm.stream("wave", GREEDY))
        assert "".join(pieces) == text
        assert list(itertools.islice(llm.stream("wave", GREEDY), 1))  # one who leaves early
        assert llm.generate("wave", GREEDY)[0].outputs[0] == whole


def test_streams_and_calls_side_by_side(folders: Path) -> None:
    with LLM(folders / "gpt") as llm:
        whole = llm.generate("wave", GREEDY)[0].outputs[0].text
        open_stream = llm.stream("wave", GREEDY)
        begun = next(open_stream)
        llm.generate("train", GREEDY)
        assert begun + "".join(open_stream) == whole
    with pytest.raises(InputError, match="closed"):
        llm.generate("wave")


def test_threads_are_left_as_they_were(folders: Path) -> None:
    before = torch.get_num_threads()
    params = SamplingParams(max_tokens=9, logprobs=0)
    with LLM(folders / "kraken", deterministic=True) as llm, LLM(folders / "gpt"):
        first = llm.generate(PROMPTS, params)[0].outputs[0].token_ids
        assert first
    assert torch.get_num_threads() == before


def test_the_longest_sequence_ends_it(folders: Path) -> None:
    with LLM(folders / "gpt") as llm:
        found = llm.generate("x" * 40, SamplingParams(max_tokens=100))[0].outputs[0]
        assert (len(found.token_ids), found.finish_reason) == (8, "length")
        with pytest.raises(InputError, match="48 tokens, but the model takes at most 48, one of them new; shorten it by 1"):
            llm.generate(["fits", "x" * 48])
        assert not llm._engine.busy, "nothing of a refused call is left"
    with LLM(folders / "gpt", max_model_len=10) as llm:
        assert len(llm.generate("12345678", SamplingParams(max_tokens=100))[0].outputs[0].token_ids) == 2
    with LLM(folders / "kraken, grouped", max_model_len=400) as llm:  # rotary positions go on, and the cache grows
        assert len(llm.generate("x" * 250, SamplingParams(max_tokens=40))[0].outputs[0].token_ids) == 40
    with pytest.raises(InputError, match="learned 48 positions"):
        LLM(folders / "gpt", max_model_len=49)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", None, "prompt is empty"),
        ([], None, "no prompts"),
        ([[]], None, "prompt is empty"),
        ([[1, 256]], None, "token 256 is not one of the 256"),
        ([[1, -1]], None, "token -1"),
        ([3.5], None, "give a text, or a list of token numbers"),
        (5, None, "prompts are 5"),
        (b"abc", None, "prompts are b'abc'"),
        ("\ud800", None, "UTF-8"),
        (["a", "b"], [SamplingParams()], "1 sampling_params for 2 prompts"),
        ("a", SamplingParams(stop_token_ids=[300]), "token 300"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts: Any, params: Any, words: str, folders: Path) -> None:
    with LLM(folders / "gpt") as llm, pytest.raises(InputError, match=words):
        llm.generate(prompts, params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "3 ranks cannot share a Kraken of degree 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": 2, "shares": (1, 1)}, "add up to 4"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 1}, "at least 2"),
        ({"tokenizer": "nowhere.json"}, "there is no tokenizer"),
        ({"shares": "31"}, "shares is '31'"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"timeout_seconds": -1}, "timeout_seconds is -1"),
        ({"device": "bogus"}, "device is 'bogus'"),
    ],
)
def test_what_does_not_fit_the_model(options: dict[str, Any], words: str, folders: Path) -> None:
    with pytest.raises(InputError, match=words):
        LLM(folders / "kraken", **options)


def test_places_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no directory"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(CheckpointError):
        LLM(tmp_path)
    save_folder(BERT(**SMALL), tmp_path / "bert")
    with pytest.raises(InputError, match="'bert' cannot generate"):
        LLM(tmp_path / "bert")
    save_folder(GPT(**{**SMALL, "vocab": 100}), tmp_path / "few")
    with pytest.raises(InputError, match="fewer than bytes"):
        LLM(tmp_path / "few")


def test_a_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"wave": 0, "train": 1, "of": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = save_folder(GPT(**{**SMALL, "vocab": 4}), tmp_path / "words", eos_token_id=3)
    inner.save(str(folder / "tokenizer.json"))
    with LLM(folder) as llm:
        found = llm.generate("train of", SamplingParams(max_tokens=6, seed=1, ignore_eos=True))[0]
        assert found.prompt_token_ids == [1, 2]
        assert set(found.outputs[0].text.split()) <= {"wave", "train", "of", "?"}
        ends = llm.generate(["of"] * 8, SamplingParams(max_tokens=40))
        assert any(o.outputs[0].finish_reason == "stop" and o.outputs[0].token_ids[-1] == 3 for o in ends)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match="no tokenizer that can be read"):
        LLM(folder, tokenizer=tmp_path / "bad.json")
