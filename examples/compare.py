"""Which schedule is the fastest on these machines? Run it with ``python examples/compare.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wavetrain import build, load_costs, prove, simulate
from wavetrain.errors import InputError
from wavetrain.schedule.analysis import idle_by_cause

costs = load_costs(Path(__file__).parent / "costs.toml")

print("schedule     seconds  bubble  held  mostly idle for")
for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-wave", "auto"):
    options: dict[str, Any] = {"iterations": 500} if name == "auto" else {}
    try:
        schedule = build(name, num_ranks=costs.num_ranks, num_micro_batches=12, costs=costs, **options)
    except InputError as error:  # above the memory cap, for one
        print(f"{name:<12} {error}")
        continue
    certificate = prove(schedule, costs).require()  # raises ProofError, with the reason, if it could not run
    timeline = simulate(schedule, costs)
    idle = idle_by_cause(timeline)
    cause = max(idle[0], key=lambda cause: sum(rank[cause] for rank in idle))
    held = max(certificate.peak_activations)
    print(f"{name:<12} {timeline.makespan:>7.2f} {timeline.bubble:>6.1%} {held:>6.2f}  {cause}")
