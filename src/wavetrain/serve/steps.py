"""What rank 0 tells the others: which tokens of which sequences are computed next. One small message a step.

    [ kind, rows, tokens, moves, candidates | row: cache row, first position, tokens … | moves: from, to … | tokens … ]

A step of decoding has one token a row, and all of it fits into the message of fixed size; longer prompts follow in a second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_HEADER: Final = 5
RUN: Final = 1
STOP: Final = 2


@dataclass(frozen=True)
class Row:
    """The next tokens of one sequence."""

    slot: int
    """The cache's row that holds the sequence."""
    start: int
    """Position of the first of these tokens; all before it are in the cache."""
    count: int
    """How many tokens."""


@dataclass(frozen=True)
class Step:
    """One pass through the model."""

    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    """Of all rows, one after the other."""
    moves: tuple[tuple[int, int], ...] = ()
    """Rows of the cache that are moved before, (from, to): the running ones stay together."""
    candidates: int = 1
    """The likeliest tokens that rank 0 needs to see of every row; 0: all."""

    @property
    def decodes(self) -> bool:
        """Whether every row has one token, and rows are those of the cache from the first on."""
        return all(row.count == 1 and row.slot == i for i, row in enumerate(self.rows))

    @property
    def longest(self) -> int:
        """Positions that the cache must hold."""
        return max(row.start + row.count for row in self.rows)


def message_size(max_rows: int) -> int:
    """Numbers in the message of fixed size."""
    return _HEADER + 6 * max_rows


def encode(step: Step | None, max_rows: int) -> tuple[Tensor, Tensor | None]:
    """The message of fixed size, and the tokens if they do not fit; None stops the other ranks."""
    message = torch.zeros(message_size(max_rows), dtype=torch.int64)
    if step is None:
        message[0] = STOP
        return message, None
    numbers = [RUN, len(step.rows), len(step.tokens), len(step.moves), step.candidates]
    numbers += [n for row in step.rows for n in (row.slot, row.start, row.count)]
    numbers += [n for move in step.moves for n in move]
    inline = len(numbers) + len(step.tokens) <= len(message)
    if inline:
        numbers += step.tokens
    message[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return message, None if inline else torch.tensor(step.tokens, dtype=torch.int64)


def tokens_that_follow(message: Tensor) -> int:
    """How many tokens the second message has; 0: there is none."""
    kind, rows, tokens, moves, _ = message[:_HEADER].tolist()
    return tokens if kind == RUN and _HEADER + 3 * rows + 2 * moves + tokens > len(message) else 0


def decode(message: Tensor, following: Tensor | None) -> Step | None:
    """The inverse of :func:`encode`."""
    numbers: Iterator[int] = iter(message.tolist())
    kind, num_rows, num_tokens, num_moves, candidates = (next(numbers) for _ in range(_HEADER))
    if kind == STOP:
        return None
    rows = tuple(Row(next(numbers), next(numbers), next(numbers)) for _ in range(num_rows))
    moves = tuple((next(numbers), next(numbers)) for _ in range(num_moves))
    tokens = tuple(following.tolist()) if following is not None else tuple(next(numbers) for _ in range(num_tokens))
    return Step(rows, tokens, moves, candidates)
