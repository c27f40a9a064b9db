"""Kernels: how alike the gradients of two points are, by the distance between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NOTHING: Final = 700.0
"""Distances beyond have kernels of no more than exp(−700)."""


def rbf(r: Floats) -> Floats:
    """exp(−r²/2), of distances ``r`` in units of the length scale."""
    found: Floats = np.exp(-0.5 * r * r)
    return found


def matern12(r: Floats) -> Floats:
    """exp(−r)."""
    found: Floats = np.exp(-r)
    return found


def matern32(r: Floats) -> Floats:
    """(1 + √3 r) exp(−√3 r)."""
    s = np.minimum(math.sqrt(3) * r, _NOTHING)
    found: Floats = (1 + s) * np.exp(-s)
    return found


def matern52(r: Floats) -> Floats:
    """(1 + √5 r + 5r²/3) exp(−√5 r)."""
    s = np.minimum(math.sqrt(5) * r, _NOTHING)
    found: Floats = (1 + s + s * s / 3) * np.exp(-s)
    return found


KERNELS: Final[dict[str, Callable[[Floats], Floats]]] = {
    "rbf": rbf,
    "matern12": matern12,
    "matern32": matern32,
    "matern52": matern52,
}
