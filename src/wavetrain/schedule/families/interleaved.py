"""Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): v stages a rank, in a loop; 1F1B over groups of P micro-batches.

A rank goes through its stages group by group: P micro-batches of its first stage, the same P of its second, and so on. Megatron
asks for a multiple of P micro-batches; other counts are run here as the next multiple, with holes.

TABLE(interleaved, P=2, B=4, stages_per_rank=2)
"""

from __future__ import annotations

from wavetrain.schedule.actions import Action
from wavetrain.schedule.placement import loop
from wavetrain.schedule.schedule import Schedule, check_counts


def interleaved(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Bubble (P−1)/(vB+P−1) where P divides B; the first rank holds P·(1+(P−1)/(Pv)) micro-batches."""
    check_counts(num_ranks, num_micro_batches)
    placement = loop(num_ranks, stages_per_rank)
    groups = range(0, num_micro_batches, num_ranks)
    visits = [(chunk, first + m) for first in groups for chunk in range(stages_per_rank) for m in range(num_ranks)]
    actions = []
    for p in range(num_ranks):
        forwards = [Action("F", chunk * num_ranks + p, m) for chunk, m in visits]
        backwards = [Action("B", (stages_per_rank - 1 - chunk) * num_ranks + p, m) for chunk, m in visits]
        # enough forwards for the first backward to come back: there and back to the last rank, and all stages but one
        warm_up = min(2 * (num_ranks - p - 1) + (stages_per_rank - 1) * num_ranks, len(forwards))
        merged = forwards[:warm_up]
        for pair in zip(forwards[warm_up:], backwards, strict=False):
            merged += pair
        merged += backwards[len(forwards) - warm_up :]
        actions.append([a for a in merged if a.micro_batch < num_micro_batches])
    return Schedule.single_route("interleaved", placement, num_micro_batches, actions)
