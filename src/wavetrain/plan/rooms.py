"""Room: which layers a rank can hold, and how many micro-batches a replica should get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wavetrain.plan.memory import StageMemory

Floats = NDArray[np.float64]


class Rooms:
    """What layers need and ranks have, in bytes.

    Args:
        layers: on one device of a slot.
        room: bytes of every rank's device that may be filled, (num_ranks,).
    """

    def __init__(self, layers: StageMemory, room: Floats) -> None:
        self._layers, self._room = layers, room
        self._states = np.concatenate(([0.0], np.cumsum(layers.states)))
        self._kept = np.concatenate(([0.0], np.cumsum(layers.activation)))

    def hold(self, cut: Sequence[int], flights: Floats) -> bool:
        """Whether every rank has room for its layers."""
        points = np.asarray(cut)
        working = np.maximum.reduceat(self._layers.working, points[:-1])
        need = np.diff(self._states[points]) + np.diff(self._kept[points]) * flights + working
        return bool((need <= self._room).all())

    def may_hold(self, flights: Floats, least: int = 1) -> bool:
        """Whether there is any cut for which every rank has room: each takes as many layers as it can, ``least`` or more."""
        first, last = 0, len(self._states) - 1
        for k, (flight, room) in enumerate(zip(flights.tolist(), self._room.tolist(), strict=True)):
            need = self._states + flight * self._kept
            working = np.maximum.accumulate(self._layers.working[first:])
            fits = need[first + 1 :] - need[first] + working <= room
            count = int(fits.argmin()) if not fits.all() else len(fits)
            if count < least:
                return False
            first = min(first + count, last - least * (len(flights) - 1 - k))
        return first == last

    def allowed(self, flights: Floats, least: int = 1) -> list[NDArray[np.bool_]]:
        """Whether rank k has room for layers a … b − 1, ``least`` or more, as [k][a, b]."""
        size = len(self._states)
        need_states = self._states[None, :] - self._states[:, None]
        need_kept = self._kept[None, :] - self._kept[:, None]
        for first in range(size - 1):
            need_states[first, first + 1 :] += np.maximum.accumulate(self._layers.working[first:])
        made: dict[tuple[float, float], NDArray[np.bool_]] = {}
        found = []
        for flight, room in zip(flights.tolist(), self._room.tolist(), strict=True):
            if (flight, room) not in made:
                made[flight, room] = (need_states + need_kept * flight <= room) & long_enough(size - 1, least)
            found.append(made[flight, room])
        return found


@lru_cache(maxsize=32)
def long_enough(num_layers: int, least: int) -> NDArray[np.bool_]:
    """Whether layers a … b − 1 are ``least`` or more, as [a, b]."""
    points = np.arange(num_layers + 1)
    found: NDArray[np.bool_] = points[None, :] - points[:, None] >= least
    return found


def balanced(total: int, pace: Floats, fill: Floats) -> tuple[int, ...] | None:
    """Whole numbers, at least 1 each, that add up to ``total``, such that max(number · pace + fill) is least; None if too few."""
    count = len(pace)
    if total < count:
        return None
    low, high = 0.0, float(total * pace.max() + fill.max())
    for _ in range(60):
        middle = (low + high) / 2
        fits = np.maximum(np.floor((middle - fill) / pace * (1 + 1e-12)), 1.0)
        if fits.sum() >= total:
            high = middle
        else:
            low = middle
    numbers = np.maximum(np.floor((high - fill) / pace * (1 + 1e-9)), 1.0).astype(np.int64)
    while (over := int(numbers.sum()) - total) > 0:
        ends = np.where(numbers > 1, numbers * pace + fill, -math.inf)
        for r in np.argsort(-ends)[:over]:
            if numbers[r] > 1:
                numbers[r] -= 1
    return tuple(int(n) for n in numbers)
