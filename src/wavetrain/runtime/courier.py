"""The courier: work beside the computing thread, in order.

To start a transfer over Gloo takes a few hundred microseconds where it wakes a sleeping neighbour: the kernel copies the message
and hands it over within the call. That time, and all book-keeping of messages, is the courier's, a thread that does nothing else;
it works while the computing thread computes (torch's kernels do not hold Python's lock). On a GPU, where starting a transfer does
not wait (not run here), there is no such thread and everything is done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class Courier:
    """Does jobs one after another; in a thread of its own, or at once."""

    def __init__(self, *, threaded: bool) -> None:
        self._queue: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._threaded = threaded
        if threaded:
            threading.Thread(target=self._run, name="courier", daemon=True).start()

    def put(self, job: Callable[..., Any], *args: Any) -> None:
        """Have a job done. What it raises is raised by the next :meth:`check` or :meth:`call`."""
        if self._threaded:
            self._queue.put((job, args))
        else:
            job(*args)

    def call(self, job: Callable[..., Result], *args: Any) -> Result:
        """Have a job done after all that were put before, and wait for its result."""
        if not self._threaded:
            return job(*args)
        found: list[Result] = []
        done = threading.Event()

        def wrapped() -> None:
            try:
                found.append(job(*args))
            except BaseException as error:
                self._error = self._error or error  # before the caller looks
            finally:
                done.set()

        self._queue.put((wrapped, ()))
        done.wait()
        self.check()
        return found[0]

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        if self._threaded:
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job, args = item
            try:
                job(*args)
            except BaseException as error:
                self._error = self._error or error  # the first one is told
            del item, job, args  # tensors are not to be kept until the next job
