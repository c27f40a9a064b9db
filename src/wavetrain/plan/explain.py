"""Explanations: where the time of a plan goes, what binds it, why it beats others, and what would change if the cluster did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from wavetrain.cluster import Cluster, describe_link
from wavetrain.devices import GBPS
from wavetrain.errors import InputError
from wavetrain.plan.baselines import amp_pick, best_even, megatron_rule
from wavetrain.plan.estimate import PARTS, CostModel
from wavetrain.plan.plan import Plan
from wavetrain.plan.planner import make_plan
from wavetrain.plan.search import Candidate
from wavetrain.plan.shapes import Limits

WORDS: Final = {
    "compute": "computing, on the slowest rank",
    "tensor": "all-reduces of tensor parallelism",
    "messages": "messages between ranks that nothing hides",
    "idle": "waiting for the pipeline to fill and drain",
    "reduction": "reducing gradients over the replicas",
    "optimizer": "the optimizer",
    "other": "all else",
}
FAST_GBPS: Final = 100.0
WHAT_IF_SECONDS: Final = 2.0
"""About how long the search for one what-if may take."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What else one would have run."""

    name: str
    plan: str
    """In a line; empty where there is none."""
    seconds: float | None
    """By our estimate; None where it does not fit."""
    ratio: float | None
    """Over the plan's."""
    why: str
    """Where the difference comes from."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Another cluster."""

    change: str
    seconds: float | None
    """Of the best plan there; None if none fits."""
    speedup: float | None
    dollars_per_step: float | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that is told of a plan."""

    parts: tuple[tuple[str, float, float], ...]
    """(name, seconds, share), the largest first."""
    binds: tuple[str, ...]
    """What would have to be better for the step to be."""
    baselines: tuple[Baseline, ...]
    what_ifs: tuple[WhatIf, ...]
    dollars_per_step: float | None
    pareto: tuple[str, ...]
    """Changes that no other beats in both time and money; empty without prices."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def explain(
    plan: Plan,
    model: CostModel,
    cluster: Cluster,
    limits: Limits | None = None,
    *,
    what_ifs: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain a plan for a model on a cluster."""
    total = sum(plan.parts.values())
    parts = sorted(
        ((name, plan.parts[name], plan.parts[name] / total) for name in PARTS if name in plan.parts), key=lambda p: -p[1]
    )
    found = tuple(_what_ifs(plan, model, cluster, limits or Limits(), progress)) if what_ifs else ()
    return Explanation(
        parts=tuple(parts),
        binds=tuple(_binds(plan, cluster)),
        baselines=tuple(baselines(plan, model, cluster)),
        what_ifs=found,
        dollars_per_step=_dollars(plan.seconds, cluster),
        pareto=_pareto(plan, cluster, found),
    )


def baselines(plan: Plan, model: CostModel, cluster: Cluster) -> Iterator[Baseline]:
    """The usual choice, the best of its kind, and AMP's, by our estimate."""
    for name, pick in (("Megatron's rule", megatron_rule), ("best even plan", best_even), ("AMP's pick", amp_pick)):
        try:
            candidate = pick(model, cluster, plan.global_batch)
        except InputError:
            candidate = None
        if candidate is None:
            yield Baseline(name=name, plan="", seconds=None, ratio=None, why="it has no plan that fits")
            continue
        fits = candidate.estimate.fits
        yield Baseline(
            name=name,
            plan=_in_a_line(candidate),
            seconds=candidate.seconds if fits else None,
            ratio=candidate.seconds / plan.seconds if fits else None,
            why=_difference(plan, candidate)
            if fits
            else f"needs {max(candidate.estimate.memory_share):.2f}× the memory there is",
        )


def _in_a_line(candidate: Candidate) -> str:
    s, layout = candidate.strategy, candidate.layout
    extra = "" if s.recompute == "none" else f", {s.recompute} recompute"
    return f"tp {candidate.tp}, dp {layout.num_replicas}, pp {layout.num_ranks}, micro-batch {s.micro_batch}, {s.schedule}{extra}"


def _difference(plan: Plan, candidate: Candidate) -> str:
    """The two parts that differ most."""
    gaps = sorted(((candidate.estimate.parts[n] - plan.parts.get(n, 0.0), n) for n in PARTS), key=lambda g: -abs(g[0]))
    return ", ".join(f"{gap:+.3g} s {name}" for gap, name in gaps[:3] if abs(gap) > 0.005 * plan.seconds)


