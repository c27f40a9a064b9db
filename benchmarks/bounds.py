"""What ``auto`` cannot beat: the least lower bound over everything it considers."""

from __future__ import annotations

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.families.auto import MAX_STAGES_PER_RANK, placements, wave_shares
from wavetrain.schedule.graph import Graph, build_graph, schedule_graph
from wavetrain.schedule.optimizer.bound import lower_bound, time_bound
from wavetrain.schedule.optimizer.construct import has_room
from wavetrain.schedule.placement import Placement, wave


def considered(num_ranks: int, num_micro_batches: int, costs: Costs) -> list[Graph]:
    """A graph for every placement on which one micro-batch fits, and Chimera's two routes where that is within the cap."""
    most = MAX_STAGES_PER_RANK if costs.divisible else costs.num_stages // num_ranks
    found: list[tuple[Placement, tuple[float, ...] | None]] = [(p, None) for p in placements(num_ranks, costs)]
    for w in (1, 2, 3, 4):
        if 2 * w <= most:
            found += [(wave(num_ranks, w), shares) for shares in wave_shares(num_ranks, num_micro_batches, w)]
    routes = (0,) * num_micro_batches
    graphs = [g for p, shares in found if has_room(g := build_graph((p,), routes, num_ranks, costs, shares))]
    try:
        chimera = build("chimera", num_ranks=num_ranks, num_micro_batches=num_micro_batches, costs=costs)
    except InputError:
        return graphs  # P is odd, or it holds more than the cap
    return [*graphs, schedule_graph(chimera, costs)[0]]


def least_bounds(num_ranks: int, num_micro_batches: int, costs: Costs) -> tuple[float, float]:
    """Seconds, the least over all that is considered: were memory free, and with the memory that must be held."""
    graphs = considered(num_ranks, num_micro_batches, costs)
    return min(time_bound(g) for g in graphs), min(lower_bound(g) for g in graphs)
