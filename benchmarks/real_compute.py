"""Real compute: a GPT of about 30 M parameters on two ranks of one thread, against torch.distributed.pipelining and one process.

Every side trains the same model on the same batches with the same AdamW, cut into stages alike; a step is forward, backward and
optimizer.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
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
NUM_LEADING = 3
"""Schedules of either side in the final."""
OURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {}),
    ("interleaved", {"stages_per_rank": 2}),
    ("zbv", {}),
    ("zb-h1", {}),
    ("zb-h2", {}),
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
    ours = {_label(name, given): (name, given) for name, given in OURS[: 2 if quick else None]}
    peers = list(TORCH)[: 1 if quick else None]
    seconds, final = launch(_contest, ranks=RANKS, args=(shape, ours, peers))
    one = statistics.median(seconds["one process"])
    mine = {label: statistics.median(seconds[f"ours, {label}"]) for label in ours}
    theirs = {name: statistics.median(seconds[f"torch, {name}"]) for name in peers}
    alone = next(iter(final))
    best_ours, best_torch = (_leading(final, who)[0] for who in ("ours", "torch"))
    tokens = shape["batch"] * shape["seq"]
    rows = [
        _ratio(f"{best_ours} against torch's best ({best_torch})", 0.0 if quick else 1.0, final[best_torch], final[best_ours]),
        _ratio(f"{best_ours} against one process, one thread", 0.0 if quick else 1.7, final[alone], final[best_ours], RANKS),
    ]
    for label, (name, given) in ours.items():
        if name in peers:
            peak = launch(_peaks_ours, ranks=RANKS, args=(shape, name, given))
            peer = launch(_peaks_torch, ranks=RANKS, args=(shape, name))
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
        notes=(
            f"All sides live in the same two processes and take turns step by step, in an order that is drawn anew for every "
            f"turn: the machine's mood meets them all alike. Where one process trains alone, the other waits. Medians of "
            f"{shape['steps']} steps choose the {NUM_LEADING} fastest of either side; the ratios are of a final of "
            f"{shape['final']} more turns between these and one process: the fastest of either side there, medians of the ratios "
            "within a turn.",
            "Peak memory: in processes of their own, the kernel's high-water mark of a rank's resident set, with weights and "
            "optimizer.",
        ),
    )


def _label(name: str, options: dict[str, Any]) -> str:
    return name + "".join(f", {k} = {v}" for k, v in options.items())


def _shape(quick: bool) -> dict[str, int]:
    if quick:
        return {"layers": 4, "hidden": 64, "heads": 4, "batch": 8, "seq": 32, "micro_batches": 4, "steps": 2, "final": 2}
    return {"layers": 10, "hidden": 512, "heads": 8, "batch": 16, "seq": 128, "micro_batches": 8, "steps": 4, "final": 15}


def _ratio(case: str, target: float, others: list[float], ours: list[float], limit: float | None = None) -> Row:
    """How many times as fast ours is: the median over turns."""
    ratio = statistics.median(a / b for a, b in zip(others, ours, strict=True))
    return Row(
        case=case,
        target=f"≥ {target:.2f}×",
        measured=f"{ratio:.3f}× ({statistics.median(others):.3f} s / {statistics.median(ours):.3f} s)",
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


Seconds = dict[str, list[float]]


def _contest(shape: dict[str, int], ours: dict[str, tuple[str, dict[str, Any]]], peers: list[str]) -> tuple[Seconds, Seconds]:
    """Seconds of every step of every side, the first of each left out; and of the final between the fastest."""
    torch.set_num_threads(1)
    join()
    sides: dict[str, Callable[[], object]] = {"one process": _one_process(shape) if dist.get_rank() == 0 else lambda: None}
    sides |= {f"ours, {label}": _ours(shape, name, given) for label, (name, given) in ours.items()}
    sides |= {f"torch, {name}": _torch(shape, name) for name in peers}
    seconds = {label: found[1:] for label, found in _turns(sides, shape["steps"] + 1).items()}
    labels = list(sides)
    leading = [labels.index(label) for who in ("ours", "torch") for label in _leading(seconds, who)]
    chosen = torch.tensor(leading)
    dist.broadcast(chosen, 0)  # the clocks of two ranks are not the same
    final = ("one process", *(labels[i] for i in chosen.tolist()))
    return seconds, _turns({label: sides[label] for label in final}, shape["final"])


def _leading(seconds: Seconds, who: str) -> list[str]:
    """The fastest of one side."""
    return sorted((k for k in seconds if k.startswith(who)), key=lambda k: statistics.median(seconds[k]))[:NUM_LEADING]


def _turns(sides: dict[str, Callable[[], object]], count: int) -> Seconds:
    """A step of every side in every turn."""
    draw = random.Random(0)
    seconds: Seconds = {label: [] for label in sides}
    for _ in range(count):
        for label in draw.sample(list(sides), len(sides)):
            dist.barrier()
            start = time.monotonic()
            sides[label]()
            dist.barrier()
            seconds[label].append(time.monotonic() - start)
    return seconds


def _peaks_ours(shape: dict[str, int], name: str, options: dict[str, Any]) -> list[float]:
    torch.set_num_threads(1)
    return _peaks(_ours(shape, name, options))


def _peaks_torch(shape: dict[str, int], name: str) -> list[float]:
    torch.set_num_threads(1)
    join()
    return _peaks(_torch(shape, name))


def _peaks(step: Callable[[], object]) -> list[float]:
    """MiB of every rank at its highest, after three steps."""
    for _ in range(3):
        step()
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    peaks = torch.zeros(RANKS, dtype=torch.float64)
    peaks[dist.get_rank()] = int(status.split()[0]) / 1024
    dist.all_reduce(peaks)
    return list(peaks.tolist())


def _with_optimizer(parameters: Iterable[nn.Parameter], compute: Callable[[], object]) -> Callable[[], object]:
    """A whole step: ``compute`` the gradients, change the weights."""
    optimizer = torch.optim.AdamW(list(parameters), lr=1e-4)

    def step() -> None:
        compute()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _one_process(shape: dict[str, int]) -> Callable[[], object]:
    model, (inputs, targets) = _model(shape), _batch(shape)
    number = shape["micro_batches"]

    def compute() -> None:
        for x, y in zip(inputs.chunk(number), targets.chunk(number), strict=True):
            torch.autograd.backward(_loss(model(x), y) / number)

    return _with_optimizer(model.parameters(), compute)


def _ours(shape: dict[str, int], name: str, options: dict[str, Any]) -> Callable[[], object]:
    pipe = Pipeline(_model(shape), schedule=name, num_micro_batches=shape["micro_batches"], loss_fn=_loss, **options)
    inputs, targets = _batch(shape)
    return _with_optimizer(pipe.parameters(), lambda: pipe.step(inputs, targets))


def _torch(shape: dict[str, int], name: str) -> Callable[[], object]:
    kind, like, options = TORCH[name]
    number = shape["micro_batches"]
    schedule = build(like, num_ranks=RANKS, num_micro_batches=number, **options)
    layers = list(_model(shape))
    cut = cut_layers(layers, schedule)
    rank, device = dist.get_rank(), torch.device("cpu")
    stages = [
        pipelining.PipelineStage(nn.Sequential(*(layers[i] for i in cut[s])), s, schedule.num_stages, device)
        for s, home in enumerate(schedule.placements[0])
        if home == rank
    ]
    one_stage = kind == "Schedule1F1B"
    runner = getattr(pipelining, kind, None) or getattr(pipelining.schedules, kind)
    steps = runner(stages[0] if one_stage else stages, n_microbatches=number, loss_fn=_loss)
    inputs, targets = _batch(shape)
    given = (inputs,) if any(s.is_first for s in stages) else ()
    wanted = {"target": targets} if any(s.is_last for s in stages) else {}
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    return _with_optimizer(parameters, lambda: steps.step(*given, **wanted))


if __name__ == "__main__":
    main(run)
