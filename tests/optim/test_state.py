"""What OptEx saves and loads, and what it takes of scalers and histories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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
                history.put(row, torch.zeros(6), np.zeros(8))
            reached.append(history.reached)
            history.close(rows)
        assert reached[0] == reached[1]
        assert large.newest == small.newest
