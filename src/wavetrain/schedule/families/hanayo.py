"""Hanayo (Liu et al. 2023): waves. The stages lie in a snake over the ranks, 2·W on each; two meet at every turn.

Groups of P micro-batches follow one another, so that no rank holds more than P. ``breadth_first`` instead lets every visit of a
stage take its share of all B micro-batches in a row: less bubble, B held.

`build("hanayo", num_ranks=3, num_micro_batches=3, waves=1)` draws as

    rank 0  0F0 0F1 0F2 ·   ·   5F0 5B0 --- 5F1 5B1 --- 5F2 5B2 --- ·   ·   0B0 --- ·   ·   0B1 --- ·   ·   0B2 ---
    rank 1  ·   1F0 1F1 1F2 4F0 ·   4F1 ·   4B0 --- 4F2 4B1 --- ·   1B0 --- 4B2 --- 1B1 --- ·   ·   1B2 ---
    rank 2  ·   ·   2F0 3F0 2F1 3F1 2F2 3F2 ·   ·   3B0 --- 2B0 --- 3B1 --- 2B1 --- 3B2 --- 2B2 ---

`build("hanayo", num_ranks=2, num_micro_batches=4, waves=1, breadth_first=True)` draws as

    rank 0  0F0 0F1 0F2 0F3 3F0 3F1 3B0 --- 3B1 --- 3F2 3F3 3B2 --- 3B3 --- 0B0 --- 0B1 --- ·   ·   ·   0B2 --- 0B3 ---
    rank 1  ·   1F0 1F1 2F0 2F1 1F2 1F3 2F2 2F3 2B0 --- 2B1 --- 1B0 --- 1B1 --- 2B2 --- 2B3 --- 1B2 --- 1B3 ---
"""

from __future__ import annotations

from wavetrain.schedule.actions import Action
from wavetrain.schedule.families.chimera import repeat_group
from wavetrain.schedule.families.slots import slotted_actions
from wavetrain.schedule.placement import wave
from wavetrain.schedule.schedule import Schedule, check_counts


def hanayo(num_ranks: int, num_micro_batches: int, waves: int = 2, *, breadth_first: bool = False) -> Schedule:
    """Bubble (2P−2)/(3PW+2P−2) for B = P, with P micro-batches held on the fullest rank.

    Breadth first, the bubble is at most (2P−2)/(3BW+2P−2), and B are held.
    """
    check_counts(num_ranks, num_micro_batches)
    placement = wave(num_ranks, waves)
    if breadth_first and num_micro_batches > num_ranks:
        group = slotted_actions((placement,), (0,) * num_ranks, num_ranks)
        ends = [num_micro_batches * (m + 1) // num_ranks for m in range(num_ranks)]
        starts = [0, *ends[:-1]]
        actions: list[list[Action]] = [
            [Action(kind, s, each) for kind, s, m in rank for each in range(starts[m], ends[m])] for rank in group
        ]
        return Schedule.single_route("hanayo", placement, num_micro_batches, actions)
    size = min(num_ranks, num_micro_batches)
    group = slotted_actions((placement,), (0,) * size, num_ranks)
    return Schedule.single_route("hanayo", placement, num_micro_batches, repeat_group(group, size, num_micro_batches))
