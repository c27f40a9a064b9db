"""Timelines for chrome://tracing and ui.perfetto.dev: the Trace Event Format, as JSON.

One thread a rank with a slice an action, an arrow a message, a counter of activation bytes a rank.
"""

from __future__ import annotations

from typing import Any, Final

from wavetrain.schedule.actions import KIND_NAMES
from wavetrain.schedule.analysis import memory_curve
from wavetrain.schedule.timeline import Span, Timeline

_MICRO: Final = 1e6
"""The format's times are in microseconds."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """``timeline`` as a trace; ``json.dump`` it to a file."""
    events = _names(timeline)
    for rank, spans in enumerate(timeline.spans):
        events += [_slice(rank, span) for span in spans]
    events += _arrows(timeline)
    for rank, curve in enumerate(memory_curve(timeline)):
        events += [
            {"ph": "C", "pid": 0, "name": f"activations of rank {rank}", "ts": at * _MICRO, "args": {"bytes": held}}
            for at, held in curve
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "name": timeline.name,
            "source": timeline.source,
            "ranks": timeline.num_ranks,
            "stages": timeline.num_stages,
            "micro_batches": timeline.num_micro_batches,
            "makespan_seconds": timeline.makespan,
            "bubble": timeline.bubble,
        },
    }


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    title = {"name": f"{timeline.name} ({timeline.source})"}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": title}]
    for rank in range(timeline.num_ranks):
        for name, args in (("thread_name", {"name": f"rank {rank}"}), ("thread_sort_index", {"sort_index": rank})):
            events.append({"ph": "M", "pid": 0, "tid": rank, "name": name, "args": args})
    return events


def _slice(rank: int, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "name": str(span.action),
        "cat": KIND_NAMES[span.kind],
        "ts": span.start * _MICRO,
        "dur": (span.end - span.start) * _MICRO,
        "args": {"kind": span.kind, "stage": span.stage, "micro_batch": span.micro_batch},
    }


def _arrows(timeline: Timeline) -> list[dict[str, Any]]:
    """Flow events. Viewers tie each end to the slice that is open at its time, so both stand within their slices."""
    halves = (s for spans in timeline.spans for s in spans if s.kind != "W")
    spans = {("F" if s.kind == "F" else "B", s.stage, s.micro_batch): s for s in halves}
    events: list[dict[str, Any]] = []
    for number, message in enumerate(timeline.messages):
        produced = spans.get((message.kind, message.stage, message.micro_batch))
        used = spans.get((message.kind, message.target_stage, message.micro_batch))
        if produced is None or used is None:
            continue
        common = {"pid": 0, "id": number, "name": "activations" if message.kind == "F" else "gradients", "cat": "message"}
        args = {
            "stage": message.stage,
            "micro_batch": message.micro_batch,
            "from_rank": message.source,
            "to_rank": message.target,
            "sent": message.sent * _MICRO,
            "on_link": message.start * _MICRO,
            "arrived": message.end * _MICRO,
        }
        leaves = (produced.start + produced.end) / 2
        events.append({"ph": "s", "tid": message.source, "ts": leaves * _MICRO, "args": args, **common})
        events.append({"ph": "f", "bp": "e", "tid": message.target, "ts": used.start * _MICRO, "args": args, **common})
    return events
