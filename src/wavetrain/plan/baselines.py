"""Baselines: what one would run without a planner, and what AMP would.

Megatron's rule (Narayanan et al., SC'21): tensor parallelism within a node and no further; then as much pipeline parallelism as
it takes for the model to fit; data parallelism with what is left, outermost; layers cut evenly; the best micro-batch that fits.

The best even plan: of all sizes of the three, within the same rules, the one that is quickest: what trying them all would find.

AMP's cost model (Li et al., NeurIPS'22): time linear in the micro-batch, backward twice the forward, speeds of unlike devices
averaged, (B − 1) · max + sum + messages, a ring over the slowest link; no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster import Cluster
from wavetrain.errors import InputError
from wavetrain.plan.clock import Recompute
from wavetrain.plan.cut import best_cut
from wavetrain.plan.estimate import CostModel, Strategy
from wavetrain.plan.layout import Layout, even_cut
from wavetrain.plan.placement import layouts, num_slots
from wavetrain.plan.search import Candidate

Floats = NDArray[np.float64]
AMP_BACKWARD = 2.0
"""Backward over forward, in AMP's model."""


def megatron_rule(model: CostModel, cluster: Cluster, global_batch: int, *, gradient_bytes: int = 4) -> Candidate | None:
    """The plan of Megatron's rule, with 1F1B; None if it fits with no size of the model's parts."""
    for recompute in ("none", "full"):
        for tp, ranks in _parts(model, cluster):
            found = _best_micro_batch(model, cluster, global_batch, tp, ranks, recompute, gradient_bytes)
            if found is not None:
                return found
    return None


def best_even(
    model: CostModel, cluster: Cluster, global_batch: int, *, gradient_bytes: int = 4, max_slots: int = 64
) -> Candidate | None:
    """The quickest of all plans with tp within a node, layers cut evenly, equal shares of the batch and 1F1B.

    None if none fits, or for clusters with more slots than it is tried on.
    """
    found: list[Candidate] = []
    for tp in _tensor_sizes(model, cluster):
        slots = num_slots(cluster.groups, tp)
        if slots > max_slots:
            continue
        for ranks in range(1, min(slots, model.workload.num_layers) + 1):
            if slots % ranks:
                continue
            for recompute in ("none", "full"):
                one = _best_micro_batch(model, cluster, global_batch, tp, ranks, recompute, gradient_bytes)
                if one is not None:
                    found.append(one)
    return min(found, key=lambda one: one.seconds, default=None)


def _parts(model: CostModel, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(tp, pp) in the order of the rule: tp up to a node, then pp."""
    sizes = _tensor_sizes(model, cluster)
    for tp in sizes:
        yield tp, 1
    slots = num_slots(cluster.groups, sizes[-1])
    for ranks in range(2, min(slots, model.workload.num_layers) + 1):
        if slots % ranks == 0:
            yield sizes[-1], ranks


def _tensor_sizes(model: CostModel, cluster: Cluster) -> list[int]:
    most = min(g.gpus for g in cluster.groups)
    limit = model.workload.tensor_limit
    return [t for t in range(1, most + 1) if all(g.gpus % t == 0 for g in cluster.groups) and limit % t == 0]


def _best_micro_batch(
    model: CostModel, cluster: Cluster, global_batch: int, tp: int, ranks: int, recompute: Recompute, gradient_bytes: int
) -> Candidate | None:
    slots = num_slots(cluster.groups, tp)
    replicas = slots // ranks
    if global_batch % replicas:
        return None
    layout = next(layouts(cluster.groups, tp, ranks, replicas))
    cut = even_cut(model.workload.num_layers, ranks)
    best: Candidate | None = None
    for micro_batch in range(1, global_batch // replicas + 1):
        if (global_batch // replicas) % micro_batch:
            continue
        strategy = Strategy(
            micro_batch=micro_batch,
            num_micro_batches=(global_batch // replicas // micro_batch,) * replicas,
            recompute=recompute,
            gradient_bytes=gradient_bytes,
        )
        estimate = model.estimate(layout, cut, strategy)
        if estimate.fits and (best is None or estimate.seconds < best.seconds):
            best = Candidate(layout=layout, cut=cut, strategy=strategy, estimate=estimate)
    return best


def amp_pick(model: CostModel, cluster: Cluster, global_batch: int, *, max_slots: int = 64) -> Candidate | None:
    """The plan that AMP's model finds best, with our estimate of it; None for clusters with more slots than it is tried on."""
    best: tuple[float, Candidate] | None = None
    for tp in (1, 2, 4, 8):
        if any(g.gpus % tp for g in cluster.groups) or model.workload.tensor_limit % tp:
            continue
        slots = num_slots(cluster.groups, tp)
        if slots > max_slots:
            return None
        for ranks in range(1, min(slots, model.workload.num_layers) + 1):
            replicas = slots // ranks
            if slots % ranks or global_batch % replicas:
                continue
            layout = next(layouts(cluster.groups, tp, ranks, replicas))
            for micro_batch in range(1, global_batch // replicas + 1):
                if (global_batch // replicas) % micro_batch:
                    continue
                count = global_batch // replicas // micro_batch
                seconds, cut = amp_model(model, layout, micro_batch, count)
                if best is None or seconds < best[0]:
                    strategy = Strategy(micro_batch=micro_batch, num_micro_batches=(count,) * replicas)
                    estimate = model.estimate(layout, cut, strategy)
                    best = (seconds, Candidate(layout=layout, cut=cut, strategy=strategy, estimate=estimate))
    return None if best is None else best[1]


def amp_model(
    model: CostModel, layout: Layout, micro_batch: int, num_micro_batches: int, cut: tuple[int, ...] | None = None
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a step by AMP's own cost model, and the cut that is best by it (or the one given)."""
    groups, counts = np.unique(layout.group, return_counts=True)
    tp = int(layout.tp.max())
    forward: Floats = np.sum(
        [count / counts.sum() * model.layers(layout, int(g), tp, 1).forward for g, count in zip(groups, counts, strict=True)],
        axis=0,
    )
    times = (1 + AMP_BACKWARD) * micro_batch * forward
    sizes = micro_batch * model.arrays.output_bytes
    slowest = min(min(g.inter.bandwidth, g.flow_bandwidth) for g in layout.groups)
    edges = [sizes / slowest] * (layout.num_ranks - 1)
    if cut is None:
        found = best_cut([times] * layout.num_ranks, edges, num_micro_batches)
        if found is None:
            raise InputError(f"{len(times)} layers cannot be cut into {layout.num_ranks} stages")
        cut = found.points
    stages = np.add.reduceat(times, np.asarray(cut[:-1]))
    pipeline = (num_micro_batches - 1) * float(stages.max()) + float(stages.sum())
    pipeline += sum(float(sizes[b - 1]) / slowest for b in cut[1:-1])
    a = model.arrays
    parameters = np.add.reduceat(a.parameters_split / tp + a.parameters_whole, np.asarray(cut[:-1]))
    replicas = layout.num_replicas
    rate, _, _ = layout.reduction if replicas > 1 else (np.array([math.inf]), None, None)
    return pipeline + 2 * (replicas - 1) / replicas * float(parameters.max()) * 4 / float(rate.min()), cut
