"""Chimera (Li & Hoefler 2021): two copies of the model, one from each end; micro-batches take the two routes in turn.

Groups of P micro-batches follow one another; the last may be smaller.

`build("chimera", num_ranks=4, num_micro_batches=4)` draws as

    rank 0  0F0 0F2 ·   3F1 3B1 --- 3F3 3B3 --- ·   0B0 --- ·   ·   0B2 ---
    rank 1  ·   1F0 2F1 1F2 2F3 ·   2B1 --- 1B0 --- 2B3 --- 1B2 ---
    rank 2  ·   1F1 2F0 1F3 2F2 ·   2B0 --- 1B1 --- 2B2 --- 1B3 ---
    rank 3  0F1 0F3 ·   3F0 3B0 --- 3F2 3B2 --- ·   0B1 --- ·   ·   0B3 ---
"""

from __future__ import annotations

from wavetrain.errors import InputError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.families.slots import slotted_actions
from wavetrain.schedule.placement import reverse, straight
from wavetrain.schedule.schedule import Schedule, check_counts


def chimera(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Bubble (P−2)/(1.5B+P−2) for B = P; two copies of the weights. P must be even."""
    check_counts(num_ranks, num_micro_batches)
    if num_ranks % 2:
        raise InputError(f"chimera needs an even number of ranks, {num_ranks} is odd: use {num_ranks + 1}, or another schedule")
    placements = (straight(num_ranks), reverse(num_ranks))
    routes = tuple(m % 2 for m in range(num_micro_batches))
    group = slotted_actions(placements, routes[:num_ranks] or (0,), num_ranks)
    actions = repeat_group(group, num_ranks, num_micro_batches)
    return Schedule(name="chimera", num_micro_batches=num_micro_batches, placements=placements, routes=routes, actions=actions)


def repeat_group(group: list[list[Action]], group_size: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of one group of micro-batches, over and over, without those of micro-batches that do not exist."""
    return tuple(
        tuple(
            Action(kind, stage, first + m)
            for first in range(0, num_micro_batches, group_size)
            for kind, stage, m in actions
            if first + m < num_micro_batches
        )
        for actions in group
    )
