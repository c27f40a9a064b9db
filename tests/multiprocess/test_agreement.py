"""Ranks that were given different things, and ranks that need nothing from others."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wavetrain as wt
from wavetrain.errors import RankFailedError

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def layers(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(number)))


def disagree(what: str) -> None:
    rank = int(os.environ["RANK"])
    schedule = ("gpipe", "1f1b")[rank] if what == "schedule" else "1f1b"
    cut = ([1, 3], [2, 2])[rank] if what == "cut" else None
    model = layers(4 + 2 * rank if what == "model" else 4)
    wt.Pipeline(model, schedule=schedule, num_micro_batches=4, loss_fn=nn.functional.mse_loss, cut=cut)


@pytest.mark.parametrize("what", ["model", "schedule", "cut"])
def test_ranks_that_disagree_are_told(what: str) -> None:
    with pytest.raises(RankFailedError, match=f"rank 1 was given another {what} than rank 0"):
        wt.launch(disagree, ranks=2, args=(what,))


def do_different_things(what: str) -> None:
    rank = int(os.environ["RANK"])
    pipe = wt.Pipeline(layers(4), schedule="1f1b", num_micro_batches=4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(8, 8)
    pipe.step(x, x)
    if what == "step and evaluate":
        (pipe.step, pipe.evaluate)[rank](x, x)
    elif what == "predict and evaluate":
        pipe.evaluate(x, x) if rank else pipe.predict(x)
    else:
        x = x[: (4, 8)[rank]]
        pipe.step(x, x)


@pytest.mark.parametrize("what", ["step and evaluate", "predict and evaluate", "batch"])
def test_ranks_that_do_different_things_are_told(what: str) -> None:
    with pytest.raises(RankFailedError, match=r"rank \d waited for .* same shapes and call the same methods"):
        wt.launch(do_different_things, ranks=2, args=(what,))


def train_the_end_only() -> float:
    torch.set_num_threads(1)
    model = layers(4)
    model[:2].requires_grad_(False)
    pipe = wt.Pipeline(model, schedule="1f1b", num_micro_batches=4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4096, 8)
    for _ in range(3):
        loss = pipe.step(x, x)
    assert dist.is_initialized()
    return float(loss)


def test_a_first_stage_without_gradients_may_end_early() -> None:
    assert wt.launch(train_the_end_only, ranks=2) > 0
