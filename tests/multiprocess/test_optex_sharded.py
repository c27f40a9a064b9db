"""OptEx over ranks that each keep a part of the history: the same steps, less of everything on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.optim.problems import OPTIMIZERS, Task, flat, network
from wavetrain.errors import CheckpointError, DivergedError, InputError, RuntimeFailure
from wavetrain.optim import OptEx
from wavetrain.runtime.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

ROUNDS = 6


def made(name: str = "adam", **how: Any) -> tuple[OptEx, Task]:
    model = network()
    base = OPTIMIZERS[name](list(model.parameters()))
    return OptEx(base, process_group=dist.group.WORLD, **how), Task(model)


def play(opt: OptEx, task: Task, rounds: range) -> None:
    for r in rounds:
        opt.step(lambda i, r=r: task.loss(opt.parallel * r + i))


def everywhere(values: list[float]) -> list[list[float]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def over_ranks(name: str, mode: str) -> tuple[list[list[float]], list[int], list[list[float]]]:
    dist.init_process_group("gloo")
    opt, task = made(name, shard_history=True, mode=mode)
    play(opt, task, range(ROUNDS))
    kept = everywhere([opt.held_bytes(), len(opt.base.state), opt.stats.last.loss])
    return everywhere([float(v) for v in flat(task.model)]), [one.num_accepted for one in opt.stats], kept


@pytest.mark.parametrize(
    ("name", "mode"), [("adam", "auto"), ("sgd", "auto"), ("adamw fused", "auto"), ("adagrad", "auto"), ("adam", "paper")]
)
def test_steps_are_those_of_one_process(name: str, mode: str) -> None:
    found, accepted, kept = launch(over_ranks, ranks=2, args=(name, mode))
    model = network()
    task, opt = Task(model), OptEx(OPTIMIZERS[name](list(model.parameters())), parallel=2, mode=mode)  # type: ignore[arg-type]
    play(opt, task, range(ROUNDS))
    assert found[0] == found[1], "to the bit, on all ranks"
    assert found[0] == pytest.approx([float(v) for v in flat(model)], rel=1e-3, abs=1e-4)
    assert accepted == [one.num_accepted for one in opt.stats]
    assert sum(one[1] for one in kept) == len(opt.base.state), "every parameter's state is on one rank"
    assert kept[0][2] == kept[1][2]


def bytes_of(shard_history: bool) -> list[list[float]]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    opt = OptEx(torch.optim.Adam(model.parameters()), process_group=dist.group.WORLD, shard_history=shard_history)
    for _ in range(3):
        opt.step(lambda: model(torch.ones(2, 64)).square().mean())
    return everywhere([opt.held_bytes()])


def test_a_rank_keeps_its_part() -> None:
    whole, parts = (launch(bytes_of, ranks=2, args=(how,)) for how in (False, True))
    assert max(one[0] for one in parts) < 0.6 * whole[0][0]


def resumed() -> tuple[list[list[float]], list[list[float]], str]:
    dist.init_process_group("gloo")
    opt, task = made(shard_history=True)
    play(opt, task, range(4))
    saved = copy.deepcopy(opt.state_dict())
    kept = [p.detach().clone() for p in task.model.parameters()]
    play(opt, task, range(4, 7))
    straight = everywhere([float(v) for v in flat(task.model)])
    opt, task = made(shard_history=True)
    with torch.no_grad():
        for p, value in zip(task.model.parameters(), kept, strict=True):
            p.copy_(value)
    opt.load_state_dict(saved)
    torch.manual_seed(0)
    play(opt, task, range(4, 7))
    again = everywhere([float(v) for v in flat(task.model)])
    states: list[Any] = [None, None]
    dist.all_gather_object(states, saved)
    try:
        opt.load_state_dict(states[1 - dist.get_rank()])
    except CheckpointError as error:
        return straight, again, str(error)
    return straight, again, ""


def test_every_rank_resumes_from_its_own_state() -> None:
    straight, again, told = launch(resumed, ranks=2)
    assert straight == again
    assert "that of rank 1 of 2, here it would be that of rank 0 of 2" in told


def one_fails() -> list[Any]:
    dist.init_process_group("gloo")
    opt, task = made(shard_history=True)
    play(opt, task, range(3))
    before = [float(v) for v in flat(task.model)]

    def closure(i: int) -> torch.Tensor:
        if i == 1:
            raise ValueError("no such image")
        return task.loss(i)

    try:
        opt.step(closure)
    except (ValueError, RuntimeFailure) as error:
        told = str(error)
    after = [float(v) for v in flat(task.model)]
    play(opt, task, range(3, 5))
    return [told, before == after, everywhere([float(v) for v in flat(task.model)])]


def test_a_round_that_fails_is_rolled_back_everywhere() -> None:
    told, same, after = launch(one_fails, ranks=2)
    assert "failed on rank 1" in told
    assert same
    assert after[0] == after[1]


def odd_parts() -> list[Any]:
    """More ranks than parameters, one that is frozen for a while, one that is put before the others."""
    dist.init_process_group("gloo")
    x = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    opt = OptEx(torch.optim.Adam([x], lr=0.1), process_group=dist.group.WORLD, shard_history=True)
    for _ in range(6):
        opt.step(lambda: x.square().sum())
    found = [everywhere([float(v) for v in x])]
    opt, task = made(shard_history=True)
    first = next(task.model.parameters())
    for r in range(9):
        first.requires_grad_(not 3 <= r < 6)
        play(opt, task, range(r, r + 1))
        found.append(everywhere([float(v) for v in flat(task.model)]))
    new = torch.nn.Parameter(torch.ones(7))
    opt.base.param_groups[0]["params"].insert(0, new)
    kept = set(opt.base.state)
    opt.step(lambda i: task.loss(i) + new.square().sum())
    found.append(everywhere([float(v) for v in new]))
    assert kept <= set(opt.base.state), "what was learnt of parameters stays where it was"
    return found


def test_parts_may_be_empty_and_stay_where_they_are() -> None:
    found = launch(odd_parts, ranks=2)
    assert all(one[0] == one[1] for one in found)
    assert sum(v * v for v in found[0][0]) < 10
    assert found[4][0] != found[5][0], "the others are trained while one is frozen"


def differing(what: str) -> list[str]:
    dist.init_process_group("gloo")
    opt, task = made(shard_history=what != "whole")
    play(opt, task, range(2))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, opt.base.state_dict())
    try:
        if what == "state":
            opt.load_state_dict(states[1 - dist.get_rank()])
        elif dist.get_rank() == 1:
            opt.param_groups[0]["lr"] *= 0.5
        play(opt, task, range(2, 3))
    except (RuntimeFailure, CheckpointError) as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(
    ("what", "told"), [("rate", "rates"), ("whole", "rates"), ("state", "nothing of the parameters that this rank keeps")]
)
def test_ranks_that_differ_are_told(what: str, told: str) -> None:
    assert told in launch(differing, ranks=2, args=(what,))[0]


def no_numbers() -> str:
    dist.init_process_group("gloo")
    opt, task = made(shard_history=True)
    play(opt, task, range(2))
    with torch.no_grad():
        next(task.model.parameters()).fill_(torch.nan)
    try:
        play(opt, task, range(2, 3))
    except DivergedError as error:
        return str(error)
    return ""


def test_parameters_that_are_no_numbers_have_diverged() -> None:
    assert "is a number" in launch(no_numbers, ranks=2)


def test_only_ranks_share_a_history() -> None:
    with pytest.raises(InputError, match="ranks of process_group"):
        OptEx(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1), parallel=2, shard_history=True)


def of_a_pipeline() -> list[list[float]]:
    """One rank's weights decay and have momentum, the other's have neither."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x, slopes = torch.nn.Parameter(torch.randn(50)), torch.logspace(-2, 0.5, 50)
    base = torch.optim.SGD([x], lr=0.05, weight_decay=0.0 if rank else 1e-3, momentum=0.0 if rank else 0.9)
    opt = OptEx(base, parallel=4, shard_group=dist.group.WORLD)

    def loss(i: int) -> torch.Tensor:
        mine = (slopes * x.square()).sum()
        whole = mine.detach().clone()
        dist.all_reduce(whole)
        return mine + (whole - mine.detach())

    told = [opt.step(loss) for _ in range(30)]
    return everywhere([*told, *(float(one.num_accepted) for one in opt.stats)])


def test_ranks_whose_parts_are_trained_differently_go_the_same_way() -> None:
    one, other = launch(of_a_pipeline, ranks=2)
    assert one == other
    assert one[29] < 0.1 * one[0]


def with_decay() -> list[list[float]]:
    dist.init_process_group("gloo")
    x, still = torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    groups: list[dict[str, Any]] = [{"params": [x]}, {"params": [still], "weight_decay": 0.0}]
    base = torch.optim.AdamW(groups, lr=0.02, weight_decay=1e-4)
    opt = OptEx(base, process_group=dist.group.WORLD, shard_history=True)
    for _ in range(10):
        opt.step(lambda i: (torch.logspace(-2, 0.5, 40) * x.square()).sum())
    return everywhere(x.tolist())


def test_weights_decay_where_a_rank_keeps_none() -> None:
    one, other = launch(with_decay, ranks=2)
    assert one == other
    assert max(one) < 1
