"""The planner: from a model, a cluster and a batch to a ranked list of plans.

search  ─►  finalists, staged and simulated  ─►  ranked, with an interval each  ─►  Plan
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from wavetrain.cluster import Cluster
from wavetrain.errors import InputError
from wavetrain.plan.estimate import CostModel
from wavetrain.plan.plan import Plan
from wavetrain.plan.search import Candidate, Found, search
from wavetrain.plan.shapes import Limits
from wavetrain.plan.sources import Sources
from wavetrain.plan.staging import Staged, can_stage, num_actions, stage

STAGING_SECONDS: Final = 0.4
PATIENT_SECONDS: Final = 4.0
DISAPPOINTING: Final = 1.05
"""About how long finalists are staged (at least one is): longer, if the best of them is so much slower than the next may be."""
BUILD_SECONDS: Final = 3e-4
"""About how long an action of a zero-bubble wave takes to be placed; other families take next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What planning found."""

    plans: tuple[Plan, ...]
    """The fastest first."""
    found: Found

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def ties(self) -> tuple[Plan, ...]:
        """Plans that the predictions cannot tell from the best."""
        return tuple(p for p in self.plans[1:] if not self.best.differs_from(p))


def make_plan(
    model: CostModel,
    cluster: Cluster,
    global_batch: int,
    sources: Sources,
    limits: Limits | None = None,
    progress: Callable[[str], None] | None = None,
) -> Planned:
    """Plans for a model on a cluster, the best first.

    Raises:
        InputError: nothing fits; the message says the closest, by how much it misses and what would make it fit.
    """
    found = search(model, cluster, global_batch, limits, progress)
    if not found.best:
        raise InputError(no_fit(found, cluster))
    staged = _finalists(found, model, progress)
    if not model.overlaps:  # ranks that wait for messages are not what the simulator knows: its costs only, for rehearsals
        stages = {id(s.candidate): s for s in staged}
        plans = [replace(plan_of(c, None, global_batch, sources), **_costs_of(stages.get(id(c)))) for c in found.best]
    elif not staged:
        plans = [plan_of(candidate, None, global_batch, sources) for candidate in found.best]
    else:
        plans = [plan_of(s.candidate, s, global_batch, sources) for s in staged]
        done = {id(s.candidate) for s in staged}
        worst = max(s.seconds for s in staged)
        others = [c for c in found.best if id(c) not in done]
        plans += [plan_of(c, None, global_batch, sources) for c in others if c.seconds >= worst or not can_stage(c)]
    return Planned(plans=tuple(sorted(plans, key=lambda plan: plan.seconds)), found=found)


def _costs_of(staged: Staged | None) -> dict[str, Any]:
    return {} if staged is None else {"costs": staged.costs, "stages": staged.points}


def _finalists(found: Found, model: CostModel, progress: Callable[[str], None] | None) -> list[Staged]:
    """The first candidates with their schedules: as long as time allows, and longer if one that follows may well be better."""
    begun = time.monotonic()
    staged: list[Staged] = []
    for candidate in found.best:
        takes = BUILD_SECONDS * num_actions(candidate) if candidate.strategy.schedule == "zb-wave" else 0.0
        if not can_stage(candidate):
            continue
        best = min((s.seconds for s in staged), default=math.inf)
        allowed = STAGING_SECONDS if best <= DISAPPOINTING * candidate.seconds else PATIENT_SECONDS
        if staged and (best <= candidate.seconds or time.monotonic() - begun + takes > allowed):
            continue
        if progress is not None:
            progress(f"simulating {candidate.strategy.schedule} on {candidate.layout.num_ranks} ranks")
        one = stage(candidate, model)
        if one is not None and one.fits:
            staged.append(one)
    return sorted(staged, key=lambda s: s.seconds)


def plan_of(candidate: Candidate, staged: Staged | None, global_batch: int, sources: Sources) -> Plan:
    """A candidate as a plan that can be written down."""
    layout, strategy, estimate = candidate.layout, candidate.strategy, candidate.estimate
    seconds, parts = estimate.seconds, dict(estimate.parts)
    if staged is not None:
        slowest = max(staged.rank_seconds)
        tensor = parts["tensor"] / (parts["compute"] + parts["tensor"])
        busy = min(slowest * max(strategy.num_micro_batches), staged.pipeline_seconds)
        parts |= {"compute": (1 - tensor) * busy, "tensor": tensor * busy, "messages": 0.0}
        parts["idle"] = staged.pipeline_seconds - busy
        seconds = staged.seconds
    names = [group.device.name for group in layout.groups]
    return Plan(
        sources=sources,
        global_batch=global_batch,
        tp=candidate.tp,
        micro_batch=strategy.micro_batch,
        micro_batches=strategy.num_micro_batches,
        schedule=strategy.schedule,
        waves=strategy.waves,
        recompute=strategy.recompute,
        sharded_optimizer=strategy.sharded_optimizer,
        cut=candidate.cut,
        stages=staged.points if staged is not None else candidate.cut,
        devices=tuple(tuple(names[g] for g in row) for row in layout.group.tolist()),
        nodes=tuple(tuple(row) for row in layout.node.tolist()),
        seconds=seconds,
        error=estimate.error,
        parts={name: float(value) for name, value in parts.items()},
        rank_seconds=staged.rank_seconds if staged is not None else estimate.rank_seconds,
        memory_bytes=staged.peak_bytes if staged is not None else tuple(h.total for h in estimate.memory),
        memory_share=staged.memory_share if staged is not None else estimate.memory_share,
        slowest=estimate.slowest,
        simulated=staged is not None,
        costs=staged.costs if staged is not None else None,
        pipeline_seconds=staged.pipeline_seconds if staged is not None else None,
    )


def no_fit(found: Found, cluster: Cluster) -> str:
    """Why no plan fits, which comes closest, and what would help."""
    closest = found.closest
    if closest is None:
        return f"no plan fits {cluster.describe()}: its devices are too small for the layers even with full recompute"
    share = max(closest.estimate.memory_share)
    rank = int(np.argmax(closest.estimate.memory_share))
    held = closest.estimate.memory[rank]
    size = held.total / share
    strategy = closest.strategy
    more = math.ceil(cluster.num_nodes * (share - 1)) or 1
    kind = (
        f"tp {closest.tp}, dp {closest.layout.num_replicas}, pp {closest.layout.num_ranks}, micro-batch {strategy.micro_batch}, "
        f"{strategy.recompute} recompute{', sharded optimizer' if strategy.sharded_optimizer else ''}"
    )
    made_of = (
        f"weights, gradients and optimizer {held.states / 1e9:.1f}, activations {held.activations / 1e9:.1f}, "
        f"one layer's work {held.working / 1e9:.1f}"
    )
    return (
        f"no plan fits. The closest ({kind}) needs {held.total / 1e9:.1f} GB on rank {rank}, where a device has "
        f"{size / 1e9:.1f}: {(held.total - size) / 1e9:.1f} GB more ({made_of}). About {more} more "
        f"node{'s' if more > 1 else ''}, devices of {held.total / 1e9:.0f} GB, a smaller batch or a shorter sequence would do"
    )
