"""OptEx by the clock: two ranks on two cores, against one process that steps with every minibatch.

A GPT learns Shakespeare's letters. How long until the loss that vanilla Adam, at its best rate, reaches in 300 steps? Losses on
held-out text are looked at between rounds, off the clock.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from benchmarks.report import Report, Row, main
from torch import Tensor
from torch.nn.functional import cross_entropy

from wavetrain.data.batches import Batches
from wavetrain.data.tokens import open_data
from wavetrain.files import write_text
from wavetrain.models import GPT
from wavetrain.optim import OptEx
from wavetrain.runtime.launch import launch
from wavetrain.runtime.mesh import join
from wavetrain.view.chart import line_chart

DATA = Path(os.environ.get("WAVETRAIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
RANKS = 2
RATES = (5e-4, 1e-3, 2e-3)
STEPS = 300
LOOK_EVERY = 10
TARGET = 0.75
KINDS = ("OptEx", "Large batch")
SEQ = 64
PLOT = Path(__file__).resolve().parent / "plots" / "optex_wall_clock.svg"


@dataclass(frozen=True)
class Size:
    """Of the model and its training."""

    layers: int = 4
    hidden: int = 128
    batch: int = 32
    steps: int = STEPS
    held_out: int = 8


Curve = list[tuple[int, float, float]]
"""(rounds, seconds, held-out loss), every now and then."""


def _streams(size: Size) -> tuple[Batches, list[tuple[Tensor, Tensor]], str]:
    """Minibatches without end, those that are held out, and what the text is called."""
    file = DATA / "text" / "tinyshakespeare.txt"
    kept, held_out = open_data([file] if file.exists() else None).split(0.1)
    validation = Batches(held_out, batch=32, seq=SEQ, shuffle=False)
    looked_at = [validation.at(i) for i in range(size.held_out)]
    return Batches(kept, batch=size.batch, seq=SEQ), looked_at, file.stem if file.exists() else "Python's standard library"


Loss = Callable[[int], Tensor]
Make = Callable[[GPT, float], tuple[int, Callable[[Loss], object]]]
"""(model, rate) → minibatches of a round, and what does a round, given the loss of each."""


def _train(
    size: Size, rate: float, threads: int, make: Make, until: float | None = None, most_seconds: float = math.inf
) -> Curve:
    """Losses by rounds and seconds, up to where the loss is at ``until``, or longer than it is allowed to take."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT(num_layers=size.layers, hidden=size.hidden, num_heads=4, vocab=256, max_length=SEQ)
    batches, looked_at, _ = _streams(size)
    number, go = make(model, rate)
    curve: Curve = []
    seconds = 0.0
    for step in range(1, size.steps + 1):
        first = (step - 1) * number

        def loss(i: int, first: int = first) -> Tensor:
            x, y = batches.at(first + i)
            return cross_entropy(model(x).flatten(0, 1), y.flatten())

        begin = time.perf_counter()
        go(loss)
        seconds += time.perf_counter() - begin
        if step % LOOK_EVERY == 0:
            with torch.no_grad():
                found = sum(float(cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in looked_at) / len(looked_at)
            curve.append((step, seconds, found if math.isfinite(found) else math.inf))
            if _anywhere((until is not None and found <= until) or seconds > most_seconds):
                break
    return curve


def _anywhere(one: bool) -> bool:
    """Whether it is so on any rank: their clocks differ, and all end together."""
    if not dist.is_initialized():
        return one
    flag = torch.tensor(float(one))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _vanilla(size: Size, rate: float, threads: int) -> Curve:
    def make(model: GPT, rate: float) -> tuple[int, Callable[[Loss], object]]:
        opt = torch.optim.Adam(model.parameters(), lr=rate)

        def go(loss: Loss) -> None:
            opt.zero_grad()
            torch.autograd.backward(loss(0))
            opt.step()

        return 1, go

    return _train(size, rate, threads, make)


def _on_ranks(size: Size, rate: float, kind: str, until: float, most_seconds: float) -> Curve:
    """One of two ranks, with one thread: OptEx, or a step with the mean of both gradients."""
    join()

    def make(model: GPT, rate: float) -> tuple[int, Callable[[Loss], object]]:
        base = torch.optim.Adam(model.parameters(), lr=rate)
        if kind == "OptEx":
            opt = OptEx(base, process_group=dist.group.WORLD, shard_history=True)
            return RANKS, lambda loss: opt.step(loss)

        def go(loss: Loss) -> None:
            base.zero_grad()
            torch.autograd.backward(loss(dist.get_rank()))
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            whole = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(whole)
            for g, part in zip(gradients, torch.split(whole / RANKS, [g.numel() for g in gradients]), strict=True):
                g.copy_(part.view_as(g))
            base.step()

        return RANKS, go

    return _train(size, rate, 1, make, until, most_seconds)


def _learns(curves: Iterable[Curve]) -> bool:
    """All that is asked of a quick run."""
    return all(curve[-1][2] < curve[0][2] for curve in curves)


def _quickest(curves: Mapping[float, Curve], wanted: float) -> tuple[float, tuple[int, float] | None]:
    """The rate that is at a loss first, and its rounds and seconds; None of them where none is."""
    reached = {rate: [(n, s) for n, s, loss in curve if loss <= wanted] for rate, curve in curves.items()}
    best = min(curves, key=lambda rate: reached[rate][0][1] if reached[rate] else math.inf)
    return best, reached[best][0] if reached[best] else None


def run(quick: bool) -> Report:
    """Seconds to a loss."""
    size = Size(layers=1, hidden=32, batch=4, steps=20, held_out=1) if quick else Size()
    rates = RATES[:1] if quick else RATES
    vanilla = {(rate, 1): launch(_vanilla, ranks=1, args=(size, rate, 1)) for rate in rates}
    best = min(rates, key=lambda r: vanilla[r, 1][-1][2])
    wanted = vanilla[best, 1][-1][2]
    vanilla[best, 2] = launch(_vanilla, ranks=1, args=(size, best, 2))
    slowest = vanilla[best, 1][-1][1]
    curves = {
        (kind, rate): launch(_on_ranks, ranks=RANKS, args=(size, rate, kind, *((-1.0, math.inf) if quick else (wanted, slowest))))
        for kind in KINDS
        for rate in rates
    }
    rows = [
        Row(
            case=f"vanilla Adam at {best:g}, {size.steps} steps, one process, {threads} thread{'s' if threads > 1 else ''}",
            measured=f"{vanilla[best, threads][-1][1]:.1f} s to a held-out loss of {wanted:.4f}",
        )
        for threads in (1, 2)
    ]
    drawn = {f"vanilla, {threads} thread{'s' if threads > 1 else ''}": vanilla[best, threads] for threads in (1, 2)}
    for kind in KINDS:
        rate, found = _quickest({rate: curves[kind, rate] for rate in rates}, wanted)
        drawn[f"{kind}, {RANKS} ranks"] = curves[kind, rate]
        for threads in (1, 2):
            seconds = vanilla[best, threads][-1][1]
            ours = kind == "OptEx"
            rows.append(
                Row(
                    case=f"{kind}, {RANKS} ranks of one thread, to that loss: time over vanilla's with {threads}",
                    target=f"≤ {TARGET:g}×" if ours else "",
                    measured=f"not reached within {slowest:.0f} s"
                    if found is None
                    else f"{found[1] / seconds:.2f}× ({found[1]:.1f} s, {found[0]} rounds of {RANKS} at {rate:g})",
                    limit=f"{1 / RANKS:.2f}×, rounds as long as steps" if threads == 1 else "",
                    passed=None
                    if not ours
                    else _learns([curves[kind, rate] for rate in rates])
                    if quick
                    else found is not None and found[1] <= TARGET * seconds,
                )
            )
    if not quick:
        lines = {name: [(seconds, loss) for _, seconds, loss in curve] for name, curve in drawn.items()}
        write_text(
            PLOT, line_chart(lines, title="Held-out loss by seconds", x_label="seconds", y_label="loss", y_from_zero=False)
        )
    return Report(
        name="optex_wall_clock",
        claim=f"{_streams(size)[2]}, a GPT of {size.layers} layers of width {size.hidden}, minibatches of {size.batch} x {SEQ}.",
        rows=tuple(rows),
        notes=(
            f"Every side at the best of the rates {', '.join(f'{r:g}' for r in rates)}. Rounds are looked at every {LOOK_EVERY}.",
            "Vanilla with two threads uses as many cores as two ranks; with one, half as many. Large batch: one step a round "
            "with the mean of both ranks' gradients.",
            *(() if quick else (f"[Loss by seconds](plots/{PLOT.name})",)),
        ),
    )


if __name__ == "__main__":
    main(run)
