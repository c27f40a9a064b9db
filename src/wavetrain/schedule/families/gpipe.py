"""GPipe: all forwards, then all backwards (Huang et al. 2019).

`build("gpipe", num_ranks=3, num_micro_batches=3)` draws as

    rank 0  0F0 0F1 0F2 ·   ·   ·   ·   ·   ·   0B0 --- 0B1 --- 0B2 ---
    rank 1  ·   1F0 1F1 1F2 ·   ·   ·   1B0 --- 1B1 --- 1B2 ---
    rank 2  ·   ·   2F0 2F1 2F2 2B0 --- 2B1 --- 2B2 ---
"""

from __future__ import annotations

from wavetrain.schedule.actions import Action, Kind
from wavetrain.schedule.placement import straight
from wavetrain.schedule.schedule import Schedule, check_counts


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Bubble (P−1)/(B+P−1); every rank holds B micro-batches."""
    check_counts(num_ranks, num_micro_batches)
    kinds: tuple[Kind, ...] = ("F", "B")
    actions = [[Action(kind, p, m) for kind in kinds for m in range(num_micro_batches)] for p in range(num_ranks)]
    return Schedule.single_route("gpipe", straight(num_ranks), num_micro_batches, actions)
