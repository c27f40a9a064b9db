"""The black box: what each rank is doing, kept where it outlives the rank.

The directory that ``WAVETRAIN_BLACKBOX`` names holds, for rank 3,

    rank3.state     60 bytes, mapped into the rank's memory and overwritten by every :meth:`Recorder.note`
    rank3.json      why the rank gave up, written once by :meth:`Recorder.record_failure`

A note is one ``pack_into`` on the map, about a microsecond, and what it wrote stays when the rank is killed: so whoever
watches (:func:`read`, :func:`read_failures`) can say *rank 1 was killed in B of stage 2, micro-batch 1*. A state is::

    magic  pid | count  time  step  phase  kind  stage  micro-batch  peer  count

written from left to right: where the two counts differ, the reader came in the middle of a note, and looks again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import struct
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from wavetrain.errors import InputError, PeerLostError
from wavetrain.schedule.actions import KINDS, Action, Kind

DIRECTORY_VARIABLE: Final = "WAVETRAIN_BLACKBOX"

_PREFIX: Final = "wavetrain-blackbox-"
_HEADER: Final = struct.Struct("<4sI")  # magic, pid
_WHAT: Final = struct.Struct("<iiiii")  # phase, kind, stage, micro-batch, peer
_BODY: Final = struct.Struct(f"<Qdq{_WHAT.size}sQ")  # count, time, step, what, count
_SIZE: Final = _HEADER.size + _BODY.size
_MAGIC: Final = b"WTB1"
_KIND_CODES: Final[dict[Kind | None, int]] = {None: -1, **{kind: code for code, kind in enumerate(KINDS)}}
_MAX_FAILURE_BYTES: Final = 1 << 20

_PEER_VANISHED: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out (waiting|after)"
    r"|(recvvalue|sendbytes|recvbytes|recvvector) failed|failed to recv|remote process exited",
    re.IGNORECASE,
)


class Phase(IntEnum):
    """What a rank is busy with."""

    IDLE = 0
    """Outside a step."""
    COMPUTE = 1
    RECEIVE = 2
    """Waiting for a message of ``peer``."""
    SEND = 3
    """Waiting for ``peer`` to take a message."""
    COLLECTIVE = 4
    SAVING = 5


@dataclass(frozen=True, kw_only=True)
class State:
    """What one rank was doing when it last said so."""

    rank: int
    pid: int
    count: int
    """How many notes the rank made: as long as it grows, the rank moves."""
    time: float
    """Seconds of this machine's monotonic clock at the note."""
    step: int
    """The step the rank is in, from 0; -1 before the first."""
    phase: Phase
    action: Action | None
    """What is computed, or what the message waited for carries."""
    peer: int | None
    """The rank at the other end of the message waited for."""

    def describe(self) -> str:
        """The state in words that follow "rank 1 was killed"."""
        what = self.action.describe() if self.action else None
        match self.phase:
            case Phase.COMPUTE:
                return f"in {what}" if what else "in a step"
            case Phase.RECEIVE:
                return f"waiting for {what or 'a message'}" + ("" if self.peer is None else f" from rank {self.peer}")
            case Phase.SEND:
                return f"waiting to send {what or 'a message'}" + ("" if self.peer is None else f" to rank {self.peer}")
            case Phase.COLLECTIVE:
                return f"in a collective after {what}" if what else "in a collective"
            case Phase.SAVING:
                return "saving a checkpoint"
            case _:
                return "before its first step" if self.step < 0 else "outside a step"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank gave up."""

    rank: int
    time: float
    """Seconds of this machine's monotonic clock."""
    type: str
    message: str
    traceback: str
    secondary: bool
    """Whether it is only the echo of another rank's end."""
    doing: str
    """:meth:`State.describe` at that moment."""

    @property
    def error(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def ready_note(phase: Phase, kind: Kind | None = None, stage: int = -1, micro_batch: int = -1, peer: int = -1) -> bytes:
    """A note in the form that :meth:`Recorder.note_ready` writes."""
    return _WHAT.pack(phase, _KIND_CODES[kind], stage, micro_batch, peer)


class Recorder:
    """Where a rank notes what it does.

    Args:
        rank: its rank.
        directory: the black box; None keeps the notes in private memory, where only this recorder sees them.
    """

    def __init__(self, rank: int, directory: str | os.PathLike[str] | None = None) -> None:
        self.rank = rank
        self.step = -1
        """The step that the next notes belong to."""
        self._directory = None if directory is None else Path(directory)
        self._map: mmap.mmap | bytearray = (
            bytearray(_SIZE) if self._directory is None else _map(_state_path(self._directory, rank))
        )
        state = _parse(rank, bytes(self._map))
        if state is not None and state.pid == os.getpid():  # another recorder of this very process: go on where it is
            self.step, self._count = state.step, state.count
        else:
            self._count = 0
            _HEADER.pack_into(self._map, 0, _MAGIC, os.getpid())
            self.note(Phase.IDLE)
            if self._directory is not None:  # of an earlier run in the same directory
                _failure_path(self._directory, rank).unlink(missing_ok=True)

    @classmethod
    def from_environment(cls) -> Recorder:
        """The recorder of this process: ``RANK`` says which, ``WAVETRAIN_BLACKBOX`` where."""
        return cls(int(os.environ.get("RANK", "0")), os.environ.get(DIRECTORY_VARIABLE) or None)

    def note(self, phase: Phase, kind: Kind | None = None, stage: int = -1, micro_batch: int = -1, peer: int = -1) -> None:
        """Say what this rank does from now on; ``note(Phase.COMPUTE, *action)``."""
        self.note_ready(ready_note(phase, kind, stage, micro_batch, peer))

    def note_ready(self, ready: bytes) -> None:
        """The same with what :func:`ready_note` made of it, for those who say the same again and again."""
        self._count = count = self._count + 1
        _BODY.pack_into(self._map, _HEADER.size, count, time.monotonic(), self.step, ready, count)

    def state(self) -> State:
        """What was noted last."""
        state = _parse(self.rank, bytes(self._map))
        assert state is not None, "no one else writes this rank's state"
        return state

    def record_failure(self, exc: BaseException) -> Failure:
        """Keep why this rank gives up, with its traceback and what it was doing; who watches ends the run at once."""
        failure = Failure(
            rank=self.rank,
            time=time.monotonic(),
            type=type(exc).__name__,
            message=_text(exc)[:10_000],
            traceback="".join(traceback.format_exception(exc))[-100_000:],
            secondary=is_secondary(exc),
            doing=self.state().describe(),
        )
        if self._directory is not None:
            write_atomically(_failure_path(self._directory, self.rank), json.dumps(asdict(failure)))
        return failure


@contextlib.contextmanager
def fresh_directory() -> Iterator[Path]:
    """A new black box, gone afterwards. Those of launchers that were killed, and so could not see to it, go as well."""
    shm = Path("/dev/shm")  # memory: no note ever waits for a disk
    parent = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):  # its launcher is gone, else the lock would be
            if time.time() - left.stat().st_mtime > 60:  # or it is about to take it
                shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with _locked(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def read(directory: str | os.PathLike[str]) -> list[State]:
    """The state of every rank that noted one, by rank. What is not a state is left out."""
    states = []
    for rank, path in _ranks(directory, "state"):
        for _ in range(3):  # a note takes less than a look: a second look is never torn twice but by a writer that died in it
            with contextlib.suppress(OSError), path.open("rb") as file:
                state = _parse(rank, file.read(_SIZE))
                if state is not None:
                    states.append(state)
                    break
    return states


def read_failures(directory: str | os.PathLike[str]) -> list[Failure]:
    """Why ranks gave up, the earliest first. What is not a failure record is left out."""
    failures = []
    for rank, path in _ranks(directory, "json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            with path.open("rb") as file:
                record: dict[str, Any] = json.loads(file.read(_MAX_FAILURE_BYTES))
            failures.append(
                Failure(
                    rank=rank,
                    time=float(record["time"]),
                    type=str(record["type"]),
                    message=str(record["message"]),
                    traceback=str(record["traceback"]),
                    secondary=bool(record["secondary"]),
                    doing=str(record["doing"]),
                )
            )
    return sorted(failures, key=lambda failure: failure.time)


def is_secondary(exc: BaseException) -> bool:
    """Whether an exception only says that another rank is gone: it, or one that it was raised from."""
    import torch.distributed as dist  # reading a black box needs no torch

    seen = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, (PeerLostError, dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(link, RuntimeError) and _PEER_VANISHED.search(_text(link)):  # Gloo and NCCL have no type for it
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _map(path: Path) -> mmap.mmap:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_size != _SIZE:
                os.ftruncate(file, 0)
                os.write(file, bytes(_SIZE))  # takes its space now: a map onto a full disk would end the rank by SIGBUS
            return mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
    except OSError as exc:
        raise InputError(
            f"the black box {path.parent} cannot be written ({exc.strerror}); "
            f"let {DIRECTORY_VARIABLE} name a directory that can, or unset it"
        ) from exc


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock that the kernel lets go of when this process ends, however it ends."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _parse(rank: int, data: bytes) -> State | None:
    """A state, or None where the bytes are none: never written, torn, or not ours."""
    if len(data) < _SIZE:
        return None
    magic, pid = _HEADER.unpack_from(data)
    count, noted, step, what, count_again = _BODY.unpack_from(data, _HEADER.size)
    phase, kind, stage, micro_batch, peer = _WHAT.unpack(what)
    if magic != _MAGIC or count == 0 or count != count_again or not (0 <= phase < len(Phase) and -1 <= kind < len(KINDS)):
        return None
    return State(
        rank=rank,
        pid=pid,
        count=count,
        time=noted,
        step=step,
        phase=Phase(phase),
        action=None if kind < 0 else Action(KINDS[kind], stage, micro_batch),
        peer=None if peer < 0 else peer,
    )


def _ranks(directory: str | os.PathLike[str], suffix: str) -> list[tuple[int, Path]]:
    """The plain files ``rank<r>.<suffix>`` of a directory, by rank; none where it cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(directory).iterdir():
            match = re.fullmatch(rf"rank(0|[1-9]\d{{0,8}})\.{suffix}", path.name, re.ASCII)
            if match and path.is_file():
                found.append((int(match[1]), path))
    return sorted(found)


def _state_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.state"


def _failure_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.json"


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # an exception's own __str__ may be what is broken
        return "(its message could not be made)"
