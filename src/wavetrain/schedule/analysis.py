"""What a timeline tells: idle time by cause, the critical path, the memory curve. The same for simulated and measured ones."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from wavetrain.schedule.actions import Action, Kind
from wavetrain.schedule.proof import CAP_TOLERANCE
from wavetrain.schedule.timeline import Message, Span, Timeline

CAUSES: Final = ("warm-up", "drain", "message", "imbalance", "memory cap", "overhead")
"""Why a rank idles:

warm-up     before its first action
drain       after its last action
message     what its next action needs is done, and on its way
imbalance   the rank that makes what its next action needs is still at it
memory cap  it could do another forward, had it room for the activations
overhead    what its next action needs has arrived (nothing in a simulation; the runtime's share in a measured run)
"""


class PathStep(NamedTuple):
    """One step of the critical path: an action on ``rank``, or a message that ``rank`` receives; seconds."""

    what: Literal["action", "message"]
    rank: int
    action: Action
    """For a message, the action that waits for it."""
    start: float
    end: float


def _slot(kind: Kind) -> str:
    return "B" if kind == "I" else kind


def _incoming(timeline: Timeline) -> dict[tuple[str, int, int], Message]:
    """The message that an action, by slot, stage and micro-batch, waits for."""
    return {(m.kind, m.target_stage, m.micro_batch): m for m in timeline.messages}


def idle_by_cause(timeline: Timeline) -> tuple[dict[str, float], ...]:
    """Seconds that each rank idles, by cause (see :data:`CAUSES`), one dict a rank. A rank's causes add up to its idle time."""
    incoming = _incoming(timeline)
    return tuple(_rank_idle(timeline, rank, incoming) for rank in range(timeline.num_ranks))


def _rank_idle(timeline: Timeline, rank: int, incoming: dict[tuple[str, int, int], Message]) -> dict[str, float]:
    idle = dict.fromkeys(CAUSES, 0.0)
    spans = timeline.spans[rank]
    if not spans:
        idle["drain"] = timeline.makespan
        return idle
    idle["warm-up"] = spans[0].start
    idle["drain"] = timeline.makespan - spans[-1].end
    limit = timeline.memory_cap[rank] * (1 + CAP_TOLERANCE)
    held, next_forward = 0.0, 0
    for i, span in enumerate(spans):
        gap_start = spans[i - 1].end if i else span.start
        if span.start > gap_start:
            rest_end = span.start
            next_forward = max(next_forward, i)
            while next_forward < len(spans) and spans[next_forward].kind != "F":
                next_forward += 1
            if next_forward < len(spans):
                forward = spans[next_forward]
                if held + timeline.held_bytes["F"][forward.stage] > limit:
                    arrived = _arrival(incoming, forward)
                    if arrived is not None and arrived < rest_end:
                        idle["memory cap"] += rest_end - max(arrived, gap_start)
                        rest_end = max(arrived, gap_start)
            message = incoming.get((_slot(span.kind), span.stage, span.micro_batch))
            # clocks of two ranks may disagree in a measured run: never let a message arrive before it was sent
            sent, arrived = (min(message.sent, message.end), message.end) if message else (gap_start, gap_start)
            idle["imbalance"] += _overlap(gap_start, rest_end, gap_start, sent)
            idle["message"] += _overlap(gap_start, rest_end, sent, arrived)
            idle["overhead"] += _overlap(gap_start, rest_end, arrived, rest_end)
        held += timeline.held_bytes[span.kind][span.stage]
    return idle


def _arrival(incoming: dict[tuple[str, int, int], Message], forward: Span) -> float | None:
    """When the input of a forward was there; None if it comes from the same rank, at a time its order decides."""
    if forward.stage == 0:
        return 0.0
    message = incoming.get(("F", forward.stage, forward.micro_batch))
    return message.end if message else None


def _overlap(a_start: float, a_end: float, b_start: float, b_end: float) -> float:
    return max(0.0, min(a_end, b_end) - max(a_start, b_start))


def critical_path(timeline: Timeline) -> tuple[PathStep, ...]:
    """The chain of actions and messages that makes the step as long as it is, from its start to its end.

    Before every action stands what ended last of the two things it waited for: the action before it on the rank, and its message.
    """
    incoming = _incoming(timeline)
    place = {
        (_slot(s.kind), s.stage, s.micro_batch): (r, i) for r, spans in enumerate(timeline.spans) for i, s in enumerate(spans)
    }
    ends = [(spans[-1].end, -r) for r, spans in enumerate(timeline.spans) if spans]
    if not ends:
        return ()
    rank = -max(ends)[1]
    at = len(timeline.spans[rank]) - 1
    path: list[PathStep] = []
    while True:
        span = timeline.spans[rank][at]
        path.append(PathStep("action", rank, span.action, span.start, span.end))
        before = timeline.spans[rank][at - 1].end if at else 0.0
        message = incoming.get((_slot(span.kind), span.stage, span.micro_batch))
        if message is not None and message.end > before:
            path.append(PathStep("message", rank, span.action, message.sent, message.end))
            rank, at = place[_slot(message.kind), message.stage, message.micro_batch]
        elif at == 0:
            break
        else:
            at -= 1
    return tuple(reversed(path))


def memory_curve(timeline: Timeline) -> tuple[tuple[tuple[float, float], ...], ...]:
    """(seconds, bytes held from then on) at every change, one tuple a rank.

    F takes when it starts, the others free when they end.
    """
    curves = []
    for spans in timeline.spans:
        held = 0.0
        curve = [(0.0, 0.0)]
        for s in spans:
            change = timeline.held_bytes[s.kind][s.stage]
            if change:
                held += change
                curve.append((s.start if s.kind == "F" else s.end, held))
        curves.append(tuple(curve))
    return tuple(curves)
