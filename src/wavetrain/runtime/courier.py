"""The courier: starts transfers beside the computing thread.

To start a transfer over Gloo takes a few hundred microseconds where it wakes a sleeping neighbour: the kernel copies the
message and hands it over within the call. That time is the courier's, a thread that does nothing else. It starts transfers in
the order in which they were handed to it; the computing thread only waits for those that it needs. On a GPU, where starting a
transfer does not wait (not run here), there is no such thread.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Literal

import torch.distributed as dist
from torch import Tensor


class Transfer:
    """Tensors on their way to or from one other rank. They are kept alive until it is over."""

    __slots__ = ("_error", "_started", "_works", "group", "kind", "peer", "tensors")

    def __init__(
        self, kind: Literal["send", "receive"], tensors: list[Tensor], peer: int, group: dist.ProcessGroup | None
    ) -> None:
        self.kind, self.tensors, self.peer, self.group = kind, tensors, peer, group
        """``peer`` is a global rank."""
        self._works: list[dist.Work] = []
        self._error: RuntimeError | None = None
        self._started = threading.Lock()
        self._started.acquire()

    def start(self) -> None:
        """Start it; an error is kept for who waits."""
        begin = dist.isend if self.kind == "send" else dist.irecv
        try:
            for tensor in self.tensors:
                work = begin(tensor, self.peer, group=self.group)
                assert work is not None  # None only for ranks outside the group
                self._works.append(work)
        except RuntimeError as error:
            self._error = error
        finally:
            self._started.release()

    def wait(self, timeout: timedelta) -> None:
        """Wait until it is over.

        Raises:
            RuntimeError: as torch.distributed raises it: the peer is gone, or ``timeout`` has passed.
        """
        self._started.acquire()
        self._started.release()
        if self._error is not None:
            raise self._error
        for work in self._works:
            work.wait(timeout)


class Courier:
    """Starts transfers, in order; in a thread of its own, or at once."""

    def __init__(self, *, threaded: bool) -> None:
        self._queue: SimpleQueue[list[Transfer]] = SimpleQueue()
        self._batch: list[Transfer] = []
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
            self._thread.start()

    def hand(self, transfer: Transfer) -> Transfer:
        """Take a transfer; it is started at the next :meth:`flush`."""
        if self._thread is None:
            transfer.start()
        else:
            self._batch.append(transfer)
        return transfer

    def flush(self) -> None:
        """Start what was handed over."""
        if self._batch:
            self._queue.put(self._batch)
            self._batch = []

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self.flush()
            self._queue.put([])

    def _run(self) -> None:
        while batch := self._queue.get():
            for transfer in batch:
                transfer.start()
