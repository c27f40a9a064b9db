"""Hanayo's experiment rehearsed: P = B = 8 in real processes, with times scaled and the clusters' links emulated.

The simulated part, for all P, is :mod:`benchmarks.paper`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import scaled
from benchmarks.paper import RIVALS, Case, cases
from benchmarks.report import Report, Row, main

from wavetrain.errors import CapError
from wavetrain.runtime.rehearsal import Rehearsal, rehearse_all
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.simulator import simulate

IDEAL_SECONDS = 3.0
"""A step without a bubble, after scaling."""
MESSAGE_BYTES = 128 * 1024
"""Messages are cut to this size; they are held back as long as the whole ones would take."""
MOST_OFF = 0.03


def run(quick: bool) -> Report:
    """The paper's experiment in rehearsal."""
    rows: list[Row] = []
    chosen = [c for c in cases(quick) if (c.num_ranks, c.num_micro_batches) == (8, 8)]
    for case in chosen:
        rows += _rows(case, quick)
    return Report(
        name="paper_rehearsed",
        claim=f"Hanayo's experiment, P = B = 8, rehearsed with emulated links: throughput over the best of {', '.join(RIVALS)}.",
        rows=tuple(rows),
        notes=(
            f"Times are scaled such that a step without a bubble takes {IDEAL_SECONDS:g} s; medians of 3 steps, taking turns. "
            f"Messages of {MESSAGE_BYTES // 1024} KiB, held back as long as the whole ones would take on the cluster's links.",
            "What Chimera's two copies need to agree is added as in `paper`.",
        ),
    )


def _rows(case: Case, quick: bool) -> list[Row]:
    ideal = (
        case.num_micro_batches
        / case.num_ranks
        * sum(map(sum, (case.costs.forward, case.costs.backward_input, case.costs.backward_weight)))
    )
    costs = _smaller_messages(scaled(case.costs, (0.2 if quick else IDEAL_SECONDS) / ideal))
    schedules = {}
    for label in case.schedules:
        try:
            schedules[label] = case.build(label)
        except CapError:
            continue
    best_waves = min((n for n in schedules if n.startswith("zb-wave")), key=lambda n: simulate(schedules[n], costs).makespan)
    kept = {n: s for n, s in schedules.items() if not n.startswith("zb-wave") or n == best_waves}
    if quick:
        kept = {n: kept[n] for n in ("DAPPLE", best_waves)}
    found = dict(zip(kept, rehearse_all(list(kept.values()), costs, steps=1 if quick else 3), strict=True))
    factor = (0.2 if quick else IDEAL_SECONDS) / ideal
    seconds = {n: _seconds(case, n, r, factor) for n, r in found.items()}
    rival = min((n for n in seconds if n in RIVALS), key=seconds.__getitem__)
    rows = [
        Row(
            case=f"{case.label}: {name} over {rival}",
            measured=f"{100 * (seconds[rival] / s - 1):+.1f} % ({seconds[rival]:.2f} / {s:.2f} s)",
            limit=f"{100 * (seconds[rival] / (ideal * factor) - 1):+.1f} %",
            distance=f"{s / (ideal * factor) - 1:.1%}",
            passed=seconds[rival] > s if name == best_waves and not quick else None,
            target="faster" if name == best_waves else "",
        )
        for name, s in seconds.items()
        if name not in RIVALS
    ]
    off = {n: r.measured_seconds / r.predicted_seconds - 1 for n, r in found.items()}
    worst = max(off, key=lambda n: abs(off[n]))
    rows.append(
        Row(
            case=f"{case.label}: measured against simulated, worst of {len(off)}",
            target=f"≤ {MOST_OFF:.0%} off",
            measured=f"{off[worst]:+.1%} ({worst})",
            passed=quick or abs(off[worst]) <= MOST_OFF,
        )
    )
    return rows


def _seconds(case: Case, label: str, found: Rehearsal, factor: float) -> float:
    """The measured step, and for Chimera what its copies still need to agree."""
    extra = 0.0
    if label == "Chimera":
        timeline = simulate(found.schedule, case.costs)
        extra = case.step_seconds(label, timeline) - timeline.makespan
    return found.measured_seconds + extra * factor


def _smaller_messages(costs: Costs) -> Costs:
    """The same transfer times with messages of at most :data:`MESSAGE_BYTES`."""
    factor = min(1.0, MESSAGE_BYTES / max(costs.message_bytes))
    return replace(
        costs,
        message_bytes=tuple(b * factor for b in costs.message_bytes),
        bandwidth=tuple(tuple(v * factor if v < math.inf else v for v in row) for row in costs.bandwidth),
    )


if __name__ == "__main__":
    main(run)
