"""Team: who evaluates which minibatch: this process all of them, or every rank of a process group one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.errors import RuntimeFailure


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

    def share(self, gradient: Tensor, loss: float) -> tuple[list[Tensor], list[float]]:
        """All minibatches' gradients (d,) and losses, in order, given this process's."""
        ...


class Alone:
    """One process evaluates all."""

    size: int | None = None

    def mine(self, index: int) -> bool:
        """Every one."""
        return index >= 0

    def agree(self, numbers: tuple[float, ...], seed: int) -> int:
        """With oneself."""
        return seed

    def share(self, gradient: Tensor, loss: float) -> tuple[list[Tensor], list[float]]:
        """Nothing to share."""
        return [gradient], [loss]


class Group:
    """Every rank of a process group evaluates the minibatch of its own number. All keep the same history."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size: int | None = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def mine(self, index: int) -> bool:
        """The one with this rank's number."""
        return index == self._rank

    def agree(self, numbers: tuple[float, ...], seed: int) -> int:
        """All ranks send a few numbers that are the same if their parameters and rounds are."""
        mine = torch.tensor([*numbers, float(seed)], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size or 1)]
        dist.all_gather(found, mine, group=self._group)
        odd = [i for i, one in enumerate(found) if not torch.equal(one[:-1], found[0][:-1])]
        if odd:
            raise RuntimeFailure(
                f"ranks disagree: parameters, round or number of points of rank {', '.join(map(str, odd))} differ from rank 0's; "
                "start all ranks from the same weights and call step() the same number of times on each"
            )
        return int(found[0][-1])

    def share(self, gradient: Tensor, loss: float) -> tuple[list[Tensor], list[float]]:
        """All ranks' gradients and losses."""
        gradients = [torch.empty_like(gradient) for _ in range(self.size or 1)]
        dist.all_gather(gradients, gradient, group=self._group)
        mine = torch.tensor([loss], dtype=torch.float64)
        losses = [torch.empty_like(mine) for _ in gradients]
        dist.all_gather(losses, mine, group=self._group)
        return gradients, [float(one) for one in losses]
