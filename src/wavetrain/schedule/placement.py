"""Placements: which pipeline rank computes which stage.

straight   0 1 2 3
loop       0 1 2 3 0 1 2 3
wave       0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0      two stages meet at every turn, so that hand-over is free
"""

from __future__ import annotations

from typing import TypeAlias

from wavetrain.errors import InputError

Placement: TypeAlias = tuple[int, ...]
"""Entry s is the pipeline rank of stage s."""


def straight(num_ranks: int) -> Placement:
    """Stage p on rank p."""
    return tuple(range(_checked(num_ranks, "ranks")))


def reverse(num_ranks: int) -> Placement:
    """Stage p on rank P-1-p: the second route of Chimera."""
    return straight(num_ranks)[::-1]


def loop(num_ranks: int, stages_per_rank: int) -> Placement:
    """Around and around: stage s on rank s mod P."""
    return straight(num_ranks) * _checked(stages_per_rank, "stages per rank")


def snake(num_ranks: int, passes: int) -> Placement:
    """Back and forth over the ranks, ``passes`` times; a wave is two passes."""
    there = straight(num_ranks)
    return tuple(r for i in range(_checked(passes, "passes")) for r in (there if i % 2 == 0 else there[::-1]))


def wave(num_ranks: int, waves: int) -> Placement:
    """Down and back ``waves`` times: 2·P·W stages, 2·W on every rank."""
    return snake(num_ranks, 2 * _checked(waves, "waves"))


def _checked(count: int, what: str) -> int:
    if count < 1:
        raise InputError(f"{count} {what}: a placement needs at least 1")
    return count
