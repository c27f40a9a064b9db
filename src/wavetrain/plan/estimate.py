"""What a step takes: one strategy on one layout with one cut, from layers to seconds.

    step  =  the slowest replica's pipeline (:mod:`wavetrain.plan.pipeline_time`)
             +  the part of the gradients' reduction that nothing hides  +  optimizer  +  a constant

A rank is held up by a message to or from its neighbours (links carry both ways at once, and neighbours on both sides).

Where the seconds go is told as a waterfall that adds up to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import InputError
from wavetrain.plan.calibration import Calibration
from wavetrain.plan.clock import Arrays, LayerSeconds, Recompute, arrays, layer_seconds
from wavetrain.plan.layout import Layout
from wavetrain.plan.memory import Held, StageMemory, held, in_flight, layer_memory
from wavetrain.plan.pipeline_time import passes, pipeline_seconds
from wavetrain.profile import LayerTable, Profiles
from wavetrain.workload import Layer, Workload

Floats = NDArray[np.float64]

PARTS: Final = ("compute", "tensor", "messages", "idle", "reduction", "optimizer", "other")
"""Of a step's seconds: computing of the slowest rank; its all-reduces of tensor parallelism; its messages to neighbours; what it
waits for the pipeline to fill and drain; gradients' reduction over the replicas; the optimizer; all else."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How to split the work; where it runs is the layout's."""

    micro_batch: int
    """Samples of a micro-batch."""
    num_micro_batches: tuple[int, ...]
    """Of every replica, (num_replicas,)."""
    schedule: str = "1f1b"
    waves: int = 1
    """Waves, or stages a rank of an interleaved schedule."""
    recompute: Recompute = "none"
    sharded_optimizer: bool = False
    gradient_bytes: int = 4
    """Of one gradient on its way between replicas."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step is predicted to take."""

    seconds: float
    parts: dict[str, float]
    """Seconds by :data:`PARTS`; they add up to ``seconds``."""
    rank_seconds: tuple[float, ...]
    """Of every rank for one micro-batch, forward and backward, in the slowest replica."""
    slowest: tuple[int, int]
    """(rank, replica) that holds all others up."""
    memory: tuple[Held, ...]
    """At the peak of the fullest device of every rank."""
    memory_share: tuple[float, ...]
    """Of what the device of every rank has."""
    error: float
    """Mean error to expect, as a share of ``seconds``."""
    estimated: bool = False
    """Whether a profile was used beyond what it measured."""

    @property
    def fits(self) -> bool:
        return max(self.memory_share) <= 1.0

    @property
    def peak_bytes(self) -> float:
        return max(h.total for h in self.memory)


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """All that estimates are made from, for one model."""

    workload: Workload
    calibration: Calibration
    profiles: Profiles = field(default_factory=Profiles)
    model_name: str = ""
    """What the profiles call the model; default: its own name."""
    overlaps: bool = False
    """Whether messages go on while a rank computes, as in wavetrain's own runtime; else a rank waits for them, as in Megatron."""

    def with_calibration(self, calibration: Calibration) -> CostModel:
        """The same with other constants."""
        made = replace(self, calibration=calibration)
        made.__dict__["arrays"] = self.arrays
        made.__dict__["_tables"] = self._tables
        return made

    @cached_property
    def arrays(self) -> Arrays:
        """The model's layers."""
        return arrays(self.workload)

    @cached_property
    def _tables(self) -> dict[tuple[str, int], LayerTable | None]:
        return {}

    def table(self, device: str, tp: int) -> LayerTable | None:
        """What was measured of the model on a device; layers that are alike get their mean."""
        if (device, tp) not in self._tables:
            found = self.profiles.times.get((self.model_name or self.workload.name, device, tp))
            if found is not None and found.num_layers != self.workload.num_layers:
                found = None  # of another cut of the model: it cannot say which layer is which
            if found is not None:
                kinds: dict[Layer, int] = {}
                alike = [kinds.setdefault(replace(layer, name=""), len(kinds)) for layer in self.workload.layers]
                found = found.averaged(np.array(alike, dtype=np.intp))
            self._tables[device, tp] = found
        return self._tables[device, tp]

    @cached_property
    def _clocks(self) -> dict[tuple[object, ...], LayerSeconds]:
        return {}

    @cached_property
    def _memories(self) -> dict[tuple[object, ...], StageMemory]:
        return {}

    def layers(self, layout: Layout, group: int, tp: int, micro_batch: float, recompute: Recompute = "none") -> LayerSeconds:
        """Seconds of every layer on a slot of ``tp`` devices of a node group."""
        nodes = layout.groups[group]
        key = (nodes.device.name, nodes.gpus, nodes.intra, nodes.inter, tp, micro_batch, recompute)
        if key in self._clocks:
            return self._clocks[key]
        found = self._clocks[key] = layer_seconds(
            self.arrays,
            nodes,
            self.calibration.of(nodes.device.name),
            tp=tp,
            micro_batch=micro_batch,
            recompute=recompute,
            table=self.table(nodes.device.name, tp),
        )
        return found

    def memory(self, layout: Layout, tp: int, strategy: Strategy) -> StageMemory:
        """Bytes of every layer on a slot of ``tp`` devices."""
        return self.memory_of(tp, layout.num_replicas, strategy)

    def memory_of(self, tp: int, num_replicas: int, strategy: Strategy) -> StageMemory:
        """Bytes of every layer on a slot of ``tp`` devices, with so many replicas."""
        replicas = num_replicas if strategy.sharded_optimizer else 1
        key = (tp, replicas, strategy.micro_batch, strategy.recompute, strategy.gradient_bytes)
        if key in self._memories:
            return self._memories[key]
        table = self.profiles.memory.get((self.model_name or self.workload.name, tp))
        if table is not None and len(table.parameters) != self.workload.num_layers:
            table = None
        found = self._memories[key] = layer_memory(
            self.arrays,
            tp=tp,
            micro_batch=strategy.micro_batch,
            num_replicas=replicas,
            recompute=strategy.recompute,
            sharded_optimizer=strategy.sharded_optimizer,
            gradient_bytes=strategy.gradient_bytes,
            table=table,
        )
        return found

    def estimate(self, layout: Layout, cut: Sequence[int], strategy: Strategy, *, with_memory: bool = True) -> Estimate:
        """What a step takes.

        Args:
            layout: P ranks, D replicas.
            cut: boundaries of the ranks' layers, (P + 1,).
            strategy: micro-batches of every replica, (D,).
            with_memory: whether to tell what is held, too.
        """
        if len(cut) != layout.num_ranks + 1 or cut[-1] != self.workload.num_layers:
            raise InputError(
                f"a cut of {self.workload.num_layers} layers over {layout.num_ranks} ranks has {layout.num_ranks + 1} points"
            )
        if len(strategy.num_micro_batches) != layout.num_replicas:
            raise InputError(f"{layout.num_replicas} replicas need as many counts of micro-batches")
        (kinds, tps), kind_of = layout.columns
        starts = np.asarray(cut[:-1])
        forward, backward, tensor = (np.zeros(kinds.shape) for _ in range(3))
        estimated = False
        for group, tp in {(int(g), int(t)) for g, t in zip(kinds.ravel(), tps.ravel(), strict=True)}:
            found = self.layers(layout, group, tp, strategy.micro_batch, strategy.recompute)
            estimated = estimated or found.estimated
            here = (kinds == group) & (tps == tp)
            for table, seconds in ((forward, found.forward), (backward, found.backward), (tensor, found.tensor)):
                np.copyto(table, np.add.reduceat(seconds, starts)[:, None], where=here)
        edges = self._messages(layout, cut, strategy.micro_batch)  # (P − 1, D)
        messages = np.zeros(layout.group.shape)
        messages[:-1] = edges
        messages[1:] = np.maximum(messages[1:], edges)
        messages *= passes(strategy.schedule, strategy.waves)
        if self.overlaps:  # a link takes both ways at once, and holds its ranks up only where it takes longer than they do
            least = np.asarray(strategy.num_micro_batches) * messages.max(axis=0) / 2
            messages = 0.0 * messages
            pipelines = np.maximum(self._pipelines(forward[:, kind_of], backward[:, kind_of], edges / 2, strategy), least)
        else:
            both = (forward[:, kind_of] + messages / 2, backward[:, kind_of] + messages / 2)
            pipelines = self._pipelines(*both, 0.0 * edges, strategy)
        replica = int(pipelines.argmax())
        kind = kind_of[replica]
        compute = (forward + backward)[:, kind]
        rank = int((compute + messages[:, replica]).argmax())
        reduction, optimizer = self._update(layout, cut, strategy)
        other = max(self.calibration.of(g.device.name).step for g in layout.groups)
        num = strategy.num_micro_batches[replica]
        parts = {
            "compute": num * float(compute[rank] - tensor[rank, kind]),
            "tensor": num * float(tensor[rank, kind]),
            "messages": num * float(messages[rank, replica]),
            "idle": float(pipelines[replica]) - num * float(compute[rank] + messages[rank, replica]),
            "reduction": reduction,
            "optimizer": optimizer,
            "other": other,
        }
        memory, share = self._held(layout, cut, strategy) if with_memory else ((), ())
        used = {layout.groups[g].device.name for g in np.unique(layout.group)}
        return Estimate(
            seconds=sum(parts.values()),
            parts=parts,
            rank_seconds=tuple(float(t) for t in compute),
            slowest=(rank, replica),
            memory=memory,
            memory_share=share,
            error=max(self.calibration.of(name).error for name in used),
            estimated=estimated,
        )

    def _pipelines(self, forward: Floats, backward: Floats, late: Floats, strategy: Strategy) -> Floats:
        """Seconds of every replica's pipeline, (D,); those that are alike are computed once."""
        counts = np.asarray(strategy.num_micro_batches, dtype=np.float64)
        columns = np.concatenate((forward, backward, late, counts[None]))
        index = np.zeros(columns.shape[1], dtype=np.intp)
        if columns.shape[1] > 1:
            columns, index = np.unique(columns, axis=1, return_inverse=True)
        p = forward.shape[0]
        times = [
            pipeline_seconds(c[:p], c[p : 2 * p], int(c[-1]), strategy.schedule, strategy.waves, c[2 * p : -1]) for c in columns.T
        ]
        return np.array(times)[index.reshape(-1)]

    def edge_seconds(self, layout: Layout, micro_batch: float) -> list[Floats]:
        """Seconds of a message after every layer, there and back, from every rank to the next in the slowest replica:
        P − 1 times (num_layers,).
        """
        sizes = micro_batch * self.arrays.output_bytes
        found: list[Floats] = []
        made: dict[bytes, Floats] = {}
        slowest, per_byte = self.channel_rates(layout)
        for k in range(layout.num_ranks - 1):
            worst = int((slowest[k] + sizes.max() * per_byte[k]).argmax())
            key = np.array([slowest[k, worst], per_byte[k, worst]]).tobytes()
            if key not in made:
                made[key] = 2 * (slowest[k, worst] + sizes * per_byte[k, worst])
            found.append(made[key])
        return found

    def channel_rates(self, layout: Layout) -> tuple[Floats, Floats]:
        """Seconds of a message beside its bytes, and of one byte, from every rank to the next, (P − 1, D); the devices of a slot
        send a part each.
        """
        channel = layout.channel
        constants = [self.calibration.of(g.device.name) for g in layout.groups]
        inside = np.array([c.message for c in constants])
        outside = np.array([1.0 if g.inter.measured else c.network for g, c in zip(layout.groups, constants, strict=True)])
        slower = np.minimum(outside[layout.group[:-1]], outside[layout.group[1:]])
        share = np.where(channel.crosses, slower, inside[layout.group[:-1]])
        waits = np.array([c.message_latency for c in constants])
        latency = channel.latency + np.maximum(waits[layout.group[:-1]], waits[layout.group[1:]])
        return latency, 1.0 / (layout.tp[:-1] * channel.bandwidth * share)

    def _messages(self, layout: Layout, cut: Sequence[int], micro_batch: float) -> Floats:
        """Seconds of a message between neighbours, there and back, (P − 1, D)."""
        if layout.num_ranks == 1:
            return np.zeros((0, layout.num_replicas))
        sizes = micro_batch * self.arrays.output_bytes[np.asarray(cut[1:-1]) - 1]
        latency, per_byte = self.channel_rates(layout)
        both: Floats = 2 * (latency + sizes[:, None] * per_byte)
        return both

    def _update(self, layout: Layout, cut: Sequence[int], strategy: Strategy) -> tuple[float, float]:
        """Seconds of the reduction that nothing hides, and of the optimizer."""
        a = self.arrays
        starts = np.asarray(cut[:-1])
        tp = layout.tp.min(axis=1)
        parameters = np.add.reduceat(a.parameters_split, starts) / tp + np.add.reduceat(a.parameters_whole, starts)
        if self.workload.tied and layout.num_ranks > 1:
            parameters[-1] += a.parameters_split[0] / tp[-1]
        constants = [self.calibration.of(g.device.name) for g in layout.groups]
        of = {name: np.array([getattr(c, name) for c in constants]) for name in ("reduce", "network", "exposed", "optimizer")}
        of["reduce"] = np.where([bool(g.intra.measured) for g in layout.groups], 1.0, of["reduce"])
        of["network"] = np.where([bool(g.inter.measured) for g in layout.groups], 1.0, of["network"])
        bandwidth = np.array([g.device.memory_bandwidth for g in layout.groups])
        replicas = layout.num_replicas
        reduction = 0.0
        if replicas > 1:
            rate, latency, crosses = layout.reduction
            share = np.where(crosses, of["network"][layout.group].min(axis=1), of["reduce"][layout.group].min(axis=1))
            seconds = 2 * (replicas - 1) / replicas * parameters * strategy.gradient_bytes / (rate * share)
            seconds = seconds + 2 * (replicas - 1) * latency
            reduction = float((seconds * of["exposed"][layout.group].max(axis=1)).max())
        traffic = 26.0 if self.workload.element_bytes <= 2 else 28.0
        shared = replicas if strategy.sharded_optimizer else 1
        slowest = (of["optimizer"] / bandwidth)[layout.group].max(axis=1)
        return reduction, float((parameters * traffic * slowest).max()) / shared

    def _held(self, layout: Layout, cut: Sequence[int], strategy: Strategy) -> tuple[tuple[Held, ...], tuple[float, ...]]:
        """The fullest device of every rank, and its share of what that device has."""
        flights = in_flight(strategy.schedule, layout.num_ranks, max(strategy.num_micro_batches), strategy.waves)
        (kinds, tps), _ = layout.columns
        layers: dict[int, StageMemory] = {}
        memory, shares = [], []
        for k, (first, last) in enumerate(pairwise(cut)):
            best: tuple[float, Held] | None = None
            for group, tp in {(int(g), int(t)) for g, t in zip(kinds[k], tps[k], strict=True)}:
                if tp not in layers:
                    layers[tp] = self.memory(layout, tp, strategy)
                device = layout.groups[group].device
                here = held(layers[tp], self.calibration.of(device.name), first, last, float(flights[k]))
                if best is None or here.total / device.memory_bytes > best[0]:
                    best = (here.total / device.memory_bytes, here)
            assert best is not None, "every rank has a slot"
            shares.append(best[0])
            memory.append(best[1])
        return tuple(memory), tuple(shares)
