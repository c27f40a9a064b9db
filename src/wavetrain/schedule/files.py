"""Schedules on disk: torch's CSV or our JSON, told apart by the file's suffix."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from wavetrain.errors import FormatError, InputError
from wavetrain.schedule.json_format import dump_json, parse_json
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.torch_csv import MAX_BYTES, dump_csv, parse_csv


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


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a file; whatever goes wrong is a :class:`FormatError`."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise FormatError(os.fspath(path), None, error.strerror or str(error)) from None
    except ValueError as error:  # a NUL in the name
        raise FormatError(os.fspath(path), None, str(error)) from None
    if len(data) > max_bytes:
        raise FormatError(os.fspath(path), None, f"larger than {max_bytes >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(os.fspath(path), line, f"not UTF-8 text: {error.reason}") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file such that a reader finds the old text or the new one, never a part. Folders that are missing are made.

    A link is followed, and what is no regular file (a pipe, a device) is written to, not replaced.
    """
    draft: Path | None = None
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.is_file():
            draft = target.with_name(f".{target.name}.{os.getpid()}.part")
        with open(draft or target, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        if draft is not None:
            os.replace(draft, target)
    except BaseException as error:
        if draft is not None:
            with contextlib.suppress(OSError, ValueError):
                draft.unlink()
        if isinstance(error, OSError | ValueError):
            reason = error.strerror if isinstance(error, OSError) else None
            raise InputError(f"cannot write {os.fspath(path)}: {reason or error}") from None
        raise


def _kind(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".json"):
        raise InputError(f"{os.fspath(path)}: a schedule is a .csv (torch.distributed.pipelining's) or a .json file")
    return suffix[1:]
