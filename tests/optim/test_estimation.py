"""What is known of gradients: histories, Gaussian processes, estimators, and the published algorithm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wavetrain.optim import OptEx
from wavetrain.optim.estimators import Judge, Models
from wavetrain.optim.history import History
from wavetrain.optim.kernels import KERNELS
from wavetrain.optim.pace import Pace
from wavetrain.optim.process import Prior, Process, left_out_errors, typical_distance


def filled(count: int, dims: int = 6, seed: int = 0, capacity: int | None = None, **options: Any) -> History:
    history = History(capacity or count, dims, torch.device("cpu"), torch.float64, **options)
    make = torch.Generator().manual_seed(seed)
    for _ in range(count):
        (row,) = history.take_rows(1)
        point = torch.randn(dims, generator=make, dtype=torch.float64)
        history.put(row, point)
        history.gradients[row] = point * torch.arange(1, dims + 1) + 0.1 * torch.randn(dims, generator=make, dtype=torch.float64)
        history.close([row])
    return history


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_one_at_nothing_and_fall(name: str) -> None:
    values = KERNELS[name](np.linspace(0, 6, 50))
    assert values[0] == 1
    assert (np.diff(values) < 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 5), st.integers(0, 100))
def test_matrices_are_those_of_what_is_kept(count: int, capacity: int, seed: int) -> None:
    history = filled(count, seed=seed, capacity=capacity)
    assert len(history) == min(count, capacity)
    points, gradients = history.points[history.rows], history.gradients[history.rows]
    assert np.allclose(history.between(history.rows), torch.cdist(points, points).numpy() ** 2)
    assert np.allclose(history.products[np.ix_(history.rows, history.rows)], (gradients @ gradients.T).numpy())


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 8), st.floats(0.2, 20), st.floats(1e-4, 5), st.sampled_from(sorted(KERNELS)), st.integers(0, 50))
def test_left_out_errors_are_those_of_processes_without_the_point(
    n: int, length: float, noise: float, kernel: str, seed: int
) -> None:
    history = filled(n, seed=seed)
    squares, products = history.between(history.rows), history.products[np.ix_(history.rows, history.rows)]
    prior, unit = Prior(length, noise, kernel), typical_distance(squares)
    off = 0.0
    for i in range(n):
        rest = [j for j in range(n) if j != i]
        w = Process(prior, squares[np.ix_(rest, rest)], unit).weights(squares[i, rest])
        predicted = torch.from_numpy(w) @ history.gradients[[history.rows[j] for j in rest]]
        off += float((predicted - history.gradients[history.rows[i]]).square().sum())
    found = left_out_errors((prior,), squares, unit, products, range(n))[0]
    assert found == pytest.approx(off / float(np.diag(products).sum()), rel=1e-5, abs=1e-9)


def test_without_noise_a_process_passes_through_what_it_knows() -> None:
    history = filled(5)
    squares = history.between(history.rows)
    process = Process(Prior(1.0, 0.0), squares, typical_distance(squares))
    for i in range(5):
        assert np.allclose(process.weights(squares[i]), np.eye(5)[i], atol=1e-4)
    assert process.weights(squares[0] + 1e6).sum() == pytest.approx(1.0), "far away: the mean"
    plain = Process(Prior(1.0, 0.0), squares, typical_distance(squares), mean=False)
    assert plain.weights(squares[0] + 1e6).sum() == pytest.approx(0.0)


def test_a_secant_is_exact_on_a_line() -> None:
    history = History(4, 3, torch.device("cpu"), torch.float64)
    way = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    curvature = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
    for t in (0.0, 0.4):
        (row,) = history.take_rows(1)
        history.put(row, t * way)
        history.gradients[row] = curvature * t * way
        history.close([row])
    ahead = 1.3 * way
    models = Models(history, tuple(history.rows), 1, None, None, 0.0, False)
    w = models.weights("secant", history.squares_to(ahead), None)
    assert torch.allclose(torch.from_numpy(w) @ history.gradients[history.rows], curvature * ahead)


def test_a_judge_believes_what_predicted_best() -> None:
    judge, history = Judge("matern52"), History(20, 4, torch.device("cpu"), torch.float64)
    for r in range(6):
        before, new = judge.models(history, 2, bends=False), []
        for s in range(2):
            (row,) = history.take_rows(1)
            point = torch.full((4,), 0.1 * (2 * r + s), dtype=torch.float64)
            history.put(row, point)
            history.gradients[row] = 1.0 - point  # a line: the secant knows it all
            history.close([row])
            new.append(row)
        judge.hear(before, new)
    assert judge.best(bends=False) in ("secant", "gp")
    assert judge.tried.errors[3] == pytest.approx(judge.tried.errors.min(), abs=1e-3)
    assert judge.prior.noise <= 1e-3


def test_a_pace_goes_down_and_up_again() -> None:
    pace = Pace(4)

    def hear(accepted: int, losses: list[float]) -> None:
        pace.hear(accepted, losses, losses[0])

    for _ in range(2):
        hear(1, [1.0])
    assert pace.num_points == 2
    for i in range(30):
        hear(pace.num_points, [1.0 / (i + 1)])
    assert pace.num_points == 4
    seen, make = [], np.random.default_rng(0)
    for _ in range(100):
        hear(pace.num_points, list(1.0 + 0.1 * make.standard_normal(4)))
        seen.append(pace.num_points)
    assert min(seen) == 1, "losses that do not fall: a larger batch"
    seen.clear()
    for i in range(100):
        hear(pace.num_points, list(1.0 - 0.01 * i + 0.05 * make.standard_normal(4)))
        seen.append(pace.num_points)
    assert seen[-1] == 4, "losses that fall, if not in every round: as many points as there are"


def published(x0: Any, gradient: Any, lr: float, rounds: int, parallel: int, kept: int) -> Any:
    """The algorithm as published, with plain gradient descent, written again from its description."""
    x, xs, gs = x0, list[Any](), list[Any]()
    for _ in range(rounds):

        def predict(z: Any, xs: Any = tuple(xs), gs: Any = tuple(gs)) -> Any:
            if len(xs) < 2:
                return np.zeros_like(z)
            known = np.stack(xs)
            unit = np.sqrt(np.linalg.norm(known, axis=1)).mean()

            def kernel(a: Any, b: Any) -> Any:
                r = math.sqrt(5) * np.linalg.norm(a[:, None] - b[None], axis=2) / unit / 0.1
                return (1 + r + r * r / 3) * np.exp(-r)

            return kernel(z[None], known)[0] @ np.linalg.inv(kernel(known, known) + 1e-3 * np.eye(len(xs))) @ np.stack(gs)

        way = [x]
        for _ in range(parallel - 1):
            way.append(way[-1] - lr * predict(way[-1]))
        true = [gradient(z) for z in way]
        x = way[-1] - lr * true[-1]
        xs, gs = (xs + way)[-kept:], (gs + true)[-kept:]
    return x


def test_paper_mode_is_the_published_algorithm() -> None:
    curvature = np.linspace(0.5, 2.0, 7)
    x0 = np.linspace(-1, 1, 7)
    expected = published(x0, lambda z: curvature * z + 0.3 * np.sin(z), 0.1, 9, 3, 8)
    x = nn.Parameter(torch.from_numpy(x0.copy()))
    opt = OptEx(torch.optim.SGD([x], lr=0.1), parallel=3, history=8, mode="paper")
    scale = torch.from_numpy(curvature)
    for _ in range(9):
        opt.step(lambda i: 0.5 * (scale * x**2).sum() - 0.3 * torch.cos(x).sum())
    assert np.allclose(x.detach().numpy(), expected, atol=1e-9)
