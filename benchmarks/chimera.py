"""Rehearsal against Chimera, in our own executor: Hanayo and zero-bubble waves need no second copy of the weights."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.against_torch import MESSAGE, SECONDS, prediction_row, schedules
from benchmarks.report import Report, Row, main

from wavetrain.runtime.rehearsal import rehearse_all
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.simulator import simulate

TARGETS = {"hanayo, waves = 4": 1.28, "zb-wave, waves = 4": 1.38}


def run(quick: bool) -> Report:
    """Chimera."""
    p, seconds, steps = (2, 0.01, 1) if quick else (8, SECONDS, 5)
    costs = Costs.uniform(
        p, forward=seconds, backward_input=seconds, backward_weight=seconds, message_bytes=4.0 * MESSAGE[0] * MESSAGE[1]
    )
    found = schedules(p, p, (("chimera", {}), ("hanayo", {"waves": 4}), ("zb-wave", {"waves": 4})))
    runs = dict(zip(found, rehearse_all(list(found.values()), costs, steps=steps), strict=True))
    rival = runs["chimera"].measured_seconds
    ideal = simulate(found["chimera"], costs).makespan
    rows = []
    for label, target in TARGETS.items():
        ratio, most = rival / runs[label].measured_seconds, ideal / simulate(found[label], costs).makespan
        rows.append(
            Row(
                case=f"P=B={p}: {label} against chimera",
                target=f"≥ {0 if quick else target:.2f}×",
                measured=f"{ratio:.3f}×",
                limit=f"{most:.3f}×",
                distance=f"{1 - ratio / most:.1%}",
                passed=ratio >= (0 if quick else target),
            )
        )
    rows += [prediction_row(f"P=B={p}: {label}", r, 10.0 if quick else 0.03) for label, r in runs.items()]
    return Report(
        name="chimera",
        claim=f"F = I = W = {SECONDS * 1000:.0f} ms a rank and micro-batch (the paper: up to 1.304×).",
        rows=tuple(rows),
        notes=("Limit: both on free links. Chimera's exchange of gradients between its two copies is not charged.",),
    )


if __name__ == "__main__":
    main(run)
