from __future__ import annotations

import heapq
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_costs, random_schedule, randoms
from wavetrain.errors import InputError, ProofError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.placement import straight
from wavetrain.schedule.proof import Certificate, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    rows = [[Action(kind, r, mb) for kind in ("F", "B") for mb in range(num_micro_batches)] for r in range(num_ranks)]
    return Schedule.single_route("gpipe", straight(num_ranks), num_micro_batches, rows)


def by_events(schedule: Schedule, costs: Costs) -> tuple[dict[Action, tuple[float, float]], dict[Action, tuple[float, float]]]:
    """Spans of all actions, and (on the link, arrived) of every message by the action that made it: a heap of events in time."""
    home = {a: r for r, row in enumerate(schedule.actions) for a in row}
    spans: dict[Action, tuple[float, float]] = {}
    messages: dict[Action, tuple[float, float]] = {}
    here: set[tuple[int, Action]] = set()  # results that are at a rank
    free: dict[tuple[int, int], float] = {}
    at, busy = [0] * schedule.num_ranks, [False] * schedule.num_ranks
    events: list[tuple[float, int, str, int, Action]] = []

    def needs(a: Action) -> list[Action]:
        earlier = {"F": [("F", a.stage - 1)], "W": [("I", a.stage)]}.get(
            a.kind, [("F", a.stage), ("B", a.stage + 1), ("I", a.stage + 1)]
        )
        found = [Action(kind, stage, a.micro_batch) for kind, stage in earlier]  # type: ignore[arg-type]
        return [n for n in found if n in home]

    def start(rank: int, now: float) -> None:
        row = schedule.actions[rank]
        if not busy[rank] and at[rank] < len(row) and all((rank, n) in here for n in needs(row[at[rank]])):
            action = row[at[rank]]
            end = now + costs.seconds(action.kind, action.stage, rank)
            spans[action] = (now, end)
            busy[rank] = True
            heapq.heappush(events, (end, len(spans), "done", rank, action))

    for r in range(schedule.num_ranks):
        start(r, 0.0)
    while events:
        now, _, what, rank, action = heapq.heappop(events)
        here.add((rank, action))
        if what == "done":
            busy[rank] = False
            at[rank] += 1
            targets = {home[t] for t in home if action in needs(t)} - {rank}
            for target in targets:
                edge = action.stage if action.kind == "F" else action.stage - 1
                begin = max(now, free.get((rank, target), 0.0))
                free[rank, target] = begin + costs.message_bytes[edge] / costs.bandwidth[rank][target]
                arrives = free[rank, target] + costs.latency[rank][target]
                messages[action] = (begin, arrives)
                heapq.heappush(events, (arrives, len(spans), "arrived", target, action))
        start(rank, now)
    return spans, messages


@settings(deadline=None, max_examples=150)
@given(randoms())
def test_times_equal_a_naive_simulation_of_events(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    costs = random_costs(random, schedule)
    spans, messages = by_events(schedule, costs)
    timeline = simulate(schedule, costs)
    assert timeline.num_actions == len(spans) == schedule.num_actions
    for rank, row in enumerate(timeline.spans):
        assert tuple(s.action for s in row) == schedule.actions[rank]
        for span in row:
            assert (span.start, span.end) == pytest.approx(spans[span.action])
    assert len(timeline.messages) == len(messages)
    for m in timeline.messages:
        maker = next(a for a in messages if (a.kind == "F") == (m.kind == "F") and a[1:] == (m.stage, m.micro_batch))
        assert m.sent == pytest.approx(spans[maker][1])
        assert (m.start, m.end) == pytest.approx(messages[maker])
        assert schedule.rank_of(m.stage, m.micro_batch) == m.source
        assert schedule.rank_of(m.target_stage, m.micro_batch) == m.target


@settings(deadline=None)
@given(randoms())
def test_the_timeline_and_the_proof_agree_on_memory(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    costs = random_costs(random, schedule)
    certificate = prove(schedule, costs)
    assert isinstance(certificate, Certificate)
    timeline = simulate(schedule, costs)
    assert timeline.peak_bytes == pytest.approx(certificate.peak_bytes)
    assert timeline.peak_activations == pytest.approx(certificate.peak_activations)
    assert len(timeline.messages) == certificate.num_messages


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_gpipe_by_its_formula(num_ranks: int, num_micro_batches: int) -> None:
    timeline = simulate(gpipe(num_ranks, num_micro_batches))
    ticks = num_micro_batches + num_ranks - 1
    assert timeline.makespan == 3 * ticks
    assert timeline.bubble == pytest.approx((num_ranks - 1) / ticks)
    assert timeline.peak_activations == (num_micro_batches,) * num_ranks


def test_a_link_takes_one_message_at_a_time() -> None:
    # F takes 1 s, a message 3 s of the link and 0.5 s more: the second waits for the first, and so on
    costs = replace(
        Costs.uniform(2), message_bytes=(6.0, 6.0), bandwidth=((2.0, 2.0), (2.0, 2.0)), latency=((0.5, 0.5), (0.5, 0.5))
    )
    timeline = simulate(gpipe(2, 3), costs)
    forward = [m for m in timeline.messages if m.kind == "F"]
    assert [(m.sent, m.start, m.end) for m in forward] == [(1.0, 1.0, 4.5), (2.0, 4.0, 7.5), (3.0, 7.0, 10.5)]


def test_a_message_of_no_bytes_keeps_its_place_behind_a_large_one() -> None:
    ones = (1.0,) * 4
    costs = replace(
        Costs.uniform(2),
        forward=ones,
        backward_input=ones,
        backward_weight=ones,
        activation_bytes=ones,
        message_bytes=(9.0, 0.0, 0.0, 0.0),
        bandwidth=((1.0, 1.0), (1.0, 1.0)),
        divisible=False,
    )
    words = (["0F1", "0F0", "2F1", "2F0", "2B1", "2B0", "0B1", "0B0"], ["1F1", "1F0", "3F1", "3F0", "3B1", "3B0", "1B1", "1B0"])
    actions = [[Action(w[1], int(w[0]), int(w[2])) for w in row] for row in words]  # type: ignore[arg-type]
    timeline = simulate(Schedule.single_route("loop", (0, 1, 0, 1), 2, actions), costs)
    for source, target in ((0, 1), (1, 0)):
        link = [m for m in timeline.messages if (m.source, m.target) == (source, target)]
        arrivals = [m.end for m in sorted(link, key=lambda m: m.sent)]
        assert arrivals == sorted(arrivals)


def test_what_cannot_run_is_refused() -> None:
    def on_two_ranks(*rows: tuple[Action, ...]) -> Schedule:
        return Schedule.single_route("bad", (0, 1), 1, rows)

    f0, b0, f1, b1 = Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)
    with pytest.raises(ProofError, match="never does F of stage 1"):
        simulate(on_two_ranks((f0, b0), (b1,)))
    with pytest.raises(ProofError, match="deadlock"):
        simulate(on_two_ranks((b0, f0), (f1, b1)))
    with pytest.raises(InputError, match="costs are for 3"):
        simulate(on_two_ranks((f0, b0), (f1, b1)), Costs.uniform(3))


def test_an_infinite_cap_and_a_faster_rank() -> None:
    costs = replace(Costs.uniform(2), speed=(1.0, 4.0))
    timeline = simulate(gpipe(2, 4), costs)
    assert timeline.work == pytest.approx((12.0, 3.0))
    assert timeline.memory_cap == (math.inf, math.inf)
    assert timeline.ideal == pytest.approx(7.5)
