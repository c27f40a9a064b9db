"""Chimera (Li & Hoefler 2021): two copies of the model, one from each end; micro-batches take the two routes in turn.

Groups of P micro-batches follow one another; the last may be smaller.

TABLE(chimera, P=4, B=4)
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
