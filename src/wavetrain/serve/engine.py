"""Which sequences run, one step after the other.

Prompts wait until a row of the cache is free. A step either reads the prompts of those that come in, or writes one token more of
all that run; a sequence that ends makes room at once, so that sequences come and go while others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from wavetrain.errors import InputError
from wavetrain.serve.ranks import Solo, Team
from wavetrain.serve.runner import Runner
from wavetrain.serve.sampling import SamplingParams, draw
from wavetrain.serve.sequences import Sequence, Text
from wavetrain.serve.steps import Row, Step
from wavetrain.serve.tokenizers import Tokenizer


@dataclass
class Counts:
    """What an engine did, in tokens and seconds."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    prefill_steps: int = 0
    new_tokens: int = 0
    """Written by steps of decoding; the first token of a sequence comes from its prompt."""
    decode_seconds: float = 0.0
    decode_steps: int = 0
    first_token_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    """Of the last sequences, from when each was added."""
    sequences: int = 0
    """That got their first token."""

    def summary(self) -> dict[str, Any]:
        """Rates; None where nothing was done."""
        ordered = sorted(self.first_token_seconds)
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None,
            "new_tokens": self.new_tokens + self.sequences,
            "decode_tokens_per_second": self.new_tokens / self.decode_seconds if self.decode_seconds else None,
            "median_first_token_seconds": ordered[len(ordered) // 2] if ordered else None,
        }


class Engine:
    """Rank 0's: takes prompts, decides on steps, draws tokens.

    Args:
        runner: this rank's part of the model.
        team: the ranks.
        tokenizer: text to tokens.
        vocab: tokens that the model knows.
        max_rows: sequences that run at once.
        max_length: the longest sequence.
        max_step_tokens: tokens of prompts that one step reads at most (one prompt may be longer).
        eos: tokens that end a text.
        seed: of draws whose prompt names none.
    """

    def __init__(
        self,
        runner: Runner,
        team: Solo | Team,
        tokenizer: Tokenizer,
        *,
        vocab: int,
        max_rows: int,
        max_length: int,
        max_step_tokens: int = 8192,
        eos: Iterable[int] = (),
        seed: int = 0,
    ) -> None:
        self.counts = Counts()
        self._runner, self._team, self._tokenizer = runner, team, tokenizer
        self._vocab, self._max_rows, self._max_length, self._max_step_tokens = vocab, max_rows, max_length, max_step_tokens
        self._eos, self._seed = frozenset(eos), seed
        self._number = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """By row of the cache."""
        self._moves: list[tuple[int, int]] = []
        self._added: dict[int, float] = {}

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting or self._running)

    def check(self, prompt: str | list[int], params: SamplingParams) -> list[int]:
        """The tokens of a prompt that can be continued."""
        if isinstance(prompt, str):
            try:
                tokens = self._tokenizer.encode(prompt)
            except UnicodeEncodeError as error:
                raise InputError(f"a prompt is no text that can be written as UTF-8: {error}") from error
        elif isinstance(prompt, (list, tuple)) and all(type(token) is int for token in prompt):
            tokens = list(prompt)
        else:
            raise InputError(f"a prompt is {prompt!r:.60}; give a text, or a list of token numbers")
        if not tokens:
            raise InputError("a prompt is empty; give at least one token to continue")
        for token in (*tokens, *params.stop_tokens):
            if not 0 <= token < self._vocab:
                raise InputError(f"token {token} is not one of the {self._vocab} that the model knows")
        if len(tokens) >= self._max_length:
            raise InputError(
                f"a prompt has {len(tokens)} tokens, but the model takes at most {self._max_length}, one of them new; "
                f"shorten it by {len(tokens) - self._max_length + 1} or more"
            )
        return tokens

    def add(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        """Let a prompt wait for its turn."""
        tokens = self.check(prompt, params)
        sequence = Sequence(
            number=self._number,
            prompt=tokens,
            params=params,
            text=Text(self._tokenizer, params.stops, tokens),
            eos=self._eos,
            prompt_text=prompt if isinstance(prompt, str) else None,
        )
        if params.temperature > 0:
            seed = params.seed if params.seed is not None else self._seed * 1_000_003 + self._number
            sequence.generator = torch.Generator().manual_seed(seed % 2**63)
        self._number += 1
        self._added[sequence.number] = time.perf_counter()
        self._waiting.append(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Do the next step; the sequences that got a token."""
        newcomers = self._admit()
        rows = newcomers or self._running
        if not rows:
            return []
        begin = time.perf_counter()
        given = [s.prompt if newcomers else s.tokens[-1:] for s in rows]
        wanted = [s.params.num_candidates for s in rows]
        step = Step(
            tuple(Row(s.slot or 0, s.length - len(tokens), len(tokens)) for s, tokens in zip(rows, given, strict=True)),
            tuple(token for tokens in given for token in tokens),
            tuple(self._moves),
            0 if 0 in wanted else max(wanted),
        )
        self._moves = []
        self._team.send_step(step)
        found = self._runner.run(step)
        for row, sequence in enumerate(rows):
            column = draw(found, row, sequence.params, sequence.generator)
            sequence.accept(found, row, column, self._max_length)
        self._count(newcomers, len(step.tokens), len(rows), time.perf_counter() - begin)
        touched = list(rows)
        for sequence in touched:
            if sequence.finish_reason is not None:
                self._release(sequence)
        return touched

    def abort(self, sequence: Sequence) -> None:
        """Stop a sequence where it is."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence.finish_reason is None and sequence.slot is not None:
            self._release(sequence)
        sequence.finish_reason = sequence.finish_reason or "abort"
        self._added.pop(sequence.number, None)

    def _admit(self) -> list[Sequence]:
        """Give rows to those that wait, as far as there are any, and a step is not too long."""
        newcomers: list[Sequence] = []
        tokens = 0
        while self._waiting and len(self._running) < self._max_rows:
            tokens += len(self._waiting[0].prompt)
            if newcomers and tokens > self._max_step_tokens:
                break
            sequence = self._waiting.popleft()
            sequence.slot = len(self._running)
            self._running.append(sequence)
            newcomers.append(sequence)
        return newcomers

    def _release(self, sequence: Sequence) -> None:
        """Free a row; the last one moves into it."""
        assert sequence.slot is not None
        last = self._running.pop()
        if last is not sequence:
            self._moves.append((len(self._running), sequence.slot))
            self._running[sequence.slot] = last
            last.slot = sequence.slot
        sequence.slot = None

    def _count(self, newcomers: list[Sequence], num_tokens: int, num_rows: int, seconds: float) -> None:
        counts, now = self.counts, time.perf_counter()
        if newcomers:
            counts.prompt_tokens += num_tokens
            counts.prefill_seconds += seconds
            counts.prefill_steps += 1
            counts.first_token_seconds += [now - self._added.pop(s.number) for s in newcomers]
            counts.sequences += len(newcomers)
        else:
            counts.new_tokens += num_rows
            counts.decode_seconds += seconds
            counts.decode_steps += 1
