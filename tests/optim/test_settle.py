"""What moves at the end of a round beside the inner optimizer's steps, and what must not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.optim import OptEx

DIMS = 20


def bowl() -> tuple[Tensor, Tensor]:
    """A curvature (d, d) with flat directions, and a slope (d,)."""
    make = torch.Generator().manual_seed(0)
    across = torch.randn(DIMS, DIMS, generator=make)
    return across @ across.T / DIMS, torch.randn(DIMS, generator=make)


KINDS: dict[str, Any] = {
    "SGD": lambda groups, **how: torch.optim.SGD(groups, **{"lr": 0.1, **how}),
    "momentum": lambda groups, **how: torch.optim.SGD(groups, **{"lr": 0.05, "momentum": 0.9, **how}),
    "Adam": lambda groups, **how: torch.optim.Adam(groups, **{"lr": 0.05, **how}),
    "Adagrad": lambda groups, **how: torch.optim.Adagrad(groups, **{"lr": 0.3, **how}),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("parallel", [2, 4])
def test_weights_that_decay_end_where_plain_steps_end(kind: str, parallel: int) -> None:
    curvature, slope = bowl()
    x = nn.Parameter(torch.zeros(DIMS))
    opt = OptEx(KINDS[kind]([x], weight_decay=0.1), parallel=parallel)
    for _ in range(150):
        opt.step(lambda i: 0.5 * x @ curvature @ x - slope @ x)
    wanted = torch.linalg.solve(curvature + 0.1 * torch.eye(DIMS), slope)
    assert float((x.detach() - wanted).norm()) < 0.2 * float(wanted.norm())


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("how", ["rate", "gradient"])
def test_what_stands_still_is_not_moved(kind: str, how: str) -> None:
    curvature, slope = bowl()
    x, y = nn.Parameter(torch.zeros(DIMS // 2)), nn.Parameter(torch.zeros(DIMS // 2))
    base = KINDS[kind]([{"params": [x]}, {"params": [y]}])
    opt = OptEx(base, parallel=4)

    def loss(i: int, *, both: bool = True) -> Tensor:
        whole = torch.cat([x, y if both else y.detach()])
        found: Tensor = 0.5 * whole @ curvature @ whole - slope @ whole
        return found

    for _ in range(6):
        opt.step(loss)
    before = y.detach().clone()
    if how == "rate":
        base.param_groups[1]["lr"] = 0.0
    for _ in range(5):
        opt.step(lambda i: loss(i, both=how == "rate"))
    assert torch.equal(y.detach(), before)


def left(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *, settle: bool, noise: float = 0.0, seed: int = 0
) -> float:
    """Of the loss, in a valley that is turned so that no coordinate is a way along it, after 15 rounds."""
    scale, draw = torch.logspace(-2, 0, DIMS), torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(DIMS, DIMS, generator=draw)).Q
    x = nn.Parameter(turn @ torch.ones(DIMS))

    def loss() -> Tensor:
        found: Tensor = 0.5 * (scale * (turn.T @ x).square()).sum()
        return found

    opt = OptEx(make([x]), parallel=4, settle=settle)
    for _ in range(15):
        push = noise * torch.randn(4, DIMS, generator=draw)
        opt.step(lambda i, push=push: loss() + push[i] @ x)
    return float(loss().detach())


STEEP: dict[str, Any] = {
    "as steep across as the rate bears": lambda x: torch.optim.SGD(x, lr=1.5),
    "decay that is part of the gradient": lambda x: torch.optim.SGD(x, lr=1.5, weight_decay=1e-5),
    "decay beside it": lambda x: torch.optim.AdamW(x, lr=0.3),
}


@pytest.mark.parametrize("how", list(STEEP))
def test_it_gets_along_a_valley_in_fewer_rounds(how: str) -> None:
    with_it, without = (sum(left(STEEP[how], settle=settle, seed=s) for s in range(4)) for settle in (True, False))
    assert with_it < 0.7 * without


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_where_gradients_are_noise_it_does_little_harm(noise: float) -> None:
    make = STEEP["as steep across as the rate bears"]
    with_it, without = (sum(left(make, settle=settle, noise=noise, seed=s) for s in range(8)) for settle in (True, False))
    assert with_it < 1.3 * without


@pytest.mark.parametrize("what", ["settle", "moving_losses", "shard_history"])
def test_a_word_is_no_answer(what: str) -> None:
    wrong: dict[str, Any] = {what: "no"}
    with pytest.raises(InputError, match=f"{what} is 'no'"):
        OptEx(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), parallel=2, **wrong)


def test_an_optimizer_without_a_rate() -> None:
    class Halves(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": None})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(0.1 * p.grad)

    x = nn.Parameter(torch.ones(5))
    opt = OptEx(Halves([x]), parallel=3)
    for _ in range(8):
        opt.step(lambda i: x.square().sum())
    assert float(x.detach().norm()) < 0.1


@pytest.mark.parametrize("settle", [True, False])
def test_it_can_be_left_out(settle: bool) -> None:
    """Hooks that keep parameters within limits see steps only."""
    curvature, slope = bowl()
    x = nn.Parameter(torch.zeros(DIMS))
    base = torch.optim.SGD([x], lr=0.1)

    def clamp(*_: Any) -> None:
        x.data.clamp_(-0.1, 0.1)

    base.register_step_post_hook(clamp)
    opt = OptEx(base, parallel=4, settle=settle)
    for _ in range(10):
        opt.step(lambda i: 0.5 * x @ curvature @ x - slope @ x)
    assert (float(x.detach().abs().max()) <= 0.1 * (1 + 1e-6)) is not settle


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_two_players_are_not_taken_back(kind: str) -> None:
    """One goes down and the other up: losses say nothing of progress."""
    x, y = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = OptEx(KINDS[kind]([{"params": [x]}, {"params": [y], "maximize": True}]), parallel=4)
    for _ in range(40):
        opt.step(lambda i: (x**2 - y**2 + 0.5 * x * y).sum())
    assert not any(one.took_back for one in opt.stats)
    assert max(abs(float(x.detach())), abs(float(y.detach()))) < 0.1


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("scale", [1e20, 1e-20])
def test_numbers_that_are_large_or_small_warn_of_nothing(kind: str, scale: float) -> None:
    x = nn.Parameter(torch.ones(30))
    opt = OptEx(KINDS[kind]([x], lr=0.05 if kind == "Adam" else 0.05 / scale), parallel=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            opt.step(lambda i: scale * x.square().sum())
    assert torch.isfinite(x).all()
