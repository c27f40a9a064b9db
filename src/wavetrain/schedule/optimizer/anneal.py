"""Local improvement of an order: simulated annealing on the critical path.

An order of a pipeline is a job shop: a rank is a machine, and the step is as long as its longest chain of actions and messages.
Only a change within that chain can shorten the step, so each move takes an action of a (randomly traced) critical path that had
to wait for the one before it on its rank, and brings it forward, or puts the one before it off. Memory depends on a rank's own
order alone and is checked along the moved window. A move that lengthens the step is accepted with a probability that falls to
zero.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from wavetrain.schedule.graph import Graph, makespan, replay
from wavetrain.schedule.proof import CAP_TOLERANCE

_MAX_SHIFT = 8  # how far a move may carry an action
_INSTANT = 1e-6  # of the makespan: what a shorter action adds to a cycle is not worth waiting for
_MEAN_WEIGHT = 0.02  # of the mean end over ranks, added to the makespan: a slope where the makespan alone is flat


class _State:
    """An order with its times."""

    def __init__(self, graph: Graph, orders: Sequence[Sequence[int]]) -> None:
        self.graph = graph
        self.orders = [list(o) for o in orders]
        self.position = [0] * graph.size
        for order in self.orders:
            for i, n in enumerate(order):
                self.position[n] = i
        self.start, self.end, self.arrival = replay(graph, self.orders)
        self.makespan, self.cost = self.measure(self.end)
        self.least_mean = _MEAN_WEIGHT * sum(graph.work) / graph.num_ranks
        self.log: list[tuple[list[float], int, float]] = []
        self.visits = 0  # nodes looked at so far
        self.rest = [0.0] * graph.size  # seconds of work from a node on, itself included, on its rank
        for r, order in enumerate(self.orders):
            self._set_window(r, 0, order)

    def measure(self, end: list[float]) -> tuple[float, float]:
        ends = [end[o[-1]] for o in self.orders if o]
        longest = max(ends)
        return longest, longest + _MEAN_WEIGHT * sum(ends) / len(ends)

    def critical_nodes(self, rng: random.Random) -> list[int]:
        """Nodes of a critical path that waited for the node before them on their rank."""
        graph, orders, end, arrival, position = self.graph, self.orders, self.end, self.arrival, self.position
        num_mb, rank = graph.num_micro_batches, graph.rank
        plane = graph.num_stages * num_mb
        last_backward = 2 * plane - num_mb
        best = self.makespan * (1 - 1e-12)
        n = rng.choice([o[-1] for o in orders if o and end[o[-1]] >= best])
        path: list[int] = []
        while True:
            at = position[n]
            before = orders[rank[n]][at - 1] if at else -1
            freed = end[before] if at else 0.0
            if num_mb <= n < 2 * plane and (arrival[n] > freed or (arrival[n] == freed and rng.random() < 0.5)):
                n = n - num_mb if n < plane else n + num_mb if n < last_backward else n - plane
            elif at == 0:
                return path
            else:
                path.append(n)
                n = before

    def propose(self, u: int, rng: random.Random) -> tuple[int, int, list[int]] | None:
        """A window of u's rank and its new contents; None if u cannot move so."""
        graph = self.graph
        plane = graph.num_stages * graph.num_micro_batches
        r, at = graph.rank[u], self.position[u]
        order = self.orders[r]
        if rng.random() < 0.6:
            shift = 1 if rng.random() < 0.5 else rng.randint(1, min(at, _MAX_SHIFT))
            low, high = at - shift, at
            if u >= plane and low <= self.position[u - plane] < high:
                return None
            window = [u, *order[low:high]]
        else:
            shift = 1 if rng.random() < 0.5 else rng.randint(1, min(len(order) - at, _MAX_SHIFT))
            low, high = at - 1, at - 1 + shift
            v = order[low]
            if v < 2 * plane and low < self.position[v + plane] <= high and order[self.position[v + plane]] == v + plane:
                return None
            window = [*order[low + 1 : high + 1], v]
        return (low, high, window) if self._fits(r, low, window) else None

    def _fits(self, r: int, low: int, window: list[int]) -> bool:
        held, order, limit = self.graph.held, self.orders[r], self.graph.cap[r] * (1 + CAP_TOLERANCE)
        if limit == math.inf:
            return True
        now = 0.0
        for i in range(low):
            now += held[order[i]]
        for n in window:
            now += held[n]
            if now > limit:
                return False
        return True

    def try_move(self, r: int, low: int, high: int, window: list[int], worst: float) -> bool:
        """Make the move if its cost is at most ``worst``."""
        before = self.orders[r][low : high + 1]
        self._set_window(r, low, window)
        if not self._hides_cycle(window) and self._propagate(r, low, high, worst - self.least_mean):
            longest, cost = self.measure(self.end)
            if cost <= worst:
                self.makespan, self.cost = longest, cost
                self.log.clear()
                return True
        for values, n, old in reversed(self.log):
            values[n] = old
        self.log.clear()
        self._set_window(r, low, before)
        return False

    def _hides_cycle(self, window: list[int]) -> bool:
        """Whether the order deadlocks in a cycle of actions that take no time, which times would not show.

        The action that moved, at one end of the window, is part of any new cycle.
        """
        seconds = self.graph.seconds
        instant = min(seconds[window[0]], seconds[window[-1]]) <= _INSTANT * self.makespan
        return instant and makespan(self.graph, self.orders) == math.inf

    def _set_window(self, r: int, low: int, window: list[int]) -> None:
        order, position, rest, seconds = self.orders[r], self.position, self.rest, self.graph.seconds
        order[low : low + len(window)] = window
        at = low + len(window)
        after = rest[order[at]] if at < len(order) else 0.0
        for n in reversed(window):
            at -= 1
            position[n] = at
            after += seconds[n]
            rest[n] = after

    def _propagate(self, r: int, low: int, high: int, limit: float) -> bool:
        """Bring all times in line after a change of a window; False if the step cannot end by ``limit``.

        Nodes are revisited in order of time, and only as far as something changes. An order that would deadlock makes times grow
        around its cycle until they pass the limit.
        """
        orders, position, rest, start, end, arrival = self.orders, self.position, self.rest, self.start, self.end, self.arrival
        rank, seconds, consumer, delay = self.graph.rank, self.graph.seconds, self.graph.consumer, self.graph.delay
        log = self.log
        window = orders[r][low : high + 2][::-1]
        queue: list[tuple[float, int]] = []
        while window or queue:
            self.visits += 1
            n = window.pop() if window else heappop(queue)[1]
            order, at = orders[rank[n]], position[n]
            begins = end[order[at - 1]] if at else 0.0
            if arrival[n] > begins:
                begins = arrival[n]
            if begins == start[n]:
                continue
            if begins + rest[n] > limit:
                return False
            log.append((start, n, start[n]))
            log.append((end, n, end[n]))
            start[n] = begins
            done = end[n] = begins + seconds[n]
            if at + 1 < len(order):
                following = order[at + 1]
                begins = done if done > arrival[following] else arrival[following]
                if start[following] != begins:
                    heappush(queue, (begins, following))
            c = consumer[n]
            if c >= 0:
                arrives = done + delay[n]
                if arrives != arrival[c]:
                    log.append((arrival, c, arrival[c]))
                    arrival[c] = arrives
                    heappush(queue, (arrives, c))
        return True


