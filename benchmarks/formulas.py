"""The formulas of the literature, P·B·W by P·B·W: the bubble that a simulation measures against the one a paper promises.

F = I = W = 1 second a rank's share, free links, no cap.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report, Row, main, percent

from wavetrain.schedule.families import build
from wavetrain.schedule.simulator import simulate

CLOSE = 1e-9


def bubble(name: str, num_ranks: int, num_micro_batches: int, **options: Any) -> float:
    return simulate(build(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, **options)).bubble


def hanayo_deep(p: int, b: int, w: int) -> float:
    """What breadth-first Hanayo is seen to take for B ≥ 2P."""
    return 3 * (p - 1) / (6 * w * b + 3 * (p - 1))


def run(quick: bool) -> Report:
    """Published bubbles, measured."""
    ranks = (2, 4) if quick else (2, 3, 4, 6, 8, 16)
    waves = (1, 2) if quick else (1, 2, 4)
    pairs = [(p, b) for p in ranks for b in sorted({p, 2 * p, 4 * p})]
    rows = [
        _row("gpipe", "(P−1)/(B+P−1)", [(("gpipe", p, b), {}, (p - 1) / (b + p - 1)) for p, b in pairs]),
        _row("1f1b", "(P−1)/(B+P−1)", [(("1f1b", p, b), {}, (p - 1) / (b + p - 1)) for p, b in pairs]),
        _row(
            "interleaved, v = 2, 3, 4",
            "(P−1)/(vB+P−1)",
            [
                (("interleaved", p, b), {"stages_per_rank": v}, (p - 1) / (v * b + p - 1))
                for p, b in pairs
                for v in ((2,) if quick else (2, 3, 4))
            ],
        ),
        _row(
            "chimera, B = P even",
            "(P−2)/(1.5B+P−2)",
            [(("chimera", p, p), {}, (p - 2) / (1.5 * p + p - 2)) for p in ranks if p % 2 == 0],
        ),
        _row(
            "hanayo, B = P",
            "(2P−2)/(3PW+2P−2)",
            [(("hanayo", p, p), {"waves": w}, _hanayo(p, p, w)) for p in ranks for w in waves],
        ),
        _row(
            "hanayo breadth first, B ≥ 2P",
            "≤ (2P−2)/(3BW+2P−2)",
            [
                (("hanayo", p, b), {"waves": w, "breadth_first": True}, _hanayo(p, b, w))
                for p in ranks
                for b in (2 * p, 4 * p)
                for w in waves
            ],
            at_most=True,
        ),
        _row(
            "the same, against what it takes",
            "3(P−1)/(6WB+3(P−1))",
            [
                (("hanayo", p, b), {"waves": w, "breadth_first": True}, hanayo_deep(p, b, w))
                for p in ranks
                for b in (2 * p, 4 * p)
                for w in waves
            ],
        ),
        _row(
            "zb-wave, B = P",
            "≤ (P−1)/(6WB+P−1)",
            [
                (("zb-wave", p, p), {"waves": w}, (p - 1) / (6 * w * p + p - 1))
                for p in ranks
                for w in waves
                if 6 * w * p * p <= 6000
            ],
            at_most=True,
        ),
    ]
    size = 4 if quick else 8
    for name, options in (("1f1b", {}), ("chimera", {}), *(("hanayo", {"waves": w}) for w in waves)):
        measured = bubble(name, size, size, **options)
        case = name + "".join(f", {k} = {v}" for k, v in options.items())
        rows.append(
            Row(case=f"P = B = {size}: {case}", measured=percent(measured, 1), limit="0 %", distance=percent(measured, 1))
        )
    notes = (
        "A target that begins with `=` is met when measured and formula agree to 1e-9 at every point of the grid, "
        f"P in {ranks}, B in P, 2P, 4P, W in {waves}.",
        "Breadth-first hanayo comes out better than the published formula for B ≥ 2P: a rank idles 3(P−1) stage units where the "
        "formula has 4(P−1). Both are shown.",
    )
    return Report(name="formulas", claim="Published bubbles, measured by simulation.", rows=tuple(rows), notes=notes)


def _hanayo(p: int, b: int, w: int) -> float:
    return (2 * p - 2) / (3 * b * w + 2 * p - 2)


def _row(
    case: str,
    formula: str,
    points: list[tuple[tuple[str, int, int], dict[str, Any], float]],
    *,
    at_most: bool = False,
) -> Row:
    differences = [bubble(*arguments, **options) - wanted for arguments, options, wanted in points]
    above, below = max(differences), min(differences)
    met = sum(d <= CLOSE and (at_most or d >= -CLOSE) for d in differences)
    exact = max(abs(above), abs(below)) <= CLOSE
    spread = "equal" if exact else f"{100 * below:+.2f} to {100 * above:+.2f} points"
    return Row(
        case=case,
        target=formula if at_most else f"= {formula}",
        measured=f"{met} of {len(points)} points: {spread}",
        passed=met == len(points),
    )


if __name__ == "__main__":
    main(run)