def _binds(plan: Plan, cluster: Cluster) -> Iterator[str]:
    replica = plan.slowest[1]
    rank = max(range(plan.pp), key=lambda k: plan.rank_seconds[k])
    share = {name: seconds / plan.seconds for name, seconds in plan.parts.items()}
    device = plan.devices[rank][replica]
    if share.get("compute", 0) + share.get("tensor", 0) >= 0.5:
        mean = sum(plan.rank_seconds) / len(plan.rank_seconds)
        beside = f", {plan.rank_seconds[rank] / mean - 1:.0%} above the mean of all ranks" if plan.pp > 1 else ""
        yield f"computing of rank {rank} ({device}, layers {plan.layers_of(rank)}){beside}"
    if share.get("tensor", 0) >= 0.1:
        yield f"links within a node, for tp {plan.tp}: {share['tensor']:.0%} of the step"
    if share.get("idle", 0) >= 0.1:
        yield f"fill and drain of {plan.pp} ranks with {max(plan.micro_batches)} micro-batches: {share['idle']:.0%} of the step"
    if share.get("reduction", 0) >= 0.05:
        spans = [k for k, row in enumerate(plan.nodes) if len(set(row)) > 1]
        where = f"the network between nodes (ranks {_range(spans)})" if spans else "links within a node"
        yield f"{where}, for gradients of {plan.dp} replicas: {share['reduction']:.0%} of the step"
    if share.get("messages", 0) >= 0.05:
        yield f"messages between ranks: {share['messages']:.0%} of the step"
    fullest = max(range(plan.pp), key=lambda k: plan.memory_share[k])
    if plan.memory_share[fullest] >= 0.9:
        yield f"memory of rank {fullest} ({plan.devices[fullest][0]}): {plan.memory_share[fullest]:.0%} full"
    if plan.recompute != "none":
        yield f"memory: {plan.recompute} recompute was needed to fit"
    unused = cluster.num_devices - plan.num_devices
    if unused > 0:
        yield f"{unused} of {cluster.num_devices} devices are better left out"


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _what_ifs(
    plan: Plan, model: CostModel, cluster: Cluster, limits: Limits, progress: Callable[[str], None] | None
) -> Iterator[WhatIf]:
    quick = replace(limits, seconds=min(limits.seconds, WHAT_IF_SECONDS))
    for change, other in changes(cluster):
        if progress is not None:
            progress(f"what if: {change}")
        seconds: float | None
        try:
            seconds = make_plan(model, other, plan.global_batch, plan.sources, quick).best.seconds
            if other.num_devices > cluster.num_devices:
                seconds = min(seconds, plan.seconds)  # what is more can stay idle
        except InputError:
            seconds = None
        yield WhatIf(
            change=change,
            seconds=seconds,
            speedup=plan.seconds / seconds if seconds else None,
            dollars_per_step=_dollars(seconds, other) if seconds else None,
        )


def changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Clusters that one may ask about: one node more of every kind, faster links, without one type of device."""
    for i, group in enumerate(cluster.groups):
        more = replace(group, count=group.count + 1)
        yield (
            f"one more node of {group.gpus} {group.device.name}",
            replace(cluster, groups=(*cluster.groups[:i], more, *cluster.groups[i + 1 :])),
        )
    slow = [g for g in cluster.groups if min(g.inter.bandwidth, g.flow_bandwidth) < FAST_GBPS * GBPS]
    if slow and cluster.num_nodes > 1:
        rate = FAST_GBPS * GBPS
        faster = tuple(
            replace(
                g,
                inter=replace(g.inter, bandwidth=max(g.inter.bandwidth, rate), measured=()),
                flow_bandwidth=max(g.flow_bandwidth, rate),
            )
            for g in cluster.groups
        )
        yield f"networks of {FAST_GBPS:g} Gbit/s instead of {describe_link(slow[0].inter)}", replace(cluster, groups=faster)
    for name in dict.fromkeys(g.device.name for g in cluster.groups):
        without = cluster.without(name)
        if without is not None:
            yield f"without the {name}", without


def _dollars(seconds: float, cluster: Cluster) -> float | None:
    return None if cluster.price is None else cluster.price / 3600 * seconds


def _pareto(plan: Plan, cluster: Cluster, found: tuple[WhatIf, ...]) -> tuple[str, ...]:
    """Names of the clusters that no other beats in both time and money."""
    own = _dollars(plan.seconds, cluster)
    if own is None:
        return ()
    points = [("as it is", plan.seconds, own)]
    points += [
        (w.change, w.seconds, w.dollars_per_step) for w in found if w.seconds is not None and w.dollars_per_step is not None
    ]
    return tuple(
        name
        for name, seconds, dollars in points
        if not any(s <= seconds and d <= dollars and (s, d) != (seconds, dollars) for _, s, d in points)
    )
