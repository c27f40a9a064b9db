"""Profiles: what was measured, layer by layer, instead of estimated.

A folder with up to three CSV files:

    layer_profiles.csv   model, device, tp, micro_batch, layer, forward_s, backward_s, update_s   (the last two may be empty)
    layer_memory.csv     model, tp, layer, params_bytes, output_bytes, activation_bytes_per_sample
    links.csv            device, scope (intra, inter), gpus_in_group, peak_bytes_per_s

Other columns (``source``) are read over. ``wavetrain profile`` writes such a folder for this machine.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import FormatError, InputError
from wavetrain.files import read_text, write_text

Floats = NDArray[np.float64]
MAX_LAYERS: Final = 4096

_TIMES: Final = ("model", "device", "tp", "micro_batch", "layer", "forward_s")
_MEMORY: Final = ("model", "tp", "layer", "params_bytes", "output_bytes", "activation_bytes_per_sample")
_LINKS: Final = ("device", "scope", "gpus_in_group", "peak_bytes_per_s")


class Seconds(NamedTuple):
    """Of every layer for one micro-batch, (num_layers,)."""

    forward: Floats
    backward: Floats | None
    """None where only the forward pass was measured."""
    outside: bool
    """Whether the micro-batch is larger or smaller than any that was measured."""


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """Seconds of all layers of a model on one device under one tensor parallelism."""

    micro_batches: tuple[int, ...]
    """Rising."""
    forward: Floats
    """(num_micro_batches, num_layers)."""
    backward: Floats | None
    update: Floats | None
    """Of the optimizer, likewise."""

    @property
    def num_layers(self) -> int:
        return int(self.forward.shape[1])

    def averaged(self, alike: NDArray[np.intp]) -> LayerTable:
        """With the mean of layers that are alike, (num_layers,) numbers of kinds: what they differ by is the measuring's."""
        counts = np.bincount(alike)

        def mean(table: Floats | None) -> Floats | None:
            if table is None:
                return None
            return np.stack([(np.bincount(alike, weights=row) / counts)[alike] for row in table])

        forward = mean(self.forward)
        assert forward is not None, "it was given"
        return replace(self, forward=forward, backward=mean(self.backward), update=mean(self.update))

    def at(self, micro_batch: float) -> Seconds:
        """Interpolated between what was measured; beyond it, along the last two sizes (never less than the last), and said so.

        A layer never gets faster by doing more: where a small micro-batch was measured slower than a larger one, it was waiting
        for its launch, and counts as the larger one.
        """
        forward = _monotone(self.forward)
        backward = None if self.backward is None else _monotone(self.backward)
        sizes = self.micro_batches
        outside = not sizes[0] <= micro_batch <= sizes[-1]
        return Seconds(
            _interpolate(sizes, forward, micro_batch),
            None if backward is None else _interpolate(sizes, backward, micro_batch),
            outside,
        )


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of all layers of a model under one tensor parallelism, (num_layers,)."""

    parameters: Floats
    output: Floats
    """Of one sample."""
    activation: Floats
    """Of one sample."""


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """All that a folder holds."""

    times: Mapping[tuple[str, str, int], LayerTable] = field(default_factory=dict)
    """By model, device and tensor parallelism."""
    memory: Mapping[tuple[str, int], LayerMemory] = field(default_factory=dict)
    """By model and tensor parallelism."""
    links: Mapping[tuple[str, str], Mapping[int, float]] = field(default_factory=dict)
    """Bytes per second by device and scope, then by the devices of a node that take part."""

    def num_layers(self, model: str) -> int | None:
        """How many layers most tables of a model have; None if there is none."""
        counts = [len(m.parameters) for (name, _), m in self.memory.items() if name == model]
        counts = counts or [t.num_layers for (name, _, _), t in self.times.items() if name == model]
        return max(set(counts), key=counts.count) if counts else None


def load_profiles(folder: str | os.PathLike[str]) -> Profiles:
    """What the CSV files of a folder say; those that are not there say nothing.

    Raises:
        FormatError: with the file and the line.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FormatError(os.fspath(folder), None, "no such folder")
    return Profiles(
        times=_read_times(root / "layer_profiles.csv"),
        memory=_read_memory(root / "layer_memory.csv"),
        links=_read_links(root / "links.csv"),
    )


def _interpolate(sizes: tuple[int, ...], table: Floats, micro_batch: float) -> Floats:
    if len(sizes) == 1 or micro_batch <= sizes[0]:
        first: Floats = table[0]
        return first
    high = min(max(1, int(np.searchsorted(sizes, micro_batch))), len(sizes) - 1)
    low = high - 1
    part = (micro_batch - sizes[low]) / (sizes[high] - sizes[low])
    found: Floats = np.maximum(table[low] + (table[high] - table[low]) * part, table[low])
    return found


def _monotone(table: Floats) -> Floats:
    """Every row at most the rows below it."""
    found: Floats = np.minimum.accumulate(table[::-1], axis=0)[::-1]
    return found


