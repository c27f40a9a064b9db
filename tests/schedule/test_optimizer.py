"""The passes of the optimizer on random graphs: what they return is complete, can run, is within the cap and is never worse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.random_schedules import randoms
from wavetrain.errors import CapError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families.zb_wave import schedule_of
from wavetrain.schedule.graph import Graph, build_graph, makespan, replay
from wavetrain.schedule.optimizer.anneal import anneal
from wavetrain.schedule.optimizer.bound import lower_bound
from wavetrain.schedule.optimizer.construct import POLICIES, STRETCHES, construct, one_at_a_time, rounded_up
from wavetrain.schedule.optimizer.dispatch import dispatch
from wavetrain.schedule.optimizer.justify import justify
from wavetrain.schedule.optimizer.pattern import pattern_orders
from wavetrain.schedule.placement import Placement, loop, snake, straight, wave
from wavetrain.schedule.proof import CAP_TOLERANCE, prove

Orders = Sequence[Sequence[int]]


def random_costs(random: Random, placement: Placement, *, zeros: bool = True, links: bool = True, scale: float = 1.0) -> Costs:
    """Uneven stages, ranks and links, caps of one to a few micro-batches; ``zeros``: some times and activations are nothing."""
    num_stages, num_ranks = len(placement), max(placement) + 1
    nothing = [0.0] if zeros else []

    def stages(scale: float) -> tuple[float, ...]:
        return tuple(scale * random.choice([*nothing, 0.5, 1.0, 1.0, random.uniform(0.1, 3.0)]) for _ in range(num_stages))

    def pairs(values: list[float], free: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(random.choice(values) if links else free for _ in range(num_ranks)) for _ in range(num_ranks))

    activations = (0.0,) * num_stages if zeros and random.random() < 0.1 else stages(1.0)
    shares = [sum(a for a, home in zip(activations, placement, strict=True) if home == r) for r in range(num_ranks)]
    return Costs(
        forward=stages(scale),
        backward_input=stages(scale),
        backward_weight=(scale, *stages(scale)[1:]),
        activation_bytes=activations,
        message_bytes=tuple(random.choice([0.0, 1.0, 2.0]) for _ in range(num_stages)),
        speed=tuple(random.choice([0.5, 1.0, 2.0]) for _ in range(num_ranks)),
        latency=pairs([0.0, 0.1 * scale, scale], 0.0),
        bandwidth=pairs([0.5 / scale, 2.0 / scale, math.inf], math.inf),
        memory_cap=tuple(math.inf if not s or random.random() < 0.3 else s * random.choice([1.0, 1.3, 2.0, 3.0]) for s in shares),
        input_release=random.choice([0.0, 0.0, 0.25, 1.0]),
    )


def random_graph(random: Random, *, zeros: bool = True, scale: float = 1.0) -> Graph:
    num_ranks = random.randint(1, 4)
    shapes = [straight(num_ranks), wave(num_ranks, 1), wave(num_ranks, 2), loop(num_ranks, 2), snake(num_ranks, 3)]
    placement = random.choice(shapes)
    costs = random_costs(random, placement, zeros=zeros, links=random.random() < 0.6, scale=scale)
    return build_graph((placement,), (0,) * random.randint(1, 6), num_ranks, costs)


def check(graph: Graph, orders: Orders) -> float:
    """The makespan of orders that hold every node once, on its rank, can run, and stay within the cap."""
    assert sorted(n for order in orders for n in order) == list(range(graph.size))
    for r, order in enumerate(orders):
        assert all(graph.rank[n] == r for n in order)
        now = 0.0
        for n in order:
            now += graph.held[n]
            assert now <= graph.cap[r] * (1 + CAP_TOLERANCE)
    start, end, arrival = replay(graph, orders)
    assert min(start) >= 0, "some node is never reached"
    plane = graph.num_stages * graph.num_micro_batches
    for n, consumer in enumerate(graph.consumer):
        assert n < plane or start[n] >= end[n - plane]
        assert consumer < 0 or start[consumer] >= arrival[consumer] >= end[n]
    assert makespan(graph, orders) == max(end)
    return max(end)


def some_orders(graph: Graph, random: Random) -> list[list[list[int]]]:
    """Valid orders to start from, good and bad."""
    built = dispatch(graph, random.choice(POLICIES))
    assert built is not None
    return [one_at_a_time(graph), built[0]]


@settings(deadline=None, max_examples=60)
@given(randoms())
def test_dispatch_never_gets_stuck_and_knows_when_it_ends(random: Random) -> None:
    graph = random_graph(random)
    for policy in POLICIES:
        built = dispatch(graph, policy)
        assert built is not None, f"{policy} got stuck"
        orders, end = built
        assert check(graph, orders) >= lower_bound(graph) * (1 - 1e-9)
        if not any(graph.occupancy) and not policy.patience:
            assert end == pytest.approx(makespan(graph, orders))


@settings(deadline=None, max_examples=60)
@given(randoms())
def test_patterns_that_are_found_can_run(random: Random) -> None:
    graph = replace(random_graph(random), cap=[math.inf] * 4)
    period = max(graph.work) / graph.num_micro_batches
    found = [pattern_orders(graph, slack * period, stretch) for slack in (1.0, 1.5, 4.0) for stretch in STRETCHES]
    for orders in found:
        if orders is not None:
            assert check(graph, orders) >= lower_bound(graph) * (1 - 1e-9)
    assert found[-1] is not None, "with three quarters of every period free there is a pattern"


@settings(deadline=None, max_examples=60)
@given(randoms())
def test_justifying_never_makes_it_worse(random: Random) -> None:
    graph = random_graph(random)
    for orders in some_orders(graph, random):
        before = check(graph, orders)
        better, claimed = justify(graph, orders, rounds=3)
        assert check(graph, better) == pytest.approx(claimed)
        assert lower_bound(graph) * (1 - 1e-9) <= claimed <= before


@settings(deadline=None, max_examples=40)
@given(randoms())
def test_annealing_never_makes_it_worse_and_repeats_itself(random: Random) -> None:
    graph = random_graph(random)
    for orders in some_orders(graph, random):
        before = check(graph, orders)
        better, claimed = anneal(graph, orders, iterations=300, seed=7)
        assert check(graph, better) == pytest.approx(claimed)
        assert lower_bound(graph) * (1 - 1e-9) <= claimed <= before * (1 + 1e-9)
        assert anneal(graph, orders, iterations=300, seed=7) == (better, claimed)


@settings(deadline=None, max_examples=25)
@given(randoms())
def test_construction_is_proven_and_repeats_itself(random: Random) -> None:
    graph = random_graph(random)
    found = construct(graph, effort=0.05)
    assert check(graph, found.orders) == pytest.approx(found.makespan)
    assert prove(schedule_of("found", graph, found.orders)).proven
    assert construct(graph, effort=0.05).orders == found.orders


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([1e-9, 1e-4, 1e9]))
def test_the_unit_of_time_does_not_matter(seed: int, scale: float) -> None:
    plain, scaled = (random_graph(Random(seed), zeros=False, scale=s) for s in (1.0, scale))
    expected, found = construct(plain, effort=0.05), construct(scaled, effort=0.05)
    assert check(scaled, found.orders) == pytest.approx(expected.makespan * scale, rel=0.1)
    for orders in some_orders(scaled, Random(seed)):
        check(scaled, justify(scaled, orders)[0])
        check(scaled, anneal(scaled, orders, iterations=100)[0])


@pytest.mark.parametrize("placement", [straight(3), wave(3, 1), wave(3, 2), loop(3, 2)])
@pytest.mark.parametrize(
    "nothing",
    [
        {"forward": 0},
        {"forward": None},
        {"backward_input": 0},
        {"backward_input": None},
        {"backward_weight": None},
        {"forward": None, "backward_input": None},
        {"activation_bytes": 0},
        {"activation_bytes": None},
    ],
    ids=str,
)
def test_what_costs_nothing(placement: Placement, nothing: dict[str, int | None]) -> None:
    """A time, or the activations, of one stage or (None) of all stages is 0."""
    num_stages = len(placement)
    costs = Costs(
        forward=(1.0,) * num_stages,
        backward_input=(1.0,) * num_stages,
        backward_weight=(1.0,) * num_stages,
        activation_bytes=(1.0,) * num_stages,
        message_bytes=(0.0,) * num_stages,
        speed=(1.0,) * 3,
        latency=((0.0,) * 3,) * 3,
        bandwidth=((math.inf,) * 3,) * 3,
        memory_cap=(1.5 * num_stages / 3,) * 3,
    )
    for field, stage in nothing.items():
        changes: dict[str, Any] = {field: tuple(0.0 if stage in (None, s) else 1.0 for s in range(num_stages))}
        costs = replace(costs, **changes)
    graph = build_graph((placement,), (0,) * 5, 3, costs)
    found = construct(graph, effort=0.05)
    check(graph, found.orders)
    orders, claimed = anneal(graph, found.orders, iterations=500)
    assert check(graph, orders) == pytest.approx(claimed)
    assert claimed <= found.makespan


@pytest.mark.parametrize("placement", [straight(1), wave(1, 1), wave(1, 2)])
def test_one_rank_never_idles(placement: Placement) -> None:
    costs = random_costs(Random(3), placement, zeros=False)
    graph = build_graph((placement,), (0,) * 4, 1, costs)
    found = construct(graph, target=lower_bound(graph))
    assert check(graph, found.orders) == pytest.approx(graph.work[0]) == pytest.approx(lower_bound(graph))


def every_order(graph: Graph) -> Iterator[list[list[int]]]:
    """All orders within the cap in which a rank does F, I and W of a stage and micro-batch in that order."""
    plane = graph.num_stages * graph.num_micro_batches
    per_rank = []
    for r in range(graph.num_ranks):
        chains = [n for n in range(plane) if graph.rank[n] == r]
        slots = [chain for chain in chains for _ in range(3)]
        found = []
        for pick in set(itertools.permutations(slots)):
            seen: dict[int, int] = {}
            order, now, fits = [], 0.0, True
            for chain in pick:
                n = chain + plane * seen.setdefault(chain, 0)
                seen[chain] += 1
                order.append(n)
                now += graph.held[n]
                fits &= now <= graph.cap[r] * (1 + CAP_TOLERANCE)
            if fits:
                found.append(order)
        per_rank.append(found)
    for orders in itertools.product(*per_rank):
        yield list(orders)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("placement", "num_micro_batches"), [(straight(2), 2), (wave(2, 1), 1), (loop(2, 2), 1)])
def test_nothing_beats_the_best_of_all_orders(placement: Placement, num_micro_batches: int, seed: int) -> None:
    graph = build_graph((placement,), (0,) * num_micro_batches, 2, random_costs(Random(seed), placement, links=seed % 2 == 0))
    optimum = min(makespan(graph, orders) for orders in every_order(graph))
    assert lower_bound(graph) <= optimum * (1 + 1e-9)
    found = construct(graph)
    orders, claimed = anneal(graph, found.orders, iterations=500)
    check(graph, orders)
    assert optimum * (1 - 1e-9) <= claimed <= found.makespan * (1 + 1e-9)
    assert claimed <= 1.1 * optimum, "on so few actions the search is close to the optimum"


def test_annealing_improves_a_bad_order() -> None:
    costs = Costs.uniform(4).cut((wave(4, 1),))
    graph = build_graph((wave(4, 1),), (0,) * 8, 4, costs)
    bad = one_at_a_time(graph)
    assert anneal(graph, bad, iterations=4000)[1] < 0.5 * makespan(graph, bad)


def test_a_cap_below_one_micro_batch() -> None:
    graph = build_graph((straight(2),), (0, 0), 2, Costs.uniform(2, memory_cap=0.75))
    with pytest.raises(CapError, match=r"rank 0 may hold 0\.75 micro-batches") as caught:
        construct(graph)
    assert caught.value.least_cap == 1.0


@pytest.mark.parametrize(
    ("number", "text"), [(1.0, "1"), (4 / 3, "1.33334"), (2 / 3, "0.666667"), (12.5, "12.5"), (1e-7 / 3, "3.33334e-08")]
)
def test_a_least_cap_is_rounded_up(number: float, text: str) -> None:
    assert rounded_up(number) == text
    assert float(text) >= number
