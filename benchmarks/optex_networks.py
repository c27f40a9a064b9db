"""OptEx on networks: the loss after equal rounds of four gradients, beside what else they can be spent on.

MNIST (8,000 images of ``WAVETRAIN_DATA``, a residual network of 84,000 parameters) and Shakespeare (letters, a transformer of
61,000 parameters), Adam and SGD, minibatches of 128 and 1,024. Every method at the best rate of the same grid. Without the data,
images are made up, and the text is the project's own.
"""

from __future__ import annotations

import gzip
import math
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.kept import kept
from benchmarks.optimizers import METHODS, Problem, code_of, rounds
from benchmarks.report import Report, Row, main, percent
from torch import Tensor, nn

from wavetrain.files import write_text
from wavetrain.models import GPT
from wavetrain.view.chart import line_chart, stacked

DATA = Path(os.environ.get("WAVETRAIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PARALLEL = 4
ROUNDS = {"MNIST": 60, "Shakespeare": 30}
SEEDS = 5
RATES = {
    ("MNIST", "Adam"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("MNIST", "SGD"): (0.03, 0.1, 0.2, 0.4),
    ("Shakespeare", "Adam"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("Shakespeare", "SGD"): (0.03, 0.1, 0.3, 1.0),
}
SEQ = 16
LOOKS = 10
"""How often in a run the loss is looked at."""
PLOT = Path(__file__).resolve().parent / "plots" / "optex_networks.svg"
BATCHES = (128, 1024)
MUCH_BETTER = 0.85
"""Of the large batch's loss, where the batch is already large."""
NEVER_WORSE = 1.02


@lru_cache(maxsize=1)
def images() -> tuple[Tensor, Tensor]:
    """Images (n, 784) and their digits (n,)."""
    folder = DATA / "mnist"
    if not folder.exists():
        make = torch.Generator().manual_seed(0)
        digits = torch.randint(10, (2000,), generator=make)
        shapes = torch.randn(10, 784, generator=make)
        return shapes[digits] + 2 * torch.randn(2000, 784, generator=make), digits
    with gzip.open(next(folder.glob("*images*"))) as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)[:8000]
    with gzip.open(next(folder.glob("*labels*"))) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:8000]
    return (torch.tensor(pixels).float() / 255 - 0.1307) / 0.3081, torch.tensor(labels).long()


class Residual(nn.Module):
    """x + two layers of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same."""
        out: Tensor = x + self.inner(x)
        return out


Curve = list[tuple[int, float]]
"""(Round, loss) every now and then; infinite where it is no number."""


@dataclass(frozen=True)
class Run:
    """One."""

    task: str
    optimizer: str
    method: str
    rate: float
    batch: int
    seed: int = 0
    num_rounds: int = 60


@lru_cache(maxsize=1)
def sequences() -> tuple[Tensor, Tensor]:
    """Sequences (n, SEQ) of Shakespeare's letters as numbers from 0 on, and the letters that follow each."""
    file = DATA / "text" / "tinyshakespeare.txt"
    text = file.read_bytes() if file.exists() else Path(__file__).read_bytes() * 20
    letters = {byte: i for i, byte in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[byte] for byte in text[:400_000]])
    windows = numbers.unfold(0, SEQ + 1, SEQ)
    return windows[:, :-1], windows[:, 1:]


def task_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and all that it is trained on."""
    if name == "MNIST":
        return nn.Sequential(nn.Linear(784, 64), *(Residual(64) for _ in range(3)), nn.Linear(64, 10)), *images()
    x, y = sequences()
    return GPT(num_layers=2, hidden=48, num_heads=4, vocab=int(y.max()) + 1, max_length=SEQ), x, y


def measure(run: Run) -> Curve:
    """The loss over all images, or over some 8,000 sequences, every tenth of the rounds; see :mod:`benchmarks.kept`."""
    return kept(repr(run), ("models/*.py", "optex_networks.py", *code_of(run.method)), lambda: _measure(run))


def _measure(run: Run) -> Curve:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model, x, y = task_of(run.task)
    make = torch.Generator().manual_seed(100 + run.seed)
    chosen: list[Tensor] = []

    def loss_of(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x[rows]).flatten(0, -2), y[rows].flatten())

    def loss(i: int) -> Tensor:
        return loss_of(chosen[i])

    kind = torch.optim.Adam if run.optimizer == "Adam" else torch.optim.SGD
    base = kind(model.parameters(), lr=run.rate)
    go = rounds(run.method, Problem(list(model.parameters()), loss), base, PARALLEL)
    found: Curve = []
    for number in range(1, run.num_rounds + 1):
        chosen[:] = [torch.randint(len(x), (run.batch,), generator=make) for _ in range(PARALLEL)]
        go()
        if number % max(1, run.num_rounds // LOOKS) == 0 or number == run.num_rounds:
            with torch.no_grad():
                now = float(loss_of(torch.arange(0, len(x), max(1, len(x) // 8192))))
            found.append((number, now if math.isfinite(now) else math.inf))
    return found


def run(quick: bool) -> Report:
    """Losses of networks."""
    rows: list[Row] = []
    charts: list[str] = []
    with ProcessPoolExecutor(2) as pool:
        shares = {}
        for task, optimizer in [("MNIST", "Adam")] if quick else RATES:
            for batch in (32,) if quick else BATCHES:
                row, shares[f"{task}, {optimizer}, {batch}"], curves = _case(pool, task, optimizer, batch, quick)
                rows.append(row)
                charts.append(line_chart(curves, title=row.case, x_label="round", y_label="loss", log_y=True))
    if not quick:
        write_text(PLOT, stacked(charts))
    worst = max(shares, key=shares.__getitem__)
    rows.append(
        Row(
            case="never worse: the loss over the large batch's, at most",
            target=f"≤ {NEVER_WORSE:g}",
            measured=f"{shares[worst]:.3f} ({worst})",
            passed=quick or shares[worst] <= NEVER_WORSE,
        )
    )
    return Report(
        name="optex_networks",
        claim="The training loss after "
        + ", ".join(f"{count} rounds of four minibatches ({task})" for task, count in ROUNDS.items())
        + f", each method at its best rate, {SEEDS} seeds.",
        rows=tuple(rows),
        notes=(
            "MNIST's 10,000 test images, 8,000 of them, residual network of 84,000 parameters."
            if (DATA / "mnist").exists()
            else "Made-up images: set WAVETRAIN_DATA to a folder that has mnist/.",
            f"Shakespeare: 400,000 letters in sequences of {SEQ}, a GPT of two layers of width 48; the loss in nats a letter.",
            "Every minibatch is drawn anew; all methods see the same ones. Vanilla uses the first of every round. Rates are "
            "chosen by the mean of two seeds.",
            "N true steps are the limit where noise is small.",
            *(() if quick else (f"[Loss by round](plots/{PLOT.name}), means of the seeds.",)),
        ),
    )


def _case(
    pool: ProcessPoolExecutor, task: str, optimizer: str, batch: int, quick: bool
) -> tuple[Row, float, dict[str, list[tuple[float, float]]]]:
    """A row, the loss of ours over that of the large batch, and the mean loss of every method by rounds."""
    rates, count = (RATES[task, optimizer][1:3], 4) if quick else (RATES[task, optimizer], ROUNDS[task])
    choosing = 1 if quick else 2
    tried = [Run(task, optimizer, m, r, batch, s, count) for m in METHODS for r in rates for s in range(choosing)]
    first = dict(zip(tried, pool.map(measure, tried), strict=True))
    best = {
        m: min(rates, key=lambda r: statistics.fmean(c[-1][1] for t, c in first.items() if (t.method, t.rate) == (m, r)))
        for m in METHODS
    }
    final = [Run(task, optimizer, m, best[m], batch, s, count) for m in METHODS for s in range(1 if quick else SEEDS)]
    missing = [one for one in final if one not in first]
    found = {**first, **dict(zip(missing, pool.map(measure, missing), strict=True))}
    values = {m: [found[one][-1][1] for one in final if one.method == m] for m in METHODS}
    curves = {m: _mean_curve([found[one] for one in final if one.method == m]) for m in METHODS}
    mean = {m: statistics.fmean(values[m]) for m in METHODS}
    share = mean["ours"] / mean["large batch"]
    least = MUCH_BETTER if batch >= BATCHES[-1] else 1.0

    def show(m: str) -> str:
        lost = sum(math.isinf(v) for v in values[m])
        if lost:
            return f"{lost} of {len(values[m])} seeds diverged at {best[m]:g}"
        spread = statistics.stdev(values[m]) if len(values[m]) > 1 else 0.0
        return f"{mean[m]:.4f} ± {spread:.4f} at {best[m]:g}"

    row = Row(
        case=f"{task}, {optimizer}, minibatches of {batch}",
        target=f"≤ {least:g} of the large batch's" if not quick else "≤ vanilla's",
        measured=f"{show('ours')}: {share:.2f} of it ("
        + ", ".join(f"{m} {show(m)}" for m in METHODS if m not in ("ours", "target"))
        + ")",
        limit=f"N true steps {show('target')}",
        distance=percent(mean["ours"] / mean["target"] - 1, 0) + " above",
        passed=share <= least if not quick else mean["ours"] <= mean["vanilla"],
    )
    return row, share, curves


def _mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    return [(float(one[0][0]), statistics.fmean(loss for _, loss in one)) for one in zip(*curves, strict=True)]


if __name__ == "__main__":
    main(run)
