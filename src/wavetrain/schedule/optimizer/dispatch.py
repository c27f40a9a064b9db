"""The dispatcher: builds an order by running the pipeline forward in time and choosing what each free rank does next.

A rule that looks only at what is ready now needs two safeguards. First, room: under a memory cap, early forwards can fill the
memory that a later stage of the same micro-batch needs, and nothing moves again. So a forward is only begun while room is left
for the stages still to come, of the oldest unfinished micro-batch (``admit="oldest"``: enough, since that one can then always
finish and free its room for the next) or of every micro-batch on the rank (``admit="whole"``: leaner, at times better). Second,
patience: a rank that starts a long action a moment before a better one arrives delays all that hangs on the better one, so it may
wait if waiting costs less than a set fraction of that delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from wavetrain.schedule.graph import Graph
from wavetrain.schedule.proof import CAP_TOLERANCE

Preference: TypeAlias = Literal["backward", "forward", "alternate"]
Admission: TypeAlias = Literal["oldest", "whole"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the dispatcher chooses."""

    prefer: Preference = "backward"
    """Which goes first when a forward and a backward are both ready; ``alternate``: the kind that was not done last."""
    weights_when_full: bool = False
    """Whether a W goes before all else while a forward waits only for memory; otherwise W only fills idle time."""
    patience: float = 0.0
    """A rank waits for a better action if that takes less than this times the delay it would cause by not waiting."""
    admit: Admission = "oldest"
    """For what a forward must leave room: the oldest micro-batch, or all that have begun on the rank."""


