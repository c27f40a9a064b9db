"""Exports: a plan in the words of other frameworks, and what they cannot say.

What a framework has no word for (a cut, a schedule, unlike replicas) is never left out in silence: it is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from wavetrain.errors import UnknownNameError
from wavetrain.plan.plan import Plan
from wavetrain.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan for a framework."""

    text: str
    warnings: tuple[str, ...]


def export(plan: Plan, workload: Workload, to: str) -> Exported:
    """The plan for one of :data:`FRAMEWORKS`.

    Raises:
        UnknownNameError: another framework.
    """
    if to not in FRAMEWORKS:
        raise UnknownNameError("framework", to, FRAMEWORKS)
    return FRAMEWORKS[to](plan, workload)


def _common_warnings(plan: Plan, framework: str) -> list[str]:
    found = []
    if len(set(plan.micro_batches)) > 1:
        counts = ", ".join(map(str, plan.micro_batches[:8])) + (", …" if plan.dp > 8 else "")
        found.append(f"replicas get unlike numbers of micro-batches ({counts}); {framework} gives all the same")
    if len(plan.device_names) > 1:
        order = "; ".join(f"rank {k}: nodes {sorted(set(row))}" for k, row in enumerate(plan.nodes[:8]))
        found.append(f"devices are unlike: start the ranks in the plan's order ({order}{'; …' if plan.pp > 8 else ''})")
    return found


def _blocks(plan: Plan, workload: Workload) -> list[int]:
    """Blocks of every rank, without embedding and head."""
    inner = range(1, workload.num_layers - 1)
    return [sum(1 for layer in range(a, b) if layer in inner) for a, b in pairwise(plan.cut)]


def _megatron(plan: Plan, workload: Workload) -> Exported:
    warnings = _common_warnings(plan, "Megatron-LM")
    flags: dict[str, Any] = {
        "--tensor-model-parallel-size": plan.tp,
        "--pipeline-model-parallel-size": plan.pp,
        "--micro-batch-size": plan.micro_batch,
        "--global-batch-size": plan.global_batch,
        "--num-layers": workload.num_layers - 2,
        "--seq-length": workload.tokens,
        "--max-position-embeddings": workload.tokens,
    }
    if workload.element_bytes == 2:
        flags["--fp16" if plan.sources.precision == "fp16" else "--bf16"] = None
    if plan.recompute == "full":
        flags |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    elif plan.recompute == "selective":
        flags["--recompute-granularity"] = "selective"
    if plan.sharded_optimizer:
        flags["--use-distributed-optimizer"] = None
    counts = _blocks(plan, workload)
    if len(set(counts)) > 1:
        if len(set(counts[1:-1])) <= 1 and plan.pp > 2 and min(counts) > 0:
            flags["--decoder-first-pipeline-num-layers"] = counts[0]
            flags["--decoder-last-pipeline-num-layers"] = counts[-1]
        else:
            layout = "|".join(("E" if k == 0 else "") + "t" * n + ("L" if k == plan.pp - 1 else "") for k, n in enumerate(counts))
            flags["--pipeline-model-parallel-layout"] = f'"{layout}"'
    if plan.schedule == "interleaved":
        for name in (
            "--decoder-first-pipeline-num-layers",
            "--decoder-last-pipeline-num-layers",
            "--pipeline-model-parallel-layout",
        ):
            flags.pop(name, None)
        each, rest = divmod(workload.num_layers - 2, plan.pp * plan.waves)
        flags["--num-layers-per-virtual-pipeline-stage"] = max(1, each)
        sizes = [b - a for a, b in pairwise(plan.stages)]
        if rest or len(set(sizes[1:-1])) > 1:
            warnings.append(f"the plan's stages hold {sizes} layers; Megatron's virtual stages must be even")
    elif plan.schedule != "1f1b":
        warnings.append(f"Megatron-LM has no {plan.schedule}; it will run 1F1B, which idles longer than the plan says")
    lines = [name if value is None else f"{name} {value}" for name, value in flags.items()]
    lines.append(f"# --hidden-size, --num-attention-heads and the tokenizer are the model's; {plan.num_devices} GPUs in all")
    return Exported(text=" \\\n".join(lines[:-1]) + "\n" + lines[-1] + "\n", warnings=tuple(warnings))


