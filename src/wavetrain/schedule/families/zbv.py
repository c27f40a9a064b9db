"""ZB-V (Qi et al. 2024): one wave with the backward split, by hand, for F = I = W.

TABLE(zbv, P=2, B=4)
"""

from __future__ import annotations

from wavetrain.schedule.families.phases import expand
from wavetrain.schedule.placement import wave
from wavetrain.schedule.schedule import Schedule, check_counts


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Bubble (P−1)/(6B+P−1) for B ≥ 2P−1; P micro-batches held. Fewer micro-batches leave holes."""
    check_counts(num_ranks, num_micro_batches)
    full = max(2 * num_ranks - 1, num_micro_batches)
    actions = []
    for p in range(num_ranks):
        rest = num_ranks - p  # ranks from here to the turn
        warm_up = "Fa " * (2 * rest - 1) + "Fz Fa " * p + "Fz Iz Wz " * rest
        forwards_a = num_ranks + rest - 1
        steady = "Fa Ia Wa Fz Iz Wz " * (full - forwards_a) + "Ia Wa Fz Iz Wz " * (forwards_a - num_ranks)
        drain = "Ia Iz " * p + "Ia Wa " * rest + "Wz " * p + "Wa " * p
        stages = {"a": p, "z": 2 * num_ranks - 1 - p}
        actions.append(expand(warm_up + steady + drain, stages, num_micro_batches))
    return Schedule.single_route("zbv", wave(num_ranks, 1), num_micro_batches, actions)
