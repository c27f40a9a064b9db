"""The graph behind a schedule, as flat lists: what the simulator, the proof and the optimizer walk.

Every piece of work has a *node*, a number that does not depend on any order:

    node = (slot · S + stage) · B + micro-batch        slot 0: F    slot 1: B or I    slot 2: W

A node hands its result to at most one node that may sit on another rank, its *consumer*: F(s) to F(s+1), the backward of s to
that of s−1, and F of the last stage to its backward. All else a node needs, its own rank did before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedule import Schedule

SLOTS = {"F": 0, "B": 1, "I": 1, "W": 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """All nodes of a placement with B micro-batches, and what each costs. Lists are indexed by node unless said otherwise.

    ``whole`` marks backwards that are done as one B: their W node does not exist, and their slot-1 node costs I and W.
    """

    num_ranks: int
    num_stages: int
    num_micro_batches: int
    placements: tuple[Placement, ...]
    routes: tuple[int, ...]
    rank: list[int]
    seconds: list[float]
    consumer: list[int]
    """The node that waits for this one's result, or −1."""
    delay: list[float]
    """Seconds from this node's end to the consumer's earliest start, where the link is free: 0 within a rank."""
    occupancy: list[float]
    """Seconds for which this node's message occupies its link; 0 within a rank or on an infinitely fast link."""
    held: list[float]
    """Bytes this node adds to its rank's memory when it starts (F) or, negative, when it ends."""
    cap: list[float]
    """Bytes each rank may hold, by rank."""
    share: list[float]
    """Bytes of one micro-batch on all stages of a rank, by rank: the unit of a cap that is given in micro-batches."""
    overhead: float
    """Seconds of every node beside its work; part of ``seconds``."""
    shares: tuple[float, ...] | None
    """How large the stages were asked to be, as of :class:`Schedule`."""

    @property
    def size(self) -> int:
        return len(self.rank)

    @cached_property
    def work(self) -> list[float]:
        """Seconds of compute, by rank. Nodes of whole backwards' W, which do not exist, cost nothing."""
        work = [0.0] * self.num_ranks
        for r, seconds in zip(self.rank, self.seconds, strict=True):
            work[r] += seconds
        return work

    def node(self, action: Action) -> int:
        return (SLOTS[action.kind] * self.num_stages + action.stage) * self.num_micro_batches + action.micro_batch

    def stage_of(self, node: int) -> int:
        return node // self.num_micro_batches % self.num_stages

    def action(self, node: int, whole: bool = False) -> Action:
        """The action of a node; ``whole`` says whether a slot-1 node stands for B and not for I."""
        slot_stage, micro_batch = divmod(node, self.num_micro_batches)
        slot, stage = divmod(slot_stage, self.num_stages)
        return Action("F" if slot == 0 else "W" if slot == 2 else "B" if whole else "I", stage, micro_batch)


def build_graph(
    placements: Sequence[Placement],
    routes: Sequence[int],
    num_ranks: int,
    costs: Costs,
    shares: tuple[float, ...] | None = None,
) -> Graph:
    """The graph of a placement with split backwards; ``costs`` are cut for it, into stages of these ``shares``."""
    placements, routes = tuple(placements), tuple(routes)
    costs = costs.cut(placements, shares)
    num_stages, num_mb = len(placements[0]), len(routes)
    plane = num_stages * num_mb
    share = [0.0] * num_ranks
    for placement in placements:
        sums = [0.0] * num_ranks
        for stage, r in enumerate(placement):
            sums[r] += costs.activation_bytes[stage]
        share = [max(a, b) for a, b in zip(share, sums, strict=True)]
    rank: list[int] = []
    delay: list[list[float]] = [[], [], [0.0] * plane]
    occupancy: list[list[float]] = [[], [], [0.0] * plane]
    seconds: list[list[float]] = [[], [], []]
    held: list[list[float]] = [[], [], []]
    routes_set = range(len(placements))
    for s in range(num_stages):
        ranks = [p[s] for p in placements]
        rank += [ranks[r] for r in routes]
        for slot, kind in enumerate("FIW"):
            per_route = [costs.seconds(kind, s, r) for r in ranks]
            seconds[slot] += [per_route[r] for r in routes]
        per_stage = costs.activation_bytes[s]
        freed = per_stage * costs.input_release
        for slot, amount in enumerate((per_stage, -freed, freed - per_stage)):
            held[slot] += [amount] * num_mb
        for slot, other in ((0, s + 1), (1, s - 1)):
            if 0 <= other < num_stages:
                size = costs.message_bytes[min(s, other)]
                hops = [_hop(costs, p[s], p[other], size) for p in placements]
            else:
                hops = [(0.0, 0.0) for _ in routes_set]
            delay[slot] += [hops[r][0] for r in routes]
            occupancy[slot] += [hops[r][1] for r in routes]
    last = (num_stages - 1) * num_mb
    consumer = [*range(num_mb, plane), *range(plane + last, plane + last + num_mb)]
    consumer += [-1] * num_mb + [*range(plane, 2 * plane - num_mb)] + [-1] * plane
    return Graph(
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_micro_batches=num_mb,
        placements=placements,
        routes=routes,
        rank=rank * 3,
        seconds=list(chain(*seconds)),
        consumer=consumer,
        delay=list(chain(*delay)),
        occupancy=list(chain(*occupancy)),
        held=list(chain(*held)),
        cap=list(costs.memory_cap),
        share=share,
        overhead=costs.overhead,
        shares=shares,
    )


