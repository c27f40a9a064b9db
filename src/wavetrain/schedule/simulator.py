"""The simulator: a schedule and its costs to a timeline."""

from __future__ import annotations

from typing import Literal

from wavetrain.errors import InputError, ProofError
from wavetrain.schedule.actions import Kind
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.graph import Graph, replay, schedule_graph
from wavetrain.schedule.proof import check_actions, explain_deadlock
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.timeline import Message, Span, Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run ``schedule`` on paper.

    Every rank follows its list and starts an action as soon as it is free and its input has arrived; sends and receives overlap
    compute; a link takes one message at a time (see :mod:`wavetrain.schedule.costs`). Without ``costs``, F, I and W of a rank's
    share take one second each and links are free.

    Raises:
        ProofError: the schedule cannot run to its end.
    """
    costs = costs_for(schedule, costs)
    refusal = check_actions(schedule)
    if refusal is not None:
        raise ProofError(refusal)
    graph, orders = schedule_graph(schedule, costs)
    start, end, arrival = replay(graph, orders)
    for order in orders:
        if order and start[order[-1]] < 0.0:
            raise ProofError(explain_deadlock(schedule))
    spans = tuple(
        tuple([Span(a[0], a[1], a[2], start[n], end[n]) for a, n in zip(actions, order, strict=True)])
        for actions, order in zip(schedule.actions, orders, strict=True)
    )
    return Timeline(
        name=schedule.name,
        source="simulated",
        num_stages=schedule.num_stages,
        num_micro_batches=schedule.num_micro_batches,
        waves=schedule.waves,
        spans=spans,
        messages=_messages(graph, orders, end, arrival),
        held_bytes=held_bytes(schedule.cut(costs)),
        memory_cap=costs.memory_cap,
        share_bytes=tuple(graph.share),
    )


def costs_for(schedule: Schedule, costs: Costs | None) -> Costs:
    """``costs``, checked to be for as many ranks as the schedule has, or the default: one second each for F, I and W."""
    if costs is None:
        return Costs.uniform(schedule.num_ranks)
    if costs.num_ranks != schedule.num_ranks:
        raise InputError(f"the schedule has {schedule.num_ranks} ranks, but the costs are for {costs.num_ranks}")
    return costs


def held_bytes(costs: Costs) -> dict[Kind, tuple[float, ...]]:
    """Bytes that an action of each kind adds or frees, per stage."""
    share = costs.input_release
    return {
        "F": costs.activation_bytes,
        "B": tuple(-b for b in costs.activation_bytes),
        "I": tuple(-b * share for b in costs.activation_bytes),
        "W": tuple(-b * (1.0 - share) for b in costs.activation_bytes),
    }


def _messages(graph: Graph, orders: list[list[int]], end: list[float], arrival: list[float]) -> tuple[Message, ...]:
    rank, consumer, delay, num_mb, num_stages = graph.rank, graph.consumer, graph.delay, graph.num_micro_batches, graph.num_stages
    plane = num_stages * num_mb
    found = []
    for r, order in enumerate(orders):
        for n in order:
            c = consumer[n]
            if c < 0 or rank[c] == r:
                continue
            kind: Literal["F", "B"] = "F" if n < plane else "B"
            stage, mb = divmod(n % plane, num_mb)
            arrived = arrival[c]
            found.append(Message(kind, stage, mb, r, rank[c], end[n], arrived - delay[n], arrived))
    return tuple(found)
