"""A Gaussian process over gradients, with a separable kernel k·I, from squared distances and inner products alone.

    μ(θ) = m + k(θ, X) (K + σ²I)⁻¹ (G − m)               (Shu et al., NeurIPS'24, Proposition 1)

One n × n inverse serves all d coordinates, and μ is a sum of known gradients, with weights that sum to 1 where the mean m is
unknown and found by generalised least squares, or with m = 0 as published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wavetrain.optim.kernels import KERNELS

Floats = NDArray[np.float64]
JITTER: Final = 1e-8
"""Least σ²: known points may be the same."""


@dataclass(frozen=True)
class Prior:
    """What is assumed of the gradients before any is known."""

    length: float
    """Length scale, in typical distances between known points."""
    noise: float
    """σ², in units of the kernel's value at distance 0."""
    kernel: str = "matern52"

    def __str__(self) -> str:
        return f"gp(length {self.length:g}, noise {self.noise:g})"


class Process:
    """Conditioned on n known points.

    Args:
        prior: kernel, length scale and noise.
        squares: squared distances between the known points, (n, n).
        unit: the distance that length scales are given in.
        mean: whether there is an unknown mean; without, it is 0.
    """

    def __init__(self, prior: Prior, squares: Floats, unit: float, *, mean: bool = True) -> None:
        self._kernel = KERNELS[prior.kernel]
        self._length = prior.length * unit
        gram = self._kernel(np.sqrt(squares) / self._length) + max(prior.noise, JITTER) * np.eye(len(squares))
        self._inverse: Floats = np.linalg.inv(gram).astype(np.float64, copy=False)
        self._ones: Floats = self._inverse.sum(axis=1)
        self._mean = mean

    def weights(self, squares: Floats) -> Floats:
        """Of the known gradients (n,) at a point, from its squared distances (n,) to the known ones."""
        near = self._kernel(np.sqrt(squares) / self._length)
        found: Floats = self._inverse @ near
        if self._mean:
            found = found + self._ones * ((1.0 - self._ones @ near) / self._ones.sum())
        return found


def left_out_errors(
    priors: Sequence[Prior], squares: Floats, unit: float, products: Floats, which: Sequence[int]
) -> tuple[Floats, Floats]:
    """How wrong gradients ``which`` would have been predicted from all others, by each prior, and how large predictions were.

    Of a process conditioned on all but one point, the error there is (A·G)ᵢ / Aᵢᵢ, A the inverse less what the mean takes.

    Returns:
        Σ |ĝ − g|² / Σ |g|² and Σ |ĝ|² / Σ |g|² of predictions ĝ, each (priors,).
    """
    apart = np.sqrt(squares)
    lengths = sorted({prior.length for prior in priors})
    shape = {length: KERNELS[priors[0].kernel](apart / (length * unit)) for length in lengths}
    eye = np.eye(len(squares))
    grams = np.stack([shape[prior.length] + max(prior.noise, JITTER) * eye for prior in priors])  # (priors, n, n)
    inverses = np.linalg.inv(grams)
    ones = inverses.sum(axis=2)
    a = inverses - ones[:, :, None] * ones[:, None, :] / ones.sum(axis=1)[:, None, None]
    rows = a[:, which]
    own = np.diagonal(a, axis1=1, axis2=2)[:, which]
    own = np.where(np.abs(own) > 1e-150, own, 1e-150)
    along = rows @ products  # (priors, which, n)
    errors = np.maximum((along * rows).sum(axis=2), 0.0) / own**2  # |g − ĝ|²
    crossed = np.stack([along[:, q, i] for q, i in enumerate(which)], axis=1) / own  # (g − ĝ)·g
    sizes = np.diag(products)[list(which)]
    whole = max(float(sizes.sum()), 1e-300)
    return errors.sum(axis=1) / whole, np.maximum(sizes - 2 * crossed + errors, 0.0).sum(axis=1) / whole


def typical_distance(squares: Floats) -> float:
    """The median distance between points that are not the same; 1 if all are."""
    apart = np.sqrt(squares[_above(len(squares))])
    apart = apart[apart > 0]
    return float(np.median(apart)) if len(apart) else 1.0


@lru_cache(maxsize=8)
def _above(size: int) -> tuple[NDArray[np.intp], ...]:
    """Where a (size, size) matrix is above its diagonal."""
    return np.triu_indices(size, 1)
