"""Polishing: CP-SAT looks for a shorter step, with a schedule in hand as its hint.

The model is the job shop that an order solves: an interval for every action, no two at once on a rank, every action after what it
needs and the delay of its link, bytes held within the cap, and the end of the last action to be as early as can be.

    times       whole numbers of a unit: the largest that divides all costs where one is found, else 1/500 of the mean action
    links       latency + bytes/bandwidth; that messages of one link queue is left out
    memory      bytes of a stage are held from the start of its F to the end of its B or W; what I frees, to the end of I
    symmetry    micro-batches are alike, so that the k-th to be done of an action of a stage may as well be micro-batch k

What comes back is read as an order, proven and simulated with the exact costs, and taken only if it is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.graph import Graph, replay, schedule_graph
from wavetrain.schedule.optimizer.bound import lower_bound
from wavetrain.schedule.proof import CAP_TOLERANCE, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate

MAX_ACTIONS = 20_000
"""Larger schedules are returned as they are: the solver would not get beyond reading the model."""

_RESOLUTION = 500  # units in a mean action, where no unit divides all costs
_BYTES = 10**9  # units in a memory cap
_SHORTER = 1 - 1e-9


def polish(schedule: Schedule, costs: Costs, *, seconds: float, seed: int = 0, workers: int = 2) -> Schedule:
    """A schedule with a shorter step, or the given one.

    The search stops by the clock, so that the same seed may give different results on different runs. Schedules with several
    routes, and those with more than :data:`MAX_ACTIONS` actions, are returned as they are.

    Args:
        schedule: where to start; its placement, and which backwards are split, stay.
        costs: what to optimize for, and the memory cap.
        seconds: for the solver.
        seed: of the solver's random numbers.
        workers: threads of the solver.

    Raises:
        InputError: ortools is not installed.
        ProofError: the given schedule cannot run, or passes the cap.
    """
    cp_model = _solver()
    if workers < 1:
        raise InputError(f"{workers} workers: the solver needs at least 1")
    if not seconds >= 0:
        raise InputError(f"{seconds} seconds for the solver: give 0 or more")
    prove(schedule, costs).require()
    if schedule.num_routes > 1 or schedule.num_actions > MAX_ACTIONS or seconds == 0:
        return schedule
    graph, orders = schedule_graph(schedule, costs)
    problem = _Problem.of(graph, orders)
    found = problem.solve(cp_model, seconds=seconds, seed=seed, workers=workers)
    if found is None:
        return schedule
    whole = {graph.node(a) for actions in schedule.actions for a in actions if a.kind == "B"}
    actions = tuple(tuple(graph.action(n, n in whole) for n in order) for order in found)
    polished = replace(schedule, actions=actions)
    if not prove(polished, costs).proven:
        return schedule  # bytes were rounded
    return polished if simulate(polished, costs).makespan < simulate(schedule, costs).makespan * _SHORTER else schedule


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InputError("polishing needs ortools, which is not installed: pip install 'wavetrain[solve]'") from None
    return cp_model


@dataclass(frozen=True)
class _Problem:
    """The model's numbers: a graph whose times are whole numbers on free-flowing links, and an order that solves it."""

    graph: Graph
    orders: list[list[int]]
    alike: bool
    """Whether micro-batches are interchangeable: every stage does all its backwards in the same way, whole or split."""

    @classmethod
    def of(cls, graph: Graph, orders: Sequence[Sequence[int]]) -> _Problem:
        unit = _unit([*graph.seconds, *graph.delay], sum(graph.work) / sum(len(o) for o in orders))
        scaled = replace(
            graph,
            seconds=[float(round(s / unit)) for s in graph.seconds],
            delay=[float(round(d / unit)) for d in graph.delay],
            occupancy=[0.0] * graph.size,
        )
        num_mb = graph.num_micro_batches
        done = [0] * (3 * graph.num_stages)
        for order in orders:
            for n in order:
                done[n // num_mb] += 1
        alike = all(count in (0, num_mb) for count in done)
        return cls(scaled, _in_turn(orders, num_mb) if alike else [list(o) for o in orders], alike)

    def solve(self, cp_model: Any, *, seconds: float, seed: int, workers: int) -> list[list[int]] | None:
        """The best orders found; None if none is shorter than the given ones."""
        graph, num_mb = self.graph, self.graph.num_micro_batches
        plane = graph.num_stages * num_mb
        hint, hint_end, _ = replay(graph, self.orders)
        horizon = round(max(hint_end))
        least = math.ceil(lower_bound(graph) - 1e-6)
        if least >= horizon:
            return None
        model = cp_model.CpModel()
        makespan = model.new_int_var(least, horizon, "")
        model.add_hint(makespan, horizon)
        start, end = dict[int, Any](), dict[int, Any]()
        for order in self.orders:
            intervals = []
            for n in order:
                length = round(graph.seconds[n])
                start[n] = model.new_int_var(0, horizon - length, "")
                model.add_hint(start[n], round(hint[n]))
                end[n] = start[n] + length
                intervals.append(model.new_fixed_size_interval_var(start[n], length, ""))
            model.add_no_overlap(intervals)
        for n, begins in start.items():
            c = graph.consumer[n]
            if c >= 0:
                model.add(start[c] >= end[n] + round(graph.delay[n]))
            if n >= plane:
                model.add(begins >= end[n - plane])
            if n + plane not in start:
                model.add(makespan >= end[n])
            if self.alike and n % num_mb + 1 < num_mb:
                model.add(start[n + 1] >= end[n])
        for r, order in enumerate(self.orders):
            if math.isfinite(graph.cap[r]):
                self._hold(model, r, order, start, end, hint, horizon)
        model.minimize(makespan)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.random_seed = seed % 2**31
        solver.parameters.num_workers = workers
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or solver.value(makespan) >= horizon:
            return None
        at = {n: (solver.value(begins), round(graph.seconds[n]), n) for n, begins in start.items()}
        return [sorted(order, key=at.__getitem__) for order in self.orders]

    def _hold(
        self,
        model: Any,
        r: int,
        order: Iterable[int],
        start: dict[int, Any],
        end: dict[int, Any],
        hint: list[float],
        horizon: int,
    ) -> None:
        """Bytes of rank ``r`` within its cap: one interval for each part of a stage's activations that is freed at once."""
        graph = self.graph
        plane = graph.num_stages * graph.num_micro_batches
        scale = _BYTES / (graph.cap[r] * (1 + CAP_TOLERANCE))
        intervals, demands = [], []
        for n in order:
            freed = math.floor(-graph.held[n] * scale)
            if n < plane or freed <= 0:
                continue
            forward = n % plane
            size = model.new_int_var(0, horizon, "")
            model.add_hint(size, round(hint[n] + graph.seconds[n] - hint[forward]))
            intervals.append(model.new_interval_var(start[forward], size, end[n], ""))
            demands.append(freed)
        if sum(demands) > _BYTES:
            model.add_cumulative(intervals, demands, _BYTES)


def _unit(times: Iterable[float], mean: float) -> float:
    """The seconds of one unit of time."""
    distinct = sorted({t for t in times if t > 0})
    if not distinct or mean <= 0:
        return 1.0
    for parts in range(1, 61):
        unit = distinct[0] / parts
        if mean / unit <= _RESOLUTION and all(abs(t / unit - round(t / unit)) < 1e-6 for t in distinct):
            return unit
    return mean / _RESOLUTION


def _in_turn(orders: Sequence[Sequence[int]], num_mb: int) -> list[list[int]]:
    """The same orders with micro-batches renamed such that every stage does each kind of action in the order of micro-batches.

    The k-th of a stage is still ready when it starts: k of them have been handed on before. Memory is held by the same stages at
    the same time.
    """
    count = dict[int, int]()
    renamed = []
    for order in orders:
        row = []
        for n in order:
            first = n - n % num_mb
            row.append(first + count.get(first, 0))
            count[first] = count.get(first, 0) + 1
        renamed.append(row)
    return renamed
