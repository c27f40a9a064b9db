"""Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): v stages a rank, in a loop; 1F1B over groups of P micro-batches.

A rank goes through its stages group by group: P micro-batches of its first stage, the same P of its second, and so on. Megatron
asks for a multiple of P micro-batches; other counts are run here as the next multiple, with holes.

`build("interleaved", num_ranks=2, num_micro_batches=4, stages_per_rank=2)` draws as

    rank 0  0F0 0F1 2F0 2F1 0F2 ·   2B0 --- 0F3 2B1 --- 2F2 0B0 --- 2F3 0B1 --- ·   2B2 --- ·   2B3 --- 0B2 --- 0B3 ---
    rank 1  ·   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1F2 1B0 --- 1F3 1B1 --- 3F2 3B2 --- 3F3 3B3 --- 1B2 --- 1B3 ---
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
