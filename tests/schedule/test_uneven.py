"""``auto`` on random uneven pipelines: always proven, never above the best named family nor below the bound."""

from __future__ import annotations

import math
from random import Random

import pytest

from tests.schedule.test_auto import best_named
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.graph import build_graph
from wavetrain.schedule.optimizer.bound import lower_bound
from wavetrain.schedule.proof import prove
from wavetrain.schedule.simulator import simulate

MAX_ACTIONS = 900


def random_case(random: Random) -> tuple[Costs, int]:
    """Costs of P ranks and one to four times as many stages, and B ≥ 2P."""
    num_ranks = random.randint(2, 6)
    num_micro_batches = random.randint(2 * num_ranks, 2 * num_ranks + 3)
    most = max(1, min(4, MAX_ACTIONS // (3 * num_ranks * num_micro_batches)))
    num_stages = num_ranks * random.randint(1, most) + random.randint(0, num_ranks - 1)

    def stages(low: float, high: float) -> tuple[float, ...]:
        return tuple(random.uniform(low, high) for _ in range(num_stages))

    def pairs(value: float, spread: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(value * random.uniform(1.0, spread) for _ in range(num_ranks)) for _ in range(num_ranks))

    forward, activations = stages(0.5, 2.0), stages(0.5, 2.0)
    mean_share = sum(activations) / num_ranks
    caps = [math.inf if random.random() < 0.3 else mean_share * random.uniform(3.0, num_ranks + 3) for _ in range(num_ranks)]
    costs = Costs(
        forward=forward,
        backward_input=tuple(f * random.uniform(0.7, 1.4) for f in forward),
        backward_weight=tuple(f * random.uniform(0.4, 1.2) for f in forward),
        activation_bytes=activations,
        message_bytes=stages(0.5, 1.5),
        speed=tuple(random.choice([0.7, 1.0, 1.0, 1.4]) for _ in range(num_ranks)),
        latency=pairs(random.choice([0.0, 0.02, 0.2]), 2.0),
        bandwidth=pairs(random.choice([3.0, 50.0, math.inf]), 2.0),
        memory_cap=tuple(caps),
        input_release=random.choice([0.0, 0.3]),
    )
    return costs, num_micro_batches


@pytest.mark.parametrize("seed", range(30))
def test_auto_on_uneven_pipelines(seed: int) -> None:
    costs, num_micro_batches = random_case(Random(seed))
    schedule = build("auto", num_ranks=costs.num_ranks, num_micro_batches=num_micro_batches, costs=costs, iterations=300)
    prove(schedule, costs).require()
    found = simulate(schedule, costs).makespan
    best, name = best_named(costs, num_micro_batches)
    assert found <= best * (1 + 1e-9), name
    graph = build_graph(schedule.placements, schedule.routes, schedule.num_ranks, costs, schedule.shares)
    assert found >= lower_bound(graph) * (1 - 1e-9)
