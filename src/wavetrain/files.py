"""Text files, read and written whole."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from wavetrain.errors import FormatError, InputError

MAX_BYTES: Final = 64 * 1024 * 1024
"""Larger files are refused, unless more is asked for."""


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


def parse_toml(text: str, path: object) -> dict[str, Any]:
    """The data of a TOML text; ``path`` is what errors name."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        line = int(at[1]) if at and at[1] else text.count("\n") + 1 if at else None
        raise FormatError(path, line, f"not TOML: {error}") from None
    except RecursionError:
        raise FormatError(path, None, "nested too deeply") from None


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
