"""What the steps of a round are made with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.optim.problems import Task, network
from wavetrain.optim import OptEx


def test_no_replayed_gradient_is_larger_than_the_one_at_the_start() -> None:
    torch.manual_seed(0)
    slopes, x = 10 * torch.logspace(0, -3, 400), nn.Parameter(torch.randn(400))
    base, seen = torch.optim.Adam([x], lr=0.2), list[float]()

    def look(*_: object) -> None:
        assert x.grad is not None
        seen.append(float(x.grad.norm()))

    base.register_step_pre_hook(look)
    opt = OptEx(base, parallel=4)
    compared = 0
    for _ in range(30):
        seen.clear()
        opt.step(lambda i: 0.5 * (slopes * x.square()).sum())
        last = opt.stats.last
        if last.num_points == 4 and len(seen) == 3 + last.num_accepted:  # three were proposed, the others replayed
            compared += 1
            assert max(seen[3:]) <= 1.0001 * max(seen[3], last.gradient_norm), "as it was estimated, or evaluated"
    assert compared > 10


@pytest.mark.parametrize("moving", [False, True])
def test_losses_that_cannot_be_compared_are_not(moving: bool) -> None:
    task = Task(network())
    opt = OptEx(torch.optim.Adam(task.model.parameters(), lr=0.01), parallel=4, moving_losses=moving)
    for r in range(24):
        opt.step(lambda i, r=r: task.loss(4 * r + i) + 100 * (r // 8))  # as if what is learnt from changed
    assert any(one.took_back for one in opt.stats) is not moving
    assert (min(one.num_points for one in opt.stats) == 1) is not moving


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("share", [0.0, 0.02])
def test_one_minibatch_without_a_gradient_costs_no_round(which: int, share: float) -> None:
    torch.manual_seed(0)
    x, wanted = nn.Parameter(torch.zeros(100)), torch.randn(100)
    opt = OptEx(torch.optim.SGD([x], lr=0.02), parallel=4)
    for _ in range(30):
        opt.step(lambda i: (x - wanted).square().sum() * (share if i == which else 1.0))
    assert float((x.detach() - wanted).square().sum()) < 0.01 * float(wanted.square().sum())


def test_gradients_whose_squares_are_no_numbers_are_clipped() -> None:
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(50))
    opt = OptEx(torch.optim.SGD([x], lr=0.1), parallel=4, clip_norm=1.0)
    for _ in range(6):
        before = x.detach().clone()
        opt.step(lambda i: 1e20 * x.square().sum())
        assert float((x.detach() - before).norm()) <= 0.1 * 8 * 1.001, "at most eight steps, each of norm 1"


@pytest.mark.parametrize("estimator", ["mean", "average", "last"])
@pytest.mark.parametrize("by_data", [False, True])
def test_a_hook_that_writes_to_gradients_is_heard_at_every_step(
    estimator: str, by_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wavetrain.optim.estimators.Judge.best", lambda *_, **__: estimator)

    def after(by_hook: bool) -> Tensor:
        torch.manual_seed(0)
        x = nn.Parameter(torch.randn(50))
        base = torch.optim.SGD([x], lr=0.01)

        def double(*_: object) -> None:
            assert x.grad is not None
            (x.grad.data if by_data else x.grad).mul_(2.0)

        if by_hook:
            base.register_step_pre_hook(double)
        else:
            base.param_groups[0]["lr"] *= 2
        opt = OptEx(base, parallel=3)
        for _ in range(8):
            opt.step(lambda i: x.square().sum())
        return x.detach()

    assert torch.allclose(after(True), after(False), rtol=1e-4, atol=1e-6)
