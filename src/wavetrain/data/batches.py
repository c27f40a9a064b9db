"""Batches: an endless stream in which batch i depends on the seed and on i, and on nothing that came before.

The data is cut into windows of ``seq`` tokens; an epoch is one shuffled pass over all of them. Sample n of the stream (batch
n // batch, row n % batch) is window permutation(seed, n // num_windows)[n % num_windows], where the permutation is computed
for that one place. So a run can be resumed at any batch at once, and R replicas that share a batch take rows of it without
talking to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.data.shuffle import keys, permuted
from wavetrain.data.tokens import Tokens
from wavetrain.errors import InputError

_MOST_SAMPLES: Final = 1 << 62


class Objective(Protocol):
    """Makes (inputs, targets) of windows."""

    def __call__(self, windows: Tensor, samples: NDArray[np.uint64], seed: int) -> tuple[Tensor, Tensor]:
        """Turn windows (rows, seq + 1) int64 into inputs and targets, (rows, seq) each.

        ``samples`` (rows,) number the rows in the whole stream: what is random must depend only on them and ``seed``.
        """


def next_token(windows: Tensor, samples: NDArray[np.uint64], seed: int) -> tuple[Tensor, Tensor]:
    """The objective of language models: the target of a token is the one after it."""
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Batches:
    """An endless iterator over (inputs, targets), int64 tensors (batch / num_replicas, seq) each.

    Args:
        data: tokens, of memory or of files; also a bare array or bytes.
        batch: sequences a batch, over all replicas.
        seq: tokens a sequence.
        seed: names the order; 0 to 2**63 - 1.
        replica: which part of each batch is given: rows replica · batch / num_replicas and following.
        num_replicas: parts; divides ``batch``. All parts together are the batch of one replica.
        shuffle: False takes the windows in their order, as for validation.
        objective: what the targets are; the default is the next token, see also :class:`wavetrain.data.MaskedLM`.
    """

    def __init__(
        self,
        data: Tokens | NDArray[np.integer] | bytes,
        *,
        batch: int,
        seq: int,
        seed: int = 0,
        replica: int = 0,
        num_replicas: int = 1,
        shuffle: bool = True,
        objective: Objective = next_token,
    ) -> None:
        self.data = data if isinstance(data, Tokens) else Tokens(data)
        for name, value in (("batch", batch), ("seq", seq), ("num_replicas", num_replicas)):
            if value < 1:
                raise InputError(f"{name} is {value}; give at least 1")
        if not 0 <= seed < 1 << 63:
            raise InputError(f"seed is {seed}; give a whole number from 0 to 2**63 - 1")
        if not 0 <= replica < num_replicas:
            raise InputError(f"replica {replica} of {num_replicas}: replicas are numbered 0 to {num_replicas - 1}")
        if batch % num_replicas:
            above = -(-batch // num_replicas) * num_replicas
            raise InputError(f"a batch of {batch} cannot be shared by {num_replicas} replicas; take batch={above}")
        if len(self.data) < seq + 1:
            raise InputError(
                f"the data has {len(self.data)} tokens, too few for one sequence of seq={seq} and the token after it; "
                f"give more data or a seq of at most {max(len(self.data) - 1, 0)}"
            )
        self.batch = batch
        self.seq = seq
        self.seed = seed
        self.replica = replica
        self.num_replicas = num_replicas
        self.shuffle = shuffle
        self.objective = objective
        self._position = 0

    @property
    def num_windows(self) -> int:
        """Sequences an epoch."""
        return (len(self.data) - 1) // self.seq

    @property
    def position(self) -> int:
        """The batch that comes next, counted from 0 over all epochs; set it to jump there."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._check(value)
        self._position = int(value)

    @property
    def epoch(self) -> int:
        """The epoch in which the next batch begins, from 0."""
        return self._position * self.batch // self.num_windows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        made = self.at(self._position)
        self._position += 1
        return made

    def _check(self, position: int) -> None:
        if not 0 <= position < _MOST_SAMPLES // self.batch:
            raise InputError(f"position is {position}; batches are counted from 0 and end at 2**62 sequences")

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Make the batch at ``position`` (this replica's part of it); the stream stays where it is."""
        self._check(position)
        rows = self.batch // self.num_replicas
        first = position * self.batch + self.replica * rows
        samples = np.arange(first, first + rows, dtype=np.uint64)
        epochs, indices = np.divmod(samples, np.uint64(self.num_windows))
        if self.shuffle:
            indices = permuted(indices, self.num_windows, keys(self.seed, epochs))
        windows = np.stack([self.data.window(int(i) * self.seq, self.seq + 1) for i in indices])
        return self.objective(torch.from_numpy(windows), samples, self.seed)
