"""1F1B, also called DAPPLE (Fan et al. 2021): after a warm-up, a forward and a backward in turn.

`build("1f1b", num_ranks=3, num_micro_batches=4)` draws as

    rank 0  0F0 0F1 0F2 ·   ·   ·   ·   0B0 --- 0F3 0B1 --- ·   0B2 --- ·   0B3 ---
    rank 1  ·   1F0 1F1 ·   ·   1B0 --- 1F2 1B1 --- 1F3 1B2 --- ·   1B3 ---
    rank 2  ·   ·   2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 ---
"""

from __future__ import annotations

from wavetrain.schedule.families.phases import expand
from wavetrain.schedule.placement import straight
from wavetrain.schedule.schedule import Schedule, check_counts


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Bubble (P−1)/(B+P−1); rank p holds min(P−p, B) micro-batches."""
    check_counts(num_ranks, num_micro_batches)
    actions = []
    for p in range(num_ranks):
        warm_up = min(num_ranks - p - 1, num_micro_batches)
        steady = num_micro_batches - warm_up
        actions.append(expand("Fa " * warm_up + "Fa Ba " * steady + "Ba " * warm_up, {"a": p}, num_micro_batches))
    return Schedule.single_route("1f1b", straight(num_ranks), num_micro_batches, actions)
