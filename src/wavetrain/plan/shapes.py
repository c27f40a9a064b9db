"""Shapes: groups, tp, dp, pp and micro-batch of a plan, each with what it must take at least.

A lower bound holds for every layout and cut of a shape:

    all devices busy     global batch · work of a sample  /  Σ over devices of the most work a second that a device does
    path                 a micro-batch passes all layers forward, and back (its I at least)
    path (1F1B)          the first micro-batch must reach a rank before it can begin:  t_0 + … + t_{j−1} + B · t_j  for every
                         rank j; at the best cut t_j = T/B · (1 − 1/B)^j, so  T ≥ B · W / Σ_j s_j (1 − 1/B)^j  with the fastest
                         ranks first
    reduction            the even share of the gradients at the fastest link that so many replicas can have

each with the least recompute with which the layers may fit at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster import Cluster, NodeGroup
from wavetrain.plan.clock import RECOMPUTES, Recompute
from wavetrain.plan.estimate import CostModel, Strategy
from wavetrain.plan.layout import Layout
from wavetrain.plan.memory import in_flight
from wavetrain.plan.pipeline_time import fill_share, passes
from wavetrain.plan.placement import num_slots

Floats = NDArray[np.float64]

MAX_MICRO_BATCH: Final = 1024
FULLEST: Final = 0.97
"""Share of a device's memory that a plan may fill: the rest is for fragmentation."""
MANY_DEVICES: Final = 64
"""Of clusters with more devices, groups take part whole or not at all."""
MAX_SUBSETS: Final = 15
"""Choices of node groups that are tried: all of four groups."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a search may choose from."""

    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1), ("zb-wave", 1), ("zb-wave", 2))
    """Families of schedules, with their waves (or stages a rank). Others can be named: gpipe, interleaved, hanayo, zb-h1, zbv."""
    recompute: tuple[Recompute, ...] = RECOMPUTES
    sharded_optimizer: tuple[bool, ...] = (False, True)
    """Whether the optimizer may be divided over the replicas; in this order, the later only where the earlier do not fit."""
    tp: tuple[int, ...] | None = None
    """Default: all that the nodes and the heads allow."""
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    leave_out: bool = True
    """Whether node groups may be left out."""
    gradient_bytes: int = 4
    keep: int = 12
    """Plans that are kept, the best first."""
    seconds: float = 12.0
    """Stop after about so long; the bound says what may have been missed."""


def limits_of(runtime: str) -> Limits:
    """What a runtime can do: wavetrain keeps optimizers whole, and recomputes all or nothing; Megatron has no waves."""
    if runtime == "megatron":
        return Limits(schedules=(("1f1b", 1), ("interleaved", 2)))
    return Limits(sharded_optimizer=(False,), recompute=("none", "full"))


class Part(NamedTuple):
    """The nodes of a cluster that take part."""

    groups: tuple[NodeGroup, ...]
    first: tuple[int, ...]
    """Number of every group's first node in the whole cluster."""
    whole: bool = True
    """Whether all nodes of its groups take part; parts of groups are looked into only where they promise to be better."""


class Shape(NamedTuple):
    """What is chosen before the devices are laid out."""

    bound: float
    """Seconds below which no plan of the shape can be."""
    guess: float
    """Seconds that it may well take: the order of the visits."""
    part: Part
    tp: int
    num_ranks: int
    num_replicas: int
    micro_batch: int


