"""What can be served: a run of ``wavetrain train``, one of its checkpoints, or a folder of config.json and safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from wavetrain.errors import CheckpointError, InputError
from wavetrain.models.config import ModelConfig
from wavetrain.models.folders import Folder
from wavetrain.runtime.checkpoint import read_extra, read_model


@dataclass(frozen=True)
class Source:
    """A model that can be read."""

    folder: Path
    config: ModelConfig
    read: Callable[[str], Tensor]
    """Name of a weight → the whole of it, on the CPU."""
    eos: tuple[int, ...] = ()
    """Tokens that end a text."""


def open_source(path: str | os.PathLike[str]) -> Source:
    """The model of a path.

    Args:
        path: a run's directory, its checkpoints, one of them, or a folder with config.json and *.safetensors.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(
            f"there is no directory {folder}; give a run of wavetrain train, or a folder with config.json and safetensors"
        )
    if (folder / "config.json").is_file():
        opened = Folder(folder)
        return Source(folder, opened.config, opened.read, opened.eos)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    shape = read_extra(folder).get("model")
    if not isinstance(shape, dict):
        raise CheckpointError(f"{folder} does not say which model it is of; it was not saved by wavetrain train")
    config = ModelConfig.from_dict(shape, where=folder)
    weights = read_model(folder)

    def read(name: str) -> Tensor:
        if name not in weights:
            raise CheckpointError(f"{folder} lacks {name}")
        return weights[name]

    return Source(folder, config, read)
