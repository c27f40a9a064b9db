"""Hops that take time: 5 % of a forward each, P = 8, at most P micro-batches held. ``auto`` against every named family."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bounds import least_bounds
from benchmarks.report import Report, Row, main, percent, points

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.families.auto import named_options
from wavetrain.schedule.proof import prove
from wavetrain.schedule.simulator import simulate

HOP = 0.05
MOST = 0.09


def run(quick: bool) -> Report:
    """Hop latency."""
    p, counts = (3, (6,)) if quick else (8, (8, 16))
    rows: list[Row] = []
    for b in counts:
        costs = Costs.uniform(p, hop_latency=HOP, memory_cap=p)
        named: list[tuple[float, str]] = []
        above = []
        for name, options in named_options(p, costs):
            label = name + "".join(f", {k} = {v}" for k, v in options.items())
            try:
                schedule = build(name, num_ranks=p, num_micro_batches=b, costs=costs, **options)
            except InputError:
                above.append(label)
                continue
            named.append((simulate(schedule, costs).bubble, label))
        named.sort()
        schedule = build("auto", num_ranks=p, num_micro_batches=b, costs=costs)
        timeline = simulate(schedule, costs)
        _, bound = least_bounds(p, b, costs)
        limit = 1 - timeline.ideal / bound
        proven = prove(schedule, costs).proven
        shape = f"{schedule.waves} waves" if schedule.waves else f"{schedule.num_stages} stages"
        if b == 2 * p and not quick:
            rows.append(_row(f"P={p} B={b}: auto ({shape})", MOST, timeline.bubble, limit, proven))
        rows.append(_row(f"P={p} B={b}: auto ({shape}) against the best named", named[0][0], timeline.bubble, limit, proven))
        rows += [Row(case=f"P={p} B={b}: {label}", measured=percent(bubble)) for bubble, label in named]
        rows += [Row(case=f"P={p} B={b}: {label}", measured="above the cap, or P odd") for label in above]
    return Report(
        name="hop_latency",
        claim=f"A hop takes {HOP:.0%} of a rank's F, F = I = W, cap P.",
        rows=tuple(rows),
        notes=("Limit: the bubble at the lower bound, the least over all placements that `auto` considers.",),
    )


def _row(case: str, target: float, bubble: float, limit: float, proven: bool) -> Row:
    return Row(
        case=case,
        target=f"≤ {percent(target)}",
        measured=percent(bubble),
        limit=percent(limit),
        distance=points(bubble - limit),
        passed=proven and bubble <= target + 1e-9,
    )


if __name__ == "__main__":
    main(run)
