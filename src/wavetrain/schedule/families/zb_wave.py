"""Zero-bubble waves: W waves with the backward split, under a memory cap, for the costs at hand. wavetrain's own.

The order is not written down but found (:mod:`wavetrain.schedule.optimizer`), for the given stage times, links and cap. For
F = I = W on free links it reaches (P−1)/(6WB+P−1): the last rank starts P−1 stages late and never waits again.

So the step gets shorter with the first stages. With more micro-batches than ranks a *growing* wave makes them small without
making the others many: every pass over the ranks holds ``growth`` times the work of the one before. While B micro-batches of a
pass are done, the first of them passes the P larger stages of the next, so that no rank waits as long as growth ≤ B/P.

`build("zb-wave", num_ranks=3, num_micro_batches=3, waves=1)` draws as

    rank 0  0F0 0F1 0F2 ·   ·   5F0 5I0 5F1 5I1 5F2 5I2 0I0 5W0 0I1 0W0 0I2 5W1 0W1 5W2 0W2
    rank 1  ·   1F0 1F1 1F2 4F0 ·   4F1 4I0 4F2 4I1 1I0 4I2 1I1 4W0 1I2 1W0 4W1 1W1 4W2 1W2
    rank 2  ·   ·   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3I1 2I1 3I2 2I2 3W0 2W0 3W1 2W1 3W2 2W2
"""

from __future__ import annotations

import math
from dataclasses import replace

from wavetrain.errors import InputError
from wavetrain.schedule.costs import MAX_VALUE, Costs
from wavetrain.schedule.graph import Graph, build_graph
from wavetrain.schedule.optimizer.bound import lower_bound
from wavetrain.schedule.optimizer.construct import construct
from wavetrain.schedule.placement import wave
from wavetrain.schedule.schedule import Schedule, check_counts

MAX_GROWTH = 16.0
_MORE_TO_GROW = 1.5


def zb_wave(
    num_ranks: int,
    num_micro_batches: int,
    waves: int = 2,
    *,
    growth: float = 1.0,
    costs: Costs | None = None,
    effort: float = 1.0,
) -> Schedule:
    """The best order found for W waves with split backwards.

    Args:
        num_ranks: P.
        num_micro_batches: B.
        waves: W; 2·W stages a rank.
        growth: the work of a pass over the ranks (half a wave) over that of the pass before; 1: all stages alike.
        costs: what to optimize for, within its memory cap. Ranks without a cap are held to P micro-batches of their share, as
            1F1B is, or to 1.5·P where waves grow: with less they gain nothing. Default: F = I = W, free links.
        effort: how much to try; 1 takes about a second for 3,000 actions.

    Raises:
        CapError: a cap below one micro-batch.
    """
    check_counts(num_ranks, num_micro_batches)
    placement = wave(num_ranks, waves)
    costs = costs or Costs.uniform(num_ranks)
    shares = growing_shares(num_ranks, waves, growth)
    graph = with_default_cap(build_graph((placement,), (0,) * num_micro_batches, num_ranks, costs, shares))
    found = construct(graph, effort=effort, target=lower_bound(graph))
    return schedule_of("zb-wave" if shares is None else f"zb-wave, growth {growth:g}", graph, found.orders)


def growing_shares(num_ranks: int, waves: int, growth: float) -> tuple[float, ...] | None:
    """How large the stages of a wave are where every pass over the ranks holds ``growth`` times the work of the one before."""
    if not 1 <= growth <= MAX_GROWTH:
        raise InputError(f"a growth of {growth}; give 1 (all stages alike) to {MAX_GROWTH:g}")
    if growth == 1:
        return None
    if 2 * waves * math.log(growth) > math.log(MAX_VALUE):
        raise InputError(f"{waves} waves that grow by {growth:g} a pass: the last stages would hold all of the model")
    return tuple(growth**i for i in range(2 * waves) for _ in range(num_ranks))


def with_default_cap(graph: Graph) -> Graph:
    """The graph with ranks that have no memory cap held to P micro-batches of their share, as 1F1B is; growing waves to 1.5·P."""
    most = graph.num_ranks * (1.0 if graph.shares is None else _MORE_TO_GROW)
    caps = zip(graph.cap, graph.share, strict=True)
    return replace(graph, cap=[share * most if math.isinf(cap) and share else cap for cap, share in caps])


def schedule_of(name: str, graph: Graph, orders: list[list[int]]) -> Schedule:
    """The schedule of an order of split backwards on one route."""
    actions = [[graph.action(n) for n in order] for order in orders]
    return Schedule.single_route(name, graph.placements[0], graph.num_micro_batches, actions, graph.shares)
