"""Justification: all actions as late as they go, then all as early as they go, and again.

Replaying an order lets an action start early, but never before the one ahead of it in the order. Here actions are placed one by
one, in order of time, each into the first gap of its rank that is long enough and leaves the memory cap intact, jumping over what
is already there without moving it. Done backward in time and then forward again this is the double justification of project
scheduling; together the two passes close most of the idle time of warm-up and drain.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from wavetrain.schedule.graph import Graph, makespan, replay
from wavetrain.schedule.proof import CAP_TOLERANCE

_EPSILON = 1e-9  # of a mean action, or of a makespan


def justify(graph: Graph, orders: Sequence[Sequence[int]], *, rounds: int = 8) -> tuple[list[list[int]], float]:
    """A better order, or the given one, and its makespan in seconds. ``orders`` must be valid and within the cap."""
    best_orders, best = [list(o) for o in orders], makespan(graph, orders)
    unchanged = 0
    for _ in range(rounds):
        start, end, _ = replay(graph, orders)
        turn = _turns(graph, orders)
        nodes = sorted((n for order in orders for n in order), key=lambda n: (-end[n], -start[n], -turn[n]))
        late_orders, late_end = _place_all(graph, nodes, mirrored=True)
        turn = _turns(graph, [o[::-1] for o in late_orders])
        nodes.sort(key=lambda n: (-late_end[n], turn[n]))
        orders, _ = _place_all(graph, nodes, mirrored=False)
        found = makespan(graph, orders)
        if found < best * (1 - _EPSILON):
            best_orders, best, unchanged = orders, found, 0
        else:
            unchanged += 1
            if unchanged == 2:
                break
    return best_orders, best


def _turns(graph: Graph, orders: Sequence[Sequence[int]]) -> Sequence[int]:
    """A number for every node, above those of all nodes that must come before it: what decides where times are equal.

    That matters only where actions take no time; elsewhere the node's own number will do.
    """
    tiny = _EPSILON * sum(graph.work)
    if all(seconds > tiny for seconds in graph.seconds):
        return range(graph.size)
    plane, producer = graph.num_stages * graph.num_micro_batches, _producers(graph)
    turn = [-1] * graph.size
    position = [0] * graph.num_ranks
    count, moved = 0, True
    while moved:
        moved = False
        for r, order in enumerate(orders):
            while position[r] < len(order):
                n = order[position[r]]
                if (producer[n] >= 0 and turn[producer[n]] < 0) or (n >= plane and turn[n - plane] < 0):
                    break
                turn[n], count, moved = count, count + 1, True
                position[r] += 1
    return turn


def _place_all(graph: Graph, nodes: Iterable[int], *, mirrored: bool) -> tuple[list[list[int]], list[float]]:
    """Place ``nodes`` one by one, each as early as it goes; ``mirrored``: with time running backward.

    Returns the orders and the end of every node, both in the direction of time that was asked for. A node's predecessors must
    come before it, and the nodes in the given order must respect the memory cap.
    """
    num_ranks, size, plane = graph.num_ranks, graph.size, graph.num_stages * graph.num_micro_batches
    rank, seconds, delay = graph.rank, graph.seconds, graph.delay
    neighbour, sign, step = (_producers(graph), -1.0, -plane) if mirrored else (graph.consumer, 1.0, plane)
    starts: list[list[float]] = [[] for _ in range(num_ranks)]
    ends: list[list[float]] = [[] for _ in range(num_ranks)]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    memory: list[list[float]] = [[] for _ in range(num_ranks)]  # bytes held after each placed action
    epsilon = _EPSILON * sum(graph.work) / size
    shortest = _shortest(graph, epsilon)
    packed = [0] * num_ranks  # so many of a rank's first actions have no gap before them that any other could use
    ready, end = [0.0] * size, [0.0] * size
    for n in nodes:
        r = rank[n]
        begun, done, held = starts[r], ends[r], memory[r]
        count, length, change = len(begun), seconds[n], graph.held[n] * sign
        earliest = ready[n]
        at = max(bisect_right(done, earliest), packed[r])
        if change > 0.0 and graph.cap[r] < math.inf:
            # all that follows holds `change` more: stay behind the last action after which there is no room
            limit = graph.cap[r] * (1 + CAP_TOLERANCE) - change
            last = count - 1
            while last >= at - 1 and last >= 0 and held[last] <= limit:
                last -= 1
            if last >= 0 and last >= at - 1:
                at = last + 2
                assert at <= count, "the given order passes the memory cap"
                if done[at - 1] > earliest:
                    earliest = done[at - 1]
        while at < count and begun[at] - (done[at - 1] if at and done[at - 1] > earliest else earliest) < length - epsilon:
            at += 1
        begins = done[at - 1] if at and done[at - 1] > earliest else earliest
        finished = end[n] = begins + length
        begun.insert(at, begins)
        done.insert(at, finished)
        if at == packed[r]:
            free_from = done[at - 1] if at else 0.0
            while at <= count and begun[at] - free_from < shortest[r]:
                free_from = done[at]
                at += 1
            at, packed[r] = packed[r], at
        orders[r].insert(at, n)
        held.insert(at, held[at - 1] if at else 0.0)
        if change:
            for i in range(at, count + 1):
                held[i] += change
        other = neighbour[n]
        if other >= 0:
            arrives = finished + delay[other if mirrored else n]
            if arrives > ready[other]:
                ready[other] = arrives
        other = n + step
        if 0 <= other < size and finished > ready[other]:
            ready[other] = finished
    return orders, end


def _shortest(graph: Graph, epsilon: float) -> list[float]:
    """Seconds of the shortest action that takes any time, less a little, by rank."""
    shortest = [math.inf] * graph.num_ranks
    for r, seconds in zip(graph.rank, graph.seconds, strict=True):
        if 0.0 < seconds < shortest[r]:
            shortest[r] = seconds
    return [s - epsilon for s in shortest]


def _producers(graph: Graph) -> list[int]:
    """The node whose result each node waits for, or −1."""
    producer = [-1] * graph.size
    for n, c in enumerate(graph.consumer):
        if c >= 0:
            producer[c] = n
    return producer
