"""Real compute: a GPT of about 30 M parameters on two ranks of one thread, against torch.distributed.pipelining and one process.

Every side trains the same model on the same batches with the same AdamW, cut into stages alike; a step is forward, backward and
optimizer. Each case runs in processes of its own, so that the peak of its memory is its own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from benchmarks.report import Report, Row, main
from torch import Tensor, nn
from torch.distributed import pipelining

from wavetrain.models import GPT
from wavetrain.runtime.launch import launch
from wavetrain.runtime.mesh import join
from wavetrain.runtime.partition import cut_layers
from wavetrain.runtime.pipeline import Pipeline
from wavetrain.schedule.families import build

RANKS = 2
VOCAB = 256
OURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {}),
    ("interleaved", {"stages_per_rank": 2}),
    ("zbv", {}),
    ("zb-wave", {"waves": 1}),
    ("zb-wave", {"waves": 2}),
)
TORCH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "1f1b": ("Schedule1F1B", "1f1b", {}),
    "interleaved": ("ScheduleInterleaved1F1B", "interleaved", {"stages_per_rank": 2}),
    "zbv": ("ScheduleZBVZeroBubble", "zbv", {}),
    "interleaved zero bubble": ("ScheduleInterleavedZeroBubble", "interleaved", {"stages_per_rank": 2}),
}
"""By name: torch's class, and the schedule of ours whose placement and cut it is given."""


def run(quick: bool) -> Report:
    """Throughput and memory."""
    shape = _shape(quick)
    rounds = 1 if quick else 2
    alone: list[float] = []
    ours: dict[str, list[dict[str, Any]]] = {}
    torchs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):  # sides take turns
        alone += launch(_one_process, ranks=1, args=(shape,))["seconds"]
        for name, options in OURS[:2] if quick else OURS:
            label = name + "".join(f", {k} = {v}" for k, v in options.items())
            ours.setdefault(label, []).append(launch(_ours, ranks=RANKS, args=(shape, name, options)))
        for name in list(TORCH)[:1] if quick else TORCH:
            torchs.setdefault(name, []).append(launch(_torch, ranks=RANKS, args=(shape, name)))
    one = statistics.median(alone)
    mine, theirs = {k: _median(v) for k, v in ours.items()}, {k: _median(v) for k, v in torchs.items()}
    best_torch, best_ours = min(theirs, key=theirs.__getitem__), min(mine, key=mine.__getitem__)
    tokens = shape["batch"] * shape["seq"]
    rows = [
        _ratio(
            f"ours ({best_ours}) against torch's best ({best_torch})", 0.0 if quick else 1.0, theirs[best_torch], mine[best_ours]
        ),
        _ratio(f"ours ({best_ours}) against one process, one thread", 0.0 if quick else 1.7, one, mine[best_ours], limit=RANKS),
    ]
    for label, found in ours.items():
        name = label.split(",")[0]
        if name in torchs:
            peak, peer = _peak(found), _peak(torchs[name])
            pairs = " / ".join(f"{p:.0f}" for p in peak), " / ".join(f"{p:.0f}" for p in peer)
            rows.append(
                Row(
                    case=f"peak MiB by rank, {label} (torch's {name})",
                    target=f"≤ {pairs[1]}",
                    measured=pairs[0],
                    passed=quick or max(peak) <= max(peer),
                )
            )
    rows.append(Row(case="one process, one thread", measured=f"{one:.3f} s, {tokens / one:.0f} tokens/s"))
    rows += [Row(case=f"ours, {k}", measured=f"{v:.3f} s, {tokens / v:.0f} tokens/s") for k, v in mine.items()]
    rows += [Row(case=f"torch, {k}", measured=f"{v:.3f} s, {tokens / v:.0f} tokens/s") for k, v in theirs.items()]
    count = sum(p.numel() for p in _model(shape).parameters()) / 1e6
    return Report(
        name="real_compute",
        claim=f"GPT of {count:.1f} M parameters, P = {RANKS}, B = {shape['micro_batches']}, {tokens} tokens a step, fp32.",
        rows=tuple(rows),
        notes=("Peak memory: the kernel's high-water mark of a rank's resident set, weights and optimizer included.",),
    )


