"""Who takes part in a round.

A :class:`Team` shares its minibatches: this process evaluates all of them, or every rank of a process group one. :class:`Shards`
share its parameters: this process holds all of them, or every rank of a process group some. :class:`Dealt` does both: all ranks
hold all parameters to evaluate minibatches with, but each keeps the history of some, and makes the steps of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.errors import RuntimeFailure
from wavetrain.optim.flat import Flat

Floats = NDArray[np.float64]
GATHERED: Final = 8
"""Ranks, at most, whose few numbers are gathered and added up by each rather than summed on the way: where all cores have work,
Gloo's sum of as few waits three times as long."""


class Team(Protocol):
    """Those who share the minibatches of a round."""

    size: int | None
    """Minibatches of a round, where the team decides; None where the user does."""

    def agree(self, numbers: Callable[[], tuple[float, ...]], seed: int) -> int:
        """Check that all are at the same point, where ``numbers`` are the same; the seed of the round, the same for all.

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
    finite: bool = True
    """Whether loss and gradient are numbers, of all parameters that it was evaluated with."""


class Alone:
    """One process evaluates all."""

    size: int | None = None

    def agree(self, numbers: Callable[[], tuple[float, ...]], seed: int) -> int:
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

    def place(self, points: Sequence[Tensor], which: Sequence[int], start: Tensor, whole: Flat) -> None:
        """Bring the parameters to the point that this rank evaluates its minibatch at.

        Args:
            points: proposed ones, of the coordinates that this rank keeps.
            which: of these, each rank's.
            start: the first, all of it.
            whole: all parameters.
        """
        whole.write(points[which[self.rank]])

    def finish(self, flat: Flat, whole: Flat) -> None:
        """After the steps of a round: all ranks have made the same."""

    def agree(self, numbers: Callable[[], tuple[float, ...]], seed: int) -> int:
        """All ranks send a few numbers that are the same if their parameters and rounds are."""
        mine = torch.tensor([*numbers(), float(seed)], dtype=torch.float64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.size or 1)]
        dist.all_gather(found, mine, group=self._group)
        bits = [one[:-1].view(torch.int64) for one in found]  # what is no number is the same as itself
        odd = [i for i, one in enumerate(bits) if not torch.equal(one, bits[0])]
        if odd:
            raise RuntimeFailure(
                f"ranks disagree: parameters, rates, round or history of rank {', '.join(map(str, odd))} differ from rank 0's; "
                "start all ranks from the same weights and states, and call step(), and a scheduler's, equally often on each"
            )
        return int(found[0][-1])

    def share(self, mine: Shared) -> list[Shared]:
        """Every rank's; first of all whether each has one, so that none waits for a rank that failed."""
        head = self._head(mine)
        heads = [torch.empty_like(head) for _ in range(self.size or 1)]
        dist.all_gather(heads, head, group=self._group)
        self._check(mine, heads)
        gradients = [torch.empty_like(mine.gradient) for _ in heads]
        dist.all_gather(gradients, mine.gradient, group=self._group)
        return [
            Shared(gradient, float(one[1]), tuple(bool(v) for v in one[3:]), finite=bool(one[2]))
            for gradient, one in zip(gradients, heads, strict=True)
        ]

    def _head(self, mine: Shared) -> Tensor:
        """Of a rank: whether it could evaluate, its loss, whether all are numbers, and which parameters got a gradient."""
        numbers = [float(mine.error is None), mine.loss, float(mine.finite), *map(float, mine.has)]
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)

    def _check(self, mine: Shared, heads: Sequence[Tensor]) -> None:
        """Whether all ranks could evaluate."""
        if mine.error is not None:
            raise mine.error
        failed = [rank for rank, one in enumerate(heads) if not one[0]]
        if failed:
            raise RuntimeFailure(
                f"the closure failed on rank {', '.join(map(str, failed))}; the round was rolled back on all ranks"
            )


class Dealt(Group):
    """Every rank evaluates one minibatch, and keeps the history and the inner optimizer's state of 1/N of the parameters.

    What crosses, beside a few numbers: to every rank but the first the point it evaluates at, of every rank its gradient, and
    after the steps the parameters; (N − 1)/N · d numbers each, in and out of every rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._owners: dict[Tensor, int] = {}
        self._parts: list[int] = []
        """Coordinates of each rank's part."""
        self._own = slice(0)
        """Of the parameters, this rank's."""

    def deal(self, groups: Sequence[dict[str, Any]]) -> tuple[Flat, Flat]:
        """Parameters to ranks: each to the one with the least so far, those that are trained first. Who has one keeps it, so that
        the inner optimizer's state is where it is needed.

        Returns:
            The parameters of this rank, and all.
        """
        size, every = self.size or 1, [p for group in groups for p in group["params"]]
        self._owners = {p: self._owners[p] for p in every if p in self._owners}
        load = [sum(p.numel() for p, owner in self._owners.items() if owner == rank) for rank in range(size)]
        for p in sorted((p for p in every if p not in self._owners), key=lambda p: not p.requires_grad):
            self._owners[p] = load.index(min(load))
            load[self._owners[p]] += p.numel()
        owners = {id(p): rank for p, rank in self._owners.items()}
        whole = Flat(groups, owners=owners)
        parts = [[p for p in whole.parameters if owners[id(p)] == rank] for rank in range(size)]
        self._parts = [sum(p.numel() for p in part) for part in parts]
        self._own = slice(sum(map(len, parts[: self.rank])), sum(map(len, parts[: self.rank + 1])))
        return Flat(groups, owners=owners, rank=self.rank), whole

    def keeps(self, parameter: Tensor) -> bool:
        """Whether its history and state are this rank's."""
        return self._owners.get(parameter) == self.rank

    def place(self, points: Sequence[Tensor], which: Sequence[int], start: Tensor, whole: Flat) -> None:
        """Every rank sends its part of the others' points, but of the first, which all know."""
        if any(which):
            sent = [self._parts[self.rank] * min(one, 1) for one in which]
            received = [part * min(which[self.rank], 1) for part in self._parts]
            found = self._exchange(torch.cat([points[one][: sent[i]] for i, one in enumerate(which)]), sent, received)
        whole.write(found if which[self.rank] else start)

    def share(self, mine: Shared) -> list[Shared]:
        """Of every rank's gradient, the part that is this rank's; with each, its head, bit for bit."""
        own, head = self._parts[self.rank], self._head(mine).view(mine.gradient.dtype)
        given = [one for part in torch.split(mine.gradient, self._parts) for one in (part, head)]
        sent = [part + len(head) for part in self._parts]
        found = self._exchange(torch.cat(given), sent, [own + len(head)] * len(sent)).view(len(sent), own + len(head))
        heads = list(found[:, own:].contiguous().view(torch.float64))
        self._check(mine, heads)
        return [
            Shared(part, float(one[1]), tuple(bool(v) for v in one[3:][self._own]), finite=bool(one[2]))
            for part, one in zip(found[:, :own], heads, strict=True)
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
        size = dist.get_world_size(self._group)
        if size <= GATHERED:
            every = [torch.empty_like(sums) for _ in range(size)]
            dist.all_gather(every, sums, group=self._group)
            sums = torch.stack(every).sum(dim=0)
        else:
            dist.all_reduce(sums, group=self._group)
        found: Floats = sums.cpu().numpy()
        return found

    def all(self, each: Sequence[bool]) -> list[bool]:
        """Whether each is so on all ranks."""
        return [not one for one in self.total(np.array([float(not one) for one in each]))]
