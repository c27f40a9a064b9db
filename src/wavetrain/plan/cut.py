"""The cut: which layers make which stage, the best there is.

A pipeline of P stages with B micro-batches takes about

    (B − 1) · max_k t_k  +  Σ_k t_k  +  Σ_k c_k

where t_k is what stage k takes for one micro-batch, forward and backward, on the device that it is placed on, and c_k the message
from stage k to the next and back. Both sums and the maximum depend on where the layers are cut.

For a limit on the maximum, the least sum is a shortest path over (stage, last layer). The sum S(M) only falls when the limit M
rises. So the best cut is found from two sides: the least limit M* that any cut can keep gives a first value; limits so high that
(B − 1)·M + S(∞) passes it cannot win; and the rest is walked downwards from one achieved maximum to the next, until even M* could
not pay for the sum. Nothing is sampled or rounded: the result is optimal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import InputError

Floats = NDArray[np.float64]
_SAME = 1 + 1e-12
"""Sums of the same numbers in another order differ by less."""


class Cut(NamedTuple):
    """Where the layers are cut, and what comes of it."""

    points: tuple[int, ...]
    """Boundaries, (num_stages + 1,): stage k holds layers points[k] … points[k+1] − 1."""
    value: float
    """Seconds: (B − 1) · maximum + sum."""
    slowest: float
    """Seconds of the slowest stage for one micro-batch."""


def best_cut(
    seconds: Sequence[Floats],
    messages: Sequence[Floats],
    num_micro_batches: float,
    allowed: Sequence[NDArray[np.bool_]] | None = None,
    *,
    tolerance: float = 0.0,
) -> Cut | None:
    """The cut with the least value; None if none is allowed.

    Args:
        seconds: of every layer for one micro-batch, for every stage on its device: P times (num_layers,). Stages that are alike
            may share an array.
        messages: seconds of a message after every layer, from stage k to k + 1 and back: P − 1 times (num_layers,).
        num_micro_batches: B, at least 1.
        allowed: whether stage k may hold layers a … b − 1, as ``allowed[k][a, b]``: P times (num_layers + 1, num_layers + 1).
        tolerance: a share of the value; a cut may be returned that is known to be within it of the best.
    """
    num_stages, num_layers = len(seconds), len(seconds[0])
    if num_stages > num_layers:
        raise InputError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    runs = _runs(seconds, allowed)
    edges = [np.concatenate(([0.0], m)) for m in messages]
    repeats = num_micro_batches - 1
    least, _ = _shortest(runs, None, math.inf)
    if not math.isfinite(least):
        return None
    points, total = _cheapest(runs, edges, least * _SAME)
    best = _value(runs, points, total, repeats)
    _, cheapest = _cheapest(runs, edges, math.inf)
    limit = (best.value - cheapest) / repeats * _SAME if repeats > 0 else math.inf
    while limit > least and repeats * least + cheapest < best.value * (1 - tolerance):
        points, total = _cheapest(runs, edges, limit)
        found = _value(runs, points, total, repeats)
        best = min(best, found, key=lambda cut: cut.value)
        if repeats * least + total >= best.value * (1 - tolerance):
            break
        limit = found.slowest / _SAME
    return best


def _runs(seconds: Sequence[Floats], allowed: Sequence[NDArray[np.bool_]] | None) -> list[Floats]:
    """Seconds of stage k if it holds layers a … b − 1, infinite where it cannot: P times (num_layers + 1, num_layers + 1)."""
    made: dict[tuple[int, int], Floats] = {}
    runs = []
    for k, times in enumerate(seconds):
        key = (id(times), id(allowed[k]) if allowed is not None else 0)
        if key not in made:
            sums = np.concatenate(([0.0], np.cumsum(times)))
            run = sums[None, :] - sums[:, None]
            run[_lower(len(sums))] = math.inf
            if allowed is not None:
                run = np.where(allowed[k], run, math.inf)
            made[key] = run
        runs.append(made[key])
    return runs


@lru_cache(maxsize=16)
def _lower(size: int) -> NDArray[np.bool_]:
    """Where a run would be empty or backwards."""
    return np.tri(size, dtype=bool)


def _value(runs: Sequence[Floats], points: Sequence[int], total: float, repeats: float) -> Cut:
    slowest = max(float(run[a, b]) for run, a, b in zip(runs, points, points[1:], strict=False))
    return Cut(tuple(points), repeats * slowest + total, slowest)


def _shortest(runs: Sequence[Floats], edges: Sequence[Floats] | None, limit: float) -> tuple[float, list[NDArray[np.intp]]]:
    """The least sum over the stages (with ``edges``, the messages between them), or the least maximum (without), of cuts whose
    stages keep ``limit``; and where every stage begins, by (stage, end).
    """
    size = runs[0].shape[0]
    so_far = np.full(size, math.inf)
    so_far[0] = 0.0
    begins = []
    for k, run in enumerate(runs):
        allowed = np.where(run <= limit, run, math.inf) if limit < math.inf else run
        if edges is None:
            table = np.maximum(so_far[:, None], allowed)
        else:
            table = (so_far + edges[k - 1] if k else so_far)[:, None] + allowed
        begin = np.argmin(table, axis=0)
        so_far = table[begin, np.arange(size)]
        begins.append(begin)
    return float(so_far[-1]), begins


def _cheapest(runs: Sequence[Floats], edges: Sequence[Floats], limit: float) -> tuple[list[int], float]:
    """The cut with the least sum whose stages keep ``limit``."""
    total, begins = _shortest(runs, edges, limit)
    points = [runs[0].shape[0] - 1]
    for begin in reversed(begins):
        points.append(int(begin[points[-1]]))
    return points[::-1], total
