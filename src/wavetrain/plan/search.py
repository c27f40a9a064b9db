"""The search: the best plan for a model, a cluster and a global batch.

What is chosen: which node groups take part, tp, dp, pp, the micro-batch, the schedule and its waves, what is recomputed, where
the layers are cut, which devices host which rank of which replica, and how many micro-batches every replica gets.

Shapes (:mod:`wavetrain.plan.shapes`) are visited in the order of a guess, and left out if their lower bound is above the best
plan found. So, of whole node groups, nothing is sampled (with fewer nodes of a group a few shapes are only tried), and for
small clusters the plan is the best there is of the space; where time runs out, the least bound of what was not looked into says
what may be left on the table.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster import Cluster, NodeGroup
from wavetrain.errors import InputError
from wavetrain.plan.clock import Recompute
from wavetrain.plan.cut import Cut, best_cut
from wavetrain.plan.estimate import CostModel, Estimate, Strategy
from wavetrain.plan.layout import Layout, even_cut
from wavetrain.plan.memory import in_flight
from wavetrain.plan.pipeline_time import passes, pipeline_seconds
from wavetrain.plan.placement import MANY_SLOTS, layouts
from wavetrain.plan.rooms import Rooms, balanced, long_enough
from wavetrain.plan.shapes import Limits, Shape, Shapes, by_flight, room_of

Floats = NDArray[np.float64]
Progress = Callable[[str], None]

TOLERANCE: Final = 0.001
"""Of a cut, as a share of its value, while searching."""
FEW_SLOTS: Final = 6
FIRST_LAYOUTS: Final = 3
PATIENT_LAYOUTS: Final = 6
FAR: Final = 1.1
"""A shape of more than a few slots is given up after some layouts (fewer, if slots are many) if none was so close to the best."""
UNSURE: Final = 1.03
"""How far estimates of schedules other than 1F1B may be short of what their stages take."""
SHOWN: Final = 6
"""Plans whose cuts are made exact."""
SHAPES_OF_A_PART: Final = 2
"""Shapes that are looked into with fewer nodes of a group."""
KEEP_AT_LEAST: Final = 3
"""Plans that a report needs beside the best."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan with what it takes."""

    layout: Layout
    cut: tuple[int, ...]
    strategy: Strategy
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def tp(self) -> int:
        return int(self.layout.tp.max())

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that take part."""
        return tuple(sorted({self.layout.groups[g].device.name for g in np.unique(self.layout.group)}))

    @cached_property
    def mark(self) -> tuple[object, ...]:
        """What makes two plans of one kind."""
        s = self.strategy
        return (self.devices, self.tp, self.layout.num_ranks, self.layout.num_replicas, s.micro_batch, s.schedule, s.waves)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found."""

    best: tuple[Candidate, ...]
    """Plans that fit, the fastest first; several of one shape only where the shape's other plans differ in schedule."""
    bound: float
    """Seconds below which no plan of the search's space can be."""
    num_shapes: int
    num_visited: int
    """Shapes that were looked into; the bound rules the others out."""
    closest: Candidate | None
    """Where nothing fits: the plan that misses by least."""
    seconds: float
    """That the search took."""
    complete: bool = True
    """Whether the search came to its end."""
    notes: tuple[str, ...] = field(default=())


def search(
    model: CostModel, cluster: Cluster, global_batch: int, limits: Limits | None = None, progress: Progress | None = None
) -> Found:
    """The best plans.

    Args:
        model: the workload and what its layers cost.
        cluster: the nodes.
        global_batch: samples of a step, over all replicas.
        limits: what may be chosen.
        progress: is told now and then how far the search is.

    Raises:
        InputError: nothing can be chosen at all: a batch below 1, no tp that the nodes and the heads allow, …
    """
    return _Search(model, cluster, global_batch, limits or Limits(), progress).run()


