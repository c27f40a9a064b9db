"""OptEx by the clock: two ranks on two cores, against one process that steps with every minibatch.

GPTs learn Shakespeare's letters: that of :mod:`benchmarks.optex_networks` with its larger minibatches, and one twelve times its
size with minibatches that are small. How long until the loss that vanilla Adam, at its best rate, reaches in 300 steps of the
same seed? Losses on held-out text are looked at between rounds, off the clock.
"""

from __future__ import annotations

import math
import os
import statistics
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
from wavetrain.view.chart import line_chart, stacked

DATA = Path(os.environ.get("WAVETRAIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
RANKS = 2
SEEDS = 3
CHOOSING = 2
"""Of the seeds, those by which rates are chosen."""
STEPS = 300
LOOK_EVERY = 10
TARGET = 0.75
KINDS = ("OptEx", "Large batch")
LOOKED_AT = 2048
"""Letters of held-out text in one of the pieces that are looked at."""
PLOT = Path(__file__).resolve().parent / "plots" / "optex_wall_clock.svg"


@dataclass(frozen=True)
class Size:
    """Of a model and its training."""

    layers: int
    hidden: int
    batch: int
    seq: int
    rates: tuple[float, ...]
    steps: int = STEPS
    held_out: int = 8

    def __str__(self) -> str:
        return f"GPT of {self.layers} layers of width {self.hidden}, minibatches of {self.batch:,} × {self.seq}"


SIZES = (
    Size(layers=2, hidden=48, batch=1024, seq=16, rates=(3e-3, 5e-3, 8e-3)),
    Size(layers=4, hidden=128, batch=32, seq=64, rates=(7e-4, 1e-3, 1.4e-3)),
)
QUICK = Size(layers=1, hidden=32, batch=4, seq=64, rates=(1e-3,), steps=20, held_out=1)


Curve = list[tuple[int, float, float]]
"""(rounds, seconds, held-out loss), every now and then."""


@dataclass(frozen=True)
class Run:
    """One."""

    size: Size
    rate: float
    seed: int = 0


def _streams(size: Size, seed: int = 0) -> tuple[Batches, list[tuple[Tensor, Tensor]], str]:
    """Minibatches without end, those that are held out, and what the text is called."""
    file = DATA / "text" / "tinyshakespeare.txt"
    kept, held_out = open_data([file] if file.exists() else None).split(0.1)
    validation = Batches(held_out, batch=LOOKED_AT // size.seq, seq=size.seq, shuffle=False)
    looked_at = [validation.at(i) for i in range(size.held_out)]
    return (
        Batches(kept, batch=size.batch, seq=size.seq, seed=seed),
        looked_at,
        file.stem if file.exists() else "Python's standard library",
    )


Loss = Callable[[int], Tensor]
Make = Callable[[GPT, float], tuple[int, Callable[[Loss], object]]]
"""(model, rate) → minibatches of a round, and what does a round, given the loss of each."""


def _train(run: Run, threads: int, make: Make, until: float | None = None, most_seconds: float = math.inf) -> Curve:
    """Losses by rounds and seconds, up to where the loss is at ``until``, or longer than it is allowed to take."""
    size = run.size
    torch.set_num_threads(threads)
    torch.manual_seed(run.seed)
    model = GPT(num_layers=size.layers, hidden=size.hidden, num_heads=4, vocab=256, max_length=size.seq)
    batches, looked_at, _ = _streams(size, run.seed)
    number, go = make(model, run.rate)
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


def _vanilla(run: Run, threads: int) -> Curve:
    def make(model: GPT, rate: float) -> tuple[int, Callable[[Loss], object]]:
        opt = torch.optim.Adam(model.parameters(), lr=rate)

        def go(loss: Loss) -> None:
            opt.zero_grad()
            torch.autograd.backward(loss(0))
            opt.step()

        return 1, go

    return _train(run, threads, make)


def _on_ranks(run: Run, kind: str, until: float, most_seconds: float) -> Curve:
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

    return _train(run, 1, make, until, most_seconds)


def _learns(curves: Iterable[Curve]) -> bool:
    """All that is asked of a quick run."""
    return all(curve[-1][2] < curve[0][2] for curve in curves)


def _reached(curve: Curve, wanted: float) -> tuple[int, float] | None:
    """The rounds and seconds until a loss; None where it never was."""
    return next(((number, seconds) for number, seconds, loss in curve if loss <= wanted), None)


def run(quick: bool) -> Report:
    """Seconds to a loss."""
    found = [_of_size(size, quick) for size in ((QUICK,) if quick else SIZES)]
    if not quick:
        write_text(PLOT, stacked([chart for _, chart in found]))
    return Report(
        name="optex_wall_clock",
        claim=f"{_streams(QUICK)[2]}: seconds to the loss that vanilla Adam reaches in {STEPS} steps.",
        rows=tuple(row for rows, _ in found for row in rows),
        notes=(
            f"Every side at the best of the rates {'; '.join(', '.join(f'{r:g}' for r in one.rates) for one in SIZES)}, chosen "
            f"by {CHOOSING} seeds; medians of {SEEDS}. Rounds are looked at every {LOOK_EVERY}.",
            "Vanilla with two threads uses as many cores as two ranks; with one, half as many. Large batch: one step a round "
            "with the mean of both ranks' gradients.",
            *(() if quick else (f"[Loss by seconds](plots/{PLOT.name}), the first seed.",)),
        ),
    )


def _of_size(size: Size, quick: bool) -> tuple[list[Row], str]:
    """Of one model: rows, and a chart of the first seed."""
    rates, seeds, choosing = size.rates, range(1 if quick else SEEDS), range(1 if quick else CHOOSING)
    tried = {(rate, s): launch(_vanilla, ranks=1, args=(Run(size, rate, s), 1)) for rate in rates for s in choosing}
    best = min(rates, key=lambda rate: sum(tried[rate, s][-1][2] for s in choosing))
    alone = {(1, s): tried.get((best, s)) or launch(_vanilla, ranks=1, args=(Run(size, best, s), 1)) for s in seeds}
    alone |= {(2, s): launch(_vanilla, ranks=1, args=(Run(size, best, s), 2)) for s in seeds}
    rows = [
        Row(
            case=f"{size}: vanilla Adam at {best:g}, {size.steps} steps, one process, threads: {threads}",
            measured=", ".join(f"{alone[threads, s][-1][1]:.1f} s to {alone[threads, s][-1][2]:.4f}" for s in seeds),
        )
        for threads in (1, 2)
    ]
    drawn = {f"vanilla, threads: {threads}": alone[threads, 0] for threads in (1, 2)}
    for kind in KINDS:

        def measure(rate: float, seed: int, kind: str = kind) -> Curve:
            _, seconds, wanted = alone[1, seed][-1]
            limits = (-1.0, math.inf) if quick else (wanted, seconds)
            found: Curve = launch(_on_ranks, ranks=RANKS, args=(Run(size, rate, seed), kind, *limits))
            return found

        curves = {(rate, s): measure(rate, s) for rate in rates for s in choosing}

        def badness(rate: float, curves: Mapping[tuple[float, int], Curve] = curves) -> tuple[float, float]:
            found = [_reached(curves[rate, s], alone[1, s][-1][2]) for s in choosing]
            return sum(one[1] if one else math.inf for one in found), sum(curves[rate, s][-1][2] for s in choosing)

        rate = min(rates, key=badness)
        curves |= {(rate, s): measure(rate, s) for s in seeds if s not in choosing}
        drawn[f"{kind}, {RANKS} ranks"] = curves[rate, 0]
        reached = [_reached(curves[rate, s], alone[1, s][-1][2]) for s in seeds]
        for threads in (1, 2):
            shares = [found[1] / alone[threads, s][-1][1] if found else math.inf for s, found in zip(seeds, reached, strict=True)]
            ours, share = kind == "OptEx", statistics.median(shares)
            each = ", ".join(
                f"{one:.2f}× in {found[0]} rounds" if found else "not in the time of vanilla's with 1"
                for one, found in zip(shares, reached, strict=True)
            )
            rows.append(
                Row(
                    case=f"{size}: {kind}, {RANKS} ranks of one thread: time over vanilla's with {threads}",
                    target=f"≤ {TARGET:g}×" if ours else "",
                    measured=f"{'not reached' if math.isinf(share) else f'{share:.2f}×'} at {rate:g} ({each})",
                    limit=f"{1 / RANKS:.2f}×, rounds as long as steps" if threads == 1 else "",
                    passed=None if not ours else _learns(curves.values()) if quick else share <= TARGET,
                )
            )
    lines = {name: [(seconds, loss) for _, seconds, loss in curve] for name, curve in drawn.items()}
    return rows, line_chart(lines, title=str(size), x_label="seconds", y_label="held-out loss", y_from_zero=False)


if __name__ == "__main__":
    main(run)
