"""Small timelines for the tests of the page, built by hand so that they depend on no family of schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.placement import straight, wave
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.timeline import Timeline

MakeTimeline = Callable[..., Timeline]


def gpipe(num_ranks: int, num_micro_batches: int, *, name: str = "gpipe", split: bool = False) -> Schedule:
    """All forwards, then all backwards; with ``split``, every backward as I, then all W."""
    micro_batches = range(num_micro_batches)
    actions = [
        [Action("F", rank, m) for m in micro_batches]
        + [Action("I" if split else "B", rank, m) for m in micro_batches]
        + ([Action("W", rank, m) for m in micro_batches] if split else [])
        for rank in range(num_ranks)
    ]
    return Schedule.single_route(name, straight(num_ranks), num_micro_batches, actions)


def wave_gpipe(num_ranks: int, num_micro_batches: int, waves: int, *, name: str = "wave") -> Schedule:
    """All forwards stage by stage, then all I, then all W, on a wave placement: many stages a rank, for any size."""
    placement = wave(num_ranks, waves)
    actions: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        actions[rank] += [Action("F", stage, m) for m in range(num_micro_batches)]
    for stage in reversed(range(len(placement))):
        rank = placement[stage]
        actions[rank] += [Action("I", stage, m) for m in range(num_micro_batches)]
        actions[rank] += [Action("W", stage, m) for m in range(num_micro_batches)]
    return Schedule.single_route(name, placement, num_micro_batches, actions)


@pytest.fixture
def make_timeline() -> MakeTimeline:
    """``make_timeline(ranks, micro_batches, name=…, split=…, waves=…, **costs)`` simulates one of the above."""

    def make(
        num_ranks: int = 3,
        num_micro_batches: int = 4,
        *,
        name: str = "gpipe",
        split: bool = False,
        waves: int | None = None,
        **costs: float,
    ) -> Timeline:
        if waves is not None:
            schedule = wave_gpipe(num_ranks, num_micro_batches, waves, name=name)
        else:
            schedule = gpipe(num_ranks, num_micro_batches, name=name, split=split)
        return simulate(schedule, Costs.uniform(num_ranks, **costs))

    return make
