"""A checkpoint on disk: safetensors files, and a manifest in JSON that is written last.

    runs/
      step-00000120/
        manifest.json                  everything below, with sizes and SHA-256; and its own SHA-256
        model-00000.safetensors        what rank 0 wrote of the model, by canonical name
        model-00001.safetensors
        optimizer-00000.safetensors    "<parameter>.<state>", e.g. "block0.weight.exp_avg"
        rng-00000.safetensors          random number generators of rank 0
      .step-00000160.part/             being written, or left by a crash; the next save removes it

No file holds code or pickles, so reading one runs nothing. The safetensors files are written here, not by the safetensors
package, because a tensor at a time is then copied to the host and hashed on its way, and a full disk is an ``OSError``. The
format (github.com/huggingface/safetensors): eight bytes of header length, little-endian; the header, JSON; the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wavetrain.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "wavetrain checkpoint"
VERSION = 1

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FILE_NAME = re.compile(r"[a-z]+-\d{5,}\.safetensors")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A safetensors file as it was when written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a tensor and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor, in one chunk or, if it was sharded, in several."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. Names of tensors begin with their kind: ``model.``, ``optimizer.`` or ``rng.``."""

    step: int
    world_size: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    optimizer: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    extra: Mapping[str, Any]

    def of_kind(self, kind: str) -> dict[str, StoredTensor]:
        """The tensors of a kind, by the name they have in their file."""
        start = f"{kind}."
        return {name.removeprefix(start): stored for name, stored in self.tensors.items() if name.startswith(start)}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to be written: ``read`` is called once, when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def kind_of(name: str) -> str:
    """``"model"`` of ``"model.block0.weight"``."""
    return name.partition(".")[0]


def key_in_file(name: str) -> str:
    """``"block0.weight"`` of ``"model.block0.weight"``."""
    return name.partition(".")[2]


def write_safetensors(path: Path, entries: Iterable[Entry]) -> StoredFile:
    """Write tensors to a new safetensors file, one at a time, down to the disk."""
    # widest first, as the safetensors package does: every tensor is then aligned in a mapped file
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        if entry.name in header:
            raise CheckpointError(f"{entry.name!r} cannot be the name of a tensor in a safetensors file; rename it")
        if entry.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{entry.name!r} is of {entry.dtype}, which safetensors cannot hold; convert it before saving")
        begin, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.name] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    digest = hashlib.sha256(head)
    with open(path, "xb") as file:
        file.write(head)
        for entry in ordered:
            data = _bytes_of(entry)
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(size_bytes=len(head) + end, sha256=digest.hexdigest())


def _bytes_of(entry: Entry) -> memoryview:
    tensor = entry.read().detach()
    if tensor.layout != torch.strided or tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise CheckpointError(
            f"{entry.name!r} is a {tensor.layout} tensor of {tensor.dtype} {tuple(tensor.shape)}; "
            f"a dense one of {entry.dtype} {entry.shape} was to be saved"
        )
    flat: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and bring it and the folder's entries down to the disk."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": {name: {"bytes": f.size_bytes, "sha256": f.sha256} for name, f in manifest.files.items()},
        "optimizer": manifest.optimizer,
        "scheduler": manifest.scheduler,
        "extra": manifest.extra,
        "tensors": {
            name: {
                "dtype": _DTYPE_NAMES[t.dtype],
                "shape": t.shape,
                "chunks": [{"file": c.file, "offsets": c.offsets, "shape": c.shape} for c in t.chunks],
            }
            for name, t in manifest.tensors.items()
        },
    }
    text = json.dumps({"sha256": _digest(body), **body}, indent=1)
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries down to the disk, so that a rename in it survives a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its own hash.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer version.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"no {FORMAT!r}")  # noqa: TRY301
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; not a complete checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint's: {error}") from None
    version = body.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(f"{path} is of format version {version}, this wavetrain reads up to {VERSION}; upgrade wavetrain")
    if body.pop("sha256", None) != _digest(body):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one it carries")
    try:
        return _parse(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not hold what a manifest should: {type(error).__name__}: {error}") from None


def _parse(body: Mapping[str, Any]) -> Manifest:
    files = {}
    for name, record in body["files"].items():
        if not _FILE_NAME.fullmatch(name):  # never a path that leads out of the folder
            raise ValueError(f"file name {name!r}")
        files[name] = StoredFile(size_bytes=int(record["bytes"]), sha256=str(record["sha256"]))
    tensors = {name: _parse_tensor(name, record, files) for name, record in body["tensors"].items()}
    return Manifest(
        step=int(body["step"]),
        world_size=int(body["world_size"]),
        files=files,
        tensors=tensors,
        optimizer=body["optimizer"],
        scheduler=body["scheduler"],
        extra=dict(body["extra"]),
    )


def _parse_tensor(name: str, record: Mapping[str, Any], files: Mapping[str, StoredFile]) -> StoredTensor:
    shape = _sizes(record["shape"])
    chunks = tuple(Chunk(file=c["file"], offsets=_sizes(c["offsets"]), shape=_sizes(c["shape"])) for c in record["chunks"])
    for chunk in chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.shape, strict=True)]
        if chunk.file not in files or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"{name!r} has a chunk {chunk} that does not fit {shape}")
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"{name!r}: its chunks do not make up {shape}")
    return StoredTensor(dtype=DTYPES[record["dtype"]], shape=shape, chunks=chunks)


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(v, int) and v >= 0 for v in values):
        raise ValueError(f"sizes {values!r}")
    return tuple(values)


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with the manifest: size first, then SHA-256.

    Raises:
        CheckpointError: for the first that is missing, cut short or changed.
    """
    for name in names:
        stored, path = manifest.files[name], folder / name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != stored.size_bytes:
                raise CheckpointError(f"{path} is damaged: {size_bytes} bytes, {stored.size_bytes} were written")
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        if digest != stored.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one of when it was written")


def read_block(file: Any, name: str, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A block of a chunk, in an open safetensors file; ``offsets`` count from the chunk's own corner."""
    try:
        key = key_in_file(name)
        if tuple(file.get_slice(key).get_shape()) != chunk.shape:
            raise CheckpointError(f"{chunk.file}: {name!r} has not the shape {chunk.shape} that the manifest says")
        if tuple(sizes) == chunk.shape:
            whole: Tensor = file.get_tensor(key)
            return whole
        part: Tensor = file.get_slice(key)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    except SafetensorError as error:
        raise CheckpointError(f"{chunk.file}: cannot read {name!r}: {error}") from None
    return part


def open_safetensors(path: Path) -> Any:
    """A safetensors file, mapped; a context manager."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_tensor(folder: Path, name: str, stored: StoredTensor) -> Tensor:
    """A whole tensor, put together from its chunks."""
    result = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        block = result
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
            block = block.narrow(dim, offset, size)
        with open_safetensors(folder / chunk.file) as file:
            block.copy_(read_block(file, name, chunk, [0] * len(chunk.shape), chunk.shape))
    return result
