"""How the matrices of T × T numbers are worked with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from threadpoolctl import ThreadpoolController


@contextlib.contextmanager
def small() -> Iterator[None]:
    """NumPy with one thread, and without warnings of what is no number, as of a way that has exploded.

    OpenBLAS wakes its other threads for matrices of 26 × 26 numbers on, and these then wait for more to do, for some 20 ms, with
    all that their cores have to give: longer than anything here takes, while a model is to be evaluated.
    """
    _ONE.enter()
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    finally:
        _ONE.leave()


class _OneThread:
    """NumPy's libraries, limited to one thread from when the first enters until the last has left: the limit is the process's,
    while those who enter may be several threads of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._until = contextlib.ExitStack()

    @cached_property
    def _libraries(self) -> ThreadpoolController:
        return ThreadpoolController().select(user_api="blas")  # looked for once: that takes milliseconds

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._until.enter_context(self._libraries.limit(limits=1))
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._until.close()


_ONE = _OneThread()
