"""Rehearsal against torch.distributed.pipelining: both run in real processes over Gloo, compute emulated by the same waiting.

Both sides do the same work: F, I and W of every stage. (torch leaves out I of the first stage when the model's input takes no
gradient. A real first stage has layers whose weights need that walk, so here its input takes one; what torch needs without it
is shown as well, and it is that smaller time which our step is compared with.)
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report, Row, main
from benchmarks.torch_peer import Emulated, StepTimes, TorchCase, time_cases, torch_cases

from wavetrain.errors import InputError
from wavetrain.runtime.rehearsal import Rehearsal, rehearse_all
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.schedule import Schedule

SECONDS = 0.08
MESSAGE = (128, 256)
OURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpipe", {}),
    ("1f1b", {}),
    *(("interleaved", {"stages_per_rank": n}) for n in (2, 3, 4)),
    ("zbv", {}),
    ("dualpipev", {}),
    *(("hanayo", {"waves": n}) for n in (2, 4)),
    *(("zb-wave", {"waves": n}) for n in (1, 2, 3, 4, 6)),
    *(("zb-wave", {"waves": n, "growth": 2.0}) for n in (2, 3)),
)
SAME = {
    "torch GPipe": "gpipe",
    "torch 1F1B": "1f1b",
    "torch Interleaved1F1B, 2 stages a rank": "interleaved, stages_per_rank = 2",
    "torch Interleaved1F1B, 3 stages a rank": "interleaved, stages_per_rank = 3",
    "torch Interleaved1F1B, 4 stages a rank": "interleaved, stages_per_rank = 4",
    "torch ZBVZeroBubble": "zbv",
    "torch DualPipeV": "dualpipev",
}
"""Schedules of one name on both sides."""
PREDICTION = 0.03
HOP_PER_RANK = 0.00009
"""About what a hop takes where P ranks share two cores, in seconds, divided by P."""
OVERHEAD = 0.00015
"""About what an action takes beside its work, in seconds, likewise."""
WARMUP = 2
"""Steps of each that do not count."""
ROUNDS = 3
"""How often the leading schedules of both sides run again, in turns."""
NUM_LEADING = 2


def run(quick: bool) -> Report:
    """Rehearsals."""
    rows: list[Row] = []
    for p, b, target in ((2, 2, 0.0),) if quick else ((4, 4, 1.11), (8, 8, 1.10), (8, 16, 1.10)):
        rows += _compare(p, b, target, 0.01 if quick else SECONDS, quick)
    return Report(
        name="against_torch",
        claim=f"F = I = W = {SECONDS * 1000:.0f} ms a rank and micro-batch, messages of {MESSAGE[0]}×{MESSAGE[1]} floats.",
        rows=tuple(rows),
        notes=(
            "Limit: no rank ever idles. First all schedules run: medians of five steps (three at P = 8); ours take turns step by "
            "step, torch's run one after the other in one set of processes, with 2, 3 and 4 stages a rank where they loop.",
            f"Then the {NUM_LEADING} fastest of either side run {ROUNDS} times more, the sides in turns, so that the machine's "
            "mood meets both: of these steps are the medians that decide which side is how much faster.",
            "Prediction: simulated with the hop, and with the time that an action takes beside its work, both measured in the "
            "warm-up steps of the same run, which do not count. In brackets: with the measured hop alone.",
            "In brackets after a schedule: how many micro-batches of its share a rank holds at most. torch has no cap to "
            "set; ours that hold more than torch's best are compared on a row of their own.",
        ),
    )


def schedules(
    p: int, b: int, options: tuple[tuple[str, dict[str, Any]], ...] = OURS, seconds: float = SECONDS
) -> dict[str, Schedule]:
    """Ours, by label; those that do not take the counts are left out. Zero-bubble waves are ordered for the hop of such a run."""
    found = {}
    costs = Costs.uniform(
        p,
        forward=seconds,
        backward_input=seconds,
        backward_weight=seconds,
        hop_latency=HOP_PER_RANK * p,
        overhead=OVERHEAD,
    )
    for name, given in options:
        if "growth" in given and b <= p:
            continue  # nothing to gain
        label = name + "".join(f", {k} = {v}" for k, v in given.items())
        try:
            ordered = costs if name == "zb-wave" else None
            found[label] = build(name, num_ranks=p, num_micro_batches=b, costs=ordered, **given)
        except InputError:
            continue
    return found


def prediction_row(label: str, found: Rehearsal, most: float = PREDICTION) -> Row:
    """Measured against simulated."""
    off, by_hop = (found.measured_seconds / s - 1 for s in (found.predicted_seconds, found.hop_only_seconds))
    return Row(
        case=f"{label}: measured against simulated",
        target=f"≤ {most:.0%} off",
        measured=f"{found.measured_seconds * 1000:.0f} against {found.predicted_seconds * 1000:.0f} ms, {off:+.1%} "
        f"(with the hop alone {by_hop:+.1%})",
        passed=abs(off) <= most,
    )


def _compare(p: int, b: int, target: float, seconds: float, quick: bool) -> list[Row]:
    costs = Costs.uniform(
        p, forward=seconds, backward_input=seconds, backward_weight=seconds, message_bytes=4.0 * MESSAGE[0] * MESSAGE[1]
    )
    ours = schedules(p, b, OURS[:2] if quick else OURS)
    steps = 1 if quick else 5 if p == 4 else 3
    mine = dict(zip(ours, rehearse_all(list(ours.values()), costs, steps=steps, warmup=WARMUP), strict=True))
    cases = [TorchCase(schedule="1F1B")] if quick else torch_cases()
    theirs = {t.case.label: t for t in _torch(cases, p, b, seconds, steps, input_gradient=True) if t.seconds}
    refused = sorted({c.label for c in cases} - set(theirs))
    leading = sorted(mine, key=lambda label: mine[label].measured_seconds)[:NUM_LEADING]
    leading += sorted((x for x in mine if ours[x].shares is None), key=lambda x: mine[x].measured_seconds)[:NUM_LEADING]
    leading = list(dict.fromkeys(leading))
    rivals = [t.case for t in sorted(theirs.values(), key=lambda t: t.median)[:NUM_LEADING]]
    again: dict[str, list[float]] = defaultdict(list)
    same: dict[str, list[float]] = defaultdict(list)
    without: dict[str, list[float]] = defaultdict(list)
    for _ in range(1 if quick else ROUNDS):
        for label, found in zip(leading, rehearse_all([ours[x] for x in leading], costs, steps=steps), strict=True):
            again[label] += found.step_seconds
        for peer in _torch(rivals, p, b, seconds, steps, input_gradient=True):
            same[peer.case.label] += peer.seconds
        for peer in _torch(rivals, p, b, seconds, steps, input_gradient=False):
            without[peer.case.label] += peer.seconds
    ideal = 3 * b * seconds
    best, fastest = _fastest(again)
    peaks = {label: max(found.predicted.peak_activations) for label, found in mine.items()}
    rows = []
    for work, times in (("same work", same), ("torch without I of the first stage", without)):
        rival, their_best = _fastest(times)
        within = {k: v for k, v in again.items() if peaks[k] <= theirs[rival].peak * (1 + 1e-6)}
        for label, steps_of in sorted({_fastest(found) for found in (again, within) if found}):
            case = f"P={p} B={b}: {label} ({peaks[label]:.3g}) against {rival} ({theirs[rival].peak:.3g}), {work}"
            rows.append(_ratio(case, target, their_best, steps_of, ideal))
    if (p, b) == (4, 4):
        rows.append(
            Row(
                case=f"P={p} B={b}: {best}",
                target="≤ 1010 ms",
                measured=f"{fastest * 1000:.0f} ms",
                limit=f"{ideal * 1000:.0f} ms",
                distance=f"{fastest / ideal - 1:.1%}",
                passed=fastest <= 1.010,
            )
        )
    for label, name in SAME.items():
        if label in theirs and name in mine:
            case = f"P={p} B={b}: {name} against {label}, the same schedule"
            rows.append(_ratio(case, 0.0 if quick else 1.0, theirs[label].median, mine[name].measured_seconds, None))
    rows += [prediction_row(f"P={p} B={b}: {label}", found, 10.0 if quick else PREDICTION) for label, found in mine.items()]
    rows += [Row(case=f"P={p} B={b}: {label}", measured=f"{t.median * 1000:.0f} ms") for label, t in theirs.items()]
    rows += [
        Row(case=f"P={p} B={b}: {label}, no I of the first stage", measured=f"{statistics.median(found) * 1000:.0f} ms")
        for label, found in without.items()
    ]
    rows += [Row(case=f"P={p} B={b}: {label}", measured="refused by torch") for label in refused]
    return rows


def _fastest(found: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """The label and the median seconds of the quickest."""
    label = min(found, key=lambda label: statistics.median(found[label]))
    return label, statistics.median(found[label])


def _torch(cases: list[TorchCase], p: int, b: int, seconds: float, steps: int, *, input_gradient: bool) -> list[StepTimes]:
    run = Emulated(
        ranks=p,
        micro_batches=b,
        forward_seconds=seconds,
        input_seconds=seconds,
        weight_seconds=seconds,
        message_shape=MESSAGE,
        steps=steps,
        warmup=2,
        input_gradient=input_gradient,
    )
    return time_cases(cases, run, limit_seconds=1200.0)


def _ratio(case: str, target: float, theirs: float, ours: float, ideal: float | None) -> Row:
    ratio = theirs / ours
    return Row(
        case=case,
        target=f"≥ {target:.2f}×",
        measured=f"{ratio:.3f}× ({theirs * 1000:.0f} / {ours * 1000:.0f} ms)",
        limit="" if ideal is None else f"{theirs / ideal:.3f}×",
        distance="" if ideal is None else f"{ours / ideal - 1:.1%}",
        passed=ratio >= target,
    )


if __name__ == "__main__":
    main(run)