def dispatch(graph: Graph, policy: Policy, *, whole: bool = False) -> tuple[list[list[int]], float] | None:
    """An order of all nodes, one list a rank, and when its last node ends; None if it got stuck.

    Args:
        graph: the nodes and their costs; with ``whole`` its slot-1 nodes stand for B and there are no W nodes.
        policy: how to choose between kinds; within a kind the oldest micro-batch goes first.
        whole: whether backwards are not split.
    """
    num_mb, num_ranks = graph.num_micro_batches, graph.num_ranks
    plane = graph.num_stages * num_mb
    rank, seconds, consumer, delay, held = graph.rank, graph.seconds, graph.consumer, graph.delay, graph.held
    prio = _oldest_first(graph)
    prefer, weights_first, patience = policy.prefer, policy.weights_when_full, policy.patience
    reserve_all = policy.admit == "whole"

    need = _needs(graph)  # [rank][micro-batch] bytes of forwards still to come
    entire = [row.copy() for row in need]
    free = [cap * (1 + CAP_TOLERANCE) for cap in graph.cap]
    reserved = [0.0] * num_ranks  # of micro-batches that have begun, with admit="whole"
    oldest = [0] * num_ranks
    forwards: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
    backwards: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
    weights: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
    coming: list[dict[int, float]] = [{} for _ in range(num_ranks)]
    last_was_forward = [False] * num_ranks
    busy_until = [0.0] * num_ranks
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    events: list[tuple[float, int]] = []  # (time, node that arrives) or (time, −1−rank that is free)
    end_of_all = 0.0
    left = (2 if whole else 3) * plane

    next_on_route = _next_on_route(graph.routes)
    for m in {graph.routes.index(route) for route in set(graph.routes)}:
        heappush(forwards[rank[m]], (prio[m], m))
    for r in range(num_ranks):
        heappush(events, (0.0, -1 - r))

    def fits(r: int, n: int) -> bool:
        m = n % num_mb
        if held[n] <= 0.0:
            return True
        if reserve_all:
            begun = need[r][m] < entire[r][m]
            return begun or entire[r][m] <= free[r] - reserved[r]
        if m == oldest[r]:
            return held[n] <= free[r]
        return held[n] <= free[r] - need[r][oldest[r]]

    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] <= now:
            _, n = heappop(events)
            if n < 0:
                touched.add(-1 - n)
                continue
            r = rank[n]
            touched.add(r)
            if patience:
                del coming[r][n]
            heappush(forwards[r] if n < plane else backwards[r], (prio[n], n))
        for r in touched:
            if busy_until[r] > now:
                continue
            ready_f, ready_b, ready_w = forwards[r], backwards[r], weights[r]
            row, old = need[r], oldest[r]
            while old < num_mb - 1 and row[old] <= 0.0:
                old += 1
            oldest[r] = old
            forward = -1
            if ready_f:
                if fits(r, ready_f[0][1]):
                    forward = ready_f[0][1]
                elif len(ready_f) > 1:
                    forward = min((x for x in ready_f if fits(r, x[1])), default=(0.0, -1))[1]
            full = bool(ready_f) and forward < 0
            if weights_first and full and ready_w:
                n = ready_w[0][1]
            elif ready_b and (forward < 0 or prefer == "backward" or (prefer == "alternate" and last_was_forward[r])):
                n = ready_b[0][1]
            elif forward >= 0:
                n = forward
            elif ready_w:
                n = ready_w[0][1]
            else:
                continue
            if patience and coming[r]:
                done = now + seconds[n]
                if any(
                    arrives < done
                    and arrives - now < patience * (done - arrives)
                    and (c >= plane or fits(r, c))
                    and _goes_before(c, n, plane, prio, prefer, last_was_forward[r])
                    for c, arrives in coming[r].items()
                ):
                    continue
            if n < plane:
                if ready_f[0][1] == n:
                    heappop(ready_f)
                else:
                    ready_f.remove((prio[n], n))
                    ready_f.sort()
                m = n % num_mb
                if reserve_all and held[n] > 0.0:
                    reserved[r] += (entire[r][m] if row[m] >= entire[r][m] else 0.0) - held[n]
                row[m] = row[m] - held[n] if row[m] - held[n] > CAP_TOLERANCE * entire[r][m] else 0.0
                last_was_forward[r] = True
                if n < num_mb and next_on_route[n] >= 0:
                    following = next_on_route[n]
                    heappush(forwards[r], (prio[following], following))
            elif n < 2 * plane:
                heappop(ready_b)
                last_was_forward[r] = False
                if not whole:
                    heappush(ready_w, (prio[n + plane], n + plane))
            else:
                heappop(ready_w)
            free[r] -= held[n]
            orders[r].append(n)
            left -= 1
            done = now + seconds[n]
            busy_until[r] = done
            if done > end_of_all:
                end_of_all = done
            c = consumer[n]
            if c >= 0:
                arrives = done + delay[n]
                if patience:
                    coming[rank[c]][c] = arrives
                heappush(events, (arrives, c))
            heappush(events, (done, -1 - r))
    return (orders, end_of_all) if left == 0 else None


def _oldest_first(graph: Graph) -> list[float]:
    """Priorities by micro-batch, within one by how far it has come."""
    num_stages, num_mb = graph.num_stages, graph.num_micro_batches
    forward = [float(m * num_stages + s) for s in range(num_stages) for m in range(num_mb)]
    backward = [float(m * num_stages + num_stages - s) for s in range(num_stages) for m in range(num_mb)]
    return forward + backward + backward


def _goes_before(coming: int, chosen: int, plane: int, prio: Sequence[float], prefer: Preference, last_was_forward: bool) -> bool:
    """Whether ``coming`` would be chosen over ``chosen`` if both were ready."""
    if chosen >= 2 * plane:
        return True
    if (coming < plane) == (chosen < plane):
        return prio[coming] < prio[chosen]
    backward_first = prefer == "backward" or (prefer == "alternate" and last_was_forward)
    return backward_first == (coming >= plane)


def _needs(graph: Graph) -> list[list[float]]:
    need = [[0.0] * graph.num_micro_batches for _ in range(graph.num_ranks)]
    for n in range(graph.num_stages * graph.num_micro_batches):
        need[graph.rank[n]][n % graph.num_micro_batches] += graph.held[n]
    return need


def _next_on_route(routes: Sequence[int]) -> list[int]:
    """The micro-batch that enters a route after each one, or −1."""
    following, last = [-1] * len(routes), dict[int, int]()
    for m, route in enumerate(routes):
        if route in last:
            following[last[route]] = m
        last[route] = m
    return following
