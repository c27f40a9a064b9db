"""Zero-bubble waves: W waves with a split backward under a cap of P micro-batches, against (P−1)/(6WB+P−1).

That is the time in which the first forward reaches the last rank, and nothing else: on a wave placement no schedule idles less.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report, Row, main, percent, points

from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.proof import prove
from wavetrain.schedule.simulator import simulate

ONE_POINT = 0.01
MAX_ACTIONS = 30_000  # about half a minute


def run(quick: bool) -> Report:
    """Bubble of zb-wave at cap P."""
    ranks = (2, 4) if quick else (2, 3, 4, 6, 8, 12, 16, 24, 32)
    waves = (1, 2) if quick else (1, 2, 4)
    rows, skipped = [], []
    for factor in (1, 2, 4):
        for p in ranks:
            for w in waves:
                b = factor * p
                if 6 * p * w * b > MAX_ACTIONS:
                    skipped.append(f"P={p} B={b} W={w}")
                    continue
                rows.append(_row(p, b, w))
    notes = [
        "Cap: P micro-batches of a rank's share; every schedule is proven within it.",
        "Limit: (P−1)/(6WB+P−1), the lower bound of the placement. B = P must meet it, B = 2P and 4P may take one point more.",
    ]
    if skipped:
        notes.append(f"Left out, above {MAX_ACTIONS:,} actions: {', '.join(skipped)}.")
    return Report(
        name="zero_bubble_waves", claim="Zero-bubble waves, F = I = W, free links, cap P.", rows=tuple(rows), notes=tuple(notes)
    )


def _row(p: int, b: int, w: int) -> Row:
    costs = Costs.uniform(p, memory_cap=p)
    begin = time.perf_counter()
    schedule = build("zb-wave", num_ranks=p, num_micro_batches=b, waves=w, costs=costs)
    seconds = time.perf_counter() - begin
    limit = (p - 1) / (6 * w * b + p - 1)
    bubble = simulate(schedule, costs).bubble
    allowed = limit if b == p else limit + ONE_POINT
    return Row(
        case=f"P={p} B={b} W={w} ({seconds:.1f} s to build)",
        target=f"≤ {percent(allowed)}",
        measured=percent(bubble),
        limit=percent(limit),
        distance=points(bubble - limit),
        passed=prove(schedule, costs).proven and bubble <= allowed + 1e-9,
    )


if __name__ == "__main__":
    main(run)
