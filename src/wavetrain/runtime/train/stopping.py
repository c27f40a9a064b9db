"""Stopping a run after the step it is in: by Ctrl-C, or by a file named ``stop`` in its directory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from wavetrain.runtime.blackbox import Phase, State
from wavetrain.runtime.supervise import OnPoll

STOP_FILE: Final = "stop"
GRACE_SECONDS: Final = 10.0
"""How long after Ctrl-C a step may take to end before the ranks are ended without a checkpoint."""
_SAVING_SECONDS: Final = 120.0


class StopRequest:
    """Whether this rank has been asked to stop.

    Args:
        out: the run's directory.
        signals: whether to take Ctrl-C and SIGTERM as such a request, once: in ranks that no launcher of ours looks after.
    """

    def __init__(self, out: Path, *, signals: bool) -> None:
        self._file = out / STOP_FILE
        self._asked = False
        self._before = {}
        if signals and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def __bool__(self) -> bool:
        return self._asked or self._file.exists()

    def close(self) -> None:
        """Give the signals back, and take the file away."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.close()  # a second one ends the rank


@contextlib.contextmanager
def ctrl_c_stops(out: Path) -> Iterator[OnPoll | None]:
    """In a launcher: the first Ctrl-C asks the ranks to stop after their step, the second, or ten seconds, end them.

    Gives what :func:`wavetrain.launch` is to call while it waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    asked: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(time.monotonic())
        with contextlib.suppress(OSError):
            (out / STOP_FILE).touch()
        os.write(sys.stderr.fileno(), b"\nstopping after this step; Ctrl-C again ends it at once\n")

    def on_poll(states: Sequence[State]) -> None:
        if asked:
            saving = any(state.phase is Phase.SAVING for state in states)
            if time.monotonic() - asked[0] > (_SAVING_SECONDS if saving else GRACE_SECONDS):
                raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield on_poll
    finally:
        signal.signal(signal.SIGINT, before)
        clear_stop(out)


def clear_stop(out: Path) -> None:
    """Take an earlier request away."""
    with contextlib.suppress(OSError):
        (out / STOP_FILE).unlink(missing_ok=True)