def _read_times(path: Path) -> dict[tuple[str, str, int], LayerTable]:
    cells: dict[tuple[str, str, int], dict[int, dict[int, tuple[float, float | None, float | None]]]] = {}
    for line, row in _rows(path, _TIMES):
        key = (row["model"], row["device"], _count(path, line, row, "tp"))
        sizes = cells.setdefault(key, {})
        layers = sizes.setdefault(_count(path, line, row, "micro_batch"), {})
        layer = _count(path, line, row, "layer", least=0, most=MAX_LAYERS - 1)
        if layer in layers:
            raise FormatError(path, line, f"layer {layer} comes twice for {', '.join(map(str, key))}")
        layers[layer] = (
            _number(path, line, row, "forward_s"),
            _maybe(path, line, row, "backward_s"),
            _maybe(path, line, row, "update_s"),
        )
    found = {}
    for key, sizes in cells.items():
        where = f"{key[0]} on {key[1]}, tp {key[2]}"
        counts = {len(layers) for layers in sizes.values()}
        if len(counts) != 1 or any(sorted(layers) != list(range(len(layers))) for layers in sizes.values()):
            raise FormatError(path, None, f"{where}: layers must be numbered from 0, the same for every micro-batch")
        order = tuple(sorted(sizes))
        columns = [[[sizes[m][layer][i] for layer in range(max(counts))] for m in order] for i in range(3)]
        forward, backward, update = (
            None if any(v is None for values in column for v in values) else np.array(column, dtype=np.float64)
            for column in columns
        )
        assert forward is not None, "forward_s was required of every row"
        found[key] = LayerTable(micro_batches=order, forward=forward, backward=backward, update=update)
    return found


def _read_memory(path: Path) -> dict[tuple[str, int], LayerMemory]:
    cells: dict[tuple[str, int], dict[int, tuple[float, ...]]] = defaultdict(dict)
    for line, row in _rows(path, _MEMORY):
        key = (row["model"], _count(path, line, row, "tp"))
        layer = _count(path, line, row, "layer", least=0, most=MAX_LAYERS - 1)
        if layer in cells[key]:
            raise FormatError(path, line, f"layer {layer} comes twice for {key[0]}, tp {key[1]}")
        cells[key][layer] = tuple(_number(path, line, row, name) for name in _MEMORY[3:])
    found = {}
    for key, layers in cells.items():
        if sorted(layers) != list(range(len(layers))):
            raise FormatError(path, None, f"{key[0]}, tp {key[1]}: layers must be numbered from 0")
        columns = np.array([layers[i] for i in range(len(layers))], dtype=np.float64).T
        found[key] = LayerMemory(parameters=columns[0], output=columns[1], activation=columns[2])
    return found


def _read_links(path: Path) -> dict[tuple[str, str], dict[int, float]]:
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for line, row in _rows(path, _LINKS):
        if row["scope"] not in ("intra", "inter"):
            raise FormatError(path, line, f"scope is {row['scope']!r}; expected intra or inter")
        rate = _number(path, line, row, "peak_bytes_per_s")
        if rate <= 0:
            raise FormatError(path, line, "peak_bytes_per_s is 0; expected a number above 0")
        found[row["device"], row["scope"]][_count(path, line, row, "gpus_in_group")] = rate
    return dict(found)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, row) of a CSV file; none if there is no such file."""
    if not path.exists():
        return
    reader = csv.DictReader(io.StringIO(read_text(path)))
    for name in columns:
        if name not in (reader.fieldnames or ()):
            raise FormatError(path, 1, f"no column {name!r}; expected {', '.join(columns)}")
    try:
        for row in reader:
            line = reader.line_num
            if None in row or None in row.values():
                raise FormatError(path, line, f"{len(reader.fieldnames or ())} columns expected")
            yield line, row
    except csv.Error as error:
        raise FormatError(path, reader.line_num, f"not CSV: {error}") from None


def _count(path: Path, line: int, row: Mapping[str, str], name: str, least: int = 1, most: int = 2**31) -> int:
    text = row[name].strip()
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not least <= int(text) <= most:
        raise FormatError(path, line, f"{name} is {row[name]!r}; expected a whole number, {least} to {most}")
    return int(text)


def _number(path: Path, line: int, row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise FormatError(path, line, f"{name} is {row[name]!r}; expected a number, 0 or more")
    return value


def _maybe(path: Path, line: int, row: Mapping[str, str], name: str) -> float | None:
    return _number(path, line, row, name) if row.get(name, "").strip() else None


class Measured(Protocol):
    """What was measured of a layer for one micro-batch; bytes are of the whole micro-batch."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    output_bytes: float
    activation_bytes: float


def write_profiles(
    folder: str | os.PathLike[str],
    model: str,
    device: str,
    layers: Mapping[int, Sequence[Measured]],
    link_bytes_per_second: float | None = None,
    *,
    tp: int = 1,
) -> None:
    """Write the folder that :func:`load_profiles` reads.

    Args:
        folder: is made if it is not there; files in it are replaced.
        model: its name.
        device: its name.
        layers: what was measured, by micro-batch, one a layer.
        link_bytes_per_second: between two devices of the machine; None if it was not measured.
        tp: devices that shared the layers.
    """
    for name in (model, device):
        if any(c in name for c in ',"\r\n'):
            raise InputError(f"{name!r} cannot stand in a CSV file: no commas, quotes or line breaks")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    times = ["model,device,tp,micro_batch,layer,forward_s,backward_s,update_s"]
    for size, measured in sorted(layers.items()):
        for i, one in enumerate(measured):
            times.append(f"{model},{device},{tp},{size},{i},{one.forward_seconds:.9g},{one.backward_seconds:.9g},")
    smallest = min(layers)
    memory = ["model,tp,layer,params_bytes,output_bytes,activation_bytes_per_sample"]
    for i, one in enumerate(layers[smallest]):
        per_sample = (one.output_bytes / smallest, one.activation_bytes / smallest)
        memory.append(f"{model},{tp},{i},{one.parameter_bytes:.0f},{per_sample[0]:.0f},{per_sample[1]:.0f}")
    write_text(root / "layer_profiles.csv", "\n".join(times) + "\n")
    write_text(root / "layer_memory.csv", "\n".join(memory) + "\n")
    if link_bytes_per_second is not None:
        rows = ["device,scope,gpus_in_group,peak_bytes_per_s", f"{device},intra,2,{link_bytes_per_second:.0f}"]
        write_text(root / "links.csv", "\n".join(rows) + "\n")