def _shape(quick: bool) -> dict[str, int]:
    if quick:
        return {"layers": 4, "hidden": 64, "heads": 4, "batch": 8, "seq": 32, "micro_batches": 4, "steps": 2}
    return {"layers": 10, "hidden": 512, "heads": 8, "batch": 16, "seq": 128, "micro_batches": 8, "steps": 5}


def _median(runs: list[dict[str, Any]]) -> float:
    return float(statistics.median(s for run in runs for s in run["seconds"]))


def _peak(runs: list[dict[str, Any]]) -> list[float]:
    """Of every rank, the least over the rounds: what the case needs, without the operating system's chance."""
    return [min(run["peaks"][rank] for run in runs) for rank in range(RANKS)]


def _ratio(case: str, target: float, other: float, ours: float, limit: float | None = None) -> Row:
    ratio = other / ours
    return Row(
        case=case,
        target=f"≥ {target:.2f}×",
        measured=f"{ratio:.3f}× ({other:.3f} s / {ours:.3f} s)",
        limit="" if limit is None else f"{limit:.2f}×",
        distance="" if limit is None else f"{1 - ratio / limit:.1%}",
        passed=ratio >= target,
    )


def _model(shape: dict[str, int]) -> GPT:
    torch.manual_seed(0)
    return GPT(
        num_layers=shape["layers"],
        hidden=shape["hidden"],
        num_heads=shape["heads"],
        vocab=VOCAB,
        max_length=shape["seq"],
        tied=False,
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _batch(shape: dict[str, int]) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (shape["batch"], shape["seq"] + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _timed(shape: dict[str, int], parameters: list[nn.Parameter], step: Callable[[], object]) -> dict[str, Any]:
    """Seconds of every step after one that does not count, and the peak of every rank's memory in MiB."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    seconds = []
    for _ in range(shape["steps"] + 1):
        _barrier()
        start = time.monotonic()
        step()
        optimizer.step()
        optimizer.zero_grad()
        _barrier()
        seconds.append(time.monotonic() - start)
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    peaks = torch.zeros(RANKS, dtype=torch.float64)
    if dist.is_initialized():
        peaks[dist.get_rank()] = int(status.split()[0]) / 1024
        dist.all_reduce(peaks)
    return {"seconds": seconds[1:], "peaks": peaks.tolist()}


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _one_process(shape: dict[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, (inputs, targets) = _model(shape), _batch(shape)
    number = shape["micro_batches"]

    def step() -> None:
        for x, y in zip(inputs.chunk(number), targets.chunk(number), strict=True):
            torch.autograd.backward(_loss(model(x), y) / number)

    return _timed(shape, list(model.parameters()), step)


def _ours(shape: dict[str, int], name: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    pipe = Pipeline(_model(shape), schedule=name, num_micro_batches=shape["micro_batches"], loss_fn=_loss, **options)
    inputs, targets = _batch(shape)
    return _timed(shape, list(pipe.parameters()), lambda: pipe.step(inputs, targets))


def _torch(shape: dict[str, int], name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    join()
    rank = dist.get_rank()
    kind, like, options = TORCH[name]
    number = shape["micro_batches"]
    schedule = build(like, num_ranks=RANKS, num_micro_batches=number, **options)
    layers = list(_model(shape))
    cut = cut_layers(layers, schedule)
    stages = [
        pipelining.PipelineStage(nn.Sequential(*(layers[i] for i in cut[s])), s, schedule.num_stages, torch.device("cpu"))
        for s, home in enumerate(schedule.placements[0])
        if home == rank
    ]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    del layers
    one_stage = kind == "Schedule1F1B"
    runner = getattr(pipelining, kind, None) or getattr(pipelining.schedules, kind)
    steps = runner(stages[0] if one_stage else stages, n_microbatches=number, loss_fn=_loss)
    inputs, targets = _batch(shape)
    has_first, has_last = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def step() -> None:
        steps.step(*((inputs,) if has_first else ()), **({"target": targets} if has_last else {}))

    return _timed(shape, parameters, step)


if __name__ == "__main__":
    main(run)
