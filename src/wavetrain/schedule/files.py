"""Schedules on disk: torch's CSV or our JSON, told apart by the file's suffix."""

from __future__ import annotations

import os
from pathlib import Path

from wavetrain.errors import InputError
from wavetrain.files import read_text, write_text
from wavetrain.schedule.json_format import dump_json, parse_json
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.torch_csv import dump_csv, parse_csv


def load(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in a ``.csv`` (torch.distributed.pipelining's) or ``.json`` file.

    Raises:
        FormatError: there is no such file, or it does not hold a schedule.
        InputError: the suffix is neither of the two.
    """
    kind = _kind(path)
    text = read_text(path)
    return parse_json(text, path=path) if kind == "json" else parse_csv(text, name=Path(path).name, path=path)


def save(schedule: Schedule, path: str | os.PathLike[str], *, comms: bool = False) -> None:
    """Write ``schedule`` to a ``.csv`` or ``.json`` file, whole or not at all.

    Args:
        schedule: what to write.
        path: where to; an existing file is replaced.
        comms: CSV only: lowered with sends and receives, for torch's ``_load_csv(path, format="compute_comms")``.
    """
    kind = _kind(path)
    if kind == "json" and comms:
        raise InputError(f"{os.fspath(path)}: sends and receives are written to .csv only; JSON derives them")
    write_text(path, dump_json(schedule) if kind == "json" else dump_csv(schedule, comms=comms))


def _kind(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".json"):
        raise InputError(f"{os.fspath(path)}: a schedule is a .csv (torch.distributed.pipelining's) or a .json file")
    return suffix[1:]
