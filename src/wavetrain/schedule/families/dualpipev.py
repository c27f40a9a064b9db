"""DualPipeV (DeepSeek 2024, cut in half by Sea AI Lab): one wave; forwards and whole backwards of two micro-batches in turn.

Made for kernels that overlap the communication of one with the compute of the other; only the ends split the backward.

`build("dualpipev", num_ranks=2, num_micro_batches=4)` draws as

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 ·   0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
    rank 1  ·   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from wavetrain.schedule.families.phases import expand
from wavetrain.schedule.placement import wave
from wavetrain.schedule.schedule import Schedule, check_counts


def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Bubble (P−1)/(6B+P−1) for F = I = W and B ≥ 2P; P+½ micro-batches held. Fewer micro-batches leave holes."""
    check_counts(num_ranks, num_micro_batches)
    full = max(2 * num_ranks, num_micro_batches)
    actions = []
    for p in range(num_ranks):
        rest = num_ranks - p - 1  # ranks between here and the turn
        program = "Fa " * (2 * rest) + "Fa Fz " * (p + 1) + "Iz W Fz " * rest
        program += "Fa Bz Fz Ba " * (full - num_ranks - rest) + "Bz Fz Ba " * rest
        # from the middle of the drain on, the backward is split
        whole, odd = divmod(p + 1, 2)
        program += "Bz Ba " * whole + ("Bz Ia " if odd else "") + "Iz Ia " * whole
        program += "W Ia " * rest + "W " * (p + 1)
        stages = {"a": p, "z": 2 * num_ranks - 1 - p}
        actions.append(expand(program, stages, num_micro_batches))
    return Schedule.single_route("dualpipev", wave(num_ranks, 1), num_micro_batches, actions)
