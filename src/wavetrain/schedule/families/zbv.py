"""ZB-V (Qi et al. 2024): one wave with the backward split, by hand, for F = I = W.

`build("zbv", num_ranks=2, num_micro_batches=4)` draws as

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1  ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
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
