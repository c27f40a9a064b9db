"""The planner: how long a search takes, from AMP's experiments to 16,384 devices, and what its plans gain over the usual choice.

The picture is ``benchmarks/plots/planner.svg``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from benchmarks.report import Report, Row, main

from wavetrain.cluster import Cluster, cluster_from_text, load_cluster
from wavetrain.plan.baselines import best_even, megatron_rule
from wavetrain.plan.calibration import shipped
from wavetrain.plan.cut import best_cut
from wavetrain.plan.estimate import CostModel
from wavetrain.plan.explain import baselines
from wavetrain.plan.planner import make_plan
from wavetrain.plan.replay import named_workload
from wavetrain.plan.search import search
from wavetrain.plan.shapes import Limits
from wavetrain.plan.sources import Sources
from wavetrain.profile import Profiles, load_profiles
from wavetrain.view.chart import line_chart
from wavetrain.workload import load_workload

DATA = Path(os.environ.get("WAVETRAIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PLOT = Path(__file__).resolve().parent / "plots" / "planner.svg"
V100 = '[[nodes]]\ncount = {}\ndevice = "V100-16"\ngpus = 4\nintra_gbps = 170\ninter_gbps = 10\n'
T4 = '[[nodes]]\ncount = {}\ndevice = "T4-16"\ngpus = 4\nintra_gbps = 50\ninter_gbps = 50\n'
AMP = {
    "homogeneous": ("gpt2-24x1024", T4.format(4), 32, 525.0, None),
    "het_cluster": ("gpt2-24x1024", V100.format(3) + T4.format(1), 32, 402.0, 1.54),
    "het_model": ("transgan-12-12", V100.format(4), 64, 209.0, 1.77),
}
"""Model, cluster, batch, seconds of AMP's own code, and the gain over Megatron that it reports."""
SOURCES = Sources(model="m", cluster="c")
REPEATS = 5
ONE_FORWARD = Limits(schedules=(("1f1b", 1),), leave_out=False)
"""What AMP and Megatron can run too."""


def run(quick: bool) -> Report:
    """Search time and gain."""
    profiles = load_profiles(DATA) if (DATA / "layer_profiles.csv").exists() and not quick else Profiles()
    rows = [row for name in AMP for row in _amp(name, profiles, quick)]
    sizes = (16,) if quick else (16, 64, 256, 1024, 4096, 16384)
    took: list[tuple[float, float]] = []
    for size in sizes:
        seconds, gap, visited = _large(size, 1.0 if quick else 12.0)
        took.append((size, seconds))
        limit = {1024: 20.0, 16384: 60.0}.get(size)
        rows.append(
            Row(
                case=f"{size:,} devices of 4 types, 96 blocks (GPT-3 175B)" if size >= 1024 else f"{size:,} devices of 4 types",
                target=f"≤ {limit:g} s" if limit else "",
                measured=f"{seconds:.1f} s, {visited} shapes looked into",
                limit=f"at most {gap:.0%} left on the table",
                passed=seconds <= limit if limit else None,
            )
        )
    rows.append(_cuts(50 if quick else 2000))
    if not quick:
        chart = line_chart(
            {"search": took}, title="Seconds of a search", x_label="devices", y_label="seconds", log_x=True, log_y=True
        )
        PLOT.write_text(chart, encoding="utf-8")
    return Report(
        name="planner",
        claim="Plans in seconds, for any size of cluster, and better than the usual choice.",
        rows=tuple(rows),
        notes=(
            "Gains are ratios of predicted step times under the shipped calibration, of plans that Megatron can run as well "
            "(1F1B, messages that hold ranks up) and all devices in use; then what wavetrain's own runtime and schedules add.",
            "Searches for more than 64 slots stop after 12 s and say what may be left on the table. Growth: plots/planner.svg.",
            *(() if profiles.times else ("Without the measured layer profiles, from datasheets.",)),
        ),
    )


