"""A plan as settings of ``wavetrain train``, where its runtime and its models can do what the plan says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from wavetrain.plan.plan import Plan
from wavetrain.workload import Workload

_FAMILIES_WITH_WAVES = ("hanayo", "zb-wave")


def train_settings(plan: Plan, workload: Workload) -> tuple[dict[str, Any], str]:
    """Settings for a plan's ``[train]`` table; none, with the reason, where ``wavetrain train`` cannot run it."""
    shape = workload.shape
    if shape is None or not shape.is_gpt2:
        return (
            {},
            f"wavetrain train builds GPT-2 like models; {workload.name} is none: use wavetrain.Pipeline with your own model",
        )
    if len(set(plan.micro_batches)) > 1:
        return {}, "replicas get unlike numbers of micro-batches, which wavetrain train does not do yet"
    if plan.sharded_optimizer:
        return {}, "the plan shards the optimizer, which wavetrain train does not do yet"
    if plan.recompute == "selective":
        return {}, "the plan recomputes attention only; wavetrain train keeps all or recomputes all"
    settings: dict[str, Any] = {
        "model": "gpt",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "vocab": shape.vocab,
        "seq": shape.seq,
        "ranks": plan.num_devices,
        "dp": plan.dp,
        "tp": plan.tp,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches[0],
        "batch": plan.global_batch,
        "cut": [b - a for a, b in pairwise(plan.stages)],
    }
    if plan.schedule in _FAMILIES_WITH_WAVES:
        settings["waves"] = plan.waves
    elif plan.schedule == "interleaved":
        settings["stages_per_rank"] = plan.waves
    if plan.recompute == "full":
        settings["recompute"] = True
    return settings, ""
