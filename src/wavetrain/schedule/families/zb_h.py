"""ZB-H1 and ZB-H2 (Qi et al. 2023): 1F1B with the backward split, so that W fills what would be bubbles.

ZB-H1 warms up like 1F1B and holds as much as its first rank; ZB-H2 warms up for longer, holds almost twice that, and has no
bubble between a rank's own first and last action. A step ends when its last rank ends, so both start with the P−1 forwards it
takes to reach that rank.

`build("zb-h1", num_ranks=3, num_micro_batches=4)` draws as

    rank 0  0F0 0F1 0F2 ·   ·   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  ·   1F0 1F1 ·   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2  ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

`build("zb-h2", num_ranks=3, num_micro_batches=6)` draws as

    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    rank 1  ·   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
    rank 2  ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
"""

from __future__ import annotations

from wavetrain.schedule.families.phases import expand
from wavetrain.schedule.placement import straight
from wavetrain.schedule.schedule import Schedule, check_counts


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """A third of 1F1B's bubble for F = I = W; every rank holds at most P micro-batches."""
    return _split_1f1b("zb-h1", num_ranks, num_micro_batches, [num_ranks - p for p in range(num_ranks)], lag=1)


def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """No bubble between a rank's first and last action for F = I = W and B ≥ 2P−1; a rank holds at most 2P−1 micro-batches."""
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
