"""Lower bounds: what no order of a placement can beat, on its links and within its memory."""

from __future__ import annotations

import math

from wavetrain.schedule.graph import Graph
from wavetrain.schedule.proof import CAP_TOLERANCE


def lower_bound(graph: Graph) -> float:
    """Seconds that any order needs at least: the larger of :func:`time_bound` and :func:`memory_bound`."""
    return max(time_bound(graph), memory_bound(graph))


def time_bound(graph: Graph) -> float:
    """Seconds that any order needs at least, were memory free.

    The larger of two:

    - over ranks, the earliest start of its first action + all its work + the shortest tail behind its last one;
    - the chain of one micro-batch: all F, then I down to a stage, with messages, and that stage's W.
    """
    num_mb, plane = graph.num_micro_batches, graph.num_stages * graph.num_micro_batches
    rank, seconds, delay = graph.rank, graph.seconds, graph.delay
    earliest, tail = [math.inf] * graph.num_ranks, [math.inf] * graph.num_ranks
    chain = 0.0
    for route in set(graph.routes):
        m = graph.routes.index(route)
        now = 0.0
        for n in range(m, plane, num_mb):
            earliest[rank[n]] = min(earliest[rank[n]], now)
            now += seconds[n] + delay[n]
        for n in range(2 * plane - num_mb + m, plane - 1, -num_mb):
            now += seconds[n]
            chain = max(chain, now + seconds[n + plane])
            now += delay[n]
        behind = 0.0
        for n in range(plane + m, 2 * plane, num_mb):
            behind += delay[n]
            tail[rank[n]] = min(tail[rank[n]], 0.0 if seconds[n + plane] > 0.0 else behind)
            behind += seconds[n]
    return max(chain, *(earliest[r] + work + tail[r] for r, work in enumerate(graph.work) if work > 0.0))


def memory_bound(graph: Graph) -> float:
    """Seconds that any order needs at least for its memory.

    An activation is held from the start of F to the end of its W (or B, or in part of I): at least as long as the chain between
    them. All of a rank's, bytes times seconds, must fit under its cap within the step.
    """
    num_mb, plane = graph.num_micro_batches, graph.num_stages * graph.num_micro_batches
    seconds, delay, held, rank = graph.seconds, graph.delay, graph.held, graph.rank
    area, earliest = [0.0] * graph.num_ranks, [math.inf] * graph.num_ranks
    for route in set(graph.routes):
        m, count = graph.routes.index(route), graph.routes.count(route)
        now = 0.0
        for n in range(m, plane, num_mb):
            earliest[rank[n]] = min(earliest[rank[n]], now)
            now += seconds[n] + delay[n]
        there_and_back = 0.0
        for n in range(plane - num_mb + m, -1, -num_mb):
            backward, weight = n + plane, n + 2 * plane
            hops = delay[n] + delay[backward + num_mb] if backward + num_mb < 2 * plane else 0.0
            there_and_back += seconds[n] + seconds[backward] + hops
            freed_later = (there_and_back + seconds[weight]) * -held[weight]
            area[rank[n]] += count * (there_and_back * -held[backward] + freed_later)
    used = [r for r in range(graph.num_ranks) if earliest[r] < math.inf]
    return max(earliest[r] + area[r] / (graph.cap[r] * (1 + CAP_TOLERANCE)) for r in used)
