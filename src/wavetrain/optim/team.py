"""Who takes part in a round.

A :class:`Team` shares its minibatches: this process evaluates all of them, or every rank of a process group one. :class:`Shards`
share its parameters: this process holds all of them, or every rank of a process group some. :class:`Dealt` does both: all ranks
hold all parameters to evaluate minibatches with, but each keeps the history of some, and makes the steps of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.errors import InputError, RuntimeFailure
from wavetrain.optim.flat import Flat

Floats = NDArray[np.float64]


class Team(Protocol):
    """Those who share the minibatches of a round."""

    size: int | None
    """Minibatches of a round, where the team decides; None where the user does."""

    def mine(self, index: int) -> bool:
        """Whether this process evaluates minibatch ``index``."""
        ...

    def agree(self, numbers: tuple[float, ...], seed: int) -> int:
        """Check that all are at the same point; the seed of the round, the same for all.

        Raises:
            RuntimeFailure: they are not.
        """
        ...

    def share(self, mine: Shared) -> list[Shared]:
        """What all processes evaluated, in the order of minibatches, given this one's.

        Raises:
            RuntimeFailure: another one failed.
        """
        ...


@dataclass(frozen=True)
class Shared:
    """One evaluated minibatch; with an ``error``, one that could not be."""

    gradient: Tensor
    """(d,)"""
    loss: float
    has: tuple[bool, ...]
    """Which parameters got a gradient."""
    error: Exception | None = None


class Alone:
    """One process evaluates all."""

    size: int | None = None

    def mine(self, index: int) -> bool:
        """Every one."""
        return index >= 0

    def agree(self, numbers: tuple[float, ...], seed: int) -> int:
        """With oneself."""
        return seed

    def share(self, mine: Shared) -> list[Shared]:
        """Nothing to share."""
        if mine.error is not None:
            raise mine.error
        return [mine]


class Group:
    """Every rank of a process group evaluates the minibatch of its own number. All keep the same history."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.size: int | None = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def mine(self, index: int) -> bool:
        """The one with this rank's number."""
        return index == self.rank

    def place(self, points: Sequence[Tensor], whole: Flat) -> None:
        """Bring the parameters to the point, of all ranks' (d,), that this rank evaluates its minibatch at."""
        whole.write(points[self.rank])

    def finish(self, flat: Flat, whole: Flat) -> None:
        """After the steps of a round: all ranks have made the same."""

    def agree(self, numbers: tuple[float, ...], seed: int) -> int:
        """All ranks send a few numbers that are the same if their parameters and rounds are."""
        mine = torch.tensor([*numbers, float(seed)], dtype=torch.float64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.size or 1)]
        dist.all_gather(found, mine, group=self._group)
        odd = [i for i, one in enumerate(found) if not torch.equal(one[:-1], found[0][:-1])]
        if odd:
            raise RuntimeFailure(
                f"ranks disagree: parameters, round or number of points of rank {', '.join(map(str, odd))} differ from rank 0's; "
                "start all ranks from the same weights and call step() the same number of times on each"
            )
        return int(found[0][-1])

    def share(self, mine: Shared) -> list[Shared]:
        """Every rank's; first of all whether each has one, so that none waits for a rank that failed."""
        heads = self._heads(mine)
        gradients = [torch.empty_like(mine.gradient) for _ in heads]
        dist.all_gather(gradients, mine.gradient, group=self._group)
        return [
            Shared(gradient, float(one[1]), tuple(bool(v) for v in one[2:]))
            for gradient, one in zip(gradients, heads, strict=True)
        ]

    def _heads(self, mine: Shared) -> list[Tensor]:
        """Of every rank: whether it could evaluate, its loss, and which parameters got a gradient."""
        head = torch.tensor(
            [float(mine.error is None), mine.loss, *map(float, mine.has)], dtype=torch.float64, device=self._device
        )
        heads = [torch.empty_like(head) for _ in range(self.size or 1)]
        dist.all_gather(heads, head, group=self._group)
        if mine.error is not None:
            raise mine.error
        failed = [rank for rank, one in enumerate(heads) if not one[0]]
        if failed:
            raise RuntimeFailure(
                f"the closure failed on rank {', '.join(map(str, failed))}; the round was rolled back on all ranks"
            )
        return heads


class Dealt(Group):
    """Every rank evaluates one minibatch, and keeps the history and the inner optimizer's state of 1/N of the parameters.

    What crosses, beside a few numbers: to every rank the point it evaluates at, of every rank its gradient, and after the steps
    the parameters; (N − 1)/N · d numbers each, in and out of every rank.
    """

    def deal(self, groups: Sequence[dict[str, Any]]) -> tuple[Flat, Flat]:
        """Parameters to ranks: in their order, each to the rank with the least so far; frozen ones as well, so that they stay
        where they are when they are trained again.

        Returns:
            This rank's, and all.
        """
        size = self.size or 1
        load, owners = [0] * size, {}
        for p in (p for group in groups for p in group["params"]):
            owners[id(p)] = load.index(min(load))
            load[owners[id(p)]] += p.numel()
        whole = Flat(groups, owners=owners)
        parts = [[p for p in whole.parameters if owners[id(p)] == rank] for rank in range(size)]
        if not all(parts):
            raise InputError(
                f"shard_history deals {len(whole.parameters)} trained parameters to {size} ranks, and one would get none; "
                "leave it out"
            )
        self._parts = [sum(p.numel() for p in part) for part in parts]
        """Coordinates of each rank's part."""
        self._own = slice(sum(map(len, parts[: self.rank])), sum(map(len, parts[: self.rank + 1])))
        """Of the parameters, this rank's."""
        return Flat(groups, owners=owners, rank=self.rank), whole

    def place(self, points: Sequence[Tensor], whole: Flat) -> None:
        """Every rank sends its part of the others' points."""
        whole.write(self._exchange(torch.cat(list(points)), [self._parts[self.rank]] * len(points), self._parts))

    def share(self, mine: Shared) -> list[Shared]:
        """Of every rank's gradient, the part that is this rank's."""
        heads = self._heads(mine)
        own = self._parts[self.rank]
        found = self._exchange(mine.gradient, self._parts, [own] * len(heads)).view(len(heads), own)
        return [
            Shared(part, float(one[1]), tuple(bool(v) for v in one[2:][self._own]))
            for part, one in zip(found, heads, strict=True)
        ]

    def finish(self, flat: Flat, whole: Flat) -> None:
        """Every rank hears of the others' steps."""
        own = flat.read(flat.empty())
        whole.write(self._exchange(own.repeat(len(self._parts)), [len(own)] * len(self._parts), self._parts))

    def _exchange(self, given: Tensor, sent: list[int], received: list[int]) -> Tensor:
        found = given.new_empty(sum(received))
        dist.all_to_all_single(found, given, received, sent, group=self._group)
        return found


class Shards:
    """The ranks that together hold the parameters of one model, as those of a pipeline do; None: this process holds all.

    What a round decides, it decides by sums over all coordinates; these are the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device

    def total(self, numbers: Floats) -> Floats:
        """Sums over the ranks, element by element."""
        if self._group is None:
            return numbers
        sums = torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)
        dist.all_reduce(sums, group=self._group)
        found: Floats = sums.cpu().numpy()
        return found

    def all(self, one: bool) -> bool:
        """Whether it is so on all ranks."""
        return one if self._group is None else not self.total(np.array([float(not one)]))[0]
