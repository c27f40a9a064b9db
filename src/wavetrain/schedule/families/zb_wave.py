"""Zero-bubble waves: W waves with the backward split, under a memory cap, for the costs at hand. wavetrain's own.

The order is not written down but found (:mod:`wavetrain.schedule.optimizer`), for the given stage times, links and cap. For F = I = W
on free links it reaches (P−1)/(6WB+P−1): the last rank starts P−1 stages late and never waits again.

TABLE(zb-wave, P=2, B=2, waves=1)
"""

from __future__ import annotations

import math
from dataclasses import replace

from wavetrain.schedule.costs import Costs
from wavetrain.schedule.graph import Graph, build_graph
from wavetrain.schedule.optimizer.bound import lower_bound
from wavetrain.schedule.optimizer.construct import construct
from wavetrain.schedule.placement import wave
from wavetrain.schedule.schedule import Schedule, check_counts


def zb_wave(
    num_ranks: int, num_micro_batches: int, waves: int = 2, *, costs: Costs | None = None, effort: float = 1.0
) -> Schedule:
    """The best order found for W waves with split backwards.

    Args:
        num_ranks: P.
        num_micro_batches: B.
        waves: W; 2·W stages a rank.
        costs: what to optimize for, within its memory cap. Ranks without a cap are held to P micro-batches of their share, as 1F1B
            is. Default: F = I = W, free links.
        effort: how much to try; 1 takes about a second for 3,000 actions.

    Raises:
        CapError: a cap below one micro-batch.
    """
    check_counts(num_ranks, num_micro_batches)
    placement = wave(num_ranks, waves)
    costs = (costs or Costs.uniform(num_ranks)).cut((placement,))
    graph = with_default_cap(build_graph((placement,), (0,) * num_micro_batches, num_ranks, costs))
    found = construct(graph, effort=effort, target=lower_bound(graph))
    return schedule_of("zb-wave", graph, found.orders)


def with_default_cap(graph: Graph) -> Graph:
    """The graph with ranks that have no memory cap held to P micro-batches of their share, as 1F1B is."""
    caps = zip(graph.cap, graph.share, strict=True)
    return replace(graph, cap=[share * graph.num_ranks if math.isinf(cap) and share else cap for cap, share in caps])


def schedule_of(name: str, graph: Graph, orders: list[list[int]]) -> Schedule:
    """The schedule of an order of split backwards on one route."""
    actions = [[graph.action(n) for n in order] for order in orders]
    return Schedule.single_route(name, graph.placements[0], graph.num_micro_batches, actions)
