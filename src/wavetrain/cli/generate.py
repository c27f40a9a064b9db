"""``wavetrain generate`` and ``wavetrain chat``: text from a checkpoint, on one rank or several."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from wavetrain.cli.common import Count, Counts, File, Flag, Names, Output, print_json
from wavetrain.errors import InputError

if TYPE_CHECKING:
    from wavetrain.serve.llm import LLM
    from wavetrain.serve.sampling import SamplingParams

MAX_PROMPTS = 10_000
MAX_AT_ONCE = 4_096


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How text is generated."""

    ranks: Count = None
    """Processes that share the model: of a Kraken, a divisor of its degree; of others, of its heads. Default: 1."""
    shares: Counts = None
    """Of a Kraken on ranks that are not alike: sub-layers that each rank holds, e.g. 3 1."""
    max_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 128
    """New tokens at most."""
    temperature: Annotated[float, tyro.conf.arg(metavar="X")] = 0.8
    """0 takes the likeliest token, 1 draws as the model says."""
    top_k: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Draw from the N likeliest tokens only; 0: from all."""
    top_p: Annotated[float, tyro.conf.arg(metavar="X")] = 1.0
    """Draw from the fewest likeliest tokens that have this probability together."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Of the draws: the same seed, the same text."""
    stop: Names = None
    """Texts at which generation ends."""
    tokenizer: File = None
    """A tokenizer.json. Default: the one beside the weights, or bytes."""
    max_length: Count = None
    """The longest sequence, prompt and new tokens. Default: the model's."""
    deterministic: Flag = False
    """Add up in a fixed order: the same bits on any number of ranks."""
    stats: Flag = False
    """Say how fast it was, and how much communication was hidden behind compute."""
    timeout_seconds: Annotated[float, tyro.conf.arg(metavar="X")] = 600.0
    """How long a rank may be silent within a step."""

    def open(self, model: Path, *, max_rows: int) -> LLM:
        """The model, ready."""
        from wavetrain.serve.llm import LLM, MAX_RANKS

        if self.ranks is not None and not 1 <= self.ranks <= MAX_RANKS:
            raise InputError(f"--ranks is {self.ranks}; give a number from 1 to {MAX_RANKS}")

        return LLM(
            model,
            tensor_parallel_size=self.ranks,
            shares=self.shares,
            tokenizer=self.tokenizer,
            max_model_len=self.max_length,
            max_num_seqs=max_rows,
            deterministic=self.deterministic,
            seed=self.seed,
            timeout_seconds=self.timeout_seconds,
            stats=self.stats,
        )

    def params(self, logprobs: int | None = None) -> SamplingParams:
        """How a prompt is continued."""
        from wavetrain.serve.sampling import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop or (),
            logprobs=logprobs,
        )


