"""When a rank dies, raises, stalls or is given nonsense: all ranks end, and what is told is what happened first."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in its __all__

from tests.multiprocess.ranks import gpt, loss_fn, tokens
from wavetrain import Pipeline, build, launch
from wavetrain.errors import InputError, ProofError, RankFailedError
from wavetrain.runtime import checkpoint
from wavetrain.runtime.blackbox import State
from wavetrain.schedule.actions import Action
from wavetrain.schedule.schedule import Schedule

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

LONG = 300.0
"""Seconds that something takes which is to be ended before."""


def gone(pid: int) -> bool:
    """Whether a process runs no more (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


# ---- a rank is killed


def trains_for_ever(folder: str) -> None:
    torch.manual_seed(0)
    pipe = Pipeline(gpt(num_layers=10), schedule="zb-wave", waves=2, num_micro_batches=4, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        pipe.step(*tokens(pipe.num_steps))
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(folder, pipe, optimizer, extra={"next": pipe.num_steps})


def test_a_random_rank_is_killed_at_a_random_moment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    victim, after_step, wait = random.randrange(3), random.randint(1, 3), random.uniform(0, 0.5)
    print(f"rank {victim} is killed {wait:.3f} s after all have begun step {after_step}")
    pids: dict[int, int] = {}
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pids[victim], signal.SIGKILL)

    def watch(states: Sequence[State]) -> None:
        if not pids and len(states) == 3 and all(state.step >= after_step for state in states):
            pids.update({state.rank: state.pid for state in states})
            threading.Timer(wait, kill).start()

    with pytest.raises(RankFailedError) as caught:
        launch(trains_for_ever, ranks=3, args=(str(tmp_path),), on_poll=watch)
    assert time.monotonic() - killed[0] < LONG / 2, "the others go on"
    assert all(map(gone, pids.values()))
    assert (caught.value.rank, caught.value.cause) == (victim, "signal 9")
    doing = r"(in |waiting |saving |outside |in a collective)"
    assert re.match(rf"rank {victim} was killed by signal 9 {doing}.*\(step \d+; SIGKILL", str(caught.value)), str(caught.value)
    assert "Traceback" not in capfd.readouterr().err, "echoes of a death are not told"

    torch.manual_seed(1)
    pipe = Pipeline(gpt(num_layers=10), schedule="1f1b", num_micro_batches=4, loss_fn=loss_fn)  # one process
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    extra = checkpoint.load(tmp_path, pipe, optimizer)
    assert extra["next"] == pipe.num_steps >= after_step
    assert float(pipe.evaluate(*tokens(0))) < 3.5
    pipe.step(*tokens(pipe.num_steps))
    optimizer.step()


# ---- a rank raises


class Planned(torch.autograd.Function):
    """Identity; its backward raises when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: Callable[[], None]) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.raises()
        return gradients[0], None


class Trap(nn.Module):
    """A linear layer that raises at the n-th time that its kind of action is run: F, I (on the path) or W (its bias)."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind, self.left = kind, count
        if kind == "W":
            self.linear.bias.register_hook(lambda _: self.tick())  # type: ignore[no-untyped-call]

    def tick(self) -> None:
        if self.left == 0:
            raise LookupError("planned")
        self.left -= 1

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "F":
            self.tick()
        y = self.linear(x)
        return Planned.apply(y, self.tick) if self.kind == "I" else y  # type: ignore[no-any-return, no-untyped-call]


def mean_square(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def springs_a_trap(kind: str, stage: int, count: int) -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(4)]
    layers[stage] = Trap(kind, count)
    pipe = Pipeline(nn.Sequential(*layers), schedule="zb-wave", waves=1, num_micro_batches=4, loss_fn=mean_square)
    for _ in range(3):
        pipe.step(torch.randn(4, 8), torch.zeros(4))


@pytest.mark.parametrize("kind", ["F", "I", "W"])
def test_an_exception_in_a_random_action(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    stage, count = random.randrange(4), random.randrange(12)
    schedule = build("zb-wave", num_ranks=2, num_micro_batches=4, waves=1)
    rank = schedule.placements[0][stage]
    kinds = {"I": "IB", "W": "WB", "F": "F"}[kind]
    action = [a for a in schedule.actions[rank] if a.kind in kinds and a.stage == stage][count % 4]
    print(f"in {action.describe()}, step {count // 4}")
    with pytest.raises(RankFailedError) as caught:
        launch(springs_a_trap, ranks=2, args=(kind, stage, count))
    assert str(caught.value) == f"rank {rank} failed in {action.describe()}: LookupError: planned"
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    assert err.rstrip().splitlines()[-1 - (kind == "F")] == "LookupError: planned"
    if kind == "F":
        assert err.rstrip().endswith(f"in layer {stage} (Trap) of stage {stage}, which was given float32 (1, 8)")


# ---- a rank stalls


class Sleeper(nn.Module):
    """A layer that takes its time, and at last for ever."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(2, 2), calls

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.5 if self.left else LONG)
        self.left -= 1
        return self.linear(x)  # type: ignore[no-any-return]


def falls_asleep() -> float:
    """A step of 8 s in which no message takes long, then one without end; the limit for a message is 5 s."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("here", 1)
    while store.add("here", 0) < 3:  # so that all are there when the limit begins to count
        time.sleep(0.05)
    model = nn.Sequential(Sleeper(99), Sleeper(14), Sleeper(99))
    pipe = Pipeline(model, schedule="gpipe", num_micro_batches=14, loss_fn=mean_square, timeout_seconds=5.0)
    begun = time.monotonic()
    pipe.step(torch.randn(14, 2), torch.zeros(14))
    print(f"first step: {time.monotonic() - begun:.1f} s", flush=True)
    return float(pipe.step(torch.randn(14, 2), torch.zeros(14)))


def test_a_rank_that_stalls_is_named_by_who_waits_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(falls_asleep, ranks=3, grace_seconds=1.0)
    assert capfd.readouterr().out.count("first step") == 3, "a step may take longer than any message of it"
    assert caught.value.rank == 2
    what = "F of stage 1, micro-batch 0"
    assert caught.value.cause == f"StallError: rank 2 waited 5 s for {what}, to arrive from rank 1"
    assert str(caught.value).startswith(f"rank 2 failed waiting for {what} from rank 1: StallError")


# ---- a rank is given nonsense


class Wrong(nn.Module):
    """Returns what it should not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.linear = nn.Linear(3 if kind == "shape" else 2, 2)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.linear(x)
        if self.kind == "type":
            return {y}
        return (y,) if self.calls > 2 else y


def gives_nonsense(kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Wrong(kind), nn.Linear(2, 2))
    pipe = Pipeline(model, schedule="1f1b", num_micro_batches=4, loss_fn=mean_square, timeout_seconds=LONG)
    pipe.step(torch.randn(4, 2), torch.zeros(4))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("type", r"InputError: what layer 1 \(Wrong\) returns is a set; what passes between layers must be a tensor"),
        ("shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (
            "structure",
            r"InputError: F of stage 1, micro-batch 2 gives float32 \(1, 2\), but an earlier micro-batch of the same input shape",
        ),
    ],
)
def test_a_layer_that_does_not_fit(kind: str, cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        launch(gives_nonsense, ranks=3, args=(kind,))
    assert time.monotonic() - begun < LONG / 2, "nobody waits for the limit of messages"
    assert caught.value.rank == 1
    assert re.match(cause, caught.value.cause), caught.value.cause
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    if kind == "shape":
        assert "in layer 1 (Wrong) of stage 1, which was given float32 (1, 2)" in err


def refusals() -> dict[str, str]:
    """What every rank is told; none of it needs the others, so that all go on."""
    found: dict[str, str] = {}

    def attempt(name: str, error: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            call()
        found[name] = str(caught.value)

    def pipeline(**options: Any) -> Pipeline:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
        return Pipeline(model, **{"schedule": "1f1b", "num_micro_batches": 4, "loss_fn": mean_square, **options})

    deadlock = Schedule.single_route(
        "mine", (0, 1), 1, [[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 1, 0), Action("F", 1, 0)]]
    )
    x, y = torch.randn(4, 2), torch.zeros(4)
    attempt("world", InputError, lambda: pipeline(schedule=build("1f1b", num_ranks=3, num_micro_batches=4)))
    attempt("proof", ProofError, lambda: pipeline(schedule=deadlock, num_micro_batches=None))
    attempt("layers", InputError, lambda: pipeline(schedule="hanayo", waves=2))
    attempt("mesh", InputError, lambda: pipeline(dp=2, tp=2))
    attempt("tp", InputError, lambda: pipeline(tp=2))
    attempt("batch", InputError, lambda: pipeline().step(x[:3], y[:3]))
    attempt("loss", InputError, lambda: pipeline(loss_fn=None).step(x, y))
    assert float(pipeline().step(x, y)) > 0, "and after all that it works"
    return found


def test_what_is_refused_on_every_rank() -> None:
    found = launch(refusals, ranks=2)
    for name, said in {
        "world": "the schedule is for 3 pipeline ranks, but 2 were launched; launch(main, ranks=3)",
        "proof": "deadlock",
        "layers": "the model has 4 layers, but hanayo on 2 ranks has 8 stages",
        "mesh": "needs a multiple of 4 ranks, but 2 were launched",
        "tp": "Linear cannot be split over tp=2 ranks",
        "batch": "inputs hold 3 samples, which cannot be split into 4 micro-batches",
        "loss": "needs a loss",
    }.items():
        assert said in found[name]