def schedule_graph(schedule: Schedule, costs: Costs) -> tuple[Graph, list[list[int]]]:
    """The graph of a schedule and its action lists as nodes. Whole backwards get the cost of both halves.

    Actions must name stages and micro-batches that exist; whether each comes exactly once is for the proof to say.
    """
    graph = build_graph(schedule.placements, schedule.routes, schedule.num_ranks, costs, schedule.shares)
    num_mb = schedule.num_micro_batches
    plane = schedule.num_stages * num_mb
    base = {"F": 0, "B": plane, "I": plane, "W": 2 * plane}
    orders = [[base[kind] + stage * num_mb + mb for kind, stage, mb in actions] for actions in schedule.actions]
    whole = [plane + s * num_mb + mb for actions in schedule.actions for kind, s, mb in actions if kind == "B"]
    return (with_whole(graph, whole) if whole else graph), orders


def with_whole(graph: Graph, nodes: Sequence[int]) -> Graph:
    """The graph with these slot-1 nodes done as whole backwards."""
    plane = graph.num_stages * graph.num_micro_batches
    seconds, held = graph.seconds.copy(), graph.held.copy()
    for n in nodes:
        seconds[n] = graph.seconds[n] + graph.seconds[n + plane] - graph.overhead
        held[n] = graph.held[n] + graph.held[n + plane]
        seconds[n + plane] = held[n + plane] = 0.0
    return replace(graph, seconds=seconds, held=held)


def _hop(costs: Costs, source: int, target: int, size: float) -> tuple[float, float]:
    """(delay, occupancy) of a message."""
    if source == target:
        return 0.0, 0.0
    occupancy = size / costs.bandwidth[source][target]
    return costs.latency[source][target] + occupancy, occupancy


def replay(
    graph: Graph, orders: Sequence[Sequence[int]], limit: float = math.inf
) -> tuple[list[float], list[float], list[float]]:
    """When each node starts and ends, and when what it needs from its producer arrives, if ranks follow ``orders``.

    Every rank starts its next node as soon as it is free and the node's input has arrived; messages of one link go in the order
    in which they are sent. Nodes that are never reached keep a start of −1: because the orders deadlock, or because some rank
    idled so long that it cannot end by ``limit``, at which all stops.
    """
    size, num_ranks = graph.size, graph.num_ranks
    rank, seconds, consumer = graph.rank, graph.seconds, graph.consumer
    delay, occupancy = graph.delay, graph.occupancy
    start, end = [-1.0] * size, [0.0] * size
    arrival = [-1.0] * size
    arrival[: graph.num_micro_batches] = [0.0] * graph.num_micro_batches
    plane = graph.num_stages * graph.num_micro_batches
    weight = 2 * plane
    link_free: dict[int, float] = {}
    clock = [0.0] * num_ranks
    position = [0] * num_ranks
    waiting = list(range(num_ranks - 1, -1, -1))
    blocked_on = [-1] * num_ranks
    slack = [limit - work for work in graph.work]
    while waiting:
        r = waiting.pop()
        order, at, now = orders[r], position[r], clock[r]
        count = len(order)
        blocked_on[r] = -1
        while at < count:
            n = order[at]
            if n < weight:
                ready = arrival[n]
                if ready < 0.0 or (n >= plane and start[n - plane] < 0.0):
                    blocked_on[r] = n
                    break
                if ready > now:
                    slack[r] -= ready - now
                    if slack[r] < 0.0:
                        return start, end, arrival
                    now = ready
            elif start[n - plane] < 0.0:
                blocked_on[r] = n
                break
            start[n] = now
            now += seconds[n]
            end[n] = now
            at += 1
            c = consumer[n]
            if c >= 0:
                wait = delay[n]
                busy = occupancy[n]
                other = rank[c]
                if other != r and (busy > 0.0 or link_free):  # a message of no bytes waits too, behind larger ones
                    link = r * num_ranks + other
                    begin = link_free.get(link, 0.0)
                    if begin < now:
                        begin = now
                    if busy > 0.0:
                        link_free[link] = begin + busy
                    arrival[c] = begin + wait
                else:
                    arrival[c] = now + wait
                if other != r and blocked_on[other] == c:
                    waiting.append(other)
        position[r] = at
        clock[r] = now
    return start, end, arrival


def makespan(graph: Graph, orders: Sequence[Sequence[int]]) -> float:
    """Seconds until all nodes of ``orders`` have ended; infinite if they deadlock."""
    start, end, _ = replay(graph, orders)
    return max(end) if all(start[order[-1]] >= 0.0 for order in orders if order) else math.inf
