"""Lint: Megatron's launch flags looked over before the cluster is: what cannot run, what will run badly, what would be better."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from wavetrain.cluster import Cluster
from wavetrain.errors import InputError, UnknownNameError
from wavetrain.plan.clock import Recompute
from wavetrain.plan.estimate import CostModel, Estimate, Strategy
from wavetrain.plan.layout import even_cut
from wavetrain.plan.placement import layouts, num_slots
from wavetrain.plan.sources import without_bfloat16
from wavetrain.workload import Shape, Workload

_NUMBERS: Final = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "num-layers": "layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "seq-length": "seq",
    "padded-vocab-size": "vocab",
    "vocab-size": "vocab",
    "num-layers-per-virtual-pipeline-stage": "virtual",
}
_SHAPE: Final = ("layers", "hidden", "heads", "seq")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One remark."""

    level: Literal["error", "warning", "note"]
    message: str


@dataclass(frozen=True, kw_only=True)
class MegatronFlags:
    """What the flags say, as far as planning is concerned."""

    tp: int = 1
    pp: int = 1
    micro_batch: int | None = None
    global_batch: int | None = None
    recompute: Recompute = "none"
    sharded_optimizer: bool = False
    virtual: int | None = None
    shape: Shape | None = None
    precision: str = "fp32"
    not_modelled: tuple[str, ...] = ()
    """Flags that change what a step takes, and that no prediction here knows."""

    def workload(self) -> Workload:
        """The model of the flags.

        Raises:
            InputError: they do not say enough.
        """
        if self.shape is None:
            raise InputError(
                "the flags do not describe the model: give --num-layers, --hidden-size, --num-attention-heads and --seq-length"
            )
        return self.shape.workload("megatron", self.precision)


