"""Minibatches evaluated by threads: the same numbers, or a refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.problems import OPTIMIZERS, Task, flat, network
from wavetrain.errors import DivergedError, InputError
from wavetrain.optim import OptEx


@pytest.fixture(autouse=True)
def _one_core_a_product() -> Iterator[None]:
    """How many cores share a product changes its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loss_of(task: Task, number: int, model: nn.Module) -> Tensor:
    x, y = task.batch(number)
    return nn.functional.mse_loss(model(x), y)


def trained(threads: int | None, *, optimizer: str = "adam", rounds: int = 6, **options: Any) -> tuple[nn.Sequential, OptEx]:
    model = network()
    opt = OptEx(OPTIMIZERS[optimizer](list(model.parameters())), parallel=4, model=model, threads=threads, **options)
    task = Task(model)
    for r in range(rounds):
        opt.step(lambda i, model, r=r: loss_of(task, 4 * r + i, model))
    return model, opt


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
@pytest.mark.parametrize("options", [{}, {"mode": "paper"}, {"distance_coordinates": 5}])
def test_as_many_threads_as_one_likes(optimizer: str, options: dict[str, Any]) -> None:
    expected, told = trained(1, optimizer=optimizer, **options)
    for threads in (2, 4, 9):
        found, opt = trained(threads, optimizer=optimizer, **options)
        assert torch.equal(flat(found), flat(expected))
        assert [one.losses for one in opt.stats] == [one.losses for one in told.stats]
    assert torch.get_num_threads() == 1


def test_threads_are_what_no_model_is() -> None:
    model = network()
    opt, task = OptEx(OPTIMIZERS["adam"](list(model.parameters())), parallel=4), Task(model)
    for r in range(6):
        opt.step(lambda i, r=r: task.loss(4 * r + i))
    found, threaded = trained(2)
    assert torch.equal(flat(found), flat(model))
    assert threaded.held_bytes() > opt.held_bytes()


def test_frozen_parameters_buffers_and_modes_are_followed() -> None:
    def run(threads: int) -> Tensor:
        model = network(dropout=0.5, norm=True)
        opt = OptEx(OPTIMIZERS["sgd"]([model[0].weight, model[0].bias]), parallel=4, model=model, threads=threads)
        task = Task(model)
        model.eval()  # after the copies were made
        with torch.no_grad():
            model[1].running_mean.fill_(0.3)  # type: ignore[operator]
            model[4].weight.mul_(2)  # type: ignore[operator]
        for r in range(3):
            opt.step(lambda i, model, r=r: loss_of(task, 4 * r + i, model))
        return flat(model)

    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize(("what", "match"), [({"dropout": 0.5}, "random numbers"), ({"norm": True}, "writes to its buffers")])
def test_what_threads_cannot_do_is_refused_and_nothing_changes(what: dict[str, Any], match: str) -> None:
    model = network(**what)
    opt, task = OptEx(OPTIMIZERS["adam"](list(model.parameters())), parallel=4, model=model, threads=2), Task(model)
    before = flat(model)
    with pytest.raises(InputError, match=match):
        opt.step(lambda i, model: loss_of(task, i, model))
    assert torch.equal(flat(model), before)
    one = OptEx(OPTIMIZERS["adam"](list(model.parameters())), parallel=4, model=model, threads=1)
    one.step(lambda i, model: loss_of(task, i, model))


