"""OptEx over ranks: one minibatch a rank, and the same numbers as one process that evaluates them all."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.optim.problems import Task, flat, network
from wavetrain.errors import InputError, RankFailedError, RuntimeFailure
from wavetrain.optim import OptEx
from wavetrain.runtime.launch import launch
from wavetrain.runtime.train.config import TrainConfig
from wavetrain.runtime.train.metrics import read_metrics
from wavetrain.runtime.train.trainer import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

ROUNDS = 6


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def over_ranks(dropout: float) -> list[float]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network(dropout=dropout)
    torch.manual_seed(rank)  # random numbers of a round are rank 0's
    task, opt = Task(model), OptEx(torch.optim.Adam(model.parameters(), lr=0.01), process_group=dist.group.WORLD)
    assert opt.parallel == world
    for r in range(ROUNDS):
        opt.step(lambda r=r: task.loss(world * r + rank))
    return [float(v) for v in flat(model)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_ranks_give_the_numbers_of_one_process(dropout: float, one_thread: None) -> None:
    found = launch(over_ranks, ranks=2, args=(dropout,))
    model = network(dropout=dropout)
    torch.manual_seed(0)
    task, opt = Task(model), OptEx(torch.optim.Adam(model.parameters(), lr=0.01), parallel=2)
    for r in range(ROUNDS):
        opt.step(lambda i, r=r: task.loss(2 * r + i))
    assert found == [float(v) for v in flat(model)]


def unlike() -> None:
    dist.init_process_group("gloo")
    model = network(dist.get_rank())
    opt = OptEx(torch.optim.SGD(model.parameters(), lr=0.1), process_group=dist.group.WORLD)
    opt.step(lambda i: Task(model).loss(i))


def test_ranks_that_differ_are_told() -> None:
    with pytest.raises(RankFailedError, match="rank 1 differ from rank 0"):
        launch(unlike, ranks=2)


def touched(sharded: bool) -> str:
    dist.init_process_group("gloo")
    model = network()
    task = Task(model)
    opt = OptEx(torch.optim.Adam(model.parameters(), lr=0.01), process_group=dist.group.WORLD, shard_history=sharded)
    for _ in range(4):
        opt.step(lambda i: task.loss(i))
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).data.view(-1)[0] += 1e-6  # which raises no version
    try:
        opt.step(lambda i: task.loss(i))
    except RuntimeFailure as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_whose_parameters_alone_were_written_to_is_told(sharded: bool) -> None:
    assert "rank 1 differ from rank 0" in launch(touched, ranks=2, args=(sharded,))


def own_heads() -> list[float]:
    dist.init_process_group("gloo")
    heads = [network(s) for s in (1, 2)]
    opt = OptEx(torch.optim.AdamW([p for h in heads for p in h.parameters()], lr=0.01), process_group=dist.group.WORLD)
    for r in range(4):
        opt.step(lambda i, r=r: Task(heads[i]).loss(2 * r + i))
    return [float(v) for h in heads for v in flat(h)]


def test_ranks_whose_minibatches_use_other_parameters() -> None:
    found = launch(own_heads, ranks=2)
    heads = [network(s) for s in (1, 2)]
    opt = OptEx(torch.optim.AdamW([p for h in heads for p in h.parameters()], lr=0.01), parallel=2)
    for r in range(4):
        opt.step(lambda i, r=r: Task(heads[i]).loss(2 * r + i))
    assert found == [float(v) for h in heads for v in flat(h)]


def one_fails() -> list[str]:
    dist.init_process_group("gloo")
    model = network()
    task, opt = Task(model), OptEx(torch.optim.SGD(model.parameters(), lr=0.1), process_group=dist.group.WORLD)
    told: list[str] = []

    def closure(i: int) -> torch.Tensor:
        if i == 1 and not told:
            raise ValueError("no such image")
        return task.loss(i)

    for _ in range(2):
        try:
            opt.step(closure)
            told.append("done")
        except (ValueError, RuntimeFailure) as error:
            told.append(str(error))
    return told


def test_a_rank_whose_closure_fails_holds_up_no_one() -> None:
    first, second = launch(one_fails, ranks=2)
    assert "failed on rank 1" in first
    assert second == "done"


def miscounted() -> str:
    dist.init_process_group("gloo")
    try:
        OptEx(torch.optim.SGD(network().parameters(), lr=0.1), parallel=3, process_group=dist.group.WORLD)
    except InputError as error:
        return str(error)
    return ""


def test_a_group_says_how_many() -> None:
    assert "parallel is 3, but the process group has 2 ranks" in launch(miscounted, ranks=2)


@pytest.mark.parametrize(
    "way", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")], ids=["alone", "ranks"]
)
def test_the_example_learns(way: tuple[str, ...], tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "optex.py"
    done = subprocess.run(
        [sys.executable, *way, str(example), "20"], capture_output=True, text=True, timeout=150, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout))
    assert last < first < 5.6


def test_training_in_replicas_or_pipelines_gives_the_losses_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # how many threads share a sum changes its last bits
    shape: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "seq": 16, "micro_batches": 2, "batch": 8, "dropout": 0.1}
    how: dict[str, Any] = {"optex": 2, "steps": 6, "warmup": 2, "schedule": "1f1b", "validate_every": 0, "quiet": True}
    found, held_out = {}, {}
    for ranks, dp in ((1, 1), (2, 2), (2, 1), (4, 2)):
        out = tmp_path / f"{ranks}-{dp}"
        run(TrainConfig(out=str(out), ranks=ranks, dp=dp, **shape, **how))
        records = read_metrics(out / "metrics.jsonl")
        assert all(2 * record["points"] >= record["accepted"] >= 1 for record in records)
        found[ranks, dp], held_out[ranks, dp] = [record["loss"] for record in records], records[-1]["validation_loss"]
    assert found[2, 2] == found[1, 1], "two replicas, one point each: the same bits"
    assert found[4, 2] == found[2, 1], "two pipelines, one point each: the same bits"
    assert found[2, 1] == pytest.approx(found[1, 1], rel=1e-4), "sums over ranks are rounded otherwise"
    assert list(held_out.values()) == pytest.approx([held_out[1, 1]] * 4, rel=1e-4)
    assert found[1, 1][-1] < found[1, 1][0]