class _Search:
    def __init__(self, model: CostModel, cluster: Cluster, global_batch: int, limits: Limits, progress: Progress | None) -> None:
        if global_batch < 1:
            raise InputError(f"a global batch of {global_batch}; it must be at least 1")
        self.model, self.cluster, self.global_batch, self.limits = model, cluster, global_batch, limits
        self.progress = progress
        self.kept: list[Candidate] = []
        self.sure: list[Candidate] = []
        self.shapes = Shapes(model, cluster, global_batch, limits)
        self.closest: Candidate | None = None
        self.begun = time.monotonic()

    def run(self) -> Found:
        shapes = sorted(self.shapes.all(), key=lambda shape: shape.guess)
        if not shapes:
            raise InputError(self.shapes.nothing())
        visited, complete, told = 0, True, self.begun
        left = []
        for shape in shapes:
            if not shape.part.whole or shape.bound >= self._limit(1):
                continue
            if self.kept and time.monotonic() - self.begun > self.limits.seconds:
                complete = False
                left.append(shape.bound)
                continue
            visited += 1
            if self.progress is not None and time.monotonic() - told > 0.2:
                told = time.monotonic()
                so_far = f", best so far {self.kept[0].seconds:.4g} s" if self.kept else ""
                self.progress(f"{visited} of at most {len(shapes)} shapes{so_far}")
            if not self._visit(shape):
                complete = False
                left.append(shape.bound)
        visited += self._fewer_nodes(shapes)
        self._exact_cuts()
        known = {id(c) for c in self.kept}
        best = sorted([*self.kept, *(c for c in self.sure[:KEEP_AT_LEAST] if id(c) not in known)], key=lambda c: c.seconds)
        return Found(
            best=tuple(best),
            bound=min([*left, self.kept[0].seconds] if self.kept else [shape.bound for shape in shapes]),
            num_shapes=len(shapes),
            num_visited=visited,
            closest=self.closest,
            seconds=time.monotonic() - self.begun,
            complete=complete,
        )

    def _fewer_nodes(self, shapes: Sequence[Shape]) -> int:
        """Look at the most promising shapes with a part of a group's nodes only: enough to find out that less is more."""
        seen: Counter[tuple[NodeGroup, ...]] = Counter()
        for shape in shapes:
            groups = shape.part.groups
            if shape.part.whole or seen[groups] >= SHAPES_OF_A_PART or shape.bound >= self._limit(1):
                continue
            if self.kept and (shape.guess >= self.kept[0].seconds or time.monotonic() - self.begun > self.limits.seconds):
                continue
            seen[groups] += 1
            self._visit(shape, at_most=2)
        return seen.total()

    def _visit(self, shape: Shape, at_most: float = math.inf) -> bool:
        """Look into a shape; False if not all of its layouts were, for the first of them are far from the best."""
        busy = shape.bound - self.shapes.reduction_bound(shape.part.groups, shape.tp, shape.num_ranks, shape.num_replicas)
        slots = shape.num_ranks * shape.num_replicas
        patience = math.inf if slots <= FEW_SLOTS else FIRST_LAYOUTS if slots > MANY_SLOTS else PATIENT_LAYOUTS
        nearest = math.inf
        all_layouts = layouts(shape.part.groups, shape.tp, shape.num_ranks, shape.num_replicas, shape.part.first)
        for number, layout in enumerate(all_layouts):
            if number >= at_most:
                return False
            if number >= patience and nearest > FAR * self._limit(1):
                return False
            if busy + self._layout_bound(layout, shape) >= self._limit(KEEP_AT_LEAST):
                continue
            cuts: dict[tuple[Recompute, int], Cut | None] = {}
            for group in by_flight(self.limits.schedules):
                for candidate in self._cheapest(layout, shape.micro_batch, group, cuts):
                    nearest = min(nearest, candidate.seconds)
                    self._keep(candidate)
        return True

    def _exact_cuts(self) -> None:
        """The cuts of the plans that were kept, to the last bit: on the way a thousandth was as good."""
        for i, candidate in enumerate(self.kept[:SHOWN]):
            strategy, layout = candidate.strategy, candidate.layout
            per_replica = self.global_batch / strategy.micro_batch / layout.num_replicas
            flights = in_flight(strategy.schedule, layout.num_ranks, math.ceil(per_replica), strategy.waves)
            rooms = self._rooms(layout, strategy)
            least = passes(strategy.schedule, strategy.waves)
            cut = self._cut(layout, strategy, None, per_replica, least, 0.0)
            if cut is None or not rooms.hold(cut.points, flights):
                cut = self._cut(layout, strategy, rooms.allowed(flights, least), per_replica, least, 0.0)
            if cut is None or cut.points == candidate.cut:
                continue
            found = self._finished(layout, cut.points, strategy, ((strategy.schedule, strategy.waves),))
            if found and found[0].seconds < candidate.seconds:
                self.kept[i] = found[0]
        self.kept.sort(key=lambda c: c.seconds)

    def _layout_bound(self, layout: Layout, shape: Shape) -> float:
        """Seconds that come on top of all devices being busy: gradients at the rates of this layout's own rings, and messages."""
        found = 0.0
        if layout.num_replicas > 1:
            rates, _, crosses = layout.reduction
            constants = [self.model.calibration.of(g.device.name) for g in layout.groups]
            inside = max(1.0 if g.intra.measured else c.reduce for g, c in zip(layout.groups, constants, strict=True))
            outside = max(1.0 if g.inter.measured else c.network for g, c in zip(layout.groups, constants, strict=True))
            exposed = min(c.exposed for c in constants)
            total = float(self.model.arrays.parameters_split.sum()) / shape.tp * self.limits.gradient_bytes
            reached = float((rates * np.where(crosses, outside, inside)).sum())
            found += exposed * 2 * (layout.num_replicas - 1) / layout.num_replicas * total / reached
        if layout.num_ranks > 1 and not self.model.overlaps:
            least = min(float(edge.min()) for edge in self.model.edge_seconds(layout, shape.micro_batch))
            found += max(1, self.global_batch // shape.micro_batch // layout.num_replicas) * least
        return found

    def _cheapest(
        self,
        layout: Layout,
        micro_batch: int,
        schedules: Sequence[tuple[str, int]],
        cuts: dict[tuple[Recompute, int], Cut | None],
    ) -> list[Candidate]:
        """Plans on one layout: with the least recompute, and the optimizer as whole, as memory allows.

        ``cuts`` remembers the best ones without a look at memory, which all schedules share: where they fit, they are the best.
        """
        per_replica = self.global_batch / micro_batch / layout.num_replicas
        name, waves = schedules[0]
        flights = in_flight(name, layout.num_ranks, math.ceil(per_replica), waves)
        least = passes(name, waves)
        if least * layout.num_ranks > self.model.workload.num_layers:
            return []
        for sharded in self.limits.sharded_optimizer:
            if sharded and layout.num_replicas == 1:
                continue
            for recompute in self.limits.recompute:
                strategy = Strategy(
                    micro_batch=micro_batch,
                    num_micro_batches=(1,) * layout.num_replicas,
                    recompute=recompute,
                    sharded_optimizer=sharded,
                    gradient_bytes=self.limits.gradient_bytes,
                )
                wider = cuts.get((recompute, 1))
                if wider is not None and self._too_slow(layout, wider, per_replica):
                    return []
                if (recompute, least) not in cuts:
                    cuts[recompute, least] = self._cut(layout, strategy, None, per_replica, least)
                cut = cuts[recompute, least]
                if cut is not None and self._too_slow(layout, cut, per_replica):
                    return []
                rooms = self._rooms(layout, strategy)
                if cut is not None and not rooms.hold(cut.points, flights):
                    fits = rooms.may_hold(flights, least)
                    cut = self._cut(layout, strategy, rooms.allowed(flights, least), per_replica) if fits else None
                if cut is not None and self._too_slow(layout, cut, per_replica):
                    return []
                if cut is not None:
                    return self._finished(layout, cut.points, strategy, schedules)
        self._miss(layout, replace(strategy, schedule=name, waves=waves))
        return []

    def _too_slow(self, layout: Layout, cut: Cut, per_replica: float) -> bool:
        """Whether the slowest rank alone takes longer than the plans that are kept (where all replicas are alike)."""
        alike = layout.columns[0][0].shape[1] == 1
        return alike and per_replica * cut.slowest >= self._limit(KEEP_AT_LEAST)

    def _limit(self, count: int) -> float:
        """Seconds from which on a plan is of no interest: those of the ``count``-th best.

        Estimates of 1F1B are exact; those of other schedules may be short of what their stages take, so that up to as far above
        them a plan that is sure may still win.
        """
        if len(self.kept) < count:
            return math.inf
        found = self.kept[count - 1]
        if found.strategy.schedule == "1f1b":
            return found.seconds
        sure = self.sure[count - 1].seconds if len(self.sure) >= count else math.inf
        return min(sure, UNSURE * found.seconds)

    def _finished(
        self, layout: Layout, cut: tuple[int, ...], strategy: Strategy, schedules: Sequence[tuple[str, int]]
    ) -> list[Candidate]:
        found = []
        for name, waves in schedules:
            if layout.num_ranks == 1 and name != schedules[0][0] and name != "1f1b":
                continue
            shares = self._shares(layout, cut, replace(strategy, schedule=name, waves=waves))
            if shares is None:
                continue
            chosen = replace(strategy, schedule=name, waves=waves, num_micro_batches=shares)
            estimate = self.model.estimate(layout, cut, chosen)
            if estimate.fits:
                found.append(Candidate(layout=layout, cut=cut, strategy=chosen, estimate=estimate))
            else:
                self._remember(Candidate(layout=layout, cut=cut, strategy=chosen, estimate=estimate))
        return found

    def _cut(
        self,
        layout: Layout,
        strategy: Strategy,
        allowed: list[NDArray[np.bool_]] | None,
        per_replica: float,
        least: int = 1,
        tolerance: float = TOLERANCE,
    ) -> Cut | None:
        """The best cut, of ``least`` layers a rank or as ``allowed``."""
        (kinds, tps), index = layout.columns
        weights = np.bincount(index, minlength=kinds.shape[1]) / layout.num_replicas
        pairs = kinds * (int(tps.max()) + 1) + tps
        names, first = np.unique(pairs, return_index=True)
        times = {
            int(name): self._times(layout, int(kinds.flat[at]), int(tps.flat[at]), strategy)
            for name, at in zip(names, first, strict=True)
        }
        sums = {name: float(t.sum()) for name, t in times.items()}
        rows = pairs.tolist()
        scale = [w / sum(sums[row[c]] for row in rows) for c, w in enumerate(weights.tolist())]
        made: dict[tuple[int, ...], Floats] = {}
        seconds: list[Floats] = []
        for row in map(tuple, rows):
            if row not in made:
                made[row] = np.sum([f * times[name] for f, name in zip(scale, row, strict=True)], axis=0) / sum(scale)
            seconds.append(made[row])
        messages = self._edges(layout, strategy.micro_batch)
        if allowed is None and least > 1:
            allowed = [long_enough(self.model.workload.num_layers, least)] * layout.num_ranks
        return best_cut(seconds, messages, max(1.0, per_replica), allowed, tolerance=tolerance)

    def _times(self, layout: Layout, group: int, tp: int, strategy: Strategy) -> Floats:
        return self.model.layers(layout, group, tp, strategy.micro_batch, strategy.recompute).both

    def _edges(self, layout: Layout, micro_batch: int) -> list[Floats]:
        """Seconds of a message after every layer, between every pair of ranks: the slowest replica's."""
        if layout.num_ranks == 1:
            return []
        return self.model.edge_seconds(layout, micro_batch)

    def _rooms(self, layout: Layout, strategy: Strategy) -> Rooms:
        (kinds, tps), _ = layout.columns
        room = {g: room_of(self.model, group) for g, group in enumerate(layout.groups)}
        least = np.array([min(room[g] for g in row) for row in kinds.tolist()])
        layers = self.model.memory(layout, int(tps.max()), strategy)
        return Rooms(layers, least)

    def _shares(self, layout: Layout, cut: tuple[int, ...], strategy: Strategy) -> tuple[int, ...] | None:
        """Micro-batches of every replica: such that the slowest ends as early as can be."""
        total, replicas = self.global_batch // strategy.micro_batch, layout.num_replicas
        (kinds, _), index = layout.columns
        if kinds.shape[1] == 1:
            base, more = divmod(total, replicas)
            return tuple(base + (r < more) for r in range(replicas))
        pace, fill = self._paces(layout, cut, strategy)
        return balanced(total, pace[index], fill[index])

    def _paces(self, layout: Layout, cut: tuple[int, ...], strategy: Strategy) -> tuple[Floats, Floats]:
        """Seconds that a further micro-batch adds to a replica of every kind, and those beside."""
        (kinds, tps), _ = layout.columns
        starts = np.asarray(cut[:-1])
        pace, fill = np.zeros(kinds.shape[1]), np.zeros(kinds.shape[1])
        for c in range(kinds.shape[1]):
            forward, backward = np.zeros(layout.num_ranks), np.zeros(layout.num_ranks)
            for k in range(layout.num_ranks):
                found = self.model.layers(layout, int(kinds[k, c]), int(tps[k, c]), strategy.micro_batch, strategy.recompute)
                forward[k] = np.add.reduceat(found.forward, starts)[k]
                backward[k] = np.add.reduceat(found.backward, starts)[k]
            pace[c] = float((forward + backward).max())
            many = 4 * layout.num_ranks
            fill[c] = pipeline_seconds(forward, backward, many, strategy.schedule, strategy.waves) - many * pace[c]
        return pace, fill

    def _keep(self, candidate: Candidate) -> None:
        """Among the best, and among the best that are sure."""
        self._insert(self.kept, candidate)
        if candidate.strategy.schedule == "1f1b":
            self._insert(self.sure, candidate)

    def _insert(self, kept: list[Candidate], candidate: Candidate) -> None:
        """Unless one of the same kind is there that is as fast."""
        if len(kept) >= self.limits.keep and candidate.seconds >= kept[-1].seconds:
            return
        mark = candidate.mark
        for i, other in enumerate(kept):
            if other.mark == mark:
                if candidate.seconds < other.seconds:
                    kept[i] = candidate
                    kept.sort(key=lambda c: c.seconds)
                return
        kept.append(candidate)
        kept.sort(key=lambda c: c.seconds)
        del kept[self.limits.keep :]

    def _miss(self, layout: Layout, strategy: Strategy) -> None:
        """A shape that does not fit: an even cut says by how much."""
        if self.kept:
            return
        base, more = divmod(self.global_batch // strategy.micro_batch, layout.num_replicas)
        counts = tuple(base + (r < more) for r in range(layout.num_replicas))
        cut = even_cut(self.model.workload.num_layers, layout.num_ranks)
        chosen = replace(strategy, num_micro_batches=counts)
        self._remember(Candidate(layout=layout, cut=cut, strategy=chosen, estimate=self.model.estimate(layout, cut, chosen)))

    def _remember(self, candidate: Candidate) -> None:
        over = max(candidate.estimate.memory_share)
        if self.closest is None or over < max(self.closest.estimate.memory_share):
            self.closest = candidate
