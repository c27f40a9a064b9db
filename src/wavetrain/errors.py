"""The exceptions wavetrain raises on purpose.

    WavetrainError
    ├── InputError (also a ValueError)   what the user gave breaks a rule; the message says which and what to type instead
    │   ├── UnknownNameError             a name that is not in a table; carries the nearest known names
    │   ├── FormatError                  a file that cannot be read; carries its path and line
    │   └── CapError                     a memory cap that no schedule of the kind can hold; carries the least that works
    ├── CheckpointError                  a checkpoint that cannot be written, is damaged, or does not fit the model
    ├── ProofError                       a schedule that was refused by the proof; carries the refusal
    └── RuntimeFailure                   a run that could not go on
        ├── RankFailedError              a rank raised or died; carries which, and the first cause
        ├── PeerLostError                a neighbour vanished; a consequence of what befell that rank, never the cause
        ├── DivergedError                a loss or gradient is no number; carries the step and the ranks where it shows
        └── StallError                   something did not come within its limit

Everything else that escapes is a bug in wavetrain.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wavetrain.schedule.proof import Refusal


class WavetrainError(Exception):
    """Base of all errors raised on purpose."""


class InputError(WavetrainError, ValueError):
    """A value that breaks a rule."""


class UnknownNameError(InputError):
    """A name that is not known.

    Args:
        what: the kind of thing named, e.g. ``"schedule"``.
        name: what was given.
        known: the names that would have been accepted.
    """

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        near = difflib.get_close_matches(str(name), self.known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(self.known)}"
        super().__init__(f"unknown {what} {name!r}; {hint}")


class FormatError(InputError):
    """A file whose contents do not follow its format.

    Args:
        path: the file as the user named it.
        line: 1-based line, or None where a line has no meaning.
        problem: what is wrong and what was expected.
    """

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        self.path = str(path)
        self.line = line
        where = self.path if line is None else f"{self.path}:{line}"
        super().__init__(f"{where}: {problem}")


class CapError(InputError):
    """A memory cap below what any schedule of the asked kind needs.

    ``least_cap`` is the smallest cap that works, in the unit of the cap that was given.
    """

    def __init__(self, message: str, *, least_cap: float) -> None:
        self.least_cap = least_cap
        super().__init__(message)


class CheckpointError(WavetrainError):
    """A checkpoint that cannot be written, is damaged, or does not fit the model or optimizer it is loaded into."""


class ProofError(WavetrainError):
    """A schedule that cannot be run; ``refusal`` says where and why."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(str(refusal))


class RuntimeFailure(WavetrainError):
    """A run that could not go on, through no fault of what the user typed."""


class RankFailedError(RuntimeFailure):
    """A rank raised an exception or died, and the run ended with it.

    ``rank`` is the one that failed first, ``cause`` is what befell it: ``"ValueError: no such token"``, ``"signal 9"``
    or ``"exit code 3"``.
    """

    def __init__(self, message: str, *, rank: int, cause: str) -> None:
        self.rank = rank
        self.cause = cause
        super().__init__(message)


class PeerLostError(RuntimeFailure):
    """A neighbour vanished in the middle of a transfer; ``rank`` is the neighbour."""

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class DivergedError(RuntimeFailure):
    """A loss or gradient became infinite or NaN; ``step`` counts from 1, ``ranks`` are those that hold what is no number."""

    def __init__(self, message: str, *, step: int, ranks: tuple[int, ...]) -> None:
        self.step = step
        self.ranks = ranks
        super().__init__(message)


class StallError(RuntimeFailure):
    """Something did not come within its limit: a message, or the end of the run."""


def require_keys(where: object, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise :class:`UnknownNameError` for the first key of ``given`` that is not in ``known``."""
    names = tuple(known)
    for key in given:
        if key not in names:
            raise UnknownNameError(f"key in {where}", key, names)