def parse_flags(text: str) -> MegatronFlags:
    """Megatron's flags from a command line.

    Raises:
        InputError: a number that is none.
        UnknownNameError: a flag of parallelism that is misspelt.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"the flags cannot be read: {error}") from None
    values: dict[str, Any] = {}
    bare: set[str] = set()
    unknown: list[str] = []
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, _, inline = word[2:].partition("=")
        if name in _NUMBERS:
            given = inline or (words[i + 1] if i + 1 < len(words) else "")
            if not re.fullmatch(r"[0-9]{1,9}", given) or int(given) < 1:
                raise InputError(f"--{name} is {given!r}; expected a whole number above 0")
            values[_NUMBERS[name]] = int(given)
        elif name == "recompute-granularity":
            granularity = inline or (words[i + 1] if i + 1 < len(words) else "")
            if granularity not in ("full", "selective"):
                raise UnknownNameError("value of --recompute-granularity", granularity, ("full", "selective"))
            values["recompute"] = granularity
        elif name not in _KNOWN and (near := difflib.get_close_matches(name, _NUMBERS, n=1, cutoff=0.88)):
            raise UnknownNameError("flag", f"--{name}", [f"--{n}" for n in near])
        else:
            bare.add(name)
            value = inline or (words[i + 1] if i + 1 < len(words) else "")
            if name in _NOT_MODELLED and value not in ("1", "0", "false"):
                unknown.append(f"--{name}")
    if {"fp16", "bf16"} <= bare:
        raise InputError("--fp16 and --bf16 are both given; Megatron takes one")
    shape = None
    if all(key in values for key in _SHAPE):
        shape = Shape(
            **{key: values[key] for key in _SHAPE},
            vocab=values.get("vocab", 50304),
            ffn=values.get("ffn"),
            kv_heads=values.get("kv_heads"),
            gated="swiglu" in bare,
            tied="untie-embeddings-and-output-weights" not in bare,
            fused_attention="use-flash-attn" in bare,
        )
    return MegatronFlags(
        tp=values.get("tp", 1),
        pp=values.get("pp", 1),
        micro_batch=values.get("micro_batch"),
        global_batch=values.get("global_batch"),
        recompute=values.get("recompute", "none"),
        sharded_optimizer="use-distributed-optimizer" in bare,
        virtual=values.get("virtual"),
        shape=shape,
        precision="bf16" if "bf16" in bare else "fp16" if "fp16" in bare else "fp32",
        not_modelled=tuple(unknown),
    )


_NOT_MODELLED: Final = ("context-parallel-size", "num-experts", "expert-model-parallel-size", "sequence-parallel", "fp8-format")
_KNOWN: Final = (
    *("sequence-parallel", "context-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size"),
    *("pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    *(
        "use-tp-pp-dp-mapping",
        "overlap-p2p-communication-warmup-flush",
        "rampup-batch-size",
        "num-virtual-stages-per-pipeline-rank",
    ),
    *("pipeline-model-parallel-split-rank", "tp-comm-overlap", "distributed-backend", "sequence-parallel-size"),
)


def lint(flags: MegatronFlags, model: CostModel, cluster: Cluster) -> tuple[list[Finding], Estimate | None]:
    """Remarks on the flags, the worst first, and what a step would take where it can run."""
    found = list(_shape_findings(flags, model.workload, cluster))
    estimate = None
    if not any(f.level == "error" for f in found):
        estimate = _estimate(flags, model, cluster)
        found += _cost_findings(flags, estimate)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda f: order[f.level]), estimate


def _shape_findings(flags: MegatronFlags, workload: Workload, cluster: Cluster) -> Iterator[Finding]:
    world = cluster.num_devices
    parts = flags.tp * flags.pp
    smallest = min(g.gpus for g in cluster.groups)
    for name in flags.not_modelled:
        yield Finding(level="warning", message=f"{name} is not part of the prediction")
    if flags.precision == "bf16" and (old := without_bfloat16(cluster)):
        yield Finding(level="error", message=f"--bf16, but {', '.join(old)} do not compute in it: use --fp16")
    if flags.micro_batch is None:
        yield Finding(level="error", message="no --micro-batch-size: Megatron wants one")
    if flags.global_batch is None:
        yield Finding(level="warning", message="no --global-batch-size: without it Megatron runs one micro-batch a replica")
    if world % parts:
        yield Finding(level="error", message=f"{world} devices cannot be divided by tp {flags.tp} × pp {flags.pp} = {parts}")
    if workload.tensor_limit % flags.tp:
        yield Finding(level="error", message=f"tp {flags.tp} does not divide {workload.tensor_limit} heads")
    if flags.tp <= smallest and smallest % flags.tp:
        yield Finding(level="error", message=f"tp {flags.tp} does not divide the {smallest} devices of a node")
    if flags.tp > smallest:
        yield Finding(
            level="error", message=f"tp {flags.tp} leaves its node ({smallest} devices): every layer waits for the network"
        )
    if flags.pp > workload.num_layers - 2 or (workload.num_layers - 2) % flags.pp:
        yield Finding(
            level="error",
            message=f"{workload.num_layers - 2} blocks cannot be cut evenly over pp {flags.pp} (Megatron's default)",
        )
    if flags.virtual is not None and ((workload.num_layers - 2) // max(1, flags.pp)) % flags.virtual:
        yield Finding(
            level="error",
            message=f"{flags.virtual} layers a virtual stage do not divide the {(workload.num_layers - 2) // flags.pp} of a rank",
        )
    if not world % parts and flags.global_batch is not None and flags.micro_batch is not None:
        replicas = world // parts
        if flags.global_batch % (replicas * flags.micro_batch):
            yield Finding(
                level="error",
                message=f"a batch of {flags.global_batch} does not divide into dp {replicas} × micro-batch {flags.micro_batch}",
            )


def _estimate(flags: MegatronFlags, model: CostModel, cluster: Cluster) -> Estimate:
    slots = num_slots(cluster.groups, flags.tp)
    replicas = slots // flags.pp
    layout = next(layouts(cluster.groups, flags.tp, flags.pp, replicas))
    assert flags.micro_batch is not None, "its absence was an error"
    batch = flags.global_batch if flags.global_batch is not None else flags.micro_batch * replicas
    strategy = Strategy(
        micro_batch=flags.micro_batch,
        num_micro_batches=(batch // replicas // flags.micro_batch,) * replicas,
        schedule="interleaved" if flags.virtual else "1f1b",
        waves=max(1, (model.workload.num_layers - 2) // (flags.pp * flags.virtual)) if flags.virtual else 1,
        recompute=flags.recompute,
        sharded_optimizer=flags.sharded_optimizer,
    )
    return model.estimate(layout, even_cut(model.workload.num_layers, flags.pp), strategy)


def _cost_findings(flags: MegatronFlags, estimate: Estimate) -> Iterator[Finding]:
    worst = max(range(len(estimate.memory_share)), key=lambda k: estimate.memory_share[k])
    share = estimate.memory_share[worst]
    held = estimate.memory[worst]
    if share > 1:
        helps = [
            "--use-distributed-optimizer" if not flags.sharded_optimizer else "",
            "--recompute-granularity full" if flags.recompute != "full" else "",
            "a larger tp or pp",
            "a smaller --micro-batch-size" if (flags.micro_batch or 1) > 1 else "",
        ]
        yield Finding(
            level="error",
            message=f"rank {worst} needs {held.total / 1e9:.1f} GB, {share:.2f}× what its device has; what helps: "
            + ", ".join(h for h in helps if h),
        )
    elif share > 0.93:
        yield Finding(level="warning", message=f"rank {worst} is {share:.0%} full: fragmentation may be enough to run out")
    total = sum(estimate.parts.values())
    for name, limit, advice in (
        (
            "idle",
            0.2,
            "more micro-batches (a smaller --micro-batch-size), fewer ranks, or --num-layers-per-virtual-pipeline-stage",
        ),
        ("tensor", 0.25, "a smaller tp"),
        ("reduction", 0.2, "more pp and less dp, or a faster network between nodes"),
    ):
        if estimate.parts[name] > limit * total:
            yield Finding(
                level="warning", message=f"{name} takes {estimate.parts[name] / total:.0%} of the step; what helps: {advice}"
            )
    spread = max(estimate.rank_seconds) / (sum(estimate.rank_seconds) / len(estimate.rank_seconds))
    if spread > 1.1:
        yield Finding(
            level="warning",
            message=f"the slowest rank takes {spread:.2f}× the mean: an uneven cut would help (--pipeline-model-parallel-layout)",
        )
    yield Finding(level="note", message=f"a step is predicted to take {estimate.seconds:.4g} s")
