"""What OptEx costs: the share of a round that goes to estimation, how it grows, and what it keeps.

The transformer of :mod:`benchmarks.optex_networks`, larger ones on bytes of Python's standard library, and a network of a million
parameters; one thread. Of a network of dense layers a small minibatch is the hardest case: nothing has less work for every
parameter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.optex_networks import task_of
from benchmarks.report import Report, Row, main, percent
from torch import Tensor, nn

from wavetrain.data import Batches, stdlib_corpus
from wavetrain.models import GPT
from wavetrain.optim import OptEx
from wavetrain.optim.history import History

PARALLEL = 4
HISTORY = 20


def run(quick: bool) -> Report:
    """Seconds and bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [_letters(quick, batch) for batch in (128, 1024)]
    rows += [_transformer(quick, *((2, 64, 15) if quick else shape)) for shape in ((2, 64, 15), (4, 144, 25))]
    rows += [_million(quick, batch) for batch in (128, 1024)]
    rows += _growth(quick)
    rows.append(_memory())
    return Report(
        name="optex_cost",
        claim="Estimation is a small part of a round, and linear in coordinates and history.",
        rows=tuple(rows),
        notes=(
            "Estimation: predictions, distances, inner products, tuning. The inner optimizer's steps (up to 2N − 1 a round) and "
            "the copies of its state are counted apart. Medians of rounds, after the history is full.",
            "The public code spends 62 to 93 % of an iteration on estimation.",
        ),
    )


def _shares(opt: OptEx, loss: Callable[[int], Tensor], count: int) -> tuple[float, float, float]:
    """Shares of estimation and of the inner steps, and the seconds of a round."""
    for _ in range(count):
        opt.step(loss)
    told = list(opt.stats)[-(count // 2) :]
    whole = [one.estimate_seconds + one.evaluate_seconds + one.step_seconds for one in told]
    steps = [one.step_seconds / w for one, w in zip(told, whole, strict=True)]
    return statistics.median(one.estimate_share for one in told), statistics.median(steps), statistics.median(whole)


def _letters(quick: bool, batch: int) -> Row:
    """The transformer of the benchmark of networks, as OptEx comes."""
    model, x, y = task_of("Shakespeare")
    opt = OptEx(torch.optim.Adam(model.parameters(), lr=1e-3), parallel=PARALLEL)
    make = torch.Generator().manual_seed(0)

    def loss(_: int) -> Tensor:
        rows = torch.randint(len(x), (8 if quick else batch,), generator=make)
        return nn.functional.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())

    share, steps, seconds = _shares(opt, loss, 2 if quick else 40)
    size = sum(p.numel() for p in model.parameters())
    return Row(
        case=f"transformer of {size:,} parameters, minibatches of {batch:,} × 16 letters, N = 4, history as it comes: "
        "estimation's share of a round",
        target="≤ 15 %",
        measured=f"{percent(share, 1)} of {seconds * 1e3:.0f} ms (inner steps {percent(steps, 1)})",
        passed=None if quick else share <= 0.15,
    )


def _transformer(quick: bool, layers: int, hidden: int, most: int) -> Row:
    model = GPT(num_layers=layers, hidden=hidden, num_heads=4, vocab=256, max_length=64)
    batches = iter(Batches(stdlib_corpus(), batch=8 if quick else 128, seq=64))
    opt = OptEx(torch.optim.AdamW(model.parameters(), lr=1e-3), parallel=PARALLEL, history=HISTORY)

    def loss(_: int) -> Tensor:
        inputs, targets = next(batches)
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    share, steps, seconds = _shares(opt, loss, 2 if quick else 12)
    size = sum(p.numel() for p in model.parameters())
    return Row(
        case=f"transformer of {size:,} parameters, minibatches of 128 × 64 bytes, N = 4: estimation's share of a round",
        target=f"≤ {most} %",
        measured=f"{percent(share, 1)} of {seconds:.2f} s (inner steps {percent(steps, 1)})",
        passed=None if quick else share <= most / 100,
    )


def _million(quick: bool, batch: int) -> Row:
    width = 100 if quick else 570
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    size = sum(p.numel() for p in model.parameters())
    opt = OptEx(torch.optim.Adam(model.parameters(), lr=1e-4), parallel=PARALLEL, history=HISTORY)
    x = torch.randn(PARALLEL, batch, width)
    share, steps, seconds = _shares(opt, lambda i: model(x[i]).square().mean(), 2 if quick else 16)
    return Row(
        case=f"network of {size:,} parameters, minibatches of {batch}, history of {HISTORY}: estimation's share of a round",
        target="≤ 25 %",
        measured=f"{percent(share, 1)} of {seconds * 1e3:.0f} ms (inner steps {percent(steps, 1)})",
        passed=None if quick else share <= 0.25,
    )


def _estimate_seconds(size: int, history: int, repeats: int) -> float:
    """Of what a round does with ``history`` known pairs: N distances, N − 1 predictions, the new inner products, N replays."""
    sampled = torch.arange(0, size, max(1, size // 32_768))
    kept = History(history + PARALLEL, size, torch.device("cpu"), torch.float32, sampled)
    kept.rows = list(range(history))
    point, out = torch.randn(size), torch.empty(size)
    weights = torch.randn(history).double().numpy()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        new = list(range(history, history + PARALLEL))
        for row in new:
            kept.put(row, point)
            kept.measure(row)
            kept.combine(weights, kept.rows, out)
        kept.close(new)
        for _ in new:
            kept.squares_to(point)
            kept.combine(weights, kept.rows[:history], out)
        kept.rows = kept.rows[:history]
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _growth(quick: bool) -> list[Row]:
    base, repeats = (20_000, 2) if quick else (1_000_000, 7)  # of either, nothing fits into a cache
    rows = []
    for what, one, two in (
        ("coordinates", (base, 20), (4 * base, 20)),
        ("pairs of history", (base, 20), (base, 80)),
    ):
        a, b = _estimate_seconds(*one, repeats), _estimate_seconds(*two, repeats)
        rows.append(
            Row(
                case=f"four times the {what} ({one} → {two}): estimation",
                target="≤ 5× (linear: 4×)",
                measured=f"{b / a:.1f}× ({a * 1e3:.0f} → {b * 1e3:.0f} ms)",
                passed=None if quick else b / a <= 5,
            )
        )
    return rows


def _memory() -> Row:
    size = 1_000_000
    x = nn.Parameter(torch.randn(size))
    opt = OptEx(torch.optim.Adam([x], lr=1e-3), parallel=PARALLEL, history=HISTORY)
    for _ in range(3):
        opt.step(lambda i: x.square().sum())
    held = opt.held_bytes()
    limit = 2 * HISTORY * size * 4
    return Row(
        case=f"bytes kept beside parameters, gradients and the optimizer's own state, {size:,} coordinates, Adam",
        target="≤ 2·T·d·4 + 10 %",
        measured=f"{held / limit:.3f} of 2·T·d·4",
        passed=held <= 1.1 * limit,
    )


if __name__ == "__main__":
    main(run)