class Scaled(nn.Module):
    """Has what models have: a frozen part, an attribute that is changed, a lock, a kept activation, an expanded buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.recurrent, self.head = nn.LSTM(6, 5), nn.Linear(5, 3)
        self.temperature, self.lock = 1.0, threading.Lock()
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.kept = self.inner(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.inner(x)) * self.temperature * self.mask[0]
        found: Tensor = self.head(self.recurrent(x)[0])
        return found


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def scaled(threads: int, *, hooked: bool = False) -> tuple[Scaled, OptEx]:
    model = Scaled()
    if hooked:
        model.inner.weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[no-untyped-call]
        model.head.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
    trained = [p for p in model.parameters() if p.requires_grad and p is not model.head.bias]
    opt, task = OptEx(torch.optim.SGD(trained, lr=0.1), parallel=4, model=model, threads=threads), Task(model)
    for r in range(4):
        model.temperature = 1.0 + r  # after the optimizer was made
        if r == 2:
            model.head.register_forward_hook(lambda module, given, out: out.tanh())
        opt.step(lambda i, model, r=r: loss_of(task, 4 * r + i, model))
    return model, opt


@pytest.mark.parametrize("hooked", [False, True])
def test_a_twin_is_the_model_as_it_is_now(hooked: bool) -> None:
    one, _ = scaled(1, hooked=hooked)
    two, opt = scaled(2, hooked=hooked)
    assert torch.equal(flat(one), flat(two))
    assert hooked == torch.equal(two.inner.weight, Scaled().inner.weight)
    assert two.head.bias.grad is None  # not the optimizer's, and no thread's either
    frozen = sum(p.numel() for p in two.frozen.parameters())
    assert opt._threads is not None
    assert opt._threads.held_bytes() <= 2 * 4 * (flat(two).numel() - frozen)


def test_a_loss_that_leads_past_the_twin_is_refused() -> None:
    model = network()
    opt, task = OptEx(OPTIMIZERS["sgd"](list(model.parameters())), parallel=4, model=model, threads=2), Task(model)
    before = flat(model)
    with pytest.raises(InputError, match="use its model everywhere"):
        opt.step(lambda i, twin: loss_of(task, i, twin) + flat_of(model).square().sum())
    forward = model[0].forward
    model[0].forward = lambda x: forward(x)
    with pytest.raises(InputError, match="use its model everywhere"):
        opt.step(lambda i, twin: loss_of(task, i, twin))
    assert torch.equal(flat(model), before)


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([p.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_models_are_refused_by_threads_alone(wrapped: bool) -> None:
    model: Any = network()
    if wrapped:
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(InputError, match=r"torch\.compile"):
        OptEx(torch.optim.SGD(model.parameters(), lr=0.1), parallel=4, model=model, threads=2)
    OptEx(torch.optim.SGD(model.parameters(), lr=0.1), parallel=4, model=model, threads=1)


def test_autocast_around_the_round_is_that_of_threads() -> None:
    seen = []

    def loss(i: int, model: nn.Module) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return flat_of(model).square().sum()

    model = network()
    opt = OptEx(OPTIMIZERS["sgd"](list(model.parameters())), parallel=4, model=model, threads=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opt.step(loss)
    assert seen == [True] * 4


def test_strangers_are_refused_before_anything_changes() -> None:
    model, opt = trained(2, rounds=2)
    with pytest.raises(InputError, match="not the model's"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(opt.param_groups) == 1
    task = Task(model)
    opt.step(lambda i, model: loss_of(task, i, model))


def test_a_closure_that_fails_is_heard_and_the_round_undone() -> None:
    model, opt = trained(2, rounds=2)
    before, task = flat(model), Task(model)

    def failing(i: int, model: nn.Module) -> Tensor:
        if i == 2:
            raise ZeroDivisionError("of mine")
        return loss_of(task, i, model)

    with pytest.raises(ZeroDivisionError, match="of mine"):
        opt.step(failing)
    assert torch.equal(flat(model), before)
    opt.step(lambda i, model: loss_of(task, i, model) * float("nan"))
    assert opt.stats.last.took_back
    before = flat(model)
    with pytest.raises(DivergedError):
        opt.step(lambda i, model: loss_of(task, i, model) * float("nan"))
    assert torch.equal(flat(model), before)
    opt.step(lambda i, model: loss_of(task, i, model))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threads": 2}, "give model="),
        ({"model": 3}, "expected a torch module"),
        ({"model": network(), "threads": 2}, "not the model's"),
        ({"model": network(), "threads": 0}, "threads is 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        OptEx(torch.optim.SGD(network().parameters(), lr=0.1), parallel=4, **options)


@pytest.mark.parametrize("closure", [lambda: 0.0, lambda i: 0.0, lambda i, model, more: 0.0, lambda i, *, model: 0.0])
def test_a_closure_of_the_wrong_kind(closure: Callable[..., Any]) -> None:
    model = network()
    opt = OptEx(torch.optim.SGD(model.parameters(), lr=0.1), parallel=4, model=model)
    with pytest.raises(InputError, match="lambda i, model"):
        opt.step(closure)
    with pytest.raises(InputError, match="leave out model="):
        opt.later(lambda: 0.0)
    with pytest.raises(InputError, match="needs a closure"):
        opt.step()
