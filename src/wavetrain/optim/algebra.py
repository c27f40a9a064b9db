"""How the matrices of T × T numbers are worked with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np
from threadpoolctl import ThreadpoolController

_LIMITING: Final = threading.Lock()


@contextlib.contextmanager
def small() -> Iterator[None]:
    """NumPy with one thread, and without warnings of what is no number, as of a way that has exploded.

    OpenBLAS wakes its other threads for matrices of 26 × 26 numbers on, and these then wait for more to do, for some 20 ms, with
    all that their cores have to give: longer than anything here takes, while a model is to be evaluated. The limit is the
    process's: of several threads that are here at once, the first sets it and puts it back.
    """
    with contextlib.ExitStack() as stack:
        if _LIMITING.acquire(blocking=False):
            stack.callback(_LIMITING.release)
            stack.enter_context(_libraries().limit(limits=1))
        stack.enter_context(np.errstate(over="ignore", invalid="ignore"))
        yield


@cache
def _libraries() -> ThreadpoolController:
    """OpenBLAS as it is loaded, NumPy's; found once, since that takes milliseconds."""
    return ThreadpoolController().select(internal_api="openblas")
