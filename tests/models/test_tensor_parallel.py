"""A layer split over two ranks computes what the whole layer does, forwards and backwards."""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.models import BERT, GPT, Uneven, parallelize_layer

NUM_RANKS = 2
LIMIT_SECONDS = 240.0
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 20, "max_length": 8}
KINDS = ("gpt", "bert", "uneven", "dropout")


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(5)
    model: nn.Sequential
    if kind == "bert":
        model = BERT(**SHAPE)
    elif kind == "uneven":
        model = Uneven(**SHAPE, wide_layers=1, wide_hidden=24, wide_heads=6)
    else:
        model = GPT(**SHAPE, dropout=0.2 if kind == "dropout" else 0.0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def run_model(model: nn.Sequential, kind: str) -> dict[str, Tensor]:
    """Output and gradients of all parameters, sharded ones put together."""
    torch.manual_seed(6)
    x: Any = torch.randint(0, 20, (3, 7))
    if kind == "bert":
        x = (x, torch.arange(7).expand(3, 7) < torch.tensor([[7], [5], [2]]))
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {"output": y.detach()}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        grad: Any = p.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def run_rank(rank: int, folder: str) -> None:
    try:
        _run_rank(rank, Path(folder))
    except BaseException:
        (Path(folder) / f"error{rank}.txt").write_text(traceback.format_exc())
        raise


def _run_rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=LIMIT_SECONDS),
    )
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for kind in KINDS:
        model = make_model(kind)
        for layer in model:
            assert parallelize_layer(layer, mesh) is layer
        block: Any = model[1]
        found[f"{kind} local"] = tuple(block.attention.qkv.weight.to_local().shape)
        found[kind] = run_model(model, kind)
    for name, layer in {"foreign": nn.Linear(4, 4), "odd": GPT(**{**SHAPE, "num_heads": 1})[1]}.items():
        try:
            parallelize_layer(layer, mesh)
        except InputError as error:
            found[f"refused {name}"] = str(error)
    torch.save(found, folder / f"found{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = [context.Process(target=run_rank, args=(r, str(folder)), daemon=True) for r in range(NUM_RANKS)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_SECONDS)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    errors = "\n".join(file.read_text() for file in sorted(folder.glob("error*.txt")))
    assert all(process.exitcode == 0 for process in ranks), errors or "a rank did not end in time"
    return [torch.load(folder / f"found{r}.pt", weights_only=True) for r in range(NUM_RANKS)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", KINDS)
def test_split_layers_equal_whole_ones(kind: str, found: list[dict[str, Any]]) -> None:
    whole = run_model(make_model(kind), kind)
    for split in found:
        assert split[f"{kind} local"][0] * NUM_RANKS == 3 * SHAPE["hidden"]
        assert split[kind].keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(split[kind][name], value, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.multiprocess
def test_what_cannot_be_split_is_refused(found: list[dict[str, Any]]) -> None:
    for split in found:
        assert "Linear cannot be split" in split["refused foreign"]
        assert "1 heads cannot be split over tp=2" in split["refused odd"]