def _amp(name: str, profiles: Profiles, quick: bool) -> list[Row]:
    preset, text, batch, theirs, reported = AMP[name]
    cluster = cluster_from_text(text)
    load = named_workload(preset, "fp16")
    waits = CostModel(workload=load, calibration=shipped(), profiles=profiles)
    hides = replace(waits, overlaps=True)
    times = []
    for _ in range(1 if quick else REPEATS):
        fresh = CostModel(workload=load, calibration=shipped(), profiles=profiles, overlaps=True)
        begin = time.perf_counter()
        planned = make_plan(fresh, cluster, batch, SOURCES)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    own = make_plan(waits, cluster, batch, SOURCES, ONE_FORWARD).best
    whole = make_plan(hides, cluster, batch, SOURCES, Limits(leave_out=False)).best
    usual = megatron_rule(waits, cluster, batch)
    rows = [
        Row(
            case=f"AMP's {name}: whole search, finalists simulated",
            target="≤ 1 s",
            measured=f"{seconds:.2f} s",
            limit=f"AMP's code: {theirs:g} s",
            distance=f"{theirs / seconds:,.0f}× faster",
            passed=seconds <= 1 if not quick else None,  # of a machine that is not idle
        )
    ]
    even = best_even(waits, cluster, batch)
    if even is not None:
        rows.append(
            Row(
                case=f"{name}: gain over the best even plan (every tp, dp, pp and micro-batch tried), same runtime and 1F1B",
                target="≥ 1×",
                measured=f"{even.seconds / own.seconds:.2f}× ({even.seconds:.3f} → {own.seconds:.3f} s)",
                passed=even.seconds >= 0.999 * own.seconds,
            )
        )
    if usual is not None:
        why = next(iter(baselines(own, waits, cluster))).why
        least = reported if reported is not None else 1.0
        rows.append(
            Row(
                case=f"{name}: gain over Megatron's rule, same runtime and 1F1B",
                target=f"≥ {least}×",
                measured=f"{usual.seconds / own.seconds:.2f}× ({usual.seconds:.3f} → {own.seconds:.3f} s: {own.describe()})",
                limit=f"from {why}",
                passed=usual.seconds / own.seconds >= least,
            )
        )
        rows.append(
            Row(
                case=f"{name}: the same with wavetrain's schedules and runtime",
                measured=f"{usual.seconds / whole.seconds:.2f}× ({whole.seconds:.3f} s: {whole.describe()})",
            )
        )
    assert planned.plans
    return rows


def _large(size: int, limit: float) -> tuple[float, float, int]:
    """Seconds, gap and visited shapes of a search over four types of devices."""
    nodes = size // 8
    if nodes < 4:
        cluster: Cluster = load_cluster(
            " + ".join(f"1 x {size // 4} x {name}" for name in ("V100-32", "A100-40", "A100-80", "H100-80"))
        )
    else:
        cluster = load_cluster(" + ".join(f"{nodes // 4} x 8 x {name}" for name in ("V100-32", "A100-40", "A100-80", "H100-80")))
    load = load_workload("gpt3-1.3b" if size < 64 else "gpt3-13b" if size < 1024 else "gpt3-175b")
    model = CostModel(workload=load, calibration=shipped(), overlaps=True)
    found = search(model, cluster, max(64, min(4096, size)), Limits(seconds=limit))
    return found.seconds, max(0.0, 1 - found.bound / found.best[0].seconds), found.num_visited


def _cuts(count: int) -> Row:
    """Random instances, cut by us and by looking at every cut."""
    rng = np.random.default_rng(0)
    same = 0
    for _ in range(count):
        layers, batches = int(rng.integers(2, 10)), int(rng.integers(1, 20))
        stages = int(rng.integers(1, layers + 1))
        seconds = [rng.uniform(0, 3, layers) for _ in range(stages)]
        messages = [rng.uniform(0, 1, layers) for _ in range(stages - 1)]
        best = min(
            (batches - 1) * max(parts) + sum(parts) + sum(m[p - 1] for m, p in zip(messages, inner, strict=True))
            for inner in combinations(range(1, layers), stages - 1)
            for parts in [[s[a:b].sum() for s, a, b in zip(seconds, (0, *inner), (*inner, layers), strict=True)]]
        )
        found = best_cut(seconds, messages, batches)
        same += found is not None and abs(found.value - best) <= 1e-9 * best
    return Row(
        case=f"the cut against all cuts, {count} random instances",
        target="all equal",
        measured=f"{same} equal",
        passed=same == count,
    )


if __name__ == "__main__":
    main(run)
