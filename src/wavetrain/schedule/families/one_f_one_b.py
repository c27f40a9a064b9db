"""1F1B, also called DAPPLE (Fan et al. 2021): after a warm-up, a forward and a backward in turn.

TABLE(1f1b, P=3, B=4)
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
