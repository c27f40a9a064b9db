"""16 and 32 ranks of the real runtime on one machine: whether it runs, and whether as simulated."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.against_torch import MESSAGE, prediction_row, schedules
from benchmarks.report import Report, main

from wavetrain.runtime.rehearsal import rehearse_all
from wavetrain.schedule.costs import Costs

SECONDS = 0.16


def run(quick: bool) -> Report:
    """Many ranks."""
    rows = []
    for p in (4,) if quick else (16, 32):
        seconds = 0.01 if quick else SECONDS
        costs = Costs.uniform(
            p, forward=seconds, backward_input=seconds, backward_weight=seconds, message_bytes=4.0 * MESSAGE[0] * MESSAGE[1]
        )
        found = schedules(p, p, (("1f1b", {}), ("hanayo", {"waves": 2}), ("zb-wave", {"waves": 1}), ("zb-wave", {"waves": 2})))
        runs = rehearse_all(list(found.values()), costs, steps=1 if quick else 3, timeout_seconds=180.0)
        rows += [prediction_row(f"P=B={p}: {label}", r, 10.0 if quick else 0.08) for label, r in zip(found, runs, strict=True)]
    return Report(
        name="many_ranks",
        claim=f"F = I = W = {SECONDS * 1000:.0f} ms a rank and micro-batch, messages of {MESSAGE[0]}×{MESSAGE[1]} floats.",
        rows=tuple(rows),
        notes=("Simulated with the hop measured in the warm-up steps of the same run.",),
    )


if __name__ == "__main__":
    main(run)
