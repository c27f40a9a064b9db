"""OptEx as its users see it: a torch optimizer, whichever one it wraps."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import wavetrain as wt
from tests.optim.problems import OPTIMIZERS, Task, flat, network
from wavetrain.errors import CheckpointError, DivergedError, InputError, UnknownNameError
from wavetrain.optim import OptEx


def trained(rounds: int, make: Callable[[Any], Optimizer], *, parallel: int = 3, **options: Any) -> tuple[nn.Sequential, OptEx]:
    model = network()
    task, opt = Task(model), OptEx(make(list(model.parameters())), parallel=parallel, **options)
    for r in range(rounds):
        opt.step(lambda i, r=r: task.loss(parallel * r + i))
    return model, opt


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_one_minibatch_a_round_it_is_the_inner_optimizer(name: str) -> None:
    model = network()
    task, base = Task(model), OPTIMIZERS[name](list(model.parameters()))
    for r in range(6):
        model.zero_grad()
        torch.autograd.backward(task.loss(r))
        base.step()
    other, _ = trained(6, OPTIMIZERS[name], parallel=1)
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["auto", "paper"])
def test_a_round_takes_losses_down_with_any_optimizer(name: str, mode: str) -> None:
    model = network()
    task = Task(model)
    before = float(task.loss(10_000).detach())
    model, opt = trained(25, OPTIMIZERS[name], mode=mode)
    after = float(Task(model).loss(10_000).detach())
    assert after < before
    assert len(opt.stats) == 25
    assert all(1 <= one.num_accepted <= one.num_points <= 3 and len(one.losses) == 3 for one in opt.stats)
    assert all(p.grad is None for group in opt.param_groups for p in group["params"])


def test_without_noise_a_round_is_worth_n_true_steps() -> None:
    def run(parallel: int, *, true: bool) -> float:
        x = nn.Parameter(torch.linspace(-2, 3, 200))
        base = torch.optim.Adam([x], lr=0.02)
        scale = torch.linspace(0.5, 3, 200)
        if true:
            for _ in range(12 * parallel):
                base.zero_grad()
                torch.autograd.backward((scale * x**2).mean())
                base.step()
        else:
            opt = OptEx(base, parallel=parallel)
            for _ in range(12 + 1):  # nothing is known in the first round: it takes one step
                opt.step(lambda i: (scale * x**2).mean())
            assert all(parallel <= one.num_accepted <= 2 * parallel for one in list(opt.stats)[1:])
            assert max(one.num_accepted for one in opt.stats) > parallel, "past the last point, where predictions are good"
            assert opt.stats.last.cosines[0] > 0.99
        return float((scale * x**2).mean())

    assert run(5, true=False) <= run(5, true=True)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 5, 10), (20.0, 1, 2)])
def test_the_second_round_makes_n_steps_where_there_is_no_noise(noise: float, least: int, most: int) -> None:
    torch.manual_seed(0)
    x, scale = nn.Parameter(torch.linspace(-2, 3, 200)), torch.linspace(0.5, 3, 200)
    opt = OptEx(torch.optim.Adam([x], lr=0.02), parallel=5)
    for _ in range(2):
        opt.step(lambda i: (scale * x**2).mean() + noise * (torch.randn(200) * x).mean())
    assert opt.stats[0].num_accepted == 1
    assert least <= opt.stats[1].num_accepted <= most


def test_between_evaluated_points_steps_are_true() -> None:
    """Predictions overshoot, but gradients along the way are known: the second round is five true steps, and no less."""
    x = nn.Parameter(torch.linspace(-1, 1, 100))
    opt = OptEx(torch.optim.SGD([x], lr=0.3), parallel=5)
    for _ in range(2):
        opt.step(lambda i: x.square().sum())
    assert opt.stats.last.num_accepted == 5
    assert torch.all(x.detach().abs() <= 0.4**6 * torch.linspace(-1, 1, 100).abs() + 1e-3)


def test_a_way_that_explodes_is_left() -> None:
    torch.manual_seed(0)
    x = nn.Parameter(2 * torch.rand(300) - 1)

    def rosenbrock(i: int) -> Tensor:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    start = float(rosenbrock(0).detach())
    opt = OptEx(torch.optim.SGD([x], lr=0.001), parallel=5)
    for _ in range(25):
        opt.step(rosenbrock)
    assert max(max(one.losses) for one in opt.stats) > start  # some points were far off
    assert float(rosenbrock(0).detach()) < 0.03 * start


def test_rises_that_the_next_step_takes_back_are_no_harm() -> None:
    """A valley with steep walls and a rate at which steps go from one wall to the other: what counts is the way along it."""

    def run(parallel: int | None) -> float:
        make = torch.Generator().manual_seed(0)
        slopes = torch.cat((torch.full((20,), 17.0), torch.full((200,), 0.2)))
        x = nn.Parameter(torch.ones(220))

        def loss(i: int = 0) -> Tensor:
            return 0.5 * (slopes * x.square()).sum() + 0.5 * (torch.randn(220, generator=make) * x).sum()

        base = torch.optim.SGD([x], lr=0.1)
        opt = None if parallel is None else OptEx(base, parallel=parallel)
        for _ in range(40):
            if opt is not None:
                opt.step(loss)
            else:  # a large batch
                base.zero_grad()
                for _ in range(4):
                    torch.autograd.backward(loss() / 4)
                base.step()
        return float((slopes * x.detach().square()).sum())

    assert run(4) < 0.6 * run(None)


def test_noise_turns_a_round_into_a_large_batch() -> None:
    torch.manual_seed(0)
    x = nn.Parameter(torch.zeros(50))
    opt = OptEx(torch.optim.SGD([x], lr=0.3), parallel=4)
    for _ in range(60):  # nothing but noise
        opt.step(lambda i: 0.5 * (x**2).sum() + 3 * (torch.randn(50) * x).sum())
    assert sum(one.num_points for one in list(opt.stats)[-20:]) < 3 * 20


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_stopped_and_resumed_it_is_the_same_to_the_bit(name: str, stop: int) -> None:
    whole, _ = trained(9, OPTIMIZERS[name])
    model, opt = trained(stop, OPTIMIZERS[name])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = network(5)
    again.load_state_dict(saved["model"])
    other = OptEx(OPTIMIZERS[name](list(again.parameters())), parallel=3)
    other.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    task = Task(again)
    for r in range(stop, 9):
        other.step(lambda i, r=r: task.loss(3 * r + i))
    assert torch.equal(flat(whole), flat(again))


def test_a_state_without_history_is_small_and_loads() -> None:
    _, opt = trained(3, OPTIMIZERS["adam"])
    state = opt.state_dict(history=False)
    assert "history" not in state["optex"]
    model = network()
    task, other = Task(model), OptEx(torch.optim.Adam(model.parameters(), lr=0.01), parallel=3)
    other.load_state_dict(state)
    assert math.isfinite(other.step(task.loss))
    assert other.stats.last.number == 4
    OptEx(torch.optim.Adam(network().parameters()), parallel=3).load_state_dict(
        torch.optim.Adam(network().parameters()).state_dict()
    )
    with pytest.raises(CheckpointError, match="use the same parameters, mode, parallel, history"):
        OptEx(torch.optim.Adam(network().parameters()), parallel=3, history=7).load_state_dict(opt.state_dict())


def test_schedulers_groups_and_hooks_work_as_ever() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    base = torch.optim.SGD(groups, lr=1.0)
    opt = OptEx(base, parallel=2)
    assert isinstance(opt, Optimizer)
    assert opt.param_groups is base.param_groups
    called = []
    opt.register_step_post_hook(lambda *_: called.append("after"))
    task, scheduler = Task(model), CosineAnnealingLR(opt, 10)
    rates = []
    for r in range(5):
        opt.step(lambda i, r=r: task.loss(2 * r + i))
        scheduler.step()
        rates.append([group["lr"] for group in opt.param_groups])
    assert all(a[0] > b[0] and a[1] > b[1] for a, b in pairwise(rates))
    assert rates[-1][0] == pytest.approx(10 * rates[-1][1])
    assert len(called) == 5
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.5})
    assert len(base.param_groups) == 3
    opt.step(task.loss)
    opt.zero_grad()


def test_unused_and_frozen_parameters_stay_as_they_are() -> None:
    model, unused = network(), nn.Parameter(torch.ones(4))
    opt = OptEx(torch.optim.AdamW([*model.parameters(), unused], lr=0.01, weight_decay=0.5), parallel=3)
    task = Task(model)
    for r in range(4):
        opt.step(lambda i, r=r: task.loss(3 * r + i))
    assert torch.equal(unused.detach(), torch.ones(4)), "no gradient, no decay: as torch does"
    first, *_, last = model.parameters()
    first.requires_grad_(False)
    before, moved = first.detach().clone(), last.detach().clone()
    opt.step(task.loss)
    assert torch.equal(before, first)
    assert not torch.equal(moved, last)


def test_dropout_and_running_statistics() -> None:
    def run() -> nn.Sequential:
        model = network(dropout=0.5, norm=True)
        task, opt = Task(model), OptEx(torch.optim.Adam(model.parameters(), lr=0.01), parallel=3)
        for r in range(3):
            opt.step(lambda i, r=r: task.loss(3 * r + i))
        return model

    a, b = run(), run()
    assert torch.equal(flat(a), flat(b))
    assert int(dict(a.named_buffers())["1.num_batches_tracked"]) == 9


@pytest.mark.parametrize(
    "options",
    [
        {"distance_coordinates": 20},
        {"distance_coordinates": None},
        {"history_dtype": torch.bfloat16},
        {"kernel": "rbf"},
        {"kernel": "matern12", "history": 6},
    ],
    ids=str,
)
def test_what_is_kept_may_be_less(options: dict[str, Any]) -> None:
    model = network()
    before = float(Task(model).loss(10_000).detach())
    model, opt = trained(20, OPTIMIZERS["adam"], **options)
    assert float(Task(model).loss(10_000).detach()) < 0.5 * before
    assert opt.stats.last.estimator


@pytest.mark.parametrize("select", ["last", "loss", "gradient"])
def test_paper_mode_goes_on_from_what_was_selected(select: str) -> None:
    _, opt = trained(8, OPTIMIZERS["adam"], mode="paper", select=select)
    for one in opt.stats:
        chosen = one.num_accepted - 1
        assert chosen == (2 if select == "last" else chosen)
        if select == "loss":
            assert one.losses[chosen] == min(one.losses)


def test_gradients_are_clipped() -> None:
    model = network()
    before = flat(model)
    opt = OptEx(torch.optim.SGD(model.parameters(), lr=1.0), parallel=2, clip_norm=1e-3)
    task = Task(model)
    for r in range(3):
        opt.step(lambda i, r=r: task.loss(2 * r + i))
    steps = sum(one.num_accepted for one in opt.stats)
    assert 0 < float((flat(model) - before).norm()) <= 1e-3 * steps * 1.001


def test_a_closure_may_do_the_backward_pass_itself() -> None:
    def run(*, own: bool) -> Tensor:
        model = network()
        task, opt = Task(model), OptEx(torch.optim.Adam(model.parameters(), lr=0.01), parallel=2)
        for r in range(3):

            def closure(i: int, r: int = r) -> Tensor:
                loss = task.loss(2 * r + i)
                if own:
                    opt.zero_grad()
                    torch.autograd.backward(loss)
                return loss

            opt.step(closure)
        return flat(model)

    assert torch.equal(run(own=True), run(own=False))


def test_a_closure_without_an_index() -> None:
    model = network()
    task, opt = Task(model), OptEx(torch.optim.SGD(model.parameters(), lr=0.05), parallel=2)
    assert opt.step(lambda: task.loss(0)) > opt.step(lambda: task.loss(0))


def test_half_precision_scaling() -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    opt = OptEx(torch.optim.SGD(model.parameters(), lr=0.05), parallel=2, grad_scaler=scaler)
    task = Task(model)
    plain, _ = trained(1, OPTIMIZERS["sgd"], parallel=2)
    opt.step(task.loss)
    assert torch.allclose(flat(model), flat(plain), atol=1e-6)
    opt.step(task.loss)
    assert scaler.get_scale() == 2.0**11
    before = flat(model)
    opt.step(lambda i: task.loss(i) + _huge(model))
    assert opt.stats.last.num_accepted == 0, "an overflow: the round is left out, as GradScaler does"
    assert torch.equal(before, flat(model))
    assert scaler.get_scale() == 2.0**10
    with pytest.raises(DivergedError):
        opt.step(lambda i: task.loss(i) * math.inf)
    with pytest.raises(InputError, match=r"without loss.backward"):
        opt.step(lambda i: _backward(task.loss(i)))


def _backward(loss: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    return loss


def _huge(model: nn.Module) -> Tensor:
    """A small number whose gradient, scaled, is none."""
    first = next(model.parameters())
    return 1e36 * (first - first.detach()).sum()


def test_a_loss_that_is_no_number_rolls_the_round_back() -> None:
    model, opt = trained(4, OPTIMIZERS["adam"])
    task = Task(model)
    opt.step(lambda i: task.loss(i) * math.nan)
    assert opt.stats.last.took_back, "the steps before may have led there"
    before, state = flat(model), copy.deepcopy(opt.base.state_dict())
    with pytest.raises(DivergedError, match=r"round 6.*as they were before"):
        opt.step(lambda i: task.loss(i) * math.nan)
    assert torch.equal(before, flat(model))
    for one, other in zip(state["state"].values(), opt.base.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[k], other[k]) for k in one)
    opt.step(lambda i: task.loss(i) * (math.nan if i == 2 else 1.0))
    assert opt.stats.last.num_accepted <= 2
    assert bool(torch.isfinite(flat(model)).all())
    assert math.isfinite(opt.step(task.loss))


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_the_closure_raises_rolls_the_round_back(kind: type[BaseException], at: int) -> None:
    model, opt = trained(5, OPTIMIZERS["adam"])
    task = Task(model)
    before, state = flat(model), copy.deepcopy(opt.base.state_dict())

    def closure(i: int) -> Tensor:
        if i == at:
            raise kind("oh")
        return task.loss(i)

    with pytest.raises(kind, match="oh"):
        opt.step(closure)
    assert torch.equal(before, flat(model))
    for one, other in zip(state["state"].values(), opt.base.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[k], other[k]) for k in one)
    assert math.isfinite(opt.step(task.loss))
    assert opt.stats.last.num_accepted >= 1


def test_parameters_in_another_order_of_memory() -> None:
    def run(*, wrapped: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(4, 3, 6, 6)
        base = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        opt = OptEx(base, parallel=1) if wrapped else base
        for _ in range(3):
            base.zero_grad()

            def closure() -> Tensor:
                return _backward(model(x).square().mean())

            opt.step(closure)
        return flat(model)

    assert torch.equal(run(wrapped=True), run(wrapped=False))


def test_an_unused_parameter_does_not_change_what_is_resumed() -> None:
    def make() -> tuple[nn.Sequential, OptEx]:
        model = network()
        unused = nn.Parameter(torch.ones(5))
        return model, OptEx(torch.optim.AdamW([*model.parameters(), unused], lr=0.03, weight_decay=0.1), parallel=3)

    model, opt = make()
    task = Task(model)
    for r in range(4):
        opt.step(lambda i, r=r: task.loss(3 * r + i))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    other, resumed = make()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for one, by in ((model, opt), (other, resumed)):
        mine = Task(one)
        for r in range(4, 8):
            by.step(lambda i, r=r, mine=mine: mine.loss(3 * r + i))
    assert torch.equal(flat(model), flat(other))


def test_states_that_do_not_fit_change_nothing() -> None:
    _, opt = trained(3, OPTIMIZERS["adam"])
    for options in (
        {"parallel": 4},
        {"parallel": 3, "distance_coordinates": 10},
        {"parallel": 3, "mode": "paper", "history": 17},
    ):
        other = OptEx(torch.optim.Adam(network().parameters(), lr=0.5), **options)
        with pytest.raises(CheckpointError, match="of another optimizer"):
            other.load_state_dict(opt.state_dict())
        assert other.param_groups[0]["lr"] == 0.5
    state = opt.state_dict()
    del state["optex"]["pace"]
    with pytest.raises(CheckpointError, match="lacks pace"):
        opt.load_state_dict(state)
    older = opt.state_dict()
    del older["optex"]["judge"]["curvature"]
    older["optex"]["judge"]["tried"]["errors"] = torch.zeros(2)
    before = opt.state_dict()
    with pytest.raises(CheckpointError, match=r"another version: judge\.tried\.errors, judge\.curvature lacking"):
        opt.load_state_dict(older)
    assert str(opt.state_dict()) == str(before)


def test_groups_stay_shared_when_the_inner_optimizer_loads_others() -> None:
    _, opt = trained(2, OPTIMIZERS["adam"])
    opt.base.load_state_dict(opt.base.state_dict())
    assert opt.param_groups is opt.base.param_groups
    assert opt.state is opt.base.state
    with pytest.raises(InputError, match="one type on one device"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    assert len(opt.param_groups) == 1


def test_small_rates_with_gradients_kept_in_bfloat16() -> None:
    _, wide = trained(12, lambda p: torch.optim.Adam(p, lr=1e-4))
    _, narrow = trained(12, lambda p: torch.optim.Adam(p, lr=1e-4), history_dtype=torch.bfloat16)
    assert sum(one.num_accepted for one in narrow.stats) == sum(one.num_accepted for one in wide.stats)


def test_closures_of_all_kinds() -> None:
    model = network()
    task, opt = Task(model), OptEx(torch.optim.SGD(model.parameters(), lr=0.01), parallel=2)
    seen: list[int] = []

    def loss_of(task: Task, i: int) -> Tensor:
        seen.append(i)
        return task.loss(i)

    def default(i: int = 0) -> Tensor:
        return loss_of(task, i)

    opt.step(partial(loss_of, task=task))
    opt.step(partial(loss_of, task))
    opt.step(default)
    opt.step(task.loss)
    assert seen == [0, 1] * 3


def test_what_is_maximised_does_not_stall() -> None:
    x = nn.Parameter(torch.linspace(-2, 3, 50))
    opt = OptEx(torch.optim.SGD([x], lr=0.02, maximize=True), parallel=3)
    for _ in range(30):
        opt.step(lambda i: -x.square().sum())
    assert all(one.num_points == 3 for one in opt.stats)


def test_errors_say_what_to_do() -> None:
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"parallel is 0; expected a whole number, 1 or more"):
        OptEx(base, parallel=0)
    with pytest.raises(InputError, match=r"history is 1; expected a whole number, 2 or more"):
        OptEx(base, parallel=2, history=1)
    with pytest.raises(UnknownNameError, match="matern52"):
        OptEx(base, parallel=2, kernel="matern5")
    with pytest.raises(UnknownNameError, match="did you mean 'paper'"):
        OptEx(base, parallel=2, mode="papers")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="got Sequential"):
        OptEx(model, parallel=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="LBFGS"):
        OptEx(torch.optim.LBFGS(model.parameters()), parallel=2)
    with pytest.raises(InputError, match="give parallel=N"):
        OptEx(base, process_group=None)  # as dist.group.WORLD is before init_process_group
    with pytest.raises(InputError, match=r"expected torch\.bfloat16 or wider"):
        OptEx(base, parallel=2, history_dtype=torch.int32)
    with pytest.raises(InputError, match="cannot be copied"):
        copy.deepcopy(OptEx(base, parallel=2))
    with pytest.raises(InputError, match="no round has been done yet"):
        _ = OptEx(base, parallel=2).stats.last
    opt = OptEx(base, parallel=2)
    task = Task(model)
    with pytest.raises(InputError, match=r"opt.step\(lambda i"):
        opt.step()
    with pytest.raises(InputError, match="got Tensor"):
        opt.step(task.loss(0))  # type: ignore[call-overload]
    with pytest.raises(InputError, match="needs 2 arguments"):
        opt.step(lambda i, j: task.loss(i))
    with pytest.raises(InputError, match=r"returned a tensor of shape \(3,\)"):
        opt.step(lambda i: model(task.batch(i)[0]).mean(0))
    with pytest.raises(InputError, match="does not depend on them"):
        opt.step(lambda i: torch.zeros(()))

    def changes(i: int) -> Tensor:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return task.loss(i)

    with pytest.raises(InputError, match="changed the parameters"):
        opt.step(changes)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        OptEx(torch.optim.SGD(network().requires_grad_(False).parameters(), lr=0.1), parallel=2)
    sparse = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(InputError, match=r"parameter 0, of shape .5, 3., is sparse"):
        OptEx(torch.optim.SGD(sparse.parameters(), lr=0.1), parallel=2).step(lambda i: sparse(torch.tensor([i])).sum())


def test_statistics_are_kept_and_saved(tmp_path: Any) -> None:
    _, opt = trained(5, OPTIMIZERS["adam"])
    last = opt.stats.last
    assert last.number == 5
    assert len(last.cosines) == len(last.relative_errors) == last.num_points - 1
    assert 0 < last.estimate_share < 1
    assert last.loss == pytest.approx(sum(last.losses) / 3)
    opt.stats.save(tmp_path / "rounds.jsonl")
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 5


def test_it_is_a_public_name() -> None:
    assert wt.OptEx is OptEx
