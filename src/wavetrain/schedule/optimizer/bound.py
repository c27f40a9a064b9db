"""Lower bounds: what no order of a placement can beat, on its links, without regard to memory."""

from __future__ import annotations

import math

from wavetrain.schedule.graph import Graph


def lower_bound(graph: Graph) -> float:
    """Seconds that any order needs at least.

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
