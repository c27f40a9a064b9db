"""Rounds that led astray are taken back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.optim.problems import OPTIMIZERS, Task, flat, network
from wavetrain.errors import CheckpointError, DivergedError
from wavetrain.optim import OptEx
from wavetrain.optim.before import MOST_TRIES

PARALLEL = 3


def after(rounds: int, name: str = "adam", parallel: int = PARALLEL) -> tuple[OptEx, Task]:
    model = network()
    opt, task = OptEx(OPTIMIZERS[name](list(model.parameters())), parallel=parallel), Task(model)
    for r in range(rounds):
        opt.step(lambda i, r=r: task.loss(parallel * r + i))
    return opt, task


def steps_of(opt: OptEx) -> int:
    return int(next(iter(opt.base.state.values()))["step"])


def test_a_rise_above_the_start_undoes_the_last_round() -> None:
    opt, task = after(5)
    made = steps_of(opt) - opt.stats.last.num_accepted
    points = opt.stats.last.num_points
    opt.step(lambda i: task.loss(i) + 1000)
    assert opt.stats.last.took_back
    assert opt.stats.last.num_accepted == 1
    assert steps_of(opt) == made + 1, "the last round's steps are gone, one was made instead"
    opt.step(task.loss)
    assert not opt.stats.last.took_back
    assert opt.stats.last.num_points < points, "and gradients are asked for at fewer points"


def test_rates_that_a_scheduler_has_set_stay() -> None:
    opt, task = after(5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    expected = opt.param_groups[0]["lr"]
    for r in range(3):
        opt.step(lambda i, r=r: task.loss(i) + (1000 if r == 2 else 0))
        scheduler.step()
        expected *= 0.5
    assert opt.stats.last.took_back
    assert opt.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(("name", "tries"), [("sgd", MOST_TRIES), ("momentum", MOST_TRIES), ("adam", 1)])
def test_what_does_not_help_is_not_tried_for_ever(name: str, tries: int) -> None:
    """With a smaller gradient Adam makes the same step again: one instead of several is all that can be tried."""
    opt, task = after(5, name)
    for _ in range(tries + 2):
        opt.step(lambda i: task.loss(i) + 1000)
    assert [one.took_back for one in opt.stats][5:] == [True] * tries + [False] * 2


def test_a_round_of_one_step_of_adam_is_not_taken_back() -> None:
    opt, task = after(1)
    assert opt.stats.last.num_accepted == 1
    opt.step(lambda i: task.loss(i) + 1000)
    assert not opt.stats.last.took_back


def test_noise_alone_takes_nothing_back() -> None:
    x, make = nn.Parameter(torch.zeros(10)), torch.Generator().manual_seed(0)
    opt = OptEx(torch.optim.SGD([x], lr=0.01), parallel=4)
    for _ in range(60):
        shift = torch.randn(4, generator=make)  # of the loss: it is at its least all the time
        opt.step(lambda i, shift=shift: x.square().sum() + shift[i])
    assert not any(one.took_back for one in opt.stats)


def test_after_a_round_that_was_taken_back_steps_grow_little_by_little() -> None:
    rate = 0.01
    model = network()
    opt, task = OptEx(torch.optim.SGD(model.parameters(), lr=rate), parallel=PARALLEL), Task(model)
    opt.step(task.loss)
    opt.step(lambda i: task.loss(i) + 1000)
    assert opt.stats.last.took_back
    most = opt.stats[0].gradient_norm

    def steep(i: int) -> Tensor:
        loss = task.loss(i)
        return 100 * (loss - loss.detach())

    gone = []
    for _ in range(2):
        begin = flat(model).clone()
        opt.step(steep)
        assert opt.stats.last.num_accepted == 1
        gone.append(float((flat(model) - begin).norm()) / rate)
    assert gone[0] < most
    assert gone[1] / gone[0] == pytest.approx(1.25, rel=0.01)


def test_a_bad_beginning_is_not_held_against_the_rest() -> None:
    """After rounds of one point, some of which were taken back, gradients are asked for at several again."""
    x = nn.Parameter(torch.full((30,), 2.0))
    opt = OptEx(torch.optim.SGD([x], lr=0.4), parallel=4)
    scale = torch.linspace(0.01, 1.0, 30)
    for r in range(60):
        steep = 8.0 if 3 <= r < 15 else 1.0
        opt.step(lambda i, steep=steep: (steep * scale * x.square()).sum())
    assert any(one.took_back for one in opt.stats)
    assert min(one.num_points for one in opt.stats) == 1
    assert opt.stats.last.num_points == 4


def test_what_was_loaded_between_rounds_is_not_taken_back() -> None:
    opt, task = after(5, "sgd")
    with torch.no_grad():
        for p in task.model.parameters():
            p.add_(3.0)  # far above where all began
    moved = flat(task.model)
    opt.step(task.loss)
    assert not opt.stats.last.took_back
    assert float((flat(task.model) - moved).norm()) < 0.5 * float(moved.norm())


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_round_that_ended_where_the_loss_is_no_number_is_taken_back(name: str) -> None:
    """The loss is none beyond 0, and rounds go further than single steps."""
    x = nn.Parameter(torch.full((20,), 0.4))
    opt = OptEx(OPTIMIZERS[name]([x]), parallel=4)
    slope = torch.logspace(-0.5, 0.5, 20)
    for _ in range(60):
        opt.step(lambda i: (slope * x - x.log()).sum())
    assert torch.isfinite(x).all()
    start = float((slope * 0.4 - math.log(0.4)).sum())
    assert float((slope * x - x.log()).sum().detach()) < start


def test_momentum_is_braked_as_well() -> None:
    """At a high rate, what is carried on would lead astray again and again."""
    lost = 0
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        x, make = torch.randn(512, 6), torch.Generator().manual_seed(seed)
        y = torch.sin(x.sum(-1, keepdim=True))
        opt = OptEx(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), parallel=4)
        for _ in range(80):
            rows = torch.randint(512, (4, 32), generator=make)
            opt.step(lambda i, rows=rows, x=x, y=y, model=model: nn.functional.mse_loss(model(x[rows[i]]), y[rows[i]]))
        lost += not float(nn.functional.mse_loss(model(x), y).detach()) < 0.3
    assert lost == 0


@pytest.mark.parametrize("parallel", [2, 4])
def test_a_lucky_first_round_is_not_held_against_the_others(parallel: int) -> None:
    """Minibatches of 16: the loss of a round says little, and the first is not more than others."""
    back = []
    for seed in range(4):
        torch.manual_seed(seed)
        make = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = OptEx(torch.optim.SGD(model.parameters(), lr=0.1), parallel=parallel)
        for _ in range(150):
            x = torch.randn(parallel, 16, 6, generator=make)
            y = torch.sin(x.sum(-1, keepdim=True))
            opt.step(lambda i, x=x, y=y, model=model: nn.functional.mse_loss(model(x[i]), y[i]))
        back.append(sum(one.took_back for one in opt.stats))
    assert max(back) <= 8


def test_rounds_that_are_taken_back_over_and_over_are_warned_of() -> None:
    x = nn.Parameter(torch.ones(4))
    opt = OptEx(torch.optim.SGD([x], lr=1e-4), parallel=2)

    def run() -> None:
        for r in range(40):
            opt.step(lambda i, r=r: 2.0**r * 1e-3 * (x.square().sum() + 1))

    with pytest.warns(UserWarning, match=r"took back 10 of the last .* rounds.*moving_losses=True"):
        run()


def test_a_gradient_of_nothing_is_no_limit() -> None:
    """The loss is 0 at first, and decay leads to where it is not."""
    x = nn.Parameter(torch.full((8,), 1.2))
    opt = OptEx(torch.optim.SGD([x], lr=0.1, weight_decay=0.3), parallel=4)
    for _ in range(60):
        opt.step(lambda i: (1 - x).clamp_min(0).sum())
    assert float((1 - x).clamp_min(0).sum().detach()) < 0.5


def test_the_inner_optimizer_alone_is_left_alone() -> None:
    opt, task = after(5, parallel=1)
    opt.step(lambda i: task.loss(i) + 1000)
    assert not opt.stats.last.took_back


@pytest.mark.parametrize("name", ["adam", "momentum", "adafactor", "sgd"])
def test_a_resumed_run_takes_back_as_well_to_the_bit(name: str) -> None:
    opt, task = after(5, name)
    other, again = after(0, name)
    again.model.load_state_dict(task.model.state_dict())
    other.load_state_dict(opt.state_dict())
    for one, todo in ((opt, task), (other, again)):
        one.step(lambda i, todo=todo: todo.loss(i) + 1000)
        assert one.stats.last.took_back
        for r in range(3):
            one.step(lambda i, r=r, todo=todo: todo.loss(10 * r + i))
    assert torch.equal(flat(task.model), flat(again.model))


def test_a_state_that_lacks_where_the_last_round_began_is_refused() -> None:
    opt, _ = after(3)
    state = opt.state_dict()
    other, _ = after(0)
    del state["optex"]["before"]["start"]
    with pytest.raises(CheckpointError, match=r"lacks before\.start"):
        other.load_state_dict(state)
    del state["optex"]["before"]
    with pytest.raises(CheckpointError, match="lacks before"):
        other.load_state_dict(state)
    assert not other.base.state, "nothing has changed"


def test_a_rate_that_is_too_high_does_not_explode() -> None:
    """Steps of 0.5 across a valley of curvature 12 x² + 1 lead out of it from about x = 0.5 on."""

    def end(parallel: int) -> float:
        x = nn.Parameter(torch.linspace(-1.2, 1.2, 40))
        opt = OptEx(torch.optim.SGD([x], lr=0.5), parallel=parallel)

        def loss() -> Tensor:
            return (x**4 + 0.5 * x**2).sum()

        for _ in range(30):
            try:
                opt.step(loss)
            except DivergedError:
                return math.inf
            if not bool(torch.isfinite(x).all()):
                return math.inf
        return float(loss().detach())

    x = torch.linspace(-1.2, 1.2, 40)
    assert not end(1) < 1e6, "the inner optimizer alone does"
    assert end(4) < float((x**4 + 0.5 * x**2).sum())
