"""The folders of a run's checkpoints: which there are, which is newest, what a crash left behind.

step-00000120            a checkpoint
.step-00000160.part      being written, or being removed; a crash leaves it, the next save clears it
step-00000120.replaced   the old one, for the moment between two renames in which another takes its name
"""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from wavetrain.errors import CheckpointError
from wavetrain.runtime.checkpoint.files import MANIFEST
from wavetrain.runtime.checkpoint.team import describe

_STEP = re.compile(r"step-(\d{8,})")


def folder_of(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def draft_of(target: Path) -> Path:
    """The folder that a checkpoint is written in before it gets its name."""
    return target.with_name(f".{target.name}.part")


def replaced_of(target: Path) -> Path:
    """Where an older checkpoint of the same step waits for the moment in which the new one takes its name."""
    return target.with_name(f"{target.name}.replaced")


def candidates(path: Path) -> list[Path]:
    """The checkpoint that is meant, and those before it, newest first."""
    if _STEP.fullmatch(path.name) or (path / MANIFEST).is_file():
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint; there {_listing(path.parent)}")
        before = [other for other in checkpoints(path.parent) if _step(other) < _step(path)] if _STEP.match(path.name) else []
        return [path, *before]
    found = checkpoints(path)
    if not found:
        raise CheckpointError(f"{path}: no checkpoint there; those of a run are folders named step-00000120 and the like")
    return found


def _listing(directory: Path) -> str:
    found = [folder.name for folder in checkpoints(directory)]
    return f"are {', '.join(found[:5])}{', …' if len(found) > 5 else ''}" if found else "is none in its directory"


def _step(folder: Path) -> int:
    match = _STEP.match(folder.name)
    assert match is not None
    return int(match[1])


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, highest step first, whole or not."""
    try:
        entries = {entry.name: entry for entry in directory.iterdir() if _STEP.match(entry.name) and entry.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    # one that was being replaced when the power went still counts
    left = [
        entry for name, entry in entries.items() if name.endswith(".replaced") and name.removesuffix(".replaced") not in entries
    ]
    return sorted([entry for name, entry in entries.items() if _STEP.fullmatch(name)] + left, key=_step, reverse=True)


def tidy(directory: Path) -> None:
    """Remove what a crash left; give one that was being replaced its name back."""
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        if entry.name.startswith(".step-") and entry.name.endswith(".part"):
            shutil.rmtree(entry)
        elif _STEP.match(entry.name) and entry.name.endswith(".replaced"):
            whole = entry.with_name(entry.name.removesuffix(".replaced"))
            if whole.exists():
                shutil.rmtree(entry)
            else:
                entry.rename(whole)


def prune(directory: Path, step: int, keep: int) -> None:
    """Remove all but the ``keep`` newest up to ``step``; those beyond (a run taken up again earlier) are left to be replaced."""
    for folder in [folder for folder in checkpoints(directory) if _step(folder) <= step][keep:]:
        try:
            shutil.rmtree(folder.rename(draft_of(folder)))  # renamed first: half a checkpoint is never seen
        except OSError as error:
            warnings.warn(f"cannot remove the old checkpoint {folder}: {describe(error)}", stacklevel=3)
