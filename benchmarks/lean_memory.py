"""Lean memory: ``auto`` with fewer and fewer micro-batches held, down to the least that any schedule can."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bounds import least_bounds
from benchmarks.report import Report, Row, main, percent, points

from wavetrain.errors import CapError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.proof import Certificate, prove
from wavetrain.schedule.simulator import simulate


def run(quick: bool) -> Report:
    """Bubble under ever smaller caps."""
    p, b = (2, 8) if quick else (8, 32)
    plain = (p - 1) / (b + p - 1)  # 1F1B
    targets: dict[float, tuple[float, str] | None] = {p: None}
    targets[p // 2 + 1] = (plain / 2, "V-Half")
    targets[(p + 4) // 3] = (plain * 2 / 3, "V-Min")
    targets |= {float(cap): None for cap in (3, 2, 1) if cap < min(targets)}
    rows = [_row(p, b, cap, target) for cap, target in sorted(targets.items(), reverse=True)]
    rows.append(_refused(p, b, 0.99))
    notes = (
        f"P={p}, B={b}, F = I = W, free links. 1F1B holds {p} and idles {percent(plain, 1)}; "
        "V-Half and V-Min idle 1/2 and 2/3 of that.",
        "Limit: the bubble at the lower bound, which knows nothing of memory; under the tightest caps most of "
        "the distance to it is the cap's.",
    )
    return Report(name="lean_memory", claim="auto under a memory cap.", rows=tuple(rows), notes=notes)


def _row(p: int, b: int, cap: float, target: tuple[float, str] | None) -> Row:
    costs = Costs.uniform(p, memory_cap=cap)
    schedule = build("auto", num_ranks=p, num_micro_batches=b, costs=costs)
    timeline = simulate(schedule, costs)
    proof = prove(schedule, costs)
    _, bound = least_bounds(p, b, costs)
    limit = 1 - timeline.ideal / bound
    shape = f"{schedule.waves} waves" if schedule.waves else f"{schedule.num_stages} stages"
    held = f"{max(proof.peak_activations):.4g} held" if isinstance(proof, Certificate) else "not proven"
    return Row(
        case=f"cap {cap:g} ({shape}, {held})",
        target=f"≤ {percent(target[0])} ({target[1]})" if target else "proven",
        measured=percent(timeline.bubble),
        limit=percent(limit),
        distance=points(timeline.bubble - limit),
        passed=proof.proven and (target is None or timeline.bubble <= target[0]),
    )


def _refused(p: int, b: int, cap: float) -> Row:
    try:
        build("auto", num_ranks=p, num_micro_batches=b, costs=Costs.uniform(p, memory_cap=cap))
    except CapError as error:
        return Row(
            case=f"cap {cap:g}",
            target="refused, least cap 1",
            measured=f"refused, least cap {error.least_cap:g}",
            passed=error.least_cap == 1,
        )
    return Row(case=f"cap {cap:g}", target="refused, least cap 1", measured="built", passed=False)


if __name__ == "__main__":
    main(run)
