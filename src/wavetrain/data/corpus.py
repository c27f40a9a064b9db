"""The embedded corpus: the sources of Python's own standard library, some megabytes of text that need no download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from wavetrain.errors import InputError


def stdlib_corpus(max_bytes: int | None = None) -> bytes:
    """The top-level modules of the standard library, in the order of their names, one after the other.

    The same for every run of one Python version; packages, tests and what was installed beside are left out.

    Args:
        max_bytes: cut the text after so many bytes; None: take all.
    """
    if max_bytes is not None and max_bytes < 1:
        raise InputError(f"max_bytes is {max_bytes}; give at least 1, or None for all")
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for file in sorted(folder.glob("*.py"), key=lambda f: f.name):
        if max_bytes is not None and size >= max_bytes:
            break
        parts.append(file.read_bytes())
        size += len(parts[-1])
    if not size:
        raise InputError(f"this Python keeps no sources of its standard library in {folder}; give text files instead")
    return b"".join(parts)[:max_bytes]
