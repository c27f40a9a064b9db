"""Orders made on a grid of equal slots: the rhythm that waves and Chimera are drawn in, whatever an action really takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.graph import build_graph, with_whole
from wavetrain.schedule.optimizer.dispatch import Policy, dispatch
from wavetrain.schedule.placement import Placement


def slotted_actions(placements: Sequence[Placement], routes: Sequence[int], num_ranks: int) -> list[list[Action]]:
    """F and whole B in slots of one length, backward before forward, oldest micro-batch first."""
    graph = build_graph(placements, routes, num_ranks, Costs.uniform(num_ranks))
    plane = graph.num_stages * graph.num_micro_batches
    graph = with_whole(graph, range(plane, 2 * plane))
    built = dispatch(replace(graph, seconds=[1.0] * 2 * plane + [0.0] * plane), Policy(prefer="backward"), whole=True)
    assert built is not None, "without a memory cap the dispatcher cannot get stuck"
    return [[graph.action(n, whole=True) for n in order] for order in built[0]]
