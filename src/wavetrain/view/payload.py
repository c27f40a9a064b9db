"""A timeline as the page reads it: compact, column-oriented, valid JSON.

Everything that is per action is a column of a lane, so that 10⁵ actions take a few megabytes and the page can put them into
typed arrays without an object each::

    {"format": 1, "name": "gpipe", "source": "simulated", "ranks": 2, "stages": 2, "micro_batches": 2, "waves": null,
     "makespan": 9, "ideal": 6, "bubble": 0.333333333, "peak_activations": [2, 2],
     "lanes": [{"kind": "FFBB", "stage": [0, 0, 0, 0], "micro_batch": [0, 1, 0, 1],
                "start": [0, 1, 5, 7], "end": [1, 2, 7, 9], "held": [1, 2, 1, 0]}, …],
     "messages": {"kind": "FFBB", "stage": […], "micro_batch": […], "source": […], "target": […],
                  "sent": […], "start": […], "end": […]},
     "cap": [null, null], "share_bytes": [1, 1],
     "idle": {"causes": ["warm-up", …], "seconds": [[0, …], …]},
     "critical": {"rank": […], "index": […]}}

``held`` is the memory curve: what the rank holds once an action has taken (F, at its start) or freed (the others, at their
end), in micro-batches of the rank's share, like ``cap`` (null: no cap) and ``peak_activations``. ``critical`` names the actions
of the critical path by rank and place in the lane; between two of different ranks lies the message that joins them. Times are
seconds, rounded to a hundred-millionth of the makespan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from wavetrain.schedule.analysis import CAUSES, critical_path, idle_by_cause
from wavetrain.schedule.timeline import Timeline

FORMAT: Final = 1
"""Raised when a page of an older version could not read the payload."""

_SIGNIFICANT_DIGITS = 8
_SHARE_DECIMALS = 6


def timeline_payload(timeline: Timeline) -> dict[str, Any]:
    """What the page needs to draw ``timeline``, as plain data without infinities (see the module's text)."""
    seconds = _rounder(_decimals(timeline.makespan))
    shares = _rounder(_SHARE_DECIMALS)
    messages = timeline.messages
    return {
        "format": FORMAT,
        "name": timeline.name,
        "source": timeline.source,
        "ranks": timeline.num_ranks,
        "stages": timeline.num_stages,
        "micro_batches": timeline.num_micro_batches,
        "waves": timeline.waves,
        "makespan": seconds(timeline.makespan),
        "ideal": seconds(timeline.ideal),
        "bubble": round(timeline.bubble, 9),
        "peak_activations": [shares(p) for p in timeline.peak_activations],
        "lanes": [_lane(timeline, rank, seconds, shares) for rank in range(timeline.num_ranks)],
        "messages": {
            "kind": "".join(m.kind for m in messages),
            "stage": [m.stage for m in messages],
            "micro_batch": [m.micro_batch for m in messages],
            "source": [m.source for m in messages],
            "target": [m.target for m in messages],
            "sent": [seconds(m.sent) for m in messages],
            "start": [seconds(m.start) for m in messages],
            "end": [seconds(m.end) for m in messages],
        },
        "cap": [
            shares(cap / share) if share > 0 and math.isfinite(cap) else None
            for cap, share in zip(timeline.memory_cap, timeline.share_bytes, strict=True)
        ],
        "share_bytes": list(timeline.share_bytes),
        "idle": {
            "causes": list(CAUSES),
            "seconds": [[seconds(idle[cause]) for cause in CAUSES] for idle in idle_by_cause(timeline)],
        },
        "critical": _critical(timeline),
    }


def dump_payloads(timelines: Sequence[Timeline]) -> str:
    """``{"timelines": [...]}`` as JSON text, ASCII only."""
    payload = {"timelines": [timeline_payload(t) for t in timelines]}
    return json.dumps(payload, allow_nan=False, separators=(",", ":"))


def _lane(timeline: Timeline, rank: int, seconds: Callable[[float], float], shares: Callable[[float], float]) -> dict[str, Any]:
    spans, change = timeline.spans[rank], timeline.held_bytes
    unit = timeline.share_bytes[rank] or math.inf  # a rank without activations holds none of its share
    held, now = [], 0.0
    for s in spans:
        now += change[s.kind][s.stage]
        held.append(shares(now / unit))
    return {
        "kind": "".join(s.kind for s in spans),
        "stage": [s.stage for s in spans],
        "micro_batch": [s.micro_batch for s in spans],
        "start": [seconds(s.start) for s in spans],
        "end": [seconds(s.end) for s in spans],
        "held": held,
    }


def _critical(timeline: Timeline) -> dict[str, list[int]]:
    ranks, indices = [], []
    next_index = [0] * timeline.num_ranks  # a path visits the actions of a rank in their order
    for step in critical_path(timeline):
        if step.what == "message":
            continue
        spans, at = timeline.spans[step.rank], next_index[step.rank]
        while spans[at].action != step.action:
            at += 1
        ranks.append(step.rank)
        indices.append(at)
        next_index[step.rank] = at + 1
    return {"rank": ranks, "index": indices}


def _decimals(makespan: float) -> int:
    """Decimals that keep eight significant digits of the makespan."""
    return _SIGNIFICANT_DIGITS - math.ceil(math.log10(makespan)) if makespan > 0 else _SIGNIFICANT_DIGITS


def _rounder(decimals: int) -> Callable[[float], float]:
    def rounded(value: float) -> float:
        value = round(value, decimals)
        return int(value) if value.is_integer() else value  # 3, not 3.0: shorter

    return rounded
