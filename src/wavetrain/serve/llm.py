"""LLM: prompts in, text out. The names are vLLM's.

    from wavetrain import LLM, SamplingParams

    with LLM("runs/first", tensor_parallel_size=2) as llm:
        for output in llm.generate(["def ", "class "], SamplingParams(max_tokens=64, temperature=0.8)):
            print(output.outputs[0].text)

With several ranks this process is rank 0 and starts the others on this machine. Under torchrun (several machines) every rank
makes the same calls: rank 0's prompts count, the others follow it and get nothing back.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from wavetrain.errors import InputError, PeerLostError, RuntimeFailure
from wavetrain.models.sharding import share
from wavetrain.serve.checkpoints import open_source
from wavetrain.serve.engine import Engine
from wavetrain.serve.parts import Part, Request
from wavetrain.serve.ranks import Solo, Team, Traffic
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
        deterministic: add up in a fixed order, with one thread a rank: the same bits on any number of ranks, for more traffic.
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
        met: list[Solo | Team] = []
        threads = torch.get_num_threads()
        own = 1 if deterministic else threads if self._under_torchrun else max(1, threads // size)
        if self._under_torchrun:
            store, rank, _ = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        elif size > 1:
            source = open_source(model)  # what is wrong with it is said before processes are started
            share(source.config, size, request.shares)
            open_tokenizer(tokenizer, source.folder, source.config.vocab)
            del source
            self._workers = Workers(size, {"request": request.__dict__}, threads=own)
            store = self._workers.store
        self._ended = weakref.finalize(self, _end, self._workers, met, threads)
        torch.set_num_threads(own)
        try:
            part = Part.load(request, store, rank=rank, size=size, local=not self._under_torchrun)
        except (PeerLostError, RuntimeFailure) as error:
            raise self._cause(error) from None
        self._team, self._runner, self.max_model_len = part.team, part.runner, part.max_length
        self.config = part.source.config
        met.append(self._team)
        if stats and isinstance(self._team, Team):
            self._team.traffic = Traffic()
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
        if self._follows:
            return self._follow([])
        given = _as_list(prompts)
        params = _as_params(sampling_params, len(given))
        for prompt, how in zip(given, params, strict=True):
            self._engine.check(prompt, how)
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
        if self._follows:
            yield from self._follow([])
            return
        sequence = self._engine.add(prompt, sampling_params or SamplingParams())
        shown = 0
        for _ in self._steps([sequence]):
            text = sequence.text.safe() if sequence.finish_reason is None else sequence.text.whole()
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

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
                try:
                    touched = self._engine.step()
                except PeerLostError as error:
                    raise self._cause(error) from None
                except KeyboardInterrupt:  # the ranks may be in the middle of a sum
                    self._ended()
                    raise
                yield touched
        finally:
            for sequence in running:
                if sequence.finish_reason is None:
                    self._engine.abort(sequence)
            if self._under_torchrun:
                self._team.send_step(None)

    def _follow(self, result: list[Any]) -> list[Any]:
        self._runner.follow()
        return result

    def _cause(self, error: Exception) -> Exception:
        """The first cause of a failure that only says that a peer is gone."""
        if self._workers is None:
            return error
        found = self._workers.failure()
        self._workers.end(0)
        return found or error


def _end(workers: Workers | None, met: list[Solo | Team], threads: int) -> None:
    """Tell the workers to stop, see that they do, and give this process its threads back."""
    torch.set_num_threads(threads)
    if workers is not None:
        for team in met:
            with contextlib.suppress(PeerLostError):
                team.send_step(None)
                workers.end()
        workers.end(0)
    for team in met:
        team.close()


def _check(size: int, max_num_seqs: int, max_model_len: int | None, world: int | None) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_RANKS:
        raise InputError(f"tensor_parallel_size is {size!r}; give a whole number from 1 to {MAX_RANKS}")
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or not 1 <= max_num_seqs <= MAX_ROWS:
        raise InputError(f"max_num_seqs is {max_num_seqs!r}; give a whole number from 1 to {MAX_ROWS}")
    if max_model_len is not None and (not isinstance(max_model_len, int) or max_model_len < 2):
        raise InputError(f"max_model_len is {max_model_len!r}; give a whole number of at least 2")
    if world is not None and size > 1 and world != size:
        raise InputError(f"tensor_parallel_size is {size}, but torchrun started {world} ranks; make them equal")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
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
