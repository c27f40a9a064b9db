"""Metrics: one JSON object a step in ``metrics.jsonl``, and the same for TensorBoard or Weights & Biases where asked for."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from wavetrain.errors import InputError

METRICS_FILE: Final = "metrics.jsonl"


class Sink(Protocol):
    """Takes the numbers of steps."""

    def write(self, record: Mapping[str, Any]) -> None:
        """One step: plain numbers by name, ``step`` among them."""

    def close(self) -> None: ...


class MetricsFile:
    """``metrics.jsonl``: a line a step, on the disk as soon as it is written. What is no number becomes null.

    Args:
        path: the file.
        after_step: keep the lines up to this step, and drop what a run that ended later has left.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        kept = [json.dumps(r) for r in read_metrics(path) if r["step"] <= after_step] if after_step else []
        draft = path.with_name(f".{path.name}.part")
        draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        draft.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, by step; lines that a crash left unfinished are not there, nor is a missing file."""
    records: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class TensorBoard:
    """Scalars for TensorBoard, in ``<out>/tensorboard``."""

    def __init__(self, out: Path, after_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=after_step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:  # not run here: the package is not installed
    """A run of Weights & Biases, in the project ``wavetrain``, named after the directory."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project="wavetrain", name=out.name, id=out.name, resume="allow", dir=str(out), config=dict(config))

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def check_loggers(names: Sequence[str]) -> None:
    """Raise for a logger whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"log {name} needs the package {name}; type: pip install 'wavetrain[log]'")


def open_sinks(out: Path, log: Sequence[str], config: Mapping[str, Any], after_step: int) -> list[Sink]:
    """The metrics file, and whatever else is asked for."""
    sinks: list[Sink] = [MetricsFile(out / METRICS_FILE, after_step)]
    if "tensorboard" in log:
        sinks.append(TensorBoard(out, after_step))
    if "wandb" in log:
        sinks.append(WeightsAndBiases(out, config))
    return sinks
