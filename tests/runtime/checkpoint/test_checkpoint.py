from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from wavetrain.errors import CheckpointError, InputError
from wavetrain.runtime.checkpoint import (
    export_safetensors,
    latest,
    load,
    read_extra,
    read_model,
    save,
    verify,
)
from wavetrain.runtime.checkpoint.files import MANIFEST, Manifest, read_manifest
from wavetrain.runtime.checkpoint.folders import draft_of, folder_of
from wavetrain.runtime.checkpoint.storage import Reader, Writer, load_tensors


class Pipe:
    """Named tensors of one process, in the place of a pipeline."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]] = ()) -> None:
        self.num_steps = 0
        self.mesh = SimpleNamespace(rank=0, world_size=1)
        self._parameters, self._buffers = list(parameters), list(buffers)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return self._parameters

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return self._buffers

    def parameters(self) -> list[Tensor]:
        return [p for _, p in self._parameters]


def make(seed: int = 0) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    return model, Pipe(model.named_parameters(), model.named_buffers())


def train(model: nn.Module, pipe: Pipe, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        pipe.num_steps += 1


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    model, pipe = make()
    optimizer = OPTIMIZERS[name](pipe.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5)
    train(model, pipe, optimizer, 3, scheduler)
    made = save(tmp_path, pipe, optimizer, scheduler=scheduler, extra={"position": 7, "best": math.inf, "sizes": {8: 2}})
    assert made == tmp_path / "step-00000003"
    train(model, pipe, optimizer, 3, scheduler)

    again, other_pipe = make(seed=1)
    other = OPTIMIZERS[name](other_pipe.parameters())
    other_scheduler = torch.optim.lr_scheduler.MultiStepLR(other, milestones=[2, 4], gamma=0.5)
    train(again, other_pipe, other, 1, other_scheduler)  # whatever it held is replaced
    extra = load(tmp_path, other_pipe, other, scheduler=other_scheduler)
    assert extra == {"position": 7, "best": math.inf, "sizes": {8: 2}, "step": 3, "checkpoint": str(made)}
    assert other_pipe.num_steps == 3
    train(again, other_pipe, other, 3, other_scheduler)
    assert_equal(whole(again), whole(model))
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_random_numbers_continue(tmp_path: Path) -> None:
    _, pipe = make()
    random.gauss(0, 1), np.random.standard_normal()  # both keep a second value for the next call
    save(tmp_path, pipe)

    def draw() -> list[float]:
        return [*torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand()]

    expected = draw()
    draw()
    load(tmp_path, pipe)
    assert draw() == expected


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm-up, then": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_continue(name: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        model, pipe = make()
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        return model, pipe, optimizer, SCHEDULERS[name](optimizer)

    model, pipe, optimizer, scheduler = start()
    train(model, pipe, optimizer, 3, scheduler)
    save(tmp_path, pipe, optimizer, scheduler=scheduler)
    train(model, pipe, optimizer, 3, scheduler)
    other_model, other_pipe, other, other_scheduler = start()
    load(tmp_path, other_pipe, other, scheduler=other_scheduler)
    assert other.param_groups[0]["lr"] != 0.01
    train(other_model, other_pipe, other, 3, other_scheduler)
    assert_equal(whole(other_model), whole(model))


def test_nothing_is_a_pickle_and_safetensors_reads_it(tmp_path: Path) -> None:
    model, pipe = make()
    optimizer = torch.optim.AdamW(pipe.parameters())
    train(model, pipe, optimizer, 1)
    folder = save(tmp_path / "runs" / "one", pipe, optimizer)
    assert {f.name for f in folder.iterdir()} == {
        MANIFEST,
        "model-00000.safetensors",
        "optimizer-00000.safetensors",
        "rng-00000.safetensors",
    }
    assert_equal(load_file(folder / "model-00000.safetensors"), whole(model))
    assert json.loads((folder / MANIFEST).read_text())["step"] == 1
    assert_equal(read_model(tmp_path / "runs" / "one"), whole(model))
    exported = export_safetensors(folder, tmp_path / "out" / "model.safetensors")
    assert_equal(load_file(exported), whole(model))
    assert [f.name for f in exported.parent.iterdir()] == ["model.safetensors"]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=11),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_any_tensors_of_any_names(shapes: dict[str, tuple[torch.dtype, list[int]]], seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in shapes.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=numbers)
        tensors[name] = raw.view(dtype).squeeze(-1) if shape else raw.view(dtype)[0]
    with tempfile.TemporaryDirectory() as folder:
        save(folder, Pipe([], tensors.items()))
        empty = {name: torch.zeros_like(t) for name, t in tensors.items()}
        load(folder, Pipe([], empty.items()))
        model = read_model(folder)
        assert model.keys() == tensors.keys()
        for name, tensor in tensors.items():
            for found in (empty[name], model[name]):
                assert found.shape == tensor.shape
                assert _bits(found) == _bits(tensor)


def _bits(tensor: Tensor) -> bytes:
    found: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def save_from_ranks(folder: Path, of_ranks: list[dict[str, Tensor]]) -> None:
    """What torch.distributed.checkpoint does on several ranks, one after the other in this process."""
    target = folder_of(folder, 0)
    draft_of(target).mkdir(parents=True)
    about = Manifest(step=0, world_size=len(of_ranks), files={}, tensors={}, optimizer=None, scheduler=None, extra={})
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in of_ranks]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(of_ranks[rank], is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writers = [Writer(target, rank, about) for rank in range(len(of_ranks))]
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)


NAMES = [f"block{i}.weight" for i in range(5)]
SPLITS = st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(SPLITS, SPLITS)
def test_any_split_is_read_in_any_other(saved: list[set[str]], loaded: list[set[str]]) -> None:
    values = {f"model.{name}": torch.full((2, 3), float(i)) for i, name in enumerate(NAMES)}
    held = set().union(*saved)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_from_ranks(folder, [{f"model.{n}": values[f"model.{n}"] for n in names} for names in saved])
        verify(folder)
        manifest = read_manifest(folder_of(folder, 0))
        assert set(manifest.of_kind("model")) == held
        written = [key for file in folder_of(folder, 0).glob("*.safetensors") for key in load_file(file)]
        assert sorted(written) == sorted(held)  # a replica is written once
        for names in loaded:
            wanted = {f"model.{n}": torch.zeros(2, 3) for n in names & held}
            load_tensors(wanted, Reader(folder_of(folder, 0), manifest), distributed=False)
            assert_equal(wanted, {n: values[n] for n in wanted})


def test_two_copies_of_one_name_are_written_once_and_both_loaded(tmp_path: Path) -> None:
    def start(value: float) -> tuple[Pipe, torch.optim.Optimizer]:
        copies = [nn.Parameter(torch.full((2,), value)) for _ in range(2)]
        pipe = Pipe([("w", copies[0]), ("w", copies[1])])
        optimizer = torch.optim.Adam(pipe.parameters())
        for copy in copies:
            copy.grad = torch.ones(2)
        optimizer.step()
        return pipe, optimizer

    pipe, optimizer = start(1.0)
    save(tmp_path, pipe, optimizer)
    other_pipe, other = start(2.0)
    load(tmp_path, other_pipe, other)
    for _, copy in other_pipe.named_parameters():
        assert torch.equal(copy, pipe.named_parameters()[0][1])
        assert torch.equal(other.state[copy]["exp_avg"], optimizer.state[pipe.parameters()[0]]["exp_avg"])
    assert list(read_model(tmp_path)) == ["w"]


def test_a_parameter_not_stepped_yet_has_no_state(tmp_path: Path) -> None:
    _, pipe = make()
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe.parameters()[0].grad = torch.ones_like(pipe.parameters()[0])
    optimizer.step()
    save(tmp_path, pipe, optimizer)
    again, other_pipe = make(seed=1)
    other = torch.optim.Adam(other_pipe.parameters())
    train(again, other_pipe, other, 1)
    load(tmp_path, other_pipe, other)
    assert [len(other.state.get(p, {})) for p in other_pipe.parameters()] == [3] + [0] * (len(other_pipe.parameters()) - 1)


def groups(pipe: Pipe, *, decayed: tuple[str, ...], lr: float = 0.1) -> list[dict[str, Any]]:
    named = pipe.named_parameters()
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": 0.5, "lr": lr},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0, "lr": lr},
    ]


def test_groups_are_matched_by_parameter(tmp_path: Path) -> None:
    model, pipe = make()
    decayed = ("0.weight", "3.weight")
    optimizer = torch.optim.AdamW(groups(pipe, decayed=decayed, lr=0.3))
    train(model, pipe, optimizer, 1)
    save(tmp_path, pipe, optimizer)

    other = torch.optim.AdamW([*reversed(groups(pipe, decayed=decayed)), {"params": []}])  # in another order
    load(tmp_path, pipe, other)
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups[:2]] == [(0.3, 0.0), (0.3, 0.5)]
    assert other.param_groups[0]["betas"] == (0.9, 0.999)

    before = whole(model)
    for wrong, message in [
        (torch.optim.AdamW(groups(pipe, decayed=("0.weight", "0.bias"))), r"'0.weight' and '0.bias'.*weight_decay = 0.5 and 0.0"),
        (torch.optim.SGD(pipe.parameters(), lr=0.1), "state of AdamW, not of SGD"),
        (torch.optim.AdamW([nn.Parameter(torch.ones(9))]), r"shape \(9,\) that is not a parameter"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, pipe, wrong)
    assert_equal(whole(model), before)


def test_what_is_not_there_cannot_be_loaded(tmp_path: Path) -> None:
    _, pipe = make()
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        load(tmp_path, pipe)
    with pytest.raises(CheckpointError, match="no such checkpoint; there is none"):
        load(tmp_path / "step-00000001", pipe)
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None
    save(tmp_path, pipe)
    with pytest.raises(CheckpointError, match="no such checkpoint; there are step-00000000"):
        load(tmp_path / "step-00000001", pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="holds no optimizer; leave"):
        load(tmp_path, pipe, optimizer)
    with pytest.raises(CheckpointError, match="holds no scheduler; leave"):
        load(tmp_path, pipe, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))


def test_what_is_not_plain_is_refused_by_name(tmp_path: Path) -> None:
    _, pipe = make()
    with pytest.raises(CheckpointError, match=r"extra\['f'\]\[0\] is a function"):
        save(tmp_path, pipe, extra={"f": [lambda: 0]})
    with pytest.raises(CheckpointError, match="key 'step'"):
        save(tmp_path, pipe, extra={"step": 3})
    with pytest.raises(InputError, match="keep=0"):
        save(tmp_path, pipe, keep=0)
    with pytest.raises(CheckpointError, match="complex128, which safetensors cannot hold"):
        save(tmp_path, Pipe([("w", torch.zeros(2, dtype=torch.complex128))]))
    with pytest.raises(CheckpointError, match="'__metadata__' cannot be the name"):
        save(tmp_path, Pipe([("__metadata__", torch.zeros(2))]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("0.weight"), "it holds '0.weight', which the model does not have"),
        (lambda m: m.update(new=torch.zeros(1), more=torch.zeros(2)), "the model has 'more', 'new', which it does not hold"),
        (lambda m: m.update({"0.weight": torch.zeros(3, 4)}), r"'0.weight' has shape \(6, 4\) in it, \(3, 4\) here"),
        (lambda m: m.update({"0.weight": torch.zeros(6, 4).half()}), "'0.weight' is torch.float32 in it, torch.float16 here"),
    ],
)
def test_a_model_that_does_not_fit(change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    _, pipe = make()
    save(tmp_path, pipe)
    changed = {name: torch.zeros_like(t) for name, t in [*pipe.named_parameters(), *pipe.named_buffers()]}
    change(changed)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, Pipe(changed.items()))
    assert all((t == 0).all() for t in changed.values())


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda f: flip(f / "model-00000.safetensors"), "model-00000.safetensors is damaged: its SHA-256"),
    "the last bit": (lambda f: flip(f / "optimizer-00000.safetensors", 1.0), "optimizer-00000.safetensors is damaged"),
    "cut short": (lambda f: os.truncate(f / "model-00000.safetensors", 100), "damaged: 100 bytes"),
    "a missing file": (lambda f: (f / "rng-00000.safetensors").unlink(), "rng-00000.safetensors: No such file"),
    "a missing manifest": (lambda f: (f / MANIFEST).unlink(), "not a complete checkpoint"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "manifest.json is damaged or not a checkpoint's"),
    "another JSON": (lambda f: (f / MANIFEST).write_text("[1]"), "manifest.json is damaged or not a checkpoint's"),
    "an edited manifest": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"lr": 0.25', '"lr": 0.75')),
        "manifest.json is damaged: its SHA-256",
    ),
    "a newer one": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"version": 1', '"version": 2')),
        "format version 2, this wavetrain reads up to 1; upgrade",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_only_then_is_another_used(kind: str, tmp_path: Path) -> None:
    model, pipe = make()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.25)
    train(model, pipe, optimizer, 1)
    good = save(tmp_path, pipe, optimizer)
    expected = whole(model)
    train(model, pipe, optimizer, 1)
    bad = save(tmp_path, pipe, optimizer)
    damage, message = DAMAGE[kind]
    verify(bad)
    damage(bad)
    with pytest.raises(CheckpointError, match=message):
        verify(bad)

    for path in (tmp_path, bad):
        now = whole(model)
        with pytest.raises(CheckpointError, match=f"{message}.*fallback=True"):
            load(path, pipe, optimizer)
        assert_equal(whole(model), now)
        assert pipe.num_steps == 2
        with pytest.warns(UserWarning, match=f"{message}.*step-00000001 is used instead"):
            extra = load(path, pipe, optimizer, fallback=True)
        assert (extra["checkpoint"], pipe.num_steps) == (str(good), 1)
        assert_equal(whole(model), expected)
        pipe.num_steps = 2
    shutil.rmtree(good)
    with pytest.raises(CheckpointError, match=f"no checkpoint is whole.*{message}"):
        load(tmp_path, pipe, optimizer, fallback=True)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    from wavetrain.runtime.checkpoint import files

    _, pipe = make()
    folder = save(tmp_path, pipe)
    text = (folder / MANIFEST).read_text().replace("model-00000.safetensors", "../model-00000.safetensors")
    body = json.loads(text)
    del body["sha256"]
    (folder / MANIFEST).write_text(json.dumps({"sha256": files._digest(body), **body}))
    with pytest.raises(CheckpointError, match=r"does not hold what a manifest should.*\.\./model"):
        load(tmp_path, pipe)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    _, pipe = make()
    for step in (1, 2, 3, 100_000_000):
        pipe.num_steps = step
        save(tmp_path, pipe, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-100000000"]
    pipe.num_steps = 2  # taken up again from earlier: what is beyond stays until it is reached
    save(tmp_path, pipe, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-100000000"]
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    _, pipe = make()
    save(tmp_path, pipe, extra={"n": 1})
    save(tmp_path, pipe, extra={"n": 2})
    assert read_extra(tmp_path)["n"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("when", [1, 3, 4, 5])
def test_a_full_disk_leaves_what_was_there(error: OSError, when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pipe = make()
    optimizer = torch.optim.AdamW(pipe.parameters())
    train(model, pipe, optimizer, 1)
    save(tmp_path, pipe, optimizer)
    pipe.num_steps = 2
    calls = 0

    def fsync(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match=f"cannot save .*step-00000002: {error.strerror}.*untouched"):
            save(tmp_path, pipe, optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    load(tmp_path, pipe, optimizer)


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    _, pipe = make()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save .*Not a directory"):
        save(tmp_path / "file" / "runs", pipe)
    save(tmp_path, pipe)
    with pytest.raises(CheckpointError, match="cannot write"):
        export_safetensors(tmp_path, tmp_path / "file" / "model.safetensors")


def test_one_process_needs_no_words_about_it(tmp_path: Path) -> None:
    _, pipe = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, pipe)
        load(tmp_path, pipe)
    pipe.mesh = SimpleNamespace(rank=0, world_size=2)
    with pytest.raises(InputError, match=r"mesh has 2 ranks.*default group has 1"):
        save(tmp_path, pipe)


def crash_at_every_moment(folder: str) -> None:
    """Save over and over in a child, each dying one file operation later than the one before; check what it left."""
    torch.set_num_threads(1)
    directory = Path(folder) / "runs"
    moments = []
    for same_step in (False, True):
        for moment in range(1000):
            shutil.rmtree(directory, ignore_errors=True)
            pipe = Pipe([("w", torch.zeros(3))])
            pipe.num_steps = 1
            save(directory, pipe, keep=1)
            child = os.fork()
            if child == 0:
                _die_at(moment, str(directory))
                pipe.named_parameters()[0][1].fill_(1.0)
                pipe.num_steps = 1 if same_step else 2
                save(directory, pipe, keep=1)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found = Pipe([("w", torch.full((3,), 9.0))])
            load(directory, found)
            value = sorted(set(found.named_parameters()[0][1].tolist()))
            assert value in ([0.0], [1.0]), (same_step, moment, value)
            assert same_step or found.num_steps == 1 + value[0]
            assert value == [1.0] or code == 7
            pipe.num_steps = 3
            save(directory, pipe, keep=2)  # and the next save finds its way
            names = sorted(p.name for p in directory.iterdir())
            assert len(names) == 2, names
            assert names == [n for n in names if n.startswith("step-") and "." not in n], names
            verify(directory / names[0])
            if code == 0:
                moments.append(moment)
                break
    (Path(folder) / "moments").write_text(json.dumps(moments))


def _die_at(moment: int, directory: str) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and any(
            directory in str(a) for a in arguments[:2]
        ):
            seen += 1
            if seen > moment:
                os._exit(7)

    sys.addaudithook(hook)


def test_a_crash_at_any_moment_leaves_a_good_one(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=crash_at_every_moment, args=(str(tmp_path),), daemon=True)
    process.start()
    process.join(300)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0
    assert all(moment > 8 for moment in json.loads((tmp_path / "moments").read_text()))
