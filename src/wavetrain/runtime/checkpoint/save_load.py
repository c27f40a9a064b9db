"""Checkpoints that fit any plan: saved by P ranks in W waves, loaded by whatever comes next.

    save(directory, pipe, optimizer)      on every rank: directory/step-00000120, whole or not at all
    load(directory, pipe, optimizer)      on every rank: the newest one, checked to the last byte before anything is changed
    latest, verify, read_extra            one process: what is there, is it good, what was said with it
    read_model, export_safetensors        one process: the whole model, without the code that made it

Every rank hands over its tensors under canonical names, so nothing in a checkpoint says how the model was split; replicas and
tied weights are written once. A checkpoint gets its name only when every rank has written its part down to the disk: a crash at
any moment leaves the ones before it. Loading reads JSON and safetensors and runs no code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from wavetrain.errors import CheckpointError, InputError
from wavetrain.runtime.checkpoint.files import (
    Entry,
    Manifest,
    check_files,
    read_manifest,
    read_tensor,
    write_safetensors,
)
from wavetrain.runtime.checkpoint.folders import candidates, checkpoints, draft_of, folder_of, prune, tidy
from wavetrain.runtime.checkpoint.state import (
    OptimizerLoad,
    Scheduler,
    from_plain,
    merge_optimizers,
    optimizer_state,
    parameter_names,
    random_state,
    scheduler_load,
    scheduler_state,
    set_random_state,
    some,
    to_plain,
)
from wavetrain.runtime.checkpoint.storage import Reader, Writer, load_tensors, save_tensors
from wavetrain.runtime.checkpoint.team import Ranks, Team, describe, failures_of

PathLike: TypeAlias = str | os.PathLike[str]

_RESERVED = ("checkpoint", "step")


class Trained(Protocol):
    """What can be saved: a :class:`Pipeline`, or anything with these.

    Names are canonical: the same on every rank and under every plan. A tied weight goes by its first name in the whole model,
    also on a rank that holds only the layer of its second. A name may come twice (two routes through one rank): all are loaded.
    """

    num_steps: int

    @property
    def mesh(self) -> Ranks: ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]: ...


def save(
    directory: PathLike,
    pipe: Trained,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Scheduler | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``directory/step-<pipe.num_steps>``, whole or not at all. Collective; the directory must be one that all ranks see.

    Args:
        directory: of this run's checkpoints; made if missing. A checkpoint of the same step in it is replaced.
        pipe: the model, and how many steps it has been trained.
        optimizer: this rank's.
        scheduler: of the learning rate; rank 0's is saved.
        extra: plain data to be given back by :func:`load`, such as the data position; rank 0's is saved.
        keep: how many checkpoints up to this step are kept; older ones are removed once this one is there.

    Raises:
        CheckpointError: on every rank, if any could not write; those before are untouched.
    """
    if keep < 1:
        raise InputError(f"keep={keep}: at least 1 checkpoint, the one being saved, must be kept")
    team = Team(pipe.mesh)
    folder = Path(directory)
    target = folder_of(folder, pipe.num_steps)
    what = f"cannot save {target}"
    tensors: dict[str, Tensor] = {}

    def begin() -> tuple[int, dict[str, Any] | None]:
        tensors.update(
            {f"model.{name}": held[0] for name, held in _holders(pipe).items()},
            **{f"rng.{team.rank:05d}.{name}": t for name, t in random_state().items()},
        )
        plain = None
        if optimizer is not None:
            of_optimizer, plain = optimizer_state(optimizer, parameter_names(pipe.named_parameters()))
            tensors.update(of_optimizer)
        if team.rank == 0:
            tidy(folder)
            draft_of(target).mkdir(parents=True)
        return pipe.num_steps, plain

    def about_all() -> Manifest | None:
        if team.rank != 0:
            return None
        if len({step for step, _ in parts}) > 1:
            raise CheckpointError(f"the ranks are at different steps: {', '.join(str(step) for step, _ in parts)}")
        return Manifest(
            step=pipe.num_steps,
            world_size=team.world_size,
            files={},
            tensors={},
            optimizer=merge_optimizers([plain for _, plain in parts]),
            scheduler=None if scheduler is None else scheduler_state(scheduler),
            extra=_plain_extra(extra or {}),
        )

    try:
        parts = team.gather(begin, what)
        about = team.check(about_all, what)
        save_tensors(tensors, Writer(target, team.rank, about), distributed=team.distributed)
    except BaseException as error:
        if team.rank == 0:
            shutil.rmtree(draft_of(target), ignore_errors=True)
        if isinstance(error, CheckpointException):
            raise CheckpointError(f"{what}: {team.tell(failures_of(error))}; earlier checkpoints are untouched") from None
        raise
    if team.rank == 0:
        prune(folder, pipe.num_steps, keep)
    return target


