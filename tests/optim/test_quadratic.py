"""The quadratic model of the loss: what it knows of curvature, and what OptEx makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from wavetrain.optim import OptEx, quadratic
from wavetrain.optim import history as histories
from wavetrain.optim.estimators import Judge
from wavetrain.optim.history import History
from wavetrain.optim.pace import Pace
from wavetrain.optim.quadratic import Quadratic

DIMS = 30


def valley(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """A curvature (d, d) of some rank, and a slope (d,)."""
    make = torch.Generator().manual_seed(seed)
    across = torch.randn(DIMS, rank, generator=make, dtype=torch.float64)
    return across @ across.T, torch.randn(DIMS, generator=make, dtype=torch.float64)


def walked(count: int, curvature: Tensor, slope: Tensor, seed: int, **options: Any) -> History:
    """Points at random, and the gradients of a quadratic function there."""
    history = History(count, DIMS, torch.device("cpu"), torch.float64, **options)
    make = torch.Generator().manual_seed(1000 + seed)
    for _ in range(count):
        (row,) = history.take_rows(1)
        point = torch.randn(DIMS, generator=make, dtype=torch.float64)
        history.put(row, point)
        history.gradients[row] = curvature @ point + slope
        history.close([row])
    return history


def model_of(history: History, num_newest: int) -> Quadratic:
    rows = history.newest
    return Quadratic(rows, history.crossed(rows, rows[-1]), history.products[np.ix_(rows, rows)], num_newest)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(6, 12), st.integers(1, 3), st.integers(0, 100))
def test_it_is_exact_where_few_directions_bend(rank: int, count: int, newest: int, seed: int) -> None:
    curvature, slope = valley(rank, seed)
    history = walked(count, curvature, slope, seed)
    model = model_of(history, newest)
    point = torch.linspace(-1, 1, DIMS, dtype=torch.float64)
    w = model.weights(history.along(model.rows, point, model.origin), 0.0)
    assert w.sum() == pytest.approx(1.0)
    predicted = torch.from_numpy(w) @ history.gradients[model.rows]
    assert torch.allclose(predicted, curvature @ point + slope, rtol=1e-3, atol=1e-3 * float(curvature.norm()))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(6, 12), st.integers(0, 100), st.sampled_from([0.0, 0.05]))
def test_it_settles_where_no_way_between_known_points_leads_down(rank: int, count: int, seed: int, ridge: float) -> None:
    curvature, slope = valley(rank, seed)
    slope = curvature @ slope  # else the loss has no least value
    history = walked(count, curvature, slope, seed)
    model, points = model_of(history, 2), history.points
    at = torch.linspace(-1, 1, DIMS, dtype=torch.float64)
    weights = model.weights(history.along(model.rows, at, model.origin), 0.0)
    squares = history.between(model.rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quadratic, "SETTLING", ridge)
        ways = model.settle(weights, squares, np.inf, count).weights
    assert ways.sum() == pytest.approx(0.0, abs=1e-8 * float(np.abs(ways).sum()))
    end = at + history.way(ways, model.rows, torch.empty_like(at))
    between = points - points.mean(dim=0)
    before, after = (between @ (curvature @ one + slope) for one in (at, end))
    assert float(after.norm()) < (0.5 if ridge else 1e-3) * float(before.norm())
    short = at + history.way(model.settle(weights, squares, 0.01, count).weights, model.rows, torch.empty_like(at))
    assert float((short - at).norm()) <= 0.01 * 1.001
    fewer = model.settle(weights, squares, np.inf, 3).weights
    assert not fewer[:-3].any()
    assert fewer.sum() == pytest.approx(0.0, abs=1e-8 * float(np.abs(fewer).sum()))


@pytest.mark.parametrize("whole", [None, 5])
def test_a_move_leaves_what_never_changed_as_it_is(monkeypatch: pytest.MonkeyPatch, whole: int | None) -> None:
    monkeypatch.setattr(histories, "_ALL_IN_CACHE", 7)
    sampled = None if whole is None else torch.arange(0, DIMS, 4)
    history = History(5, DIMS, torch.device("cpu"), torch.float32, sampled, num_whole=whole)
    make = torch.Generator().manual_seed(0)
    points = torch.randn(5, DIMS, generator=make)
    points[:, ::3] = points[0, ::3]
    for point in points:
        (row,) = history.take_rows(1)
        history.put(row, point)
        history.close([row])
    at, weights = torch.randn(DIMS, generator=make), np.array([0.3, -0.1, 0.7, -0.4, -0.5])
    end = at + history.way(weights, history.rows, torch.empty_like(at))
    assert torch.equal(end[::3], at[::3])
    assert torch.allclose(end, at + torch.from_numpy(weights).float() @ points, atol=1e-5)


def test_a_flat_loss_has_the_mean_of_the_newest_round() -> None:
    history = walked(6, torch.zeros(DIMS, DIMS, dtype=torch.float64), torch.ones(DIMS, dtype=torch.float64), 0)
    model = model_of(history, 2)
    found = model.weights(np.zeros(6), 0.02)
    assert found.tolist() == pytest.approx([0, 0, 0, 0, 0.5, 0.5], abs=1e-3)


def test_inner_products_are_the_same_in_parts_and_of_the_newest_points_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature, slope = valley(3, 0)
    whole = walked(8, curvature, slope, 0)
    sampled = torch.arange(0, DIMS, 4)
    monkeypatch.setattr(histories, "_IN_CACHE", 7)
    parts = walked(8, curvature, slope, 0, sampled=sampled, num_whole=5)
    assert parts.newest == whole.rows[-5:]
    assert all(torch.equal(parts.point(row), whole.point(row)) for row in parts.newest)
    wanted = whole.gradients[whole.rows[-5:]] @ (whole.points[whole.rows[-5:]] - whole.points[whole.rows[-1]]).T
    assert np.allclose(parts.crossed(parts.newest, parts.newest[-1]), wanted.numpy())
    again = History(8, DIMS, torch.device("cpu"), torch.float64, sampled, num_whole=5)
    again.load_state_dict(parts.state_dict())
    assert np.array_equal(again.crossed(again.newest, again.newest[-1]), parts.crossed(parts.newest, parts.newest[-1]))


@pytest.mark.parametrize("what", ["nothing", "writes", "hidden writes", "an interrupt", "large parameters"])
def test_where_a_round_ended_is_known_unless_something_came_between(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    curvature, slope = valley(4, 0)
    x = nn.Parameter(torch.full((DIMS,), 1e11 if what == "large parameters" else 0.0, dtype=torch.float64))
    middle = x.detach().clone()
    opt = OptEx(torch.optim.Adam([x], lr=0.05), parallel=3, history=12)

    def go() -> None:
        opt.step(lambda i: 0.5 * (x - middle) @ curvature @ (x - middle) + slope @ (x - middle))

    for _ in range(6):
        go()
    if what == "writes":
        with torch.no_grad():
            x.add_(0.5)
    elif what == "hidden writes":
        x.data.add_(0.5)
    elif what == "an interrupt":
        with monkeypatch.context() as patch:
            patch.setattr(Pace, "hear", interrupted)
            with pytest.raises(KeyboardInterrupt):
                go()
    history, start = opt._history, x.detach().clone()
    asked: list[Tensor] = []
    plain = History._along

    def noted(self: History, rows: list[int], point: Tensor, origin: int) -> Any:
        asked.append(point)
        return plain(self, rows, point, origin)

    monkeypatch.setattr(History, "_along", noted)
    go()
    assert any(torch.equal(point, start) for point in asked) == (what != "nothing")
    rows = history.newest
    points, gradients = history.points[rows], history.gradients[rows]
    assert any(torch.equal(point, start) for point in points)
    measured = gradients @ (points - points[-1]).T
    assert np.allclose(history.crossed(rows, rows[-1]), measured.numpy(), rtol=1e-9, atol=1e-9)


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_judge_believes_the_model_across_a_valley() -> None:
    """Steep in one direction, along which points go back and forth: distance cannot tell it from the others."""
    curvature = torch.zeros(DIMS, DIMS, dtype=torch.float64)
    curvature[0, 0] = 50.0
    judge, history = Judge("matern52"), History(20, DIMS, torch.device("cpu"), torch.float64)
    make, number = torch.Generator().manual_seed(0), 0
    for _ in range(6):
        before, new = judge.models(history, 3, bends=True), []
        for _ in range(3):
            (row,) = history.take_rows(1)
            point = 0.05 * number * torch.ones(DIMS, dtype=torch.float64)
            point[0] = 0.1 * float(torch.randn((), generator=make))
            history.put(row, point)
            history.gradients[row] = curvature @ point + 1.0
            history.close([row])
            new.append(row)
            number += 1
        judge.hear(before, new)
    assert judge.bends
    assert judge.best(bends=True) == "quadratic"
    assert judge.best(bends=False) != "quadratic"


def rounds_to(share: float, opt: Any, go: Any, loss: Any) -> int:
    start = float(loss().detach())
    for number in range(1, 200):
        go(opt)
        if float(loss().detach()) <= share * start:
            return number
    return 200


@pytest.mark.parametrize("kind", ["Adam", "momentum", "SGD"])
def test_it_takes_a_long_valley_in_fewer_rounds_than_a_large_batch(kind: str) -> None:
    """Steep across, long along it; four gradients a round."""
    scale = torch.logspace(0, 2.5, 40)
    turn = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0))).Q

    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        x = nn.Parameter(turn @ torch.ones(40))
        momentum = 0.9 if kind == "momentum" else 0.0
        return x, torch.optim.Adam([x], lr=0.02) if kind == "Adam" else torch.optim.SGD([x], lr=1e-3, momentum=momentum)

    def value(x: Tensor) -> Tensor:
        found: Tensor = 0.5 * (scale * (turn.T @ x).square()).sum()
        return found

    x, base = make()

    def plain(_: Any) -> None:
        base.zero_grad()
        torch.autograd.backward(value(x))
        base.step()

    alone = rounds_to(0.01, base, plain, lambda: value(x))
    y, inner = make()
    opt = OptEx(inner, parallel=4)
    ours = rounds_to(0.01, opt, lambda opt: opt.step(lambda i: value(y)), lambda: value(y))
    assert ours <= 0.5 * alone
    assert any(one.estimator == "quadratic" for one in opt.stats)


def test_without_momentum_a_model_that_says_nothing_is_not_asked() -> None:
    torch.manual_seed(0)
    x = nn.Parameter(torch.zeros(50))
    opt = OptEx(torch.optim.SGD([x], lr=0.1), parallel=3)
    for _ in range(40):  # nothing but noise
        opt.step(lambda i: (torch.randn(50) * x).sum())
    assert sum(one.estimator == "quadratic" for one in opt.stats) <= 4


def test_a_rate_of_nothing_moves_nothing() -> None:
    """Nor does what is known of the loss: rounds go no further than a few times the way of their steps."""
    x = nn.Parameter(torch.ones(40))
    scale = torch.logspace(0, 2, 40)
    opt = OptEx(torch.optim.SGD([x], lr=0.015), parallel=4)
    for r in range(8):
        before = x.detach().clone()
        if r == 6:
            opt.param_groups[0]["lr"] = 0.0
        opt.step(lambda i: 0.5 * (scale * x.square()).sum())
        assert torch.equal(x.detach(), before) == (r >= 6)


@pytest.mark.parametrize("kind", ["Adam", "momentum"])
def test_what_is_made_large_is_made_so_as_fast_as_its_opposite_is_made_small(kind: str) -> None:
    def run(sign: float) -> list[float]:
        x = nn.Parameter(torch.linspace(-1, 1, 20))
        slopes = torch.logspace(0, 1.5, 20)
        kwargs: dict[str, Any] = {"lr": 0.02, "maximize": sign < 0}
        base = torch.optim.Adam([x], **kwargs) if kind == "Adam" else torch.optim.SGD([x], momentum=0.9, **kwargs)
        opt = OptEx(base, parallel=4)
        return [sign * opt.step(lambda i: sign * (slopes * x.square()).sum()) for _ in range(20)]

    assert run(-1.0) == pytest.approx(run(1.0), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("lr", [0.1, 0.3])
@pytest.mark.parametrize("batch", [16, 512])
def test_momentum_at_a_high_rate_does_not_lose_the_run(lr: float, batch: int) -> None:
    """At 0.3 plain steps still learn: several at once must not do worse than stand still."""
    torch.manual_seed(0)
    make = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x, truth = torch.randn(2048, 8, generator=make), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    y = truth(x).detach() + 0.1 * torch.randn(2048, 4, generator=make)
    opt = OptEx(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), parallel=8)
    start = float(nn.functional.mse_loss(model(x), y).detach())
    for _ in range(60):
        rows = torch.randint(len(x), (8, batch), generator=make)
        opt.step(lambda i, rows=rows: nn.functional.mse_loss(model(x[rows[i]]), y[rows[i]]))
    assert float(nn.functional.mse_loss(model(x), y).detach()) < start


def test_an_estimator_is_named_that_was_there() -> None:
    x = nn.Parameter(torch.ones(10))
    opt = OptEx(torch.optim.Adam([x], lr=0.1), parallel=2)
    for _ in range(6):
        opt.step(lambda i: x.square().sum())
    assert [one.estimator for one in opt.stats][:2] == ["zero", "mean"]
