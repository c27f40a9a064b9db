"""Where torch.distributed.checkpoint (DCP) writes to and reads from.

DCP plans: it finds what each rank holds, has replicas written once, and maps the chunks that were saved to those asked for. Its
own file storage keeps the plan as a pickle, which could run anything when loaded. Ours keeps it in the manifest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from wavetrain.errors import CheckpointError
from wavetrain.runtime.checkpoint.files import (
    Chunk,
    Entry,
    Manifest,
    StoredTensor,
    key_in_file,
    kind_of,
    open_safetensors,
    read_block,
    sync_folder,
    write_manifest,
    write_safetensors,
)
from wavetrain.runtime.checkpoint.folders import draft_of, replaced_of


class Writer(StorageWriter):
    """Writes this rank's tensors to a draft; on rank 0 then the manifest, and gives the draft its name.

    Args:
        target: the checkpoint's folder. Its draft exists.
        rank: of this process.
        about: on rank 0, a manifest without files and tensors.
    """

    def __init__(self, target: Path, rank: int, about: Manifest | None) -> None:
        self._target, self._draft, self._rank, self._about = target, draft_of(target), rank, about

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the draft exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file for each kind of tensor; the results carry the chunk and the file's size and hash."""
        by_kind: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            by_kind.setdefault(kind_of(item.index.fqn), []).append(item)
        results = []
        for kind, items in by_kind.items():
            name = f"{kind}-{self._rank:05d}.safetensors"
            stored = write_safetensors(self._draft / name, [_entry(item, planner) for item in items])
            for item in items:
                chunk = _data(item).chunk
                where = Chunk(file=name, offsets=tuple(chunk.offsets), shape=tuple(chunk.sizes))
                results.append(WriteResult(index=item.index, size_in_bytes=0, storage_data=(where, stored)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 once every rank has written: from here on the checkpoint exists, or it does not."""
        files, chunks = {}, dict[str, list[Chunk]]()
        for result in (r for of_rank in results for r in of_rank):
            where, stored = result.storage_data
            files[where.file] = stored
            chunks.setdefault(result.index.fqn, []).append(where)
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            about = cast("TensorStorageMetadata", about)
            tensors[name] = StoredTensor(dtype=about.properties.dtype, shape=tuple(about.size), chunks=tuple(chunks[name]))
        assert self._about is not None
        write_manifest(self._draft, replace(self._about, files=files, tensors=tensors))
        older = replaced_of(self._target)
        if self._target.exists():
            self._target.rename(older)
        try:
            self._draft.rename(self._target)
        except OSError:
            with contextlib.suppress(OSError):
                older.rename(self._target)
            raise
        sync_folder(self._target.parent)
        shutil.rmtree(older, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _data(item: WriteItem) -> Any:
    if item.tensor_data is None:  # DCP would pickle what is not a tensor
        raise CheckpointError(f"{item.index.fqn!r} is not a tensor")
    return item.tensor_data


def _entry(item: WriteItem, planner: SavePlanner) -> Entry:
    data = _data(item)

    def read() -> Tensor:
        return cast("Tensor", planner.resolve_data(item))

    return Entry(name=key_in_file(item.index.fqn), dtype=data.properties.dtype, shape=tuple(data.chunk.sizes), read=read)


class Reader(StorageReader):
    """Reads the tensors that DCP's plan asks for. Nothing but tensors can be asked for.

    Args:
        folder: the checkpoint's.
        manifest: of that folder, checked.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(state_dict_metadata={name: _metadata(stored) for name, stored in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the manifest has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, Any]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, wanted in by_file.items():
            with open_safetensors(self._folder / name) as file:
                for chunk, item in wanted:
                    block = read_block(file, item.storage_index.fqn, chunk, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(block)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self._manifest.tensors[index.fqn].chunks
        return next(chunk for chunk in chunks if index.offset is None or chunk.offsets == tuple(index.offset))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _metadata(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.shape)) for c in stored.chunks]
    return TensorStorageMetadata(properties=TensorProperties(dtype=stored.dtype), size=torch.Size(stored.shape), chunks=chunks)


def save_tensors(tensors: Mapping[str, Tensor], writer: Writer, *, distributed: bool) -> None:
    """DCP's save of a flat dict of tensors. Collective where ``distributed``."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _quietly(lambda: save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not distributed))


def load_tensors(tensors: Mapping[str, Tensor], reader: Reader, *, distributed: bool) -> None:
    """DCP's load in place into a flat dict of tensors; each rank may ask for other names. Collective where ``distributed``."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _quietly(lambda: load(dict(tensors), storage_reader=reader, planner=planner, no_dist=not distributed))


def _quietly(action: Callable[[], object]) -> None:
    with warnings.catch_warnings():  # a single process without a group is what we asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        action()