def load(
    path: PathLike,
    pipe: Trained,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Scheduler | None = None,
    fallback: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint into ``pipe``, and into the optimizer and scheduler where given. Collective.

    Every byte is checked, and that everything fits, before anything is changed. ``pipe.num_steps`` is set. Random number
    generators are put back: each rank's own where there are as many ranks as there were, else all to rank 0's.

    Args:
        path: a run's directory, for the newest checkpoint in it (the highest step), or one ``step-…`` folder.
        pipe: the model, in any split.
        optimizer: this rank's, with the same options for the same parameters as were saved; left out, only the model is loaded.
        scheduler: of the same class as was saved.
        fallback: if the checkpoint is damaged, use the newest before it that is not, and warn which.

    Returns:
        The ``extra`` that was saved, with ``"step"`` and, as ``"checkpoint"``, the folder that was used.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it does not fit.
    """
    team = Team(pipe.mesh)
    found = team.gather(lambda: candidates(Path(path)) if team.rank == 0 else [], f"cannot load {os.fspath(path)}")[0]
    folder, manifest = _first_good(found, team, fallback)
    what = f"{folder} does not fit"
    holders = team.check(lambda: _holders(pipe), what)
    fits = team.gather(lambda: _compare(holders, manifest), what)
    _refuse_misfits(folder, fits, manifest)
    names = parameter_names(pipe.named_parameters())
    state = team.check(lambda: None if optimizer is None else OptimizerLoad(optimizer, names, manifest), what)
    set_scheduler = team.check(lambda: None if scheduler is None else scheduler_load(scheduler, manifest), what)
    own = team.rank if manifest.world_size == team.world_size else 0
    generators = {
        name.partition(".")[2]: torch.empty(stored.shape, dtype=stored.dtype)
        for name, stored in manifest.of_kind("rng").items()
        if name.startswith(f"{own:05d}.")
    }
    wanted = {f"model.{name}": tensors for name, tensors in holders.items()}
    wanted |= {} if state is None else state.tensors
    wanted |= {f"rng.{own:05d}.{name}": [tensor] for name, tensor in generators.items()}
    try:
        load_tensors(
            {name: tensors[0] for name, tensors in wanted.items()}, Reader(folder, manifest), distributed=team.distributed
        )
    except CheckpointException as error:
        raise CheckpointError(f"cannot load {folder}: {team.tell(failures_of(error))}") from None
    for first, *others in wanted.values():
        for other in others:
            other.copy_(first)
    if state is not None:
        state.apply()
    if set_scheduler is not None:
        set_scheduler()
    set_random_state(generators)
    pipe.num_steps = manifest.step
    return _extra(folder, manifest)


def latest(directory: PathLike) -> Path | None:
    """The checkpoint of the highest step in a run's directory; None if there is none. It is not checked."""
    return next(iter(checkpoints(Path(directory))), None)


def verify(path: PathLike) -> None:
    """Check every byte of a checkpoint (or of a directory's newest) against what was written.

    Raises:
        CheckpointError: it is damaged; the message names the file.
    """
    _open(path, kinds=None)


def read_extra(path: PathLike) -> dict[str, Any]:
    """The ``extra`` of a checkpoint (or of a directory's newest) with ``"step"`` and ``"checkpoint"``, from its manifest."""
    folder = candidates(Path(path))[0]
    return _extra(folder, read_manifest(folder))


def read_model(path: PathLike) -> dict[str, Tensor]:
    """Every parameter and buffer of a checkpoint (or of a directory's newest) by canonical name, whole, on the CPU."""
    folder, manifest = _open(path, kinds=("model",))
    return {name: read_tensor(folder, f"model.{name}", stored) for name, stored in manifest.of_kind("model").items()}


def export_safetensors(path: PathLike, target_file: PathLike) -> Path:
    """Write the model of a checkpoint (or of a directory's newest) to one safetensors file, by canonical name.

    One tensor at a time is in memory. An existing file is replaced, whole or not at all.
    """
    folder, manifest = _open(path, kinds=("model",))
    target = Path(target_file)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    entries = [
        Entry(name=name, dtype=stored.dtype, shape=stored.shape, read=partial(read_tensor, folder, f"model.{name}", stored))
        for name, stored in manifest.of_kind("model").items()
    ]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(draft, entries)
        draft.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {describe(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return target


def _holders(pipe: Trained) -> dict[str, list[Tensor]]:
    """What this rank holds of the model, by name; more than one tensor where a name comes more than once."""
    holders: dict[str, list[Tensor]] = {}
    for name, tensor in chain(pipe.named_parameters(), pipe.named_buffers()):
        holders.setdefault(name, []).append(tensor.detach())
    return holders


def _compare(holders: Mapping[str, list[Tensor]], manifest: Manifest) -> tuple[set[str], list[str]]:
    """The names of this rank, and what is wrong with those that are saved."""
    wrong = []
    for name, (tensor, *_) in holders.items():
        stored = manifest.tensors.get(f"model.{name}")
        if stored is not None and stored.shape != tuple(tensor.shape):
            wrong.append(f"{name!r} has shape {stored.shape} in it, {tuple(tensor.shape)} here")
        elif stored is not None and stored.dtype != tensor.dtype:
            wrong.append(f"{name!r} is {stored.dtype} in it, {tensor.dtype} here")
    return set(holders), wrong


def _refuse_misfits(folder: Path, fits: Iterable[tuple[set[str], list[str]]], manifest: Manifest) -> None:
    """The same on every rank: raise unless the names of all ranks together are those of the checkpoint, in shape and dtype."""
    held, saved = set[str](), set(manifest.of_kind("model"))
    wrong: dict[str, None] = {}
    for names, problems in fits:
        held |= names
        wrong |= dict.fromkeys(problems)
    problems = [*list(wrong)[:3], *([f"{len(wrong) - 3} more like these"] if len(wrong) > 3 else [])]
    if held - saved:
        problems.insert(0, f"the model has {some(held - saved)}, which it does not hold")
    if saved - held:
        problems.insert(0, f"it holds {some(saved - held)}, which the model does not have")
    if problems:
        raise CheckpointError(f"{folder} does not fit this model: {'; '.join(problems)}; build the model that was saved")


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    for key in _RESERVED:
        if key in extra:
            raise CheckpointError(f"extra has the key {key!r}, which load() adds itself; rename it")
    plain: dict[str, Any] = to_plain(dict(extra), "extra")
    return plain


def _extra(folder: Path, manifest: Manifest) -> dict[str, Any]:
    return {**from_plain(dict(manifest.extra)), "step": manifest.step, "checkpoint": str(folder)}


def _open(path: PathLike, kinds: tuple[str, ...] | None) -> tuple[Path, Manifest]:
    """A checkpoint whose files of those kinds (all, if None) have been checked, by this process alone."""
    folder = candidates(Path(path))[0]
    manifest = read_manifest(folder)
    check_files(folder, manifest, [name for name in manifest.files if kinds is None or name.partition("-")[0] in kinds])
    return folder, manifest


def _first_good(found: list[Path], team: Team, fallback: bool) -> tuple[Path, Manifest]:
    """The first checkpoint that is whole; each rank hashes its share of the files."""

    def checked() -> Manifest:
        manifest = read_manifest(folder)
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size_bytes, name))
        check_files(folder, manifest, by_size[team.rank :: team.world_size])
        return manifest

    damaged: list[str] = []
    for folder in found:
        try:
            manifest = team.check(checked, f"cannot load {folder}")
        except CheckpointError as error:
            damaged.append(str(error))
            if not fallback:
                hint = f"; {len(found) - 1} before it: fallback=True uses the newest good one" if len(found) > 1 else ""
                raise CheckpointError(f"{error}{hint}") from None
            continue
        if damaged and team.rank == 0:
            warnings.warn(f"{'; '.join(damaged)}; {folder} is used instead", stacklevel=3)
        return folder, manifest
    raise CheckpointError(f"no checkpoint is whole: {'; '.join(damaged)}")