@dataclass(frozen=True, kw_only=True)
class Generate(Output):
    """Continue prompts with the model of a run, a checkpoint, or a folder of config.json and safetensors.

    wavetrain generate runs/first "def " --max-tokens 200

    wavetrain generate runs/kraken "def " "class " --ranks 2 --stats

    torchrun --nproc-per-node 2 -m wavetrain generate runs/kraken "def "

    One prompt is written as it comes; several are computed together, and written one after the other.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A run's directory, a checkpoint, or a folder with config.json and safetensors (wavetrain's, GPT-2's, Llama's)."""
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT ...]", help_behavior_hint="")] = ()
    """Texts to continue."""
    prompts_from: File = None
    """A file with one prompt a line, instead."""
    at_once: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Prompts that are computed together; the others wait."""
    logprobs: Count = None
    """With --json: log-probabilities of every token, and of the N likeliest."""
    how: Annotated[Generation, tyro.conf.arg(name="")] = field(default_factory=Generation)

    def run(self) -> int:
        """Generate, and print."""
        if self.logprobs is not None and not self.json:
            raise InputError("--logprobs is shown with --json only; add it")
        if not 1 <= self.at_once <= MAX_AT_ONCE:
            raise InputError(f"--at-once is {self.at_once}; give a number from 1 to {MAX_AT_ONCE}")
        prompts = self._prompts()
        with self.how.open(self.model, max_rows=min(self.at_once, len(prompts))) as llm:
            if self.json or len(prompts) > 1:
                self._all(llm, prompts)
            else:
                shown = "" if os.environ.get("RANK", "0") != "0" else prompts[0]
                for piece in llm.stream(prompts[0], self.how.params()):  # which may refuse the prompt
                    print(f"{shown}{piece}", end="", flush=True)
                    shown = ""
                if os.environ.get("RANK", "0") == "0":
                    print(shown)
            if self.how.stats and not self.json and os.environ.get("RANK", "0") == "0":
                print_stats(llm.stats())
        return 0

    def _prompts(self) -> list[str]:
        if self.prompts_from is not None:
            if self.prompts:
                raise InputError("prompts and --prompts-from are both given; one of them says what is continued")
            from wavetrain.files import read_text

            prompts = [line for line in read_text(self.prompts_from).splitlines() if line]
        else:
            prompts = list(self.prompts)
        if not prompts:
            raise InputError('there is no prompt; type: wavetrain generate MODEL "some text"')
        if len(prompts) > MAX_PROMPTS:
            raise InputError(f"{len(prompts)} prompts; at most {MAX_PROMPTS} at a time")
        return prompts

    def _all(self, llm: LLM, prompts: list[str]) -> None:
        show = sys.stderr.isatty() and not self.json

        def progress(done: int, tokens: int) -> None:
            if show:
                print(f"\r{done} of {len(prompts)} prompts, {tokens} tokens", end="", file=sys.stderr, flush=True)

        outputs = llm.generate(prompts, self.how.params(self.logprobs), on_step=progress)
        if show:
            print("\r\033[K", end="", file=sys.stderr)
        if os.environ.get("RANK", "0") != "0":
            return
        if self.json:
            found: list[dict[str, Any]] = [{"prompt": o.prompt, **asdict(o.outputs[0])} for o in outputs]
            print_json({"outputs": found, **({"stats": llm.stats()} if self.how.stats else {})})
            return
        for output in outputs:
            print(f"{output.prompt}{output.outputs[0].text}\n")


@dataclass(frozen=True, kw_only=True)
class Chat(Output):
    """Talk with a model in the terminal: what you type is added to the text, and the model goes on from there.

    wavetrain chat runs/first

    Ctrl-C stops an answer, a second one all; /reset forgets what was said; /quit or Ctrl-D ends.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A run's directory, a checkpoint, or a folder with config.json and safetensors."""
    how: Annotated[Generation, tyro.conf.arg(name="")] = field(default_factory=Generation)

    def run(self) -> int:
        """Read, answer, and so on."""
        if self.json:
            raise InputError("chat has no --json; use wavetrain generate")
        text = ""
        with self.how.open(self.model, max_rows=1) as llm:
            for line in _lines():
                if line.strip() in ("/quit", "/exit"):
                    break
                if line.strip() == "/reset":
                    text = ""
                    continue
                text = self._fitting(llm, f"{text}{line}\n")
                answer = ""
                with _ctrl_c() as pressed:
                    pieces = llm.stream(text, self.how.params())
                    for piece in pieces:
                        answer += piece
                        print(piece, end="", flush=True)
                        if pressed:
                            pieces.close()  # type: ignore[attr-defined]
                            break
                print(flush=True)
                text += answer + "\n"
            if self.how.stats:
                print_stats(llm.stats())
        return 0

    def _fitting(self, llm: LLM, text: str) -> str:
        """The end of the text, short enough to leave room for an answer."""
        room = max(1, llm.max_model_len - min(self.how.max_tokens, llm.max_model_len // 2))
        while len(llm.encode(text)) > room:
            text = text[max(1, len(text) // 8) :]
        return text


def _lines() -> Iterator[str]:
    """What the user types, until Ctrl-D."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """While an answer is written, Ctrl-C is noted: a step is not torn apart. A second one, while nothing comes, ends all."""
    pressed: list[int] = []

    def press(number: int, _: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def print_stats(stats: dict[str, Any]) -> None:
    """What was done, and how fast, on stderr."""
    from rich.console import Console
    from rich.table import Table

    def number(key: str, form: str, scale: float = 1.0) -> str:
        return "-" if stats.get(key) is None else format(stats[key] * scale, form)

    table = Table(show_header=False)
    table.add_row("ranks", str(stats["ranks"]))
    table.add_row("prompt", f"{stats['prompt_tokens']} tokens, {number('prompt_tokens_per_second', ',.0f')} a second")
    table.add_row("first token", f"{number('median_first_token_seconds', ',.1f', 1e3)} ms (median)")
    table.add_row("new", f"{stats['new_tokens']} tokens, {number('decode_tokens_per_second', ',.1f')} a second while decoding")
    table.add_row("KV cache", f"{stats['cache_bytes_here'] / 2**20:,.1f} MiB on this rank")
    if found := stats.get("communication"):
        table.add_row(
            "sums over ranks",
            f"{found['sums']} a step: {found['hidden_ms']:.2f} ms hidden behind compute, {found['exposed_ms']:.2f} ms waited for",
        )
        for i, one in enumerate(found["by_sum"]):
            table.add_row(f"  sum {i}", f"{one['hidden_ms']:.3f} ms hidden, {one['exposed_ms']:.3f} ms waited for")
    Console(stderr=True).print(table)
