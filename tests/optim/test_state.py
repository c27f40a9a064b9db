"""What OptEx saves and loads, and what it takes of scalers and histories."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.problems import OPTIMIZERS, Task, flat, network
from wavetrain.errors import CheckpointError, DivergedError, InputError
from wavetrain.optim import OptEx
from wavetrain.optim.history import History


def optimizer(**options: Any) -> tuple[OptEx, Task]:
    model = network()
    return OptEx(OPTIMIZERS["adam"](list(model.parameters())), parallel=3, **options), Task(model)


@pytest.mark.parametrize("name", ["gradients", "points", "squares", "products", "sizes", "rows", "sampled", "slots", "whole"])
def test_a_history_that_lacks_something_is_refused_and_nothing_changes(name: str) -> None:
    opt, task = optimizer()
    opt.step(task.loss)
    state = opt.state_dict()
    other, _ = optimizer()
    before = other.state_dict()
    del state["optex"]["history"][name]
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        other.load_state_dict(state)
    assert other.state_dict()["state"] == before["state"] == {}


@pytest.mark.parametrize("change", [lambda whole: whole[:-2], lambda whole: None])
def test_newest_points_of_another_number_are_refused_and_nothing_changes(change: Any) -> None:
    opt, task = optimizer(distance_coordinates=20)
    for _ in range(4):
        opt.step(task.loss)
    state = opt.state_dict()
    other, _ = optimizer(distance_coordinates=20)
    state["optex"]["history"]["whole"] = change(state["optex"]["history"]["whole"])
    with pytest.raises(CheckpointError, match="whole"):
        other.load_state_dict(state)
    assert other.state_dict()["state"] == {}


def test_a_state_of_another_optimizer_is_refused() -> None:
    opt, task = optimizer()
    opt.step(task.loss)
    other = OptEx(torch.optim.SGD(network().parameters(), lr=0.1), parallel=3)
    with pytest.raises(CheckpointError, match="is of Adam, but the inner optimizer here is SGD"):
        other.load_state_dict(opt.state_dict(history=False))


def test_hooks_of_saving_and_loading() -> None:
    opt, task = optimizer()
    opt.step(task.loss)
    told: list[str] = []

    def without_mine(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        told.append("loading")
        return {name: value for name, value in state.items() if name != "mine"}

    opt.register_state_dict_pre_hook(lambda _: told.append("saving"))
    opt.register_state_dict_post_hook(lambda _, state: {**state, "mine": 7})
    opt.register_load_state_dict_pre_hook(without_mine)
    opt.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
    state = opt.state_dict()
    assert state["mine"] == 7
    opt.load_state_dict(state)
    assert told == ["saving", "loading", "loaded"]


def test_a_scaler_that_is_switched_off_is_none() -> None:
    opt, task = optimizer(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    before = flat(task.model)
    with pytest.raises(DivergedError):
        opt.step(lambda i: task.loss(i) * float("nan"))
    assert torch.equal(flat(task.model), before)
    opt.step(task.loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int32, "bfloat16"])
def test_types_that_gradients_do_not_fit_in(dtype: Any) -> None:
    with pytest.raises(InputError, match="history_dtype"):
        optimizer(history_dtype=dtype)


def test_the_history_grows_with_n_within_bounds() -> None:
    for parallel, pairs in ((1, 32), (5, 32), (8, 32), (16, 64), (100, 102)):
        opt = OptEx(torch.optim.SGD(network().parameters(), lr=0.1), parallel=parallel)
        assert len(opt.state_dict()["optex"]["history"]["gradients"]) == pairs


def test_ranks_keep_points_of_the_same_rows_whatever_their_parts_sizes() -> None:
    """With a sample of the coordinates, as on a rank with a large part, or all of them: sums over ranks are of the same rows."""
    device = torch.device("cpu")
    large = History(8, 6, device, torch.float32, sampled=torch.arange(3), num_whole=5)
    small = History(8, 6, device, torch.float32, num_whole=5)
    for _ in range(7):
        reached = []
        for history in (large, small):
            rows = history.take_rows(2)
            for row in rows:
                history.put(row, torch.zeros(6))
            reached.append(history.reached)
            history.close(rows)
        assert reached[0] == reached[1]
        assert large.newest == small.newest


@pytest.mark.parametrize("way", [[], [torch.zeros(3)]], ids=["of the form before", "of another size"])
def test_a_way_that_does_not_fit_is_refused_and_nothing_changes(way: list[Tensor]) -> None:
    opt, task = optimizer()
    for _ in range(6):
        opt.step(task.loss)
    state = opt.state_dict()
    if way:
        state["optex"]["settling"]["way"] = way
    else:
        del state["optex"]["settling"]["way"]
    fresh, _ = optimizer()
    with pytest.raises(CheckpointError, match=r"way"):
        fresh.load_state_dict(state)
    assert not fresh.base.state_dict()["state"]


@pytest.mark.parametrize("early", [True, False], ids=["weights first", "optimizer first"])
def test_other_weights_than_were_saved_are_noticed_whichever_is_loaded_first(early: bool) -> None:
    """Else the first round would be compared with the last one before, and taken back to where that began."""
    x = torch.nn.Parameter(torch.ones(8))
    opt = OptEx(torch.optim.Adam([x], lr=0.05), parallel=4)
    for _ in range(8):
        opt.step(lambda i: x.square().sum())
    state = opt.state_dict()
    other = torch.nn.Parameter(x.detach().clone())
    resumed = OptEx(torch.optim.Adam([other], lr=0.05), parallel=4)
    for load in (True, False) if early else (False, True):
        if load:
            with torch.no_grad():
                other.copy_(torch.full((8,), 5.0))
        else:
            resumed.load_state_dict(state)
    resumed.step(lambda i: other.square().sum())
    assert not resumed.stats.last.took_back
    assert float(other.detach().min()) > 4


def test_a_layer_that_was_frozen_before_the_state_is_loaded() -> None:
    def made() -> tuple[OptEx, torch.nn.Sequential]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        return OptEx(torch.optim.Adam(model.parameters(), lr=0.01), parallel=2), model

    x = torch.randn(5, 4)
    opt, model = made()
    for p in model[0].parameters():
        p.requires_grad_(False)
    for _ in range(4):
        opt.step(lambda i: model(x).square().sum())
    resumed, twin = made()
    twin.load_state_dict(model.state_dict())
    for p in twin[0].parameters():
        p.requires_grad_(False)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.step(lambda i: model(x).square().sum())
    resumed.step(lambda i: twin(x).square().sum())
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
    ],
)
def test_a_history_wider_or_narrower_than_the_parameters(dtype: torch.dtype, kept: torch.dtype) -> None:
    x = torch.nn.Parameter(torch.linspace(-1, 1, 40, dtype=dtype))
    opt = OptEx(torch.optim.SGD([x], lr=0.1), parallel=3, history_dtype=kept)
    first = opt.step(lambda i: x.square().sum())
    for _ in range(8):
        last = opt.step(lambda i: x.square().sum())
    assert last < 0.1 * first


def test_autocast_around_a_round_is_as_within_the_closure() -> None:
    def trained(around: bool) -> tuple[list[tuple[float, ...]], Tensor]:
        w = torch.nn.Parameter(torch.tensor([[0.5, -0.25]]))
        opt = OptEx(torch.optim.SGD([w], lr=0.05), parallel=4)
        x = torch.tensor([[1.0, 2.0]])

        def loss(i: int) -> Tensor:
            with contextlib.nullcontext() if around else torch.autocast("cpu", dtype=torch.float16):
                return torch.nn.functional.linear(x, w).float().sub(3).square().sum()

        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.float16, enabled=around):
                opt.step(loss)
        return [one.losses for one in opt.stats], w.detach()

    losses, w = trained(around=True)
    others, v = trained(around=False)
    assert losses == others
    assert torch.equal(w, v)
    assert any(len(set(of_a_round)) > 1 for of_a_round in losses), "points differ, and so do their losses"
