"""What a run can tell in the end: its losses, and its step as measured and as predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wavetrain.runtime.executor import Moment
from wavetrain.runtime.mesh import Mesh
from wavetrain.runtime.trace import clock_offset, gather_moments, measured_timeline
from wavetrain.runtime.train.metrics import read_metrics
from wavetrain.schedule.costs import Costs, square
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.timeline import Timeline


def gather_timelines(steps: Sequence[Sequence[Moment]], schedule: Schedule, mesh: Mesh) -> list[Timeline]:
    """Steps of this replica as they ran; collective.

    Args:
        steps: of each step, the moments of this rank.
        schedule: what ran.
        mesh: who ran it.
    """
    group = mesh.group("pp")
    if group is None:
        return [measured_timeline(schedule, [moments]) for moments in steps]
    offset = clock_offset(group)
    return [measured_timeline(schedule, gather_moments(moments, schedule, group, offset)) for moments in steps]


def measured_costs(schedule: Schedule, timelines: Sequence[Timeline]) -> Costs:
    """What actions and hops took, medians over all micro-batches of the steps; B counts as I and W in halves.

    A hop is from the end of an action to the start of the one that waits for its result, where a rank was idle for it.
    """
    found: dict[tuple[str, int], list[float]] = {}
    hops: list[float] = []
    for timeline in timelines:
        for spans in timeline.spans:
            for span in spans:
                found.setdefault((span.kind, span.stage), []).append(span.end - span.start)
        hops += _hops(timeline)

    def median(kind: str, stage: int) -> float:
        samples = found.get((kind, stage))
        if samples:
            return statistics.median(samples)
        return median("B", stage) / 2 if kind != "B" and ("B", stage) in found else 0.0

    num_ranks, stages = schedule.num_ranks, range(schedule.num_stages)
    return Costs(
        forward=tuple(median("F", s) for s in stages),
        backward_input=tuple(median("I", s) for s in stages),
        backward_weight=tuple(median("W", s) for s in stages),
        activation_bytes=(num_ranks / len(stages),) * len(stages),
        message_bytes=(0.0,) * len(stages),
        speed=(1.0,) * num_ranks,
        latency=square(num_ranks, statistics.median(hops) if hops else 0.0),
        bandwidth=square(num_ranks, math.inf),
        memory_cap=(math.inf,) * num_ranks,
    )


def _hops(timeline: Timeline) -> list[float]:
    """Seconds of the messages that a rank sat waiting for."""
    free = {
        ("F" if span.kind == "F" else "B", span.stage, span.micro_batch): spans[i - 1].end if i else 0.0
        for spans in timeline.spans
        for i, span in enumerate(spans)
        if span.kind != "W"
    }
    return [m.end - m.sent for m in timeline.messages if free[m.kind, m.target_stage, m.micro_batch] <= m.sent]


def step_figures(schedule: Schedule, timelines: Sequence[Timeline]) -> tuple[dict[str, Any], list[Timeline]]:
    """The figures of the median step and of its prediction; and both: measured, predicted."""
    measured = sorted(timelines, key=lambda t: t.makespan)[len(timelines) // 2]
    costs = measured_costs(schedule, timelines)
    predicted = simulate(schedule, costs)
    figures = {
        "pipeline_seconds": measured.makespan,
        "predicted_pipeline_seconds": predicted.makespan,
        "bubble": measured.bubble,
        "predicted_bubble": predicted.bubble,
        "hop_seconds": costs.latency[0][0],
    }
    return figures, [measured, predicted]


def loss_curves(metrics: Path) -> dict[str, list[tuple[float, float]]]:
    """(step, loss) of a metrics file, of training and of validation, where there are any."""
    return _curves(metrics, {"training": "loss", "validation": "validation_loss"})


def round_curves(metrics: Path) -> dict[str, list[tuple[float, float]]]:
    """(step, number) of a metrics file: of the rounds of OptEx, where there are any."""
    return _curves(metrics, {"points asked for": "points", "steps taken": "accepted", "cosine of predictions": "cosine"})


def _curves(metrics: Path, keys: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    records = read_metrics(metrics)
    curves = {name: [(float(r["step"]), float(r[key])) for r in records if r.get(key) is not None] for name, key in keys.items()}
    return {name: points for name, points in curves.items() if points}
