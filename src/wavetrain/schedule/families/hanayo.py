"""Hanayo (Liu et al. 2023): waves. The stages lie in a snake over the ranks, 2·W on each; two meet at every turn.

Groups of P micro-batches follow one another, so that no rank holds more than P. ``breadth_first`` instead lets every visit of a stage
take its share of all B micro-batches in a row: less bubble, B held.

TABLE(hanayo, P=3, B=3, waves=1)
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
