"""Results that took long, written down: with ``WAVETRAIN_KEPT`` set to a file, a benchmark that was ended goes on where it was.

The code that a result depends on is part of what is remembered, so that other code begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

import wavetrain

HERE = Path(__file__).resolve().parent
T = TypeVar("T")


def kept(what: str, code: Sequence[str], compute: Callable[[], T]) -> T:
    """What was computed before, or is now.

    Args:
        what: says all that it depends on, beside code.
        code: patterns of the files it depends on, in the package or among the benchmarks.
        compute: computes it: numbers, or lists of them.
    """
    name = os.environ.get("WAVETRAIN_KEPT")
    if name is None:
        return compute()
    file, key = Path(name), hashlib.sha256((_hash(tuple(code)) + what).encode()).hexdigest()
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith(key):
            found: T = json.loads(line.split(maxsplit=1)[1])
            return found
    found = compute()
    with file.open("a") as out:
        out.write(f"{key} {json.dumps(found)}\n")
    return found


@lru_cache
def _hash(code: tuple[str, ...]) -> str:
    files = sorted(f for pattern in code for root in (Path(wavetrain.__file__).parent, HERE) for f in root.glob(pattern))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files) + torch.__version__.encode()).hexdigest()
