from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_costs, random_schedule, randoms
from wavetrain.schedule.actions import Action
from wavetrain.schedule.analysis import CAUSES, critical_path, idle_by_cause, memory_curve
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.timeline import Timeline


def two_ranks(costs: Costs | None = None) -> Timeline:
    rows = (
        [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)],
    )
    return simulate(Schedule.single_route("1f1b", (0, 1), 2, rows), costs)


@settings(deadline=None, max_examples=150)
@given(randoms())
def test_causes_add_up_to_the_idle_time(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    costs = random_costs(random, schedule)
    timeline = simulate(schedule, costs)
    timeline = replace(timeline, memory_cap=tuple(random.choice([1.0, p * 1.01 + 0.1, 1e9]) for p in timeline.peak_bytes))
    for rank, idle in enumerate(idle_by_cause(timeline)):
        assert tuple(idle) == CAUSES
        assert min(idle.values()) >= -1e-9
        assert idle["overhead"] == pytest.approx(0.0, abs=1e-9)
        assert sum(idle.values()) == pytest.approx(timeline.makespan - timeline.work[rank])


@settings(deadline=None, max_examples=150)
@given(randoms())
def test_the_critical_path_has_no_hole(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    timeline = simulate(schedule, random_costs(random, schedule))
    path = critical_path(timeline)
    assert path[0].start == 0.0
    assert path[-1].end == timeline.makespan
    for before, after in itertools.pairwise(path):
        assert after.start == before.end
        if before.what == "message":
            assert (after.what, after.rank, after.action) == ("action", before.rank, before.action)
    spans = {(r, s.action): (s.start, s.end) for r, row in enumerate(timeline.spans) for s in row}
    for step in path:
        if step.what == "action":
            assert spans[step.rank, step.action] == (step.start, step.end)


@settings(deadline=None)
@given(randoms())
def test_the_memory_curve_peaks_where_the_timeline_says_and_ends_empty(random: Random) -> None:
    schedule = random_schedule(random)
    timeline = simulate(schedule, random_costs(random, schedule))
    for rank, curve in enumerate(memory_curve(timeline)):
        assert curve[0] == (0.0, 0.0)
        assert max(held for _, held in curve) == pytest.approx(timeline.peak_bytes[rank])
        assert curve[-1][1] == pytest.approx(0.0, abs=1e-9)
        assert [t for t, _ in curve] == sorted(t for t, _ in curve)


def test_waiting_for_a_rank_is_imbalance_and_for_a_link_is_message() -> None:
    # rank 0: 0F0 0F1 until 2, then it waits for 1B0, done at 4.25 and there at 4.5; then, from 6.5, for 1B1, done at 7.25
    idle = idle_by_cause(two_ranks(Costs.uniform(2, hop_latency=0.25)))
    assert idle[0] == pytest.approx(dict.fromkeys(CAUSES, 0.0) | {"imbalance": 2.25 + 0.75, "message": 0.25 + 0.25})
    assert idle[1] == pytest.approx(dict.fromkeys(CAUSES, 0.0) | {"warm-up": 1.25, "drain": 2.25})


def test_a_rank_without_actions_drains_all_along() -> None:
    schedule = Schedule.single_route("lone", (0,), 1, [[Action("F", 0, 0), Action("B", 0, 0)], []])
    timeline = simulate(schedule, replace(Costs.uniform(2), forward=(1.0,), backward_input=(1.0,), backward_weight=(1.0,),
                                          activation_bytes=(1.0,), message_bytes=(0.0,), divisible=False))  # fmt: skip
    assert idle_by_cause(timeline)[1] == dict.fromkeys(CAUSES, 0.0) | {"drain": 3.0}
    assert [step.action for step in critical_path(timeline)] == [Action("F", 0, 0), Action("B", 0, 0)]


def test_a_full_rank_waits_for_room() -> None:
    # rank 0 could do 0F1 at once, but may hold one micro-batch only
    rows = (
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)],
    )
    schedule = Schedule.single_route("lean", (0, 1), 2, rows)
    idle = idle_by_cause(simulate(schedule, Costs.uniform(2, memory_cap=1)))
    # from the end of 0F0 (1) to the start of 0B0 (4); later there is no forward left
    assert idle[0]["memory cap"] == 3.0
    assert idle[0]["imbalance"] == 3.0
    roomy = idle_by_cause(simulate(schedule, Costs.uniform(2, memory_cap=2)))
    assert roomy[0]["memory cap"] == 0.0


@pytest.mark.parametrize("first", [0.0, 3.0])
def test_an_empty_timeline_has_no_path(first: float) -> None:
    timeline = two_ranks()
    empty = replace(timeline, spans=((), ()), messages=(), memory_cap=(first + 1, 1.0))
    assert critical_path(empty) == ()
    assert empty.makespan == empty.bubble == 0.0
