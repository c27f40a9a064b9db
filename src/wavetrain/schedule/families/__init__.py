"""The families of schedules by name, and :func:`build`, which makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wavetrain.errors import CapError, InputError, UnknownNameError
from wavetrain.schedule.actions import Kind
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families.chimera import chimera
from wavetrain.schedule.families.dualpipev import dualpipev
from wavetrain.schedule.families.gpipe import gpipe
from wavetrain.schedule.families.hanayo import hanayo
from wavetrain.schedule.families.interleaved import interleaved
from wavetrain.schedule.families.one_f_one_b import one_f_one_b
from wavetrain.schedule.families.zb_h import zb_h1, zb_h2
from wavetrain.schedule.families.zb_wave import zb_wave
from wavetrain.schedule.families.zbv import zbv
from wavetrain.schedule.optimizer.construct import rounded_up
from wavetrain.schedule.proof import CAP_TOLERANCE
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import costs_for, held_bytes


@dataclass(frozen=True)
class Family:
    """A way to build schedules."""

    name: str
    build: Callable[..., Schedule]
    stages_per_rank: int | None = None
    """How many stages every rank holds, where the scheme fixes it."""

    @property
    def takes_waves(self) -> bool:
        return self._takes("waves")

    @property
    def takes_stages_per_rank(self) -> bool:
        return self._takes("stages_per_rank")

    @property
    def takes_growth(self) -> bool:
        return self._takes("growth")

    @property
    def takes_costs(self) -> bool:
        """Whether the order is made for the costs; otherwise it is the same for all."""
        return self._takes("costs")

    def _takes(self, name: str) -> bool:
        return name in inspect.signature(self.build).parameters


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpipe", gpipe, 1),
        Family("1f1b", one_f_one_b, 1),
        Family("interleaved", interleaved),
        Family("chimera", chimera, 1),
        Family("hanayo", hanayo),
        Family("zb-h1", zb_h1, 1),
        Family("zb-h2", zb_h2, 1),
        Family("zbv", zbv, 2),
        Family("dualpipev", dualpipev, 2),
        Family("zb-wave", zb_wave),
    )
}
"""Every named family; ``auto`` searches among and beyond them."""

NAMES: tuple[str, ...] = (*FAMILIES, "auto")
"""What :func:`build` takes."""


def build(
    name: str,
    *,
    num_ranks: int,
    num_micro_batches: int,
    waves: int | None = None,
    stages_per_rank: int | None = None,
    breadth_first: bool = False,
    growth: float | None = None,
    costs: Costs | None = None,
    **options: Any,
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: one of :data:`NAMES`.
        num_ranks: P, at least 1.
        num_micro_batches: B, at least 1.
        waves: W, for ``hanayo`` and ``zb-wave``. Default: 2, or as many as the stages of ``costs`` allow. ``auto`` tries it too.
        stages_per_rank: v, for ``interleaved``. Default: 2, or as many as the stages of ``costs`` allow.
        breadth_first: for ``hanayo``.
        growth: for ``zb-wave``: the work of a pass over the ranks over that of the pass before. ``auto`` finds its own.
        costs: what to optimize for (``zb-wave``, ``auto``), and the memory cap to check (all).
        options: for ``auto``, as :func:`wavetrain.schedule.families.auto.auto` takes them.

    Raises:
        UnknownNameError: no such family.
        CapError: the schedule holds more than the cap; the error says the least cap that works.
        InputError: counts that the scheme cannot take.
    """
    if name not in NAMES:
        raise UnknownNameError("schedule", name, NAMES)
    if costs is not None and num_ranks >= 1 and costs.num_ranks != num_ranks:
        raise InputError(f"{num_ranks} ranks asked for, but the costs are for {costs.num_ranks}")
    if name == "auto":
        from wavetrain.schedule.families.auto import auto

        if stages_per_rank is not None:
            raise InputError("auto chooses the stages per rank itself; leave them out, or name a family")
        if growth is not None:
            raise InputError("auto chooses the growth of waves itself; leave it out, or name zb-wave")
        return auto(num_ranks, num_micro_batches, costs=costs, waves=waves, **options)
    family = FAMILIES[name]
    arguments: dict[str, Any] = dict(options)
    if stages_per_rank is not None and not family.takes_stages_per_rank:
        raise InputError(f"{name} takes no stages per rank{': give waves' if family.takes_waves else ''}")
    if waves is not None and not family.takes_waves:
        raise InputError(f"{name} takes no waves{': give stages per rank' if family.takes_stages_per_rank else ''}")
    if breadth_first:
        if name != "hanayo":
            raise InputError(f"{name} has no breadth-first order; only hanayo has")
        arguments["breadth_first"] = True
    if growth is not None:
        if not family.takes_growth:
            raise InputError(f"{name} has stages of one size; only zb-wave can grow")
        arguments["growth"] = growth
    if family.takes_waves:
        arguments["waves"] = waves if waves is not None else _default_count(costs, 2 * max(num_ranks, 1))
    if family.takes_stages_per_rank:
        default = _default_count(costs, max(num_ranks, 1))
        arguments["stages_per_rank"] = stages_per_rank if stages_per_rank is not None else default
    if family.takes_costs:
        arguments["costs"] = costs
    schedule = family.build(num_ranks, num_micro_batches, **arguments)
    if costs is not None and not family.takes_costs:
        _check_cap(schedule, costs)
    return schedule


def _default_count(costs: Costs | None, unit: int) -> int:
    """2, or fewer if the costs do not name as many stages."""
    if costs is None or costs.divisible:
        return 2
    return max(1, min(2, costs.num_stages // unit))


def _check_cap(schedule: Schedule, costs: Costs) -> None:
    costs = costs_for(schedule, costs)
    peaks = _peaks(schedule, held_bytes(schedule.cut(costs)))
    share = sum(costs.activation_bytes) / costs.num_ranks  # as in Costs.with_cap
    for r, (peak, cap) in enumerate(zip(peaks, costs.memory_cap, strict=True)):
        if peak > cap * (1 + CAP_TOLERANCE):
            least = max(peaks) / share
            raise CapError(
                f"{schedule.name} with {schedule.num_micro_batches} micro-batches holds {peak / share:.6g} times a micro-batch's "
                f"even share on rank {r}, above its cap of {cap / share:.6g}; "
                f"the least cap that works is {rounded_up(least)}, or use zb-wave or auto",
                least_cap=least,
            )


def _peaks(schedule: Schedule, held: Mapping[Kind, Sequence[float]]) -> list[float]:
    """Bytes at the peak, by rank."""
    peaks = []
    for actions in schedule.actions:
        now = peak = 0.0
        for kind, stage, _ in actions:
            now += held[kind][stage]
            peak = max(peak, now)
        peaks.append(peak)
    return peaks
