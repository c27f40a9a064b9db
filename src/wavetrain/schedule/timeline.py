"""A timeline: who did what when, simulated or measured. One type for both, so that they can be laid on one axis.

What can be read off a timeline is in :mod:`wavetrain.schedule.analysis`: idle time by cause, critical path, memory curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from wavetrain.schedule.actions import Action, Kind


class Span(NamedTuple):
    """One action on one rank, from ``start`` to ``end`` in seconds since the step began."""

    kind: Kind
    stage: int
    micro_batch: int
    start: float
    end: float

    @property
    def action(self) -> Action:
        return Action(self.kind, self.stage, self.micro_batch)


class Message(NamedTuple):
    """The result of an action on its way to another rank.

    ``sent`` is when the action that produced it ended, ``start`` when the link took it, ``end`` when it had arrived; seconds.
    """

    kind: Literal["F", "B"]
    """F: activations of ``stage`` on the way to the next stage. B: gradients of ``stage`` on the way to the one before."""
    stage: int
    micro_batch: int
    source: int
    target: int
    sent: float
    start: float
    end: float

    @property
    def target_stage(self) -> int:
        return self.stage + 1 if self.kind == "F" else self.stage - 1


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a pipeline."""

    name: str
    source: Literal["simulated", "measured"]
    num_stages: int
    num_micro_batches: int
    waves: int | None
    spans: tuple[tuple[Span, ...], ...]
    """In order of time, one tuple a rank."""
    messages: tuple[Message, ...]
    """Only those that cross ranks."""
    held_bytes: dict[Kind, tuple[float, ...]]
    """Bytes of activations that an action of each kind adds (F) or frees (negative) per stage, (num_stages,)."""
    memory_cap: tuple[float, ...]
    """Bytes each rank may hold, (num_ranks,); may be infinite."""
    share_bytes: tuple[float, ...]
    """Bytes of one micro-batch on all stages of a rank, (num_ranks,): the unit of :attr:`peak_activations`."""

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @property
    def num_actions(self) -> int:
        return sum(len(s) for s in self.spans)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max((s[-1].end for s in self.spans if s), default=0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds each rank computes, (num_ranks,)."""
        return tuple(sum(s.end - s.start for s in spans) for spans in self.spans)

    @property
    def ideal(self) -> float:
        """Seconds the step would take if no rank ever idled: the mean work of a rank."""
        return sum(self.work) / self.num_ranks

    @property
    def bubble(self) -> float:
        """The share of the step that a rank idles, mean over ranks."""
        return 1.0 - self.ideal / self.makespan if self.makespan > 0 else 0.0

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes of activations each rank holds at any moment, (num_ranks,)."""
        peaks = []
        for spans in self.spans:
            now = peak = 0.0
            for s in spans:
                now += self.held_bytes[s.kind][s.stage]
                if now > peak:
                    peak = now
            peaks.append(peak)
        return tuple(peaks)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """:attr:`peak_bytes` in micro-batches of a rank's share, (num_ranks,)."""
        return tuple(
            round(p / share, 9) if share > 0 else 0.0 for p, share in zip(self.peak_bytes, self.share_bytes, strict=True)
        )
