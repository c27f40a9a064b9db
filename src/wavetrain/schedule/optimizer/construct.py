"""Construction: the best order for one placement that dispatching, patterns and justification find, within a set effort."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from wavetrain.errors import CapError
from wavetrain.schedule.graph import Graph, makespan
from wavetrain.schedule.optimizer.dispatch import Admission, Policy, Preference, dispatch
from wavetrain.schedule.optimizer.justify import justify
from wavetrain.schedule.optimizer.pattern import Stretch, pattern_orders, peaks
from wavetrain.schedule.proof import CAP_TOLERANCE

_RULES: tuple[tuple[Preference, bool], ...] = (
    ("alternate", True),
    ("backward", False),
    ("forward", False),
    ("forward", True),
    ("backward", True),
)
_ADMISSIONS: tuple[Admission, ...] = ("oldest", "whole")

POLICIES = tuple(
    Policy(prefer=prefer, weights_when_full=full, patience=patience, admit=admit)
    for patience, admit, (prefer, full) in product((0.0, 1.0), _ADMISSIONS, _RULES)
)
"""Rules that are tried, in order of promise."""

STRETCHES = tuple(
    Stretch(forward=forward, backward=backward, turn=turn)
    for turn in (0.0, 1.0)
    for forward, backward in (
        ((1.0,), (1.0,)),
        ((1.0,), (2.0, 1.0)),
        ((2.0,), (1.0,)),
        ((2.0,), (1.0, 2.0)),
        ((1.0, 2.0), (1.0,)),
        ((2.0, 1.0), (1.0, 2.0)),
        ((3.0,), (1.0,)),
        ((3.0,), (2.0,)),
        ((1.0,), (2.0,)),
    )
)
"""Patterns that are tried, in order of promise."""


@dataclass(frozen=True)
class Candidate:
    """An order of a graph and how long its step takes."""

    graph: Graph
    orders: list[list[int]]
    makespan: float


def has_room(graph: Graph) -> bool:
    """Whether every rank can hold one micro-batch: the least that any schedule needs."""
    return all(share <= cap * (1 + CAP_TOLERANCE) for cap, share in zip(graph.cap, graph.share, strict=True))


def require_room(graph: Graph) -> None:
    """Raise :class:`CapError` where a rank cannot even hold one micro-batch: the least that any schedule needs."""
    if has_room(graph):
        return
    r = max(range(graph.num_ranks), key=lambda r: graph.share[r] / graph.cap[r])
    cap, share = graph.cap[r], graph.share[r]
    least = max(graph.share) / (sum(graph.share) / graph.num_ranks)
    raise CapError(
        f"rank {r} may hold {cap / share:.4g} micro-batches of its share of the activations ({cap:.4g} of {share:.4g} bytes), "
        f"but a schedule of this cut holds at least 1: the least cap that works is {rounded_up(least)}",
        least_cap=least,
    )


def rounded_up(number: float) -> str:
    """Six digits that are at least ``number`` (> 0), so that whoever types them gets enough."""
    text = f"{number:.6g}"
    step = 10.0 ** (math.floor(math.log10(number)) - 5)
    return text if float(text) >= number * (1 - CAP_TOLERANCE) else f"{float(text) + step:.6g}"


def construct(
    graph: Graph, *, effort: float = 1.0, target: float = 0.0, out_of_time: Callable[[], bool] = lambda: False
) -> Candidate:
    """The best order found for a graph with one route and split backwards, within its memory cap.

    Args:
        graph: nodes and costs.
        effort: scales how many rules and patterns are tried and justified; 1 takes a few seconds.
        target: stop at a makespan this small, e.g. a lower bound.
        out_of_time: asked between candidates; at least one is always built.

    Raises:
        CapError: not even one micro-batch at a time fits.
    """
    require_room(graph)
    tries = max(4, min(int(effort * 240_000 / graph.size), 64))
    goal = target * (1 + 1e-9)
    raw: list[Candidate] = []
    for orders in _raw_orders(graph):
        raw.append(Candidate(graph, orders, makespan(graph, orders)))
        if raw[-1].makespan <= goal or len(raw) == tries or out_of_time():
            break
    raw.sort(key=lambda c: c.makespan)
    best = raw[0]
    # What a raw order is worth shows only once justified: one round for the best and, evenly, for some of the rest, then all
    # rounds for the best of those.
    chosen = raw[: max(2, tries // 4)]
    rest = raw[len(chosen) :]
    chosen += rest[:: max(1, len(rest) // max(1, tries // 4))]
    for rounds, count in ((1, len(chosen)), (8, max(1, len(chosen) // 4))):
        for i in range(count):
            if best.makespan <= goal or out_of_time():
                return best
            chosen[i] = Candidate(graph, *justify(graph, chosen[i].orders, rounds=rounds))
            best = min(best, chosen[i], key=lambda c: c.makespan)
        chosen.sort(key=lambda c: c.makespan)
    return best


def _raw_orders(graph: Graph) -> Iterator[list[list[int]]]:
    """Orders within the cap, from dispatching and patterns in turn. The first is always there: one micro-batch has room."""
    dispatched, patterns = _dispatched(graph), _patterns(graph)
    first = next(dispatched, None)
    yield first if first is not None else one_at_a_time(graph)
    while True:
        found = [orders for source in (patterns, dispatched) if (orders := next(source, None)) is not None]
        if not found:
            return
        yield from found


def one_at_a_time(graph: Graph) -> list[list[int]]:
    """Every micro-batch runs from its first forward to its last W before the next: slow, lean, always possible."""
    plane = graph.num_stages * graph.num_micro_batches
    orders: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    for m in range(graph.num_micro_batches):
        for first in (0, plane, 2 * plane):
            stages = range(graph.num_stages) if first == 0 else range(graph.num_stages - 1, -1, -1)
            for s in stages:
                n = first + s * graph.num_micro_batches + m
                orders[graph.rank[n]].append(n)
    return orders


def _dispatched(graph: Graph) -> Iterator[list[list[int]]]:
    """Orders of every policy, each built for several views of the links.

    A dispatcher that knows the true delays starts fillers just before a message arrives; one that believes links to be free, or
    slower for gradients than they are, keeps a rhythm that survives them. Orders are judged with the true delays all the same.
    """
    stage = sum(graph.seconds) / graph.size
    crossing = [d for d in graph.delay if d > 0.0]
    hop = sum(crossing) / len(crossing) if crossing else 0.0
    views = [(0.0, 0.0), (0.0, hop), (0.0, stage / 2), (hop, hop), (0.0, stage)] if crossing else [(0.0, 0.0), (0.0, stage)]
    for policy, (forward, backward) in product(POLICIES, views):
        if policy.patience and not (forward or backward):
            continue
        built = dispatch(_with_delays(graph, forward, backward), policy)
        if built is not None:
            yield built[0]


def _with_delays(graph: Graph, forward: float, backward: float) -> Graph:
    plane = graph.num_stages * graph.num_micro_batches
    delay = [
        0.0 if c < 0 or graph.rank[c] == graph.rank[n] else forward if n < plane else backward
        for n, c in enumerate(graph.consumer)
    ]
    return replace(graph, delay=delay)


def _patterns(graph: Graph) -> Iterator[list[list[int]]]:
    """Unrolled patterns within the cap, with the period lengthened where that is what makes them fit."""
    shortest = max(graph.work) / graph.num_micro_batches
    action = sum(graph.seconds) / graph.size
    for stretch in STRETCHES:
        period = shortest
        for _ in range(6):
            orders = pattern_orders(graph, period, stretch)
            if orders is None:
                period *= 1.05
                continue
            excess = max(p / c for p, c in zip(peaks(graph, orders), graph.cap, strict=True))
            if excess <= 1 + CAP_TOLERANCE:
                yield orders
                break
            period = math.ceil(period * min(excess, 1.5) / action - 1e-9) * action
