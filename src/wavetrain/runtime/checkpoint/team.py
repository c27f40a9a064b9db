"""What the ranks do together: each does its part, then all go on or all stop.

A rank that fails alone would leave the others waiting for it. So every part is followed by an exchange of how it went, and a
failure anywhere is raised everywhere, naming the rank it happened on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from wavetrain.errors import CheckpointError, InputError, WavetrainError

T = TypeVar("T")


class Ranks(Protocol):
    """Where this process stands among all: a :class:`Mesh`, or anything with these two numbers."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


class Team:
    """The ranks of torch's default process group, or one process alone where there is no group.

    Args:
        ranks: this process's rank and the number of ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = ranks.rank, ranks.world_size
        group_size = dist.get_world_size() if self.distributed else 1
        if group_size != self.world_size:
            raise InputError(
                f"the mesh has {self.world_size} ranks, torch.distributed's default group has {group_size}; "
                "checkpoints need the group of all ranks: create the mesh before saving or loading"
            )

    def check(self, part: Callable[[], T], what: str) -> T:
        """Run ``part`` here as every other rank runs its own; what this rank's returned. Collective; raises as :meth:`gather`."""
        mine: list[T] = []
        self.gather(lambda: mine.append(part()), what)
        return mine[0]

    def gather(self, part: Callable[[], T], what: str) -> list[T]:
        """Run ``part`` here as every other rank runs its own; what each returned, by rank. Collective.

        Args:
            part: this rank's work. It must not itself wait for other ranks.
            what: begins the message should it fail anywhere, e.g. ``"cannot save runs/step-00000120"``.

        Raises:
            CheckpointError: on all ranks, if ``part`` raised on any.
        """
        failure: Exception | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = (part(), None)
        except Exception as error:  # whatever it is, the others must hear of it
            failure = error
            mine = (None, describe(error))
        everyone: list[tuple[T | None, str | None]] = [mine]
        if self.distributed:
            everyone = [mine] * self.world_size
            dist.all_gather_object(everyone, mine)
        problems = {rank: problem for rank, (_, problem) in enumerate(everyone) if problem is not None}
        if problems:
            raise CheckpointError(f"{what}: {self.tell(problems)}") from failure
        return [cast("T", result) for result, _ in everyone]

    def tell(self, problems: Mapping[int, str]) -> str:
        """Problems by rank as one sentence; equal ones are said once, and a single process needs no rank."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(problems.items()):
            by_text.setdefault(text, []).append(rank)
        if self.world_size == 1 or [len(ranks) for ranks in by_text.values()] == [self.world_size]:
            return "; ".join(by_text)
        return "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()
        )


def describe(error: BaseException) -> str:
    """One line for an error: what the system says of an OSError, the message of our own, else its type and message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, WavetrainError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def failures_of(error: Any) -> dict[int, str]:
    """What torch.distributed.checkpoint's ``CheckpointException`` carries, as a line by rank."""
    return {rank: describe(cause) for rank, (cause, _) in error.failures.items()}