class Shapes:
    """The shapes of a search.

    Args:
        model: the workload and what its layers cost.
        cluster: the nodes.
        global_batch: samples of a step.
        limits: what may be chosen.
    """

    def __init__(self, model: CostModel, cluster: Cluster, global_batch: int, limits: Limits) -> None:
        self.model, self.cluster, self.global_batch, self.limits = model, cluster, global_batch, limits
        self.rates: dict[tuple[object, ...], tuple[Floats, Floats, float]] = {}
        self.reached = 0
        """How far the choices went: tp, dp and pp, the micro-batch."""

    def nothing(self) -> str:
        """Why there is no shape at all."""
        workload, limits = self.model.workload, self.limits
        where = f"{workload.name} on {self.cluster.describe()}"
        if self.reached == 0:
            asked = "" if limits.tp is None else f"of {', '.join(map(str, limits.tp))} "
            return f"{where}: no tensor parallelism {asked}divides both {workload.tensor_limit} heads and the devices of a node"
        if self.reached == 1:
            given = (("dp", limits.dp), ("pp", limits.pp))
            asked = ", ".join(f"{name} {', '.join(map(str, values))}" for name, values in given if values is not None)
            return (
                f"{where}: no dp × pp{f' (of {asked})' if asked else ''} uses the devices with at most {workload.num_layers} "
                f"ranks, one a layer, and {self.global_batch} replicas, one a sequence"
            )
        if self.reached == 2:
            asked = "" if limits.micro_batch is None else f" of {', '.join(map(str, limits.micro_batch))}"
            return f"{where}: no micro-batch{asked} divides a global batch of {self.global_batch} with one left for every replica"
        sharded = " and a sharded optimizer" if True in limits.sharded_optimizer else ""
        return (
            f"{where} cannot be split: even with full recompute{sharded} the layers have no room on the devices that may be "
            "used; take more or larger ones, a shorter sequence, or fewer limits"
        )

    def all(self) -> Iterator[Shape]:
        """Every shape that may fit."""
        for part in self._parts():
            for tp in self._tensor_sizes(part.groups):
                self.reached = max(self.reached, 1)
                slots = num_slots(part.groups, tp)
                for replicas in _divisors(slots):
                    ranks = slots // replicas
                    if ranks > self.model.workload.num_layers or replicas > self.global_batch:
                        continue
                    if not _allowed(self.limits.pp, ranks) or not _allowed(self.limits.dp, replicas):
                        continue
                    self.reached = max(self.reached, 2)
                    for micro_batch in self._micro_batches(replicas):
                        self.reached = max(self.reached, 3)
                        found = self._bound(part.groups, tp, ranks, replicas, micro_batch)
                        if found is not None:
                            yield Shape(*found, part, tp, ranks, replicas, micro_batch)

    def _parts(self) -> list[Part]:
        """All nodes; and, where some may be left out, every choice of groups, and each choice with fewer nodes of one group."""
        groups = self.cluster.groups
        first = tuple(int(n) for n in np.cumsum([0, *(g.count for g in groups)])[:-1])
        found = [Part(groups, first)]
        if not self.limits.leave_out:
            return found
        few = 2 ** len(groups) - 1 <= MAX_SUBSETS
        for size in range(len(groups), 0, -1) if few else (len(groups), len(groups) - 1):
            for chosen in combinations(range(len(groups)), size):
                found.append(Part(tuple(groups[i] for i in chosen), tuple(first[i] for i in chosen)))
        for part in list(found) if few and self.cluster.num_devices <= MANY_DEVICES else ():
            for i, group in enumerate(part.groups):
                for smaller in _smaller(group):
                    found.append(Part((*part.groups[:i], smaller, *part.groups[i + 1 :]), part.first, False))
        return list(dict.fromkeys(found))

    def _tensor_sizes(self, groups: Sequence[NodeGroup]) -> list[int]:
        limit = self.model.workload.tensor_limit
        found = [
            tp for tp in range(1, min(g.gpus for g in groups) + 1) if limit % tp == 0 and all(g.gpus % tp == 0 for g in groups)
        ]
        return [tp for tp in found if _allowed(self.limits.tp, tp)]

    def _micro_batches(self, replicas: int) -> list[int]:
        sizes = [m for m in _divisors(self.global_batch) if m <= MAX_MICRO_BATCH and self.global_batch // m >= replicas]
        return [m for m in sizes if _allowed(self.limits.micro_batch, m)]

    def _rates(
        self, groups: Sequence[NodeGroup], tp: int, micro_batch: int, recompute: Recompute
    ) -> tuple[Floats, Floats, float]:
        """Of a slot of every group: micro-batches of the whole model a second, at the most; how many slots there are; and the
        least seconds from the beginning of a micro-batch's forward pass to the end of its backward pass (of its I, where it is
        split).
        """
        key = (tuple(id(g) for g in groups), tp, micro_batch, recompute)
        if key not in self.rates:
            layout = _bare(groups, tp)
            found = [self.model.layers(layout, g, tp, micro_batch, recompute) for g in range(len(groups))]
            counts = np.array([g.count * (g.gpus // tp) for g in groups], dtype=np.float64)
            forward, backward = (np.min([getattr(f, name) for f in found], axis=0).sum() for name in ("forward", "backward"))
            self.rates[key] = _most_work([f.both for f in found], counts), counts, float(forward + 0.5 * backward)
        return self.rates[key]

    def _bound(
        self, groups: tuple[NodeGroup, ...], tp: int, ranks: int, replicas: int, micro_batch: int
    ) -> tuple[float, float] | None:
        """Seconds below which no plan of a shape can be, and a guess of what it takes; None if none can fit."""
        batches = self.global_batch / micro_batch
        each = max(1.0, math.floor(batches / replicas))
        reduction = self.reduction_bound(groups, tp, ranks, replicas)
        best: tuple[float, float] | None = None
        for schedules in by_flight(self.limits.schedules):
            recompute = self._least_recompute(groups, tp, ranks, replicas, micro_batch, schedules[0], math.ceil(each))
            if recompute is None:
                continue
            rates, counts, path = self._rates(groups, tp, micro_batch, recompute)
            busy = max(batches / float(rates @ counts), path)
            share = min(fill_share(name, waves) for name, waves in schedules)
            if ranks > 1 and share == 1.0:
                fastest = np.sort(np.repeat(rates, counts.astype(np.int64)))[::-1][:ranks]
                decay = (1 - 1 / each) ** np.arange(ranks) if each > 1 else np.eye(1, ranks)[0]
                busy = max(busy, each / float(fastest @ decay))
            pace = batches / each / float(rates @ counts)
            spread = 1 + 0.5 * ranks / self.model.workload.num_layers if ranks > 1 else 1.0
            guess = spread * pace * (each + share * (ranks - 1)) + reduction
            if best is None or guess < best[1]:
                best = (min(busy + reduction, best[0]) if best else busy + reduction, guess)
            else:
                best = (min(busy + reduction, best[0]), best[1])
        return best

    def _least_recompute(
        self,
        groups: tuple[NodeGroup, ...],
        tp: int,
        ranks: int,
        replicas: int,
        micro_batch: int,
        schedule: tuple[str, int],
        num_micro_batches: int,
    ) -> Recompute | None:
        """The least recompute with which all layers may fit, if devices could be shared out at will; None if none does.

        A rank of room r that holds f micro-batches in flight has room for less than r / (states + f · kept) layers, both of the
        smallest block. The sum over ranks is largest if the ranks with the most room hold the most layers in flight least: with
        rooms rising and flights falling.
        """
        flights = in_flight(schedule[0], ranks, num_micro_batches, schedule[1])
        rooms = np.sort(np.repeat([room_of(self.model, g) for g in groups], [g.count * (g.gpus // tp) for g in groups]))[-ranks:]
        for recompute in self.limits.recompute:
            strategy = Strategy(
                micro_batch=micro_batch,
                num_micro_batches=(1,) * replicas,
                recompute=recompute,
                sharded_optimizer=True in self.limits.sharded_optimizer,
                gradient_bytes=self.limits.gradient_bytes,
            )
            layers = self.model.memory_of(tp, replicas, strategy)
            blocks = layers.states >= 0.5 * layers.states.max()
            states, kept = float(layers.states[blocks].min()), float(layers.activation[blocks].min())
            if float((rooms / (states + np.sort(flights)[::-1] * kept)).sum()) >= int(blocks.sum()):
                return recompute
        return None

    def reduction_bound(self, groups: tuple[NodeGroup, ...], tp: int, ranks: int, replicas: int) -> float:
        if replicas == 1:
            return 0.0
        a = self.model.arrays
        share = float(a.parameters_split.sum()) / tp / ranks
        num_bytes = share * self.limits.gradient_bytes
        best = 0.0
        for group in groups:
            constants = self.model.calibration.of(group.device.name)
            intra = group.intra.bandwidth * (1.0 if group.intra.measured else constants.reduce)
            inter = min(group.inter.bandwidth, group.flow_bandwidth) * (1.0 if group.inter.measured else constants.network)
            rate = max(intra, inter) if replicas <= group.gpus // tp else inter
            best = max(best, rate / constants.exposed if constants.exposed else math.inf)
        return 2 * (replicas - 1) / replicas * num_bytes / best


def _most_work(times: Sequence[Floats], counts: Floats) -> Floats:
    """Micro-batches of the whole model a second that a slot of every group can add at most, (num_groups,).

    However layers and samples are shared out, a weighted sum of the layers that are done in a second is at most Σ_g count_g ·
    max_l (weight_l / time_{g,l}), for any weights (this is the dual of the linear program of the best sharing). Taken as
    weights: what every layer takes on the fastest group, of all layers or of one kind of them only; the tightest counts.
    """
    reference = np.min(times, axis=0)
    best: Floats | None = None
    for weights in (reference, np.where(reference >= 0.5 * reference.max(), reference, 0.0)):
        speeds = np.array([np.max(np.divide(weights, t, out=np.zeros_like(t), where=t > 0)) for t in times]) / weights.sum()
        if best is None or speeds @ counts < best @ counts:
            best = speeds
    assert best is not None, "there are weights"
    return best


def by_flight(schedules: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Schedules that hold as much in flight and have as many stages a rank, together: they can share a cut."""
    groups: dict[object, list[tuple[str, int]]] = {}
    for name, waves in schedules:
        kind = name if name in ("1f1b", "gpipe", "hanayo", "interleaved") else "whole"
        groups.setdefault((kind, passes(name, waves)), []).append((name, waves))
    return list(groups.values())


def _bare(groups: Sequence[NodeGroup], tp: int) -> Layout:
    """A layout that only says what the groups are."""
    one = np.zeros((1, 1), dtype=np.int64)
    return Layout(groups=tuple(groups), group=one, node=one, tp=np.full((1, 1), tp, dtype=np.int64))


def _smaller(group: NodeGroup) -> list[NodeGroup]:
    """The group with fewer nodes, or of a single node fewer devices: one less, and the next lower powers of two."""

    def fewer(count: int) -> list[int]:
        powers = [2**i for i in range(count.bit_length()) if 2**i < count]
        return sorted({count - 1, *powers[-2:], 1} - {0, count}, reverse=True)

    if group.count > 1:
        return [replace(group, count=n) for n in fewer(group.count)]
    return [replace(group, gpus=n) for n in fewer(group.gpus)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _allowed(limit: tuple[int, ...] | None, value: int) -> bool:
    return limit is None or value in limit


def room_of(model: CostModel, group: NodeGroup) -> float:
    """Bytes of a device that accounted ones may fill."""
    constants = model.calibration.of(group.device.name)
    return (FULLEST * group.device.memory_bytes - constants.memory_base) / constants.memory_extra
