"""ZB-H1 and ZB-H2 (Qi et al. 2023): 1F1B with the backward split, so that W fills what would be bubbles.

ZB-H1 warms up like 1F1B and holds as much as its first rank; ZB-H2 warms up for longer, holds almost twice that, and has no bubble
between a rank's own first and last action. A step ends when its last rank ends, so both start with the P−1 forwards it takes to
reach that rank.

TABLE(zb-h1, P=3, B=4)

TABLE(zb-h2, P=3, B=6)
"""

from __future__ import annotations

from wavetrain.schedule.families.phases import expand
from wavetrain.schedule.placement import straight
from wavetrain.schedule.schedule import Schedule, check_counts


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """A third of 1F1B's bubble for F = I = W; every rank holds at most P micro-batches."""
    return _split_1f1b("zb-h1", num_ranks, num_micro_batches, [num_ranks - p for p in range(num_ranks)], lag=1)


def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """No bubble between a rank's first and last action for F = I = W and B ≥ 2P−1; every rank holds at most 2P−1 micro-batches."""
    return _split_1f1b("zb-h2", num_ranks, num_micro_batches, [2 * (num_ranks - p) - 1 for p in range(num_ranks)], lag=2)


def _split_1f1b(name: str, num_ranks: int, num_micro_batches: int, warm_up: list[int], lag: int) -> Schedule:
    """1F1B with I for B; rank p does the W of a micro-batch lag·p backwards later."""
    check_counts(num_ranks, num_micro_batches)
    actions = []
    for p, ahead in enumerate(warm_up):
        first = min(ahead, num_micro_batches)
        words = ["Fa"] * first
        for m in range(num_micro_batches):
            words.append("Ia")
            if m >= lag * p:
                words.append("Wa")
            if first + m < num_micro_batches:
                words.append("Fa")
        words += ["Wa"] * min(lag * p, num_micro_batches)
        actions.append(expand(" ".join(words), {"a": p}, num_micro_batches))
    return Schedule.single_route(name, straight(num_ranks), num_micro_batches, actions)
