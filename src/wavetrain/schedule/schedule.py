"""A schedule: placements and one ordered action list a rank. Frozen data; builders make it, passes return new ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from wavetrain.errors import InputError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.placement import Placement, wave


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every rank does, in which order.

    A schedule may be wrong (actions missing, an order that deadlocks): :func:`wavetrain.prove` says so. Only its shape is
    checked here.
    """

    name: str
    """The family that built it, or the name of the file it was loaded from."""
    num_micro_batches: int
    placements: tuple[Placement, ...]
    """One a route; each places the same number of stages."""
    routes: tuple[int, ...]
    """The route that each micro-batch follows, (num_micro_batches,)."""
    actions: tuple[tuple[Action, ...], ...]
    """One ordered list a rank, (num_ranks,)."""
    shares: tuple[float, ...] | None = None
    """How large the stages are, relative to each other, (num_stages,); None: all alike."""

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise InputError(f"{self.num_micro_batches} micro-batches: a step needs at least 1")
        if not self.actions:
            raise InputError("0 ranks: a schedule needs at least 1")
        if not self.placements or not self.placements[0]:
            raise InputError("a schedule needs at least one route with at least one stage")
        if len({len(p) for p in self.placements}) != 1:
            raise InputError("all routes must place the same number of stages")
        if len(self.routes) != self.num_micro_batches:
            raise InputError(f"{len(self.routes)} routes given for {self.num_micro_batches} micro-batches")
        if not all(0 <= r < len(self.placements) for r in self.routes):
            raise InputError(f"a micro-batch follows a route that is not among the {len(self.placements)} placements")
        if self.shares is not None:
            if len(self.shares) != self.num_stages:
                raise InputError(f"{len(self.shares)} shares given for {self.num_stages} stages")
            if not all(0 < share < math.inf for share in self.shares):
                raise InputError("the share of a stage must be above 0, and finite")
        for placement in self.placements:
            for stage, rank in enumerate(placement):
                if not 0 <= rank < self.num_ranks:
                    raise InputError(f"stage {stage} is placed on rank {rank}, but the ranks are 0..{self.num_ranks - 1}")

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of one route."""
        return len(self.placements[0])

    @property
    def num_routes(self) -> int:
        return len(self.placements)

    @property
    def num_actions(self) -> int:
        return sum(len(a) for a in self.actions)

    @cached_property
    def waves(self) -> int | None:
        """W where the placement is a wave of W waves, else None."""
        count, rest = divmod(self.num_stages, 2 * self.num_ranks)
        is_wave = self.num_routes == 1 and rest == 0 and self.placements[0] == wave(self.num_ranks, count)
        return count if is_wave else None

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(a.kind == "W" for actions in self.actions for a in actions)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that computes ``stage`` for ``micro_batch``."""
        return self.placements[self.routes[micro_batch]][stage]

    def cut(self, costs: Costs) -> Costs:
        """``costs`` for the stages of this schedule."""
        return costs.cut(self.placements, self.shares)

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return replace(self, name=name)

    @classmethod
    def single_route(
        cls,
        name: str,
        placement: Placement,
        num_micro_batches: int,
        actions: Sequence[Iterable[Action]],
        shares: tuple[float, ...] | None = None,
    ) -> Schedule:
        """A schedule whose micro-batches all follow one route."""
        return cls(
            name=name,
            num_micro_batches=num_micro_batches,
            placements=(placement,),
            routes=(0,) * num_micro_batches,
            actions=tuple(tuple(a) for a in actions),
            shares=shares,
        )


def check_counts(num_ranks: int, num_micro_batches: int) -> None:
    """Refuse less than one rank or micro-batch, as every builder does first."""
    if num_ranks < 1:
        raise InputError(f"{num_ranks} ranks: a pipeline needs at least 1")
    if num_micro_batches < 1:
        raise InputError(f"{num_micro_batches} micro-batches: a step needs at least 1")
