"""Periodic patterns: a steady state that repeats with every micro-batch.

This is modulo scheduling, as compilers pipeline loops: one micro-batch is laid out such that copies of it, each one period later,
never meet on a rank. Its F, I and W are placed in the order of their chain, each at the first time at which its rank is free in
every period. A short chain holds few activations, so patterns are the way to low memory; how fast the chain runs on the way down
and on the way back (``stretch``) trades memory for room to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavetrain.schedule.graph import Graph

_EPSILON = 1e-9  # of a period


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """How slowly a micro-batch moves. 1 is as fast as it can; 2 leaves one action's time free after every action."""

    forward: tuple[float, ...] = (1.0,)
    """For equal runs of stages, first to last."""
    backward: tuple[float, ...] = (1.0,)
    """For equal runs of stages, first to last."""
    turn: float = 0.0
    """Forward times of the last stage to wait before the first backward."""


def pattern_orders(graph: Graph, period: float, stretch: Stretch) -> list[list[int]] | None:
    """The orders of the unrolled pattern, one list a rank; None if a rank has no gap left that is long enough.

    ``graph`` has one route and split backwards. Whether the memory cap holds is not looked at.
    """
    num_stages, num_mb, num_ranks = graph.num_stages, graph.num_micro_batches, graph.num_ranks
    plane = num_stages * num_mb
    placement = graph.placements[0]
    lanes = [_Lane(period) for _ in range(num_ranks)]
    offsets: list[float] = [0.0] * (3 * num_stages)

    def place(slot: int, stage: int, earliest: float) -> float | None:
        at = lanes[placement[stage]].place(earliest, graph.seconds[slot * plane + stage * num_mb])
        if at is not None:
            offsets[slot * num_stages + stage] = at
        return at

    earliest = 0.0
    for s in range(num_stages):
        node = s * num_mb
        at = place(0, s, earliest)
        if at is None:
            return None
        slow = stretch.forward[s * len(stretch.forward) // num_stages]
        earliest = at + graph.seconds[node] * slow + graph.delay[node]
    earliest += graph.seconds[(num_stages - 1) * num_mb] * (stretch.turn + 1.0 - stretch.forward[-1])
    for s in reversed(range(num_stages)):
        node = plane + s * num_mb
        at = place(1, s, earliest)
        if at is None:
            return None
        slow = stretch.backward[s * len(stretch.backward) // num_stages]
        earliest = at + graph.seconds[node] * slow + graph.delay[node]
    for s in reversed(range(num_stages)):
        if place(2, s, offsets[num_stages + s] + graph.seconds[plane + s * num_mb]) is None:
            return None
    lists: list[list[tuple[float, int, int]]] = [[] for _ in range(num_ranks)]
    for slot_stage, offset in enumerate(offsets):
        slot, stage = divmod(slot_stage, num_stages)
        turn = slot_stage if slot == 0 else slot * num_stages + num_stages - 1 - stage  # along the chain, where times are equal
        lists[placement[stage]] += [(offset + m * period, turn, slot_stage * num_mb + m) for m in range(num_mb)]
    return [[n for _, _, n in sorted(entries)] for entries in lists]


class _Lane:
    """What a rank does in one period: intervals on a circle."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.epsilon = _EPSILON * period
        self.taken: list[tuple[float, float]] = []  # (start, seconds)

    def place(self, earliest: float, seconds: float) -> float | None:
        """The first time from ``earliest`` on at which ``seconds`` are free in every period."""
        candidates = [earliest, *(earliest + self._ahead(earliest, start + length) for start, length in self.taken)]
        for at in sorted(candidates):
            if all(self._apart(at, seconds, start, length) for start, length in self.taken):
                self.taken.append((at % self.period, seconds))
                return at
        return None

    def _ahead(self, origin: float, point: float) -> float:
        distance = (point - origin) % self.period
        return 0.0 if distance > self.period - self.epsilon else distance

    def _apart(self, at: float, seconds: float, start: float, length: float) -> bool:
        if seconds <= self.epsilon or length <= self.epsilon:
            return True
        distance = self._ahead(at % self.period, start)
        return distance >= seconds - self.epsilon and distance + length <= self.period + self.epsilon


def peaks(graph: Graph, orders: Sequence[Sequence[int]]) -> list[float]:
    """The most bytes each rank holds under ``orders``."""
    held, found = graph.held, []
    for order in orders:
        now = peak = 0.0
        for n in order:
            now += held[n]
            if now > peak:
                peak = now
        found.append(peak)
    return found
