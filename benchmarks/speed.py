"""Speed: simulating and proving 10⁵ to 10⁶ actions, and how fast the command line answers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report, Row, main

from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families.zb_wave import schedule_of
from wavetrain.schedule.graph import build_graph
from wavetrain.schedule.optimizer.dispatch import Policy, dispatch
from wavetrain.schedule.placement import wave
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate

REPEATS = 5


def run(quick: bool) -> Report:
    """Simulate, prove, start."""
    sizes = ((4, 2, 8), (8, 2, 16)) if quick else ((32, 4, 128), (64, 4, 512))
    repeats = 1 if quick else REPEATS
    rows: list[Row] = []
    per_action = []
    for i, (p, w, b) in enumerate(sizes):
        schedule, costs = dispatched(p, b, w)

        def both(schedule: Schedule = schedule, costs: Costs = costs) -> None:
            simulate(schedule, costs)
            assert prove(schedule, costs).proven

        seconds = _median(both, repeats if i == 0 else min(repeats, 3))
        per_action.append(seconds / schedule.num_actions)
        rows.append(
            Row(
                case=f"simulate + prove, P={p} W={w} B={b}: {schedule.num_actions:,} actions",
                target="≤ 2 s" if i == 0 else "",
                measured=f"{seconds:.2f} s, {1e6 * per_action[-1]:.2f} µs an action",
                passed=seconds <= 2 if i == 0 and not quick else None,
            )
        )
    ratio = per_action[1] / per_action[0]
    rows.append(
        Row(
            case="time per action, second over first",
            target="≤ 1.5",
            measured=f"{ratio:.2f}",
            limit="1",
            distance=f"{ratio - 1:+.2f}",
            passed=None if quick else ratio <= 1.5,
        )
    )
    nothing = _median(lambda: _call("-c", "pass"), repeats)
    for case, arguments in (
        ("wavetrain --help", ["--help"]),
        (
            "wavetrain simulate (zb-wave, P = B = 8, W = 2)",
            ["simulate"],
        ),
    ):
        command = ["-m", "wavetrain", *arguments]
        if not _call(*command):
            rows.append(Row(case=case, target="< 0.5 s", measured="not there yet"))
            continue
        seconds = _median(lambda command=command: _call(*command), repeats)  # type: ignore[misc]
        rows.append(
            Row(
                case=case,
                target="< 0.5 s",
                measured=f"{seconds:.2f} s",
                limit=f"{nothing:.2f} s",
                distance=f"{seconds - nothing:.2f} s",
                passed=None if quick else seconds < 0.5,
            )
        )
    notes = (
        f"Medians of {repeats} runs (at most 3 for the large one). Orders come from one pass of the dispatcher, with split "
        "backwards and a cap of P.",
        "Limit of the command line: an interpreter that does nothing.",
    )
    return Report(name="speed", claim="Seconds to simulate and prove, and to answer.", rows=tuple(rows), notes=notes)


def dispatched(p: int, b: int, w: int) -> tuple[Schedule, Costs]:
    """A zero-bubble wave order from one dispatch, and its costs."""
    costs = Costs.uniform(p, memory_cap=p)
    placement = wave(p, w)
    graph = build_graph((placement,), (0,) * b, p, costs)
    built = dispatch(graph, Policy(prefer="alternate", weights_when_full=True))
    assert built is not None, "a cap of P has room"
    return schedule_of("dispatched", graph, built[0]), costs


def _median(do: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        do()
        taken.append(time.perf_counter() - begin)
    return median(taken)


def _call(*arguments: str) -> bool:
    return subprocess.run([sys.executable, *arguments], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main(run)
