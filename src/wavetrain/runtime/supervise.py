"""Supervision: the first rank that fails ends them all, and what is told is what happened first.

    a rank dies, or leaves a failure record          0 s
    the others may finish their own error            grace_seconds
    SIGTERM, then SIGKILL for who is still there     TERM_SECONDS

A neighbour of a rank that failed fails too, a moment later, with an error about a closed connection. So causes are ranked:
exceptions that are not such echoes, and deaths, the earliest first; an echo counts only where there is nothing else.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TypeAlias

from wavetrain.errors import RankFailedError, StallError
from wavetrain.runtime import blackbox
from wavetrain.runtime.blackbox import Failure, State

OnPoll: TypeAlias = Callable[[Sequence[State]], None]
"""Called a few times a second with what every rank does; what it raises ends the run."""

POLL_SECONDS: Final = 0.2
TERM_SECONDS: Final = 2.0
_KILL_SECONDS: Final = 5.0

_HEAD_START_SECONDS: Final = 1.0
"""A death is seen only after it happened, when neighbours may have recorded errors of unknown kinds: it goes before those."""

_REASONS: Final = {
    "SIGKILL": "out of memory, or kill -9",
    "SIGTERM": "someone asked it to end",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full disk under mapped memory",
    "SIGABRT": "native code gave up; it says why above",
}


@dataclass(frozen=True, kw_only=True)
class _Cause:
    time: float
    rank: int
    cause: str
    message: str
    traceback: str = ""


def supervise(
    processes: Sequence[BaseProcess],
    directory: Path,
    *,
    timeout_seconds: float | None,
    grace_seconds: float,
    on_poll: OnPoll | None = None,
) -> None:
    """Wait for all ranks. Whatever happens, none is left when this returns or raises.

    Args:
        processes: the ranks, in order, started.
        directory: their black box.
        timeout_seconds: how long all of it may take; None is for ever.
        grace_seconds: how long ranks may go on after the first failure.
        on_poll: what to call with the states.

    Raises:
        RankFailedError: one rank failed; the traceback of the first that did has been printed to stderr.
        StallError: ``timeout_seconds`` have passed.
    """
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    deaths: dict[int, float] = {}  # rank → when it was seen dead
    try:
        while len(deaths) < len(processes):
            _await(processes, deaths, POLL_SECONDS)
            if any(processes[rank].exitcode for rank in deaths) or blackbox.read_failures(directory):
                _await_all(processes, deaths, grace_seconds)
                break
            if on_poll is not None:
                on_poll(blackbox.read(directory))
            if end is not None and time.monotonic() > end:
                raise StallError(_stalled(processes, deaths, directory, timeout_seconds))
        exit_codes = {rank: processes[rank].exitcode or 0 for rank in deaths}
    finally:
        end_all(processes)
    cause = _first_cause(deaths, exit_codes, directory)
    if cause is not None:
        if cause.traceback:
            print(cause.traceback, file=sys.stderr, flush=True)
        raise RankFailedError(cause.message, rank=cause.rank, cause=cause.cause)


def end_all(processes: Sequence[BaseProcess]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL. Interrupted itself, it goes on with SIGKILL."""
    gone: dict[int, float] = {}
    try:
        for process in processes:
            process.terminate()
        _await_all(processes, gone, TERM_SECONDS)
    finally:
        for process in processes:
            process.kill()
        _await_all(processes, gone, _KILL_SECONDS)


def _await(processes: Sequence[BaseProcess], deaths: dict[int, float], seconds: float) -> None:
    """Wait until another rank is dead, for at most ``seconds``, and note who is in ``deaths``."""
    running = {process.sentinel: rank for rank, process in enumerate(processes) if rank not in deaths}
    for sentinel in connection.wait(list(running), seconds):
        assert isinstance(sentinel, int)
        processes[running[sentinel]].join(0.05)  # its files are closed, its exit code is a moment away
    for rank in running.values():  # all: a sentinel stays silent as long as a fork of the rank keeps it open
        if processes[rank].exitcode is not None:
            deaths[rank] = time.monotonic()


def _await_all(processes: Sequence[BaseProcess], deaths: dict[int, float], seconds: float) -> None:
    end = time.monotonic() + seconds
    while len(deaths) < len(processes) and (left := end - time.monotonic()) > 0:
        _await(processes, deaths, min(left, POLL_SECONDS))


def _first_cause(deaths: Mapping[int, float], exit_codes: Mapping[int, int], directory: Path) -> _Cause | None:
    """What happened first; None if nothing did.

    Args:
        deaths: when each rank was seen dead that ended before it was told to.
        exit_codes: their exit codes, -9 for signal 9.
        directory: the black box.
    """
    failures = blackbox.read_failures(directory)
    states = {state.rank: state for state in blackbox.read(directory)}
    recorded = {failure.rank for failure in failures}
    causes = [_of_failure(failure) for failure in failures if not failure.secondary]
    for rank, seen in deaths.items():
        if exit_codes[rank] != 0 and rank not in recorded:
            causes.append(_of_death(rank, exit_codes[rank], seen - _HEAD_START_SECONDS, states.get(rank)))
    if not causes:
        done = sorted(rank for rank, code in exit_codes.items() if code == 0)
        note = f" ({_ranks(done)} had already finished)" if done else ""
        causes = [_of_failure(failure, note) for failure in failures]
    return min(causes, key=lambda cause: cause.time, default=None)


def _of_failure(failure: Failure, note: str = "") -> _Cause:
    where = f"rank {failure.rank} failed {failure.doing}{note}"
    return _Cause(
        time=failure.time,
        rank=failure.rank,
        cause=failure.error,
        message=f"{where}: {failure.error}",
        traceback=f"{where}:\n{failure.traceback.rstrip()}",
    )


def _of_death(rank: int, exit_code: int, seen: float, state: State | None) -> _Cause:
    if exit_code >= 0:
        cause, how, reason = f"exit code {exit_code}", f"exited with code {exit_code}", ""
    else:
        name = next((s.name for s in signal.Signals if s == -exit_code), "")
        cause, how = f"signal {-exit_code}", f"was killed by signal {-exit_code}"
        reason = ": ".join(part for part in (name, _REASONS.get(name, "")) if part)
    if state is None:
        doing = "before main began"
        if exit_code == 1:
            reason = (
                "it could not import the script, or find main in it: put main at the top level of a file "
                "and launch() under `if __name__ == '__main__':`"
            )
    else:
        doing = state.describe()
        step = f"step {state.step}" if state.step >= 0 else ""
        reason = "; ".join(part for part in (step, reason) if part)
    return _Cause(time=seen, rank=rank, cause=cause, message=f"rank {rank} {how} {doing}" + (f" ({reason})" if reason else ""))


def _stalled(processes: Sequence[BaseProcess], deaths: Mapping[int, float], directory: Path, seconds: float | None) -> str:
    states = {state.rank: state.describe() for state in blackbox.read(directory)}
    lines = [
        f"  rank {rank}: {'finished' if rank in deaths else states.get(rank, 'before main began')}"
        for rank in range(len(processes))
    ]
    return "\n".join([f"main had not ended after timeout_seconds={seconds:g}; when it was stopped", *lines])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
