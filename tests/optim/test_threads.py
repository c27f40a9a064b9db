"""Minibatches evaluated by threads: the same numbers, or a refusal."""

from __future__ import annotations

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


def test_a_closure_that_fails_is_heard_and_the_round_undone() -> None:
    model, opt = trained(2, rounds=2)
    before, task = flat(model), Task(model)

    def failing(i: int, model: nn.Module) -> Tensor:
        if i == 2:
            raise ZeroDivisionError("of mine")
        return loss_of(task, i, model)

    with pytest.raises(ZeroDivisionError, match="of mine"):
        opt.step(failing)
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