_TORCH_NAMES: Final = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}


def _torchtitan(plan: Plan, workload: Workload) -> Exported:
    warnings = _common_warnings(plan, "torchtitan")
    lines = [
        "[parallelism]",
        "data_parallel_replicate_degree = 1" if plan.sharded_optimizer else f"data_parallel_replicate_degree = {plan.dp}",
        f"data_parallel_shard_degree = {plan.dp if plan.sharded_optimizer else 1}",
        f"tensor_parallel_degree = {plan.tp}",
        f"pipeline_parallel_degree = {plan.pp}",
    ]
    if plan.pp > 1:
        if plan.schedule in _TORCH_NAMES:
            lines.append(f'pipeline_parallel_schedule = "{_TORCH_NAMES[plan.schedule]}"')
        else:
            lines.append('pipeline_parallel_schedule_csv = "schedule.csv"')
            waves = f" --waves {plan.waves}" if plan.schedule in ("zb-wave", "hanayo") else ""
            warnings.append(
                f"write schedule.csv with: wavetrain simulate --schedule {plan.schedule}{waves} --ranks {plan.pp} "
                f"--micro-batches {max(plan.micro_batches)} --save schedule.csv"
            )
        lines.append(f"pipeline_parallel_microbatch_size = {plan.micro_batch}")
        names = [f"layers.{sum(_blocks(plan, workload)[:k])}" for k in range(1, plan.pp)]
        lines.append(f"# cut before: {', '.join(names)}")
        if plan.schedule in ("1f1b", "gpipe"):
            lines.append(f"pipeline_parallel_split_points = {json.dumps(names)}")
        else:
            warnings.append("the cut of a schedule with several stages a rank cannot be given; torchtitan cuts evenly")
    mode = {"none": "none", "selective": "selective", "full": "full"}[plan.recompute]
    lines += [
        "",
        "[training]",
        f"local_batch_size = {plan.micro_batch * max(plan.micro_batches)}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {workload.tokens}",
        "",
        "[activation_checkpoint]",
        f'mode = "{mode}"',
    ]
    return Exported(text="\n".join(lines) + "\n", warnings=tuple(warnings))


def _deepspeed(plan: Plan, workload: Workload) -> Exported:
    warnings = _common_warnings(plan, "DeepSpeed")
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": max(plan.micro_batches),
        "zero_optimization": {"stage": 1 if plan.sharded_optimizer else 0},
    }
    if workload.element_bytes == 2:
        config["fp16" if plan.sources.precision == "fp16" else "bf16"] = {"enabled": True}
    if plan.recompute != "none":
        config["activation_checkpointing"] = {"partition_activations": plan.tp > 1, "cpu_checkpointing": False}
    if plan.pp > 1:
        warnings.append(
            f"DeepSpeed takes the cut in code: PipelineModule(layers, num_stages={plan.pp}, …) with boundaries {list(plan.cut)} "
            "(set module.parts, or a partition_method of your own)"
        )
        if plan.schedule != "1f1b":
            warnings.append(f"DeepSpeed has no {plan.schedule}; it will run 1F1B, which idles longer than the plan says")
    if plan.tp > 1:
        warnings.append(f"tensor parallelism ({plan.tp}) is the model's own: pass an mpu, or use Megatron-DeepSpeed")
    return Exported(text=json.dumps(config, indent=2) + "\n", warnings=tuple(warnings))


FRAMEWORKS: Final[dict[str, Callable[[Plan, Workload], Exported]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
}
"""By name."""
