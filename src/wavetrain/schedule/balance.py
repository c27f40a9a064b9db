"""Balance: stages of whole layers are rarely equal, but the stages of one rank can make up for each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations_with_replacement, pairwise

from wavetrain.schedule.placement import Placement

MAX_STAGES = 64
"""Beyond so many stages a boundary is moved alone, and not in pairs: there are too many of them."""


def even_ranks(
    points: Sequence[int],
    times: Sequence[Sequence[float]],
    placements: Sequence[Placement],
    shares: Sequence[float] | None = None,
) -> list[int]:
    """Boundaries moved, one layer at a time, as long as that makes the ranks' work (and then the stages) more even.

    Args:
        points: boundaries of the stages, (num_stages + 1,).
        times: of every layer on every rank, (num_ranks, num_layers).
        placements: the rank of every stage, for every route.
        shares: how large stages are to be, relative to each other, (num_stages,); default: all alike.
    """
    num_ranks, num_stages = len(times), len(points) - 1
    sums = [[0.0, *accumulate(row)] for row in times]
    shares = shares or (1.0,) * num_stages
    unit = sum(shares) / len(shares)

    def unevenness(points: Sequence[int]) -> float:
        ranks = [0.0] * num_ranks
        stages = 0.0
        for placement in placements:
            for stage, ((a, b), rank) in enumerate(zip(pairwise(points), placement, strict=True)):
                seconds = sums[rank][b] - sums[rank][a]
                ranks[rank] += seconds
                stages += seconds * seconds * unit / shares[stage]
        mean = sum(ranks) / num_ranks
        return sum((r - mean) ** 2 for r in ranks) + 1e-3 * stages / num_stages / len(placements)

    best, value = list(points), unevenness(points)
    inner = range(1, num_stages)
    pairs = list(combinations_with_replacement(inner, 2)) if num_stages <= MAX_STAGES else [(i, i) for i in inner]
    improved = True
    while improved:
        improved = False
        for i, j in pairs:
            for di, dj in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                moved = list(best)
                moved[i] += di
                if j != i:
                    moved[j] += dj
                if all(a < b for a, b in pairwise(moved)) and (now := unevenness(moved)) < value * (1 - 1e-9):
                    best, value, improved = moved, now, True
    return best
