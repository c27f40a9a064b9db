"""OptEx and its theorems: rounds against N beside √N, and the error of estimated gradients against the length of the history."""

from __future__ import annotations

import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.optimizers import Problem, rounds
from benchmarks.report import Report, Row, main
from torch import Tensor, nn

from wavetrain.files import write_text
from wavetrain.optim.estimators import LENGTHS, NOISES
from wavetrain.optim.process import Prior, Process, left_out_errors, typical_distance
from wavetrain.view.chart import line_chart, stacked

POINTS = (1, 2, 4, 8, 16)
SHARE = 0.02
SEEDS = 3
LIMIT = 600
HISTORY = (4, 8, 16, 32, 64, 128)
SIZE = 2_000
CONDITION = 30.0
NEAR = 0.3
"""How far known points are from the one that is asked for, as a share of its own distance from the minimum."""
PLOT = Path(__file__).resolve().parent / "plots" / "optex_theory.svg"
METHODS = ("ours", "paper", "large batch", "target")


@dataclass(frozen=True)
class Run:
    """One: SGD on a quadratic function of which the steepest direction is ``CONDITION`` times as steep as the flattest."""

    method: str
    parallel: int
    noise: float
    seed: int = 0
    limit: int = LIMIT


def _slopes() -> Tensor:
    return torch.logspace(0, -math.log10(CONDITION), SIZE)


def measure(run: Run) -> float:
    """Rounds until the function is at ``SHARE`` of its start; infinite if it is not."""
    torch.set_num_threads(1)
    make = torch.Generator().manual_seed(run.seed)
    slopes = _slopes()
    x = nn.Parameter(2 * torch.rand(SIZE, generator=make) - 1)
    spread = run.noise * float((slopes * x.detach()).square().mean().sqrt())

    def loss(_: int) -> Tensor:
        value = 0.5 * (slopes * x.square()).sum()
        return value + spread * (torch.randn(SIZE, generator=make) * x).sum() if spread else value

    base = torch.optim.SGD([x], lr=0.3)
    go = rounds(run.method, Problem([x], loss), base, run.parallel)
    start = float((slopes * x.detach().square()).sum())
    for number in range(1, run.limit + 1):
        go()
        value = float((slopes * x.detach().square()).sum())
        if not math.isfinite(value):
            return math.inf
        if value <= SHARE * start:
            return number
    return math.inf


def estimation_error(length: int, noise: float, seed: int) -> float:
    """|estimated − true| / |true| of the gradient at a point, from ``length`` known ones around it.

    The process is tuned as OptEx does, by what is left out.
    """
    make = np.random.default_rng(seed)
    slopes = _slopes().double().numpy()
    x = make.uniform(-1, 1, SIZE)
    spread = noise * math.sqrt(float(np.mean((slopes * x) ** 2)))
    points = [x + NEAR * make.uniform(-1, 1, SIZE) for _ in range(length)]
    gradients = [slopes * point + spread * make.standard_normal(SIZE) for point in points]
    known = np.stack(points)
    squares = np.square(known[:, None] - known[None]).sum(-1)
    unit, products = typical_distance(squares), np.stack(gradients) @ np.stack(gradients).T
    priors = tuple(Prior(length_, noise_) for length_ in LENGTHS for noise_ in NOISES)
    best = priors[int(np.argmin(left_out_errors(priors, squares, unit, products, range(length))[0]))]
    found = Process(best, squares, unit).weights(np.square(known - x).sum(-1)) @ np.stack(gradients)
    return float(np.linalg.norm(found - slopes * x) / np.linalg.norm(slopes * x))


def run(quick: bool) -> Report:
    """Exponents."""
    points, seeds, limit = ((1, 4), 1, 120) if quick else (POINTS, SEEDS, LIMIT)
    rows: list[Row] = []
    charts: list[str] = []
    with ProcessPoolExecutor(2) as pool:
        for noise in (0.0,) if quick else (0.0, 0.3):
            by_method: dict[str, list[tuple[float, float]]] = {}
            for method in METHODS:
                cases = [(n, s) for n in points for s in range(seeds)]
                found = list(pool.map(measure, [Run(method, n, noise, s, limit) for n, s in cases]))
                middle = {n: statistics.median(v for (m, _), v in zip(cases, found, strict=True) if m == n) for n in points}
                rows.append(_exponent(method, noise, middle))
                by_method[method] = [(float(n), v) for n, v in middle.items()]
            by_method["√N"] = [(float(n), by_method["ours"][0][1] / math.sqrt(n)) for n in points]
            title = f"Rounds to {SHARE:.0%} by N, noise {noise:g}"
            charts.append(line_chart(by_method, title=title, x_label="N", y_label="rounds", log_x=True, log_y=True))
    lengths = (HISTORY[0], HISTORY[-1]) if quick else HISTORY
    by_noise: dict[str, list[tuple[float, float]]] = {}
    for noise in (0.0, 0.1, 0.5):
        errors = [statistics.fmean(estimation_error(n, noise, s) for s in range(2 if quick else 10)) for n in lengths]
        rows.append(
            Row(
                case=f"error of the estimate after {'/'.join(map(str, lengths))} gradients, noise {noise:g}",
                target="falls with the history",
                measured=" / ".join(f"{e:.2g}" for e in errors),
                limit=f"one gradient: {math.hypot(NEAR, noise):.2f}",
                passed=errors[-1] < errors[0],
            )
        )
        by_noise[f"noise {noise:g}"] = [(float(n), e) for n, e in zip(lengths, errors, strict=True)]
    if not quick:
        title = "Error of the estimate by the length of the history"
        charts.append(line_chart(by_noise, title=title, x_label="gradients", y_label="relative error", log_x=True, log_y=True))
        write_text(PLOT, stacked(charts))
    return Report(
        name="optex_theory",
        claim="SGD needs Θ(√N) fewer rounds by the theorem; the error of estimates vanishes as the history grows.",
        rows=tuple(rows),
        notes=(
            f"SGD at rate 0.3 on a quadratic function of {SIZE:,} coordinates and condition {CONDITION:g}; rounds to 2 % of its "
            f"start, medians of {seeds} seeds; exponent: least squares of log rounds over log N. N true steps a round: 1.",
            "Errors: of the gradient at a point, from gradients at random points around it; against the true one; 10 seeds.",
            *(() if quick else (f"[Rounds by N, errors by history](plots/{PLOT.name})",)),
        ),
    )


def _exponent(method: str, noise: float, middle: dict[int, float]) -> Row:
    reached = {n: v for n, v in middle.items() if math.isfinite(v)}
    exponent = -float(np.polyfit(np.log(list(reached)), np.log(list(reached.values())), 1)[0]) if len(reached) > 1 else math.nan
    told = " / ".join(f"{v:.0f}" if math.isfinite(v) else "–" for v in middle.values())
    return Row(
        case=f"rounds at N = {'/'.join(map(str, middle))}, noise {noise:g}: {method}",
        target="≥ 0.5" if method == "ours" else "",
        measured=f"{told}: exponent {exponent:.2f}",
        passed=exponent >= 0.5 if method == "ours" else None,
    )


if __name__ == "__main__":
    main(run)
