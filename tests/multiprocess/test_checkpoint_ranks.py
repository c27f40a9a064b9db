"""Checkpoints of real ranks: saved by two, loaded by one and by three, whole or sharded, and when one of them fails or dies."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from wavetrain.errors import CheckpointError
from wavetrain.runtime.checkpoint import export_safetensors, latest, load, read_model, save, verify

pytestmark = pytest.mark.multiprocess

LIMIT_SECONDS = 240.0
NUM_SPLITS = 4
SHAPES = {"embed.weight": (7, 3), "block0.weight": (5, 4), "block0.bias": (5,), "block1.scale": (), "head.weight": (3, 5)}
SHARDS = {"embed.weight": Shard(0), "block0.weight": Shard(1), "block0.bias": Shard(0), "head.weight": Shard(0)}


class Pipe:
    """What a rank holds, in the place of a pipeline."""

    def __init__(self, parameters: dict[str, Any], rank: int, world_size: int) -> None:
        self.num_steps = 0
        self.mesh = SimpleNamespace(rank=rank, world_size=world_size)
        self._parameters = parameters

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._parameters.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def whole_parameters() -> dict[str, nn.Parameter]:
    numbers = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(shape, generator=numbers)) for name, shape in SHAPES.items()}


def optimize(parameters: dict[str, Any], steps: range, optimizer: Any = None) -> Any:
    """AdamW in two groups; the gradient of an element depends on its name, place and step alone, not on who holds it."""
    if optimizer is None:
        weights = [p for name, p in parameters.items() if name.endswith("weight")]
        others = [p for name, p in parameters.items() if not name.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)
    for step in steps:
        for name, parameter in parameters.items():
            numbers = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
            grad = torch.randn(SHAPES[name], generator=numbers)
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            else:
                parameter.grad = grad
        optimizer.step()
    return optimizer


def reference(num_steps: int) -> dict[str, Tensor]:
    parameters = whole_parameters()
    optimize(parameters, range(num_steps))
    return {name: p.detach() for name, p in parameters.items()}


def split_names(seed: int, rank: int, world_size: int) -> list[str]:
    """Each name on one to all of the ranks."""
    numbers = random.Random(f"{seed} {world_size}")
    owners = {name: numbers.sample(range(world_size), numbers.randint(1, world_size)) for name in SHAPES}
    return [name for name, ranks in owners.items() if rank in ranks]


def split(seed: int, rank: int, world_size: int) -> Pipe:
    everything = whole_parameters()
    return Pipe({name: everything[name] for name in split_names(seed, rank, world_size)}, rank, world_size)


def sharded(rank: int, world_size: int) -> Pipe:
    mesh = init_device_mesh("cpu", (world_size,))
    everything = whole_parameters()
    return Pipe(
        {n: nn.Parameter(distribute_tensor(p.detach(), mesh, [SHARDS.get(n, Replicate())])) for n, p in everything.items()},
        rank,
        world_size,
    )


def full(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def assert_continues(pipe: Pipe, path: Path, from_step: int = 2) -> None:
    """Load into ``pipe`` and train on: the same numbers as one process that never stopped."""
    parameters = dict(pipe.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(9.0)
    optimizer = optimize(parameters, range(0))
    load(path, pipe, optimizer)
    assert pipe.num_steps == from_step
    expected = reference(from_step)
    for name, parameter in parameters.items():
        assert torch.equal(full(parameter), expected[name]), name
    optimize(parameters, range(from_step, from_step + 2), optimizer)
    expected = reference(from_step + 2)
    for name, parameter in parameters.items():
        assert torch.equal(full(parameter), expected[name]), name


def save_by_two(rank: int, folder: Path) -> None:
    for seed in range(NUM_SPLITS):
        pipe = split(seed, rank, 2)
        optimizer = optimize(dict(pipe.named_parameters()), range(2))
        pipe.num_steps = 2
        assert save(folder / f"split{seed}", pipe, optimizer, extra={"of": rank}) == folder / f"split{seed}" / "step-00000002"
        assert_continues(pipe, folder / f"split{seed}")
    pipe = sharded(rank, 2)
    optimizer = optimize(dict(pipe.named_parameters()), range(2))
    pipe.num_steps = 2
    save(folder / "sharded", pipe, optimizer)
    assert_continues(sharded(rank, 2), folder / "sharded")
    assert_continues(split(0, rank, 2), folder / "sharded")
    assert_continues(sharded(rank, 2), folder / "split0")
    check_random_numbers(rank, folder / "random")
    fail_alone(rank, folder)


def check_random_numbers(rank: int, folder: Path) -> None:
    pipe = split(0, rank, 2)
    torch.manual_seed(rank)
    save(folder, pipe)
    expected = torch.rand(4)
    load(folder, pipe)
    assert torch.equal(torch.rand(4), expected)  # each rank its own


def load_by_three(rank: int, folder: Path) -> None:
    for seed in range(NUM_SPLITS):
        assert_continues(split(10 + seed, rank, 3), folder / f"split{seed}")
    assert_continues(sharded(rank, 3), folder / "sharded")
    assert_continues(split(3, rank, 3), folder / "sharded")
    pipe = split(0, rank, 3)
    load(folder / "random", pipe)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(0)))  # rank 0's: there were two ranks


@contextlib.contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond that, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_alone(rank: int, folder: Path) -> None:
    """One rank fails, all are told, and nothing is lost."""
    runs = folder / "runs"
    parameters = {f"{rank}.weight": nn.Parameter(torch.ones(64, 64))}
    pipe = Pipe(parameters, rank, 2)
    pipe.num_steps = 1
    save(runs, pipe)
    pipe.num_steps = 2
    with (
        file_limit(4096) if rank == 1 else contextlib.nullcontext(),
        pytest.raises(CheckpointError, match=r"cannot save .*step-00000002: rank 1: File too large.*untouched"),
    ):
        save(runs, pipe)
    dist.barrier()
    assert [p.name for p in runs.iterdir()] == ["step-00000001"]
    dist.barrier()  # the next save begins with a folder of its own

    strange = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    own = torch.optim.SGD(parameters.values(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"rank 1: parameter group 0 of SGD holds a tensor"):
        save(runs, pipe, strange if rank == 1 else own)
    pipe.num_steps = 2 + rank
    with pytest.raises(CheckpointError, match="different steps: 2, 3"):
        save(runs, pipe)
    with pytest.raises(CheckpointError, match=r"does not fit this model: it holds '1.weight'.*the model has 'other.weight'"):
        load(runs, Pipe(parameters if rank == 0 else {"other.weight": torch.ones(1)}, rank, 2))
    dist.barrier()
    assert [p.name for p in runs.iterdir()] == ["step-00000001"]
    dist.barrier()

    pipe.num_steps = 2
    bad = save(runs, pipe)
    if rank == 0:
        data = bytearray((bad / "model-00001.safetensors").read_bytes())
        data[-1] ^= 1
        (bad / "model-00001.safetensors").write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"model-00001.safetensors is damaged.*fallback=True"):
        load(runs, pipe)
    with pytest.warns(UserWarning, match="step-00000001 is used") if rank == 0 else contextlib.nullcontext():
        assert load(runs, pipe, fallback=True)["step"] == 1


def die_while_saving(rank: int, folder: Path) -> None:
    pipe = Pipe({f"{rank}.weight": nn.Parameter(torch.ones(8))}, rank, 2)
    pipe.num_steps = 1
    save(folder / "runs", pipe)
    pipe.num_steps = 2
    if rank == 1:
        sys.addaudithook(lambda event, args: os._exit(7) if event == "open" and "rng-00001" in str(args[0]) else None)
    save(folder / "runs", pipe)


def run_rank(work: Callable[[int, Path], None], rank: int, num_ranks: int, folder: str, store: str) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=LIMIT_SECONDS),
        )
        work(rank, Path(folder))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{store}.error{rank}").write_text(traceback.format_exc())
        raise
    os._exit(0)  # as launch does: at the interpreter's end, a thread of Gloo's that is still there aborts the process


def run(work: Callable[[int, Path], None], num_ranks: int, folder: Path) -> tuple[list[int | None], str]:
    """Run ``work`` on ranks to their end; their exit codes and tracebacks."""
    store = folder / f"store-{work.__name__}"
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(work, r, num_ranks, str(folder), str(store)), daemon=True)
        for r in range(num_ranks)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        for process in ranks:
            process.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    return [p.exitcode for p in ranks], "\n".join(f.read_text() for f in sorted(folder.glob(f"{store.name}.error*")))


@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_saved_by_two_loaded_by_one_and_by_three(tmp_path: Path) -> None:
    # one test, also for a rank that fails alone: the ranks are started once
    codes, errors = run(save_by_two, 2, tmp_path)
    assert codes == [0, 0], errors
    expected = reference(2)
    for name in (*(f"split{seed}" for seed in range(NUM_SPLITS)), "sharded"):
        assert_continues(Pipe(dict(whole_parameters()), 0, 1), tmp_path / name)
        verify(tmp_path / name)
        model = read_model(tmp_path / name)
        exported = load_file(export_safetensors(tmp_path / name, tmp_path / f"{name}.safetensors"))
        assert model.keys() == exported.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(model[key], tensor)
            assert torch.equal(exported[key], tensor)
    for seed in range(NUM_SPLITS):
        written = [key for file in (tmp_path / f"split{seed}").glob("*/model-*.safetensors") for key in load_file(file)]
        assert sorted(written) == sorted(expected)  # once, though several held it
    codes, errors = run(load_by_three, 3, tmp_path)
    assert codes == [0, 0, 0], errors


@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_a_rank_that_dies_while_saving_leaves_the_last_good_one(tmp_path: Path) -> None:
    codes, _ = run(die_while_saving, 2, tmp_path)
    assert codes[1] == 7
    assert codes[0] not in (0, None)
    runs = tmp_path / "runs"
    assert latest(runs) == runs / "step-00000001"
    verify(runs)
    pipe = Pipe({f"{rank}.weight": nn.Parameter(torch.zeros(8)) for rank in range(2)}, 0, 1)
    load(runs, pipe)
    assert all((p == 1).all() for _, p in pipe.named_parameters())
    shutil.copytree(runs / "step-00000001", runs / ".step-00000009.part")  # as if rank 0 had been killed too
    pipe.num_steps = 2
    save(runs, pipe)
    assert sorted(p.name for p in runs.iterdir()) == ["step-00000001", "step-00000002"]