def anneal(
    graph: Graph,
    orders: Sequence[Sequence[int]],
    *,
    iterations: int,
    seed: int = 0,
    temperature: float = 0.2,
    target: float = 0.0,
    max_visits: int = 3_000_000,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[list[list[int]], float]:
    """A better order and its makespan in seconds, or the given one.

    Args:
        graph: nodes and costs.
        orders: a valid order to start from.
        iterations: moves to try.
        seed: of the random numbers; same seed and iterations, same result.
        temperature: how much longer a step may get by a move at the start, in mean action times.
        target: stop at a makespan this small.
        max_visits: stop when the times of so many nodes have been looked at, a second or two for a million.
        out_of_time: asked every few moves; stops early.
    """
    rng = random.Random(seed)
    state = _State(graph, orders)
    believed = best = state.makespan
    best_orders = [o.copy() for o in state.orders]
    # Moves take links as free of queues: where there are queues, what looks better is replayed before it is believed.
    doubtful = any(graph.occupancy)
    count = sum(len(o) for o in orders)
    unit = sum(graph.work) / count
    tried = 0
    while tried < iterations and best > target and state.visits < max_visits and not out_of_time():
        path = state.critical_nodes(rng)
        if not path:
            break
        for _ in range(8):
            tried += 1
            u = path[int(rng.random() * len(path))]
            proposal = state.propose(u, rng)
            if proposal is None:
                continue
            heat = temperature * unit * max(0.0, 1.0 - tried / iterations)
            worst = state.cost - heat * math.log(1.0 - rng.random())
            if state.try_move(graph.rank[u], *proposal, worst):
                if state.makespan < believed:
                    believed = state.makespan
                    exact = makespan(graph, state.orders) if doubtful else believed
                    if exact < best:
                        best, best_orders = exact, [o.copy() for o in state.orders]
                break
    return best_orders, best
