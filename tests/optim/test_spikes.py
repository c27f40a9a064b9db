"""A gradient far larger than usual does not go into what the inner optimizer remembers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.optim.problems import OPTIMIZERS, Task, flat, network
from wavetrain.optim import OptEx

PARALLEL = 2
SPIKE = 1000.0


def trained(name: str, *, spiked: bool, rounds: int = 40, parallel: int = PARALLEL) -> tuple[float, OptEx]:
    """The loss after some rounds, of which the tenth has a minibatch whose gradient is a thousand times too large."""
    model = network()
    opt, task = OptEx(OPTIMIZERS[name](list(model.parameters())), parallel=parallel), Task(model, size=64)
    direction = torch.randn(flat(model).shape, generator=torch.Generator().manual_seed(1))

    def loss(round_: int, i: int) -> Tensor:
        found = task.loss(parallel * round_ + i)
        if spiked and round_ == 10:
            along = torch.cat([p.reshape(-1) for p in model.parameters()]) @ direction
            found = found + SPIKE * (along - along.detach())  # the loss itself is as it was
        return found

    for r in range(rounds):
        opt.step(lambda i, r=r: loss(r, i))
    with torch.no_grad():
        return sum(float(task.loss(10_000 + i)) for i in range(8)) / 8, opt


@pytest.mark.parametrize("name", ["adam", "adamw fused", "amsgrad", "nadam"])
def test_adam_goes_on_after_a_spike(name: str) -> None:
    calm, _ = trained(name, spiked=False)
    spiked, opt = trained(name, spiked=True)
    start, _ = trained(name, spiked=False, rounds=10)
    assert calm < 0.8 * start, "there was something left to learn"
    assert spiked < calm + 0.3 * (start - calm)
    remembered = max(float(state["exp_avg_sq"].max()) for state in opt.base.state.values())
    assert remembered < SPIKE**2 * 1e-6


def test_one_minibatch_a_round_is_the_inner_optimizer_and_nothing_else() -> None:
    _, opt = trained("adam", spiked=True, parallel=1, rounds=11)
    assert max(float(state["exp_avg_sq"].max()) for state in opt.base.state.values()) > 1.0


def test_gradients_of_nothing_are_no_measure() -> None:
    """Where the first rounds have none, the first that has one makes a step."""
    x = nn.Parameter(torch.zeros(3))
    opt = OptEx(torch.optim.Adam([x], lr=0.1), parallel=2)
    for r in range(12):
        opt.step(lambda i, r=r: (x.sum() - 1).square() if r >= 6 else 0.0 * x.sum())
    assert float(x.detach().sum()) == pytest.approx(1.0, abs=0.5)


def test_the_measure_is_kept_in_checkpoints() -> None:
    _, opt = trained("adam", spiked=False, rounds=12)
    assert len(opt.state_dict()["optex"]["pace"]["norms"]) == 12


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_rare_large_gradients_count_in_full(name: str) -> None:
    """Of 3 % of cases, most of what there is to learn comes: they are no spikes, however much larger than usual."""
    make = torch.Generator().manual_seed(0)
    x = nn.Parameter(torch.zeros(5))
    base = torch.optim.Adam([x], lr=0.01) if name == "adam" else torch.optim.RMSprop([x], lr=0.01)
    opt, late = OptEx(base, parallel=2), []
    for r in range(600):
        y = 30.0 * (torch.rand(2, 5, generator=make) < 0.03) + 0.1 * torch.randn(2, 5, generator=make)
        opt.step(lambda i, y=y: 0.5 * (x - y[i]).square().sum())
        if r >= 300:
            late.append(float(x.detach().mean()))
    assert sum(late) / len(late) == pytest.approx(0.9, abs=0.35)
