"""LLM: prompts in, text out. The names are vLLM's.

    from wavetrain import LLM, SamplingParams

    with LLM("runs/first", tensor_parallel_size=2) as llm:
        for output in llm.generate(["def ", "class "], SamplingParams(max_tokens=64, temperature=0.8)):
            print(output.outputs[0].text)

With several ranks this process is rank 0 and starts the others on this machine. Under torchrun (several machines) every rank
makes the same calls: rank 0's prompts count, the others follow it and get nothing back. Threads of one process may call the
same LLM; not under torchrun.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from wavetrain.errors import InputError, PeerLostError, RuntimeFailure
from wavetrain.models.sharding import share
from wavetrain.serve.checkpoints import open_source
from wavetrain.serve.engine import Engine
from wavetrain.serve.parts import Part, Request
from wavetrain.serve.ranks import Solo, Team
from wavetrain.serve.sampling import SamplingParams
from wavetrain.serve.sequences import RequestOutput
from wavetrain.serve.sequences import Sequence as Running
from wavetrain.serve.tokenizers import open_tokenizer
from wavetrain.serve.workers import Workers

Prompt = str | list[int]
"""A text, or its tokens."""

MAX_RANKS = 64
MAX_ROWS = 4096


class LLM:
    """A language model that generates.

    Args:
        model: a run of ``wavetrain train``, one of its checkpoints, or a folder with config.json and safetensors (wavetrain's,
            GPT-2's or Llama's).
        tensor_parallel_size: ranks that share the model; of a Kraken, a divisor of its degree.
        shares: of a Kraken on ranks that are not alike: sub-layers that each rank holds.
        tokenizer: a ``tokenizer.json``, or ``"bytes"``; None: the one beside the weights, or bytes.
        max_model_len: the longest sequence, prompt and new tokens; None: the model's own.
        max_num_seqs: sequences that run at once; others wait for a place.
        deterministic: of a Kraken: add up in a fixed order, with one thread a rank: the same bits on any number of ranks, for
            more traffic.
        seed: of draws whose prompt names none.
        timeout_seconds: how long a rank may be silent within a step.
        stats: measure how long every sum over ranks was hidden and waited for; see :meth:`stats`.
        device: of the model; others than ``cpu`` are written and not run yet.

    Raises:
        InputError: what was asked for does not fit the model.
        CheckpointError: weights are missing, damaged, or of wrong shapes.
        RankFailedError: a rank ended while it loaded or generated.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tensor_parallel_size: int | None = None,
        shares: Sequence[int] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        deterministic: bool = False,
        seed: int = 0,
        timeout_seconds: float = 600.0,
        stats: bool = False,
        device: str = "cpu",
    ) -> None:
        world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
        size = tensor_parallel_size if tensor_parallel_size is not None else len(shares) if shares else world or 1
        _check(size, max_num_seqs, max_model_len, world)
        _check_more(shares, seed, timeout_seconds, device)
        self._one_by_one = threading.Lock()
        """Threads that generate at the same time share steps, which are done by one of them."""
        request = Request(
            path=os.fspath(model),
            max_rows=max_num_seqs,
            max_length=max_model_len,
            shares=None if shares is None else tuple(shares),
            deterministic=deterministic,
            timeout_seconds=timeout_seconds,
            device=device,
        )
        self._workers: Workers | None = None
        self._follows, self._under_torchrun = False, size > 1 and world is not None
        store, rank = None, 0
        self._met: list[Solo | Team] = []
        watch: Callable[[], None] | None = None
        if self._under_torchrun:
            store, rank, _ = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        elif size > 1:
            source = open_source(model)  # what is wrong with it is said before processes are started
            share(source.config, size, request.shares)
            open_tokenizer(tokenizer, source.folder, source.config.vocab)
            del source
            self._workers = Workers(size, {"request": request.__dict__})
            store, watch = self._workers.store, self._workers.watch
        self._ended = weakref.finalize(self, _end, self._workers, self._met)
        try:
            part = Part.load(request, store, rank=rank, size=size, local=_on_one_machine(world), watch=watch)
        except BaseException as error:
            raise self._given_up(error) from None
        self._team, self._runner, self.max_model_len = part.team, part.runner, part.max_length
        self.config = part.source.config
        self._met.append(self._team)
        if stats and isinstance(self._team, Team):
            self._team.count_traffic()
        self._follows = rank > 0
        self._tokenizer = open_tokenizer(tokenizer, part.source.folder, self.config.vocab)
        self._engine = Engine(
            part.runner,
            part.team,
            self._tokenizer,
            vocab=self.config.vocab,
            max_rows=max_num_seqs,
            max_length=part.max_length,
            eos=part.source.eos,
            seed=seed,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the results are in the order of the prompts.

        Args:
            prompts: one or several, of any lengths, as text or as tokens.
            sampling_params: how; one for all, or one for each.
            on_step: called after every step with how many prompts are done, and how many tokens were generated.
        """
        self._require_open()
        if self._follows:
            return self._follow([])
        with self._others_told():
            given = _as_list(prompts)
            params = _as_params(sampling_params, len(given))
            for prompt, how in zip(given, params, strict=True):
                self._engine.check(prompt, how)
        with self._one_by_one:
            running = [self._engine.add(prompt, how) for prompt, how in zip(given, params, strict=True)]
        done = tokens = 0
        for touched in self._steps(running):
            tokens += len(touched)
            done += sum(s.finish_reason is not None for s in touched)
            if on_step is not None:
                on_step(done, tokens)
        return [sequence.output() for sequence in running]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt; yields the text piece by piece, as it is certain."""
        self._require_open()
        if self._follows:
            yield from self._follow([])
            return
        with self._others_told(), self._one_by_one:
            sequence = self._engine.add(prompt, sampling_params or SamplingParams())
        shown = 0
        for _ in self._steps([sequence]):
            text = sequence.text.safe()
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
        if rest := sequence.text.whole()[shown:]:
            yield rest

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.encode(text)

    def stats(self) -> dict[str, Any]:
        """What was done so far: rates, the cache's bytes, and if asked for at the start, how far sums over ranks were hidden."""
        found = {"ranks": self._team.size, **self._engine.counts.summary(), "cache_bytes_here": self._runner.cache.num_bytes}
        if isinstance(self._team, Team) and self._team.traffic is not None:
            found["communication"] = self._team.traffic.summary()
        return found

    def close(self) -> None:
        """End the other ranks. A closed model cannot generate."""
        self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _steps(self, running: list[Running]) -> Iterator[list[Running]]:
        """Steps until all of ``running`` are done; whatever goes wrong, none of them is left behind."""
        try:
            while any(sequence.finish_reason is None for sequence in running):
                with self._one_by_one:
                    self._require_open()
                    try:
                        touched = self._engine.step()
                    except BaseException as error:  # Ctrl-C as well: the ranks may be in the middle of a sum
                        raise self._given_up(error) from None
                yield [sequence for sequence in touched if sequence in running]
        finally:
            with self._one_by_one:
                for sequence in running:
                    if sequence.finish_reason is None:
                        self._engine.abort(sequence)
            if self._under_torchrun and self._ended.alive:
                self._team.send_step(None)

    @contextlib.contextmanager
    def _others_told(self) -> Iterator[None]:
        """Under torchrun: ranks that follow go on to their next call, if this one ends before its first step."""
        try:
            yield
        except BaseException:
            if self._under_torchrun:
                self._team.send_step(None)
            raise

    def _require_open(self) -> None:
        if not self._ended.alive:
            raise InputError("this LLM is closed, or a rank of it has failed; make a new one")

    def _follow(self, result: list[Any]) -> list[Any]:
        self._runner.follow()
        return result

    def _given_up(self, error: BaseException) -> BaseException:
        """End all ranks at once, without a word to those that could not hear it; the first cause of what happened."""
        found = self._workers.failure() if self._workers is not None and isinstance(error, PeerLostError) else None
        for team in self._met:
            team.close()  # which is all that ranks which are not this process's own hear of it
        self._met.clear()
        self._ended()
        return found or error


def _end(workers: Workers | None, met: list[Solo | Team]) -> None:
    """Tell the workers to stop, and see that they do."""
    if workers is not None:
        for team in met:
            with contextlib.suppress(RuntimeFailure):
                team.send_step(None)
                workers.end()
        workers.end(0)
    for team in met:
        team.close()


def _on_one_machine(world: int | None) -> bool:
    """Whether all ranks are here: this process has started them, or torchrun says so."""
    return world is None or os.environ.get("LOCAL_WORLD_SIZE") == str(world)


def _check(size: int, max_num_seqs: int, max_model_len: int | None, world: int | None) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_RANKS:
        raise InputError(f"tensor_parallel_size is {size!r}; give a whole number from 1 to {MAX_RANKS}")
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or not 1 <= max_num_seqs <= MAX_ROWS:
        raise InputError(f"max_num_seqs is {max_num_seqs!r}; give a whole number from 1 to {MAX_ROWS}")
    if max_model_len is not None and (not isinstance(max_model_len, int) or max_model_len < 2):
        raise InputError(f"max_model_len is {max_model_len!r}; give a whole number of at least 2")
    if world is not None and size > 1 and world != size:
        raise InputError(f"tensor_parallel_size is {size}, but torchrun started {world} ranks; make them equal")


def _check_more(shares: Any, seed: Any, timeout_seconds: Any, device: Any) -> None:
    if shares is not None and (not isinstance(shares, list | tuple) or any(type(n) is not int for n in shares)):
        raise InputError(f"shares is {shares!r}; give a whole number of sub-layers for every rank, such as (3, 1)")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}; give a whole number")
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds < 1e9:
        raise InputError(f"timeout_seconds is {timeout_seconds!r}; give seconds above 0")
    if device != "cpu" and not (isinstance(device, str) and device.startswith("cuda")):
        raise InputError(f"device is {device!r}; give 'cpu', or 'cuda' (written, and not run yet)")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InputError(f"prompts are {prompts!r:.60}; give a text, tokens, or a list of them")
    given: list[Any] = list(prompts)
    if given and all(type(token) is int for token in given):
        return [given]
    if not given:
        raise InputError("there are no prompts; give at least one")
    return given


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each")
    return list(params)
