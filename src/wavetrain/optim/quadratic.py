"""A quadratic model of the loss around the newest points: how the gradient bends along the way, from inner products alone.

    ĝ(θ) = Σᵢ wᵢ (gᵢ + H (θ − θᵢ)),     wᵢ ∝ 1 / (κ·|g|² + |H (θ − θᵢ)|²),     H = Y K Yᵀ,     K = (Sᵀ Y)⁺

gᵢ are the gradients of the newest round, θᵢ their points: each says what the gradient at θ is, and counts for less the further it
has to be moved; where none has to be moved far, all count alike, and the noise of their minibatches is averaged. S are points and
Y their gradients, both less their means: of a quadratic function Y = H S, and where H has few large eigenvalues, as the loss of a
network has, Y K Yᵀ is H (Nyström's approximation, made from gradients that were needed anyway). It sees across valleys, where
distance alone cannot tell the steep directions from the flat ones. Sᵀ Y is made symmetric; of its eigenvalues λ, those below 0
are noise, or where the loss bends down, and count as none; the others as λ / (λ² + (ρ·λₘₐₓ)²): the larger ρ, the less noise there
is, and the less curvature.

Between the known points curvature is not approximated but measured: Sᵀ H S = Sᵀ Y. So the model also says where, on the ways
between them, the loss is least from a point θ on (:meth:`Quadratic.settle`):

    δ = S c,     c = −(Sᵀ Y)⁺ Sᵀ ĝ(θ)                        Newton's step within the span of S
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGES: Final = (0.02, 0.002, 0.1, 0.5)
"""Values of ρ that are tried, the first until anything is known."""
SETTLING: Final = 0.05
"""ρ of the ways on which the loss is made least."""
NOISE: Final = 0.1
"""κ: a gradient counts half when it has to be moved by the root of this share of its square."""
ROUNDING: Final = 1e-6
"""Eigenvalues below this share of the inner products they are made from are rounding."""


class Way(NamedTuple):
    """From a point towards where the loss is least."""

    weights: Floats
    """Of n known points (n,); their sum is 0."""
    fall: float
    """By how much the loss falls along it, to first order."""
    share: float
    """Of the way to where the loss is least, this much."""
    along: Floats
    """Inner products (n,) of the gradients with it."""


class Quadratic:
    """Of n gradients and points.

    Args:
        rows: where the history keeps them, the oldest first.
        crossed: inner products (n, n) of gradient i with the way from the newest point to point j.
        products: inner products (n, n) of the gradients.
        num_newest: of the n, those of the newest round.
        sign: −1 where the loss is to be made large: there it bends down where it is steep.
    """

    def __init__(self, rows: Sequence[int], crossed: Floats, products: Floats, num_newest: int, sign: float = 1.0) -> None:
        self.rows = list(rows)
        n = len(self.rows)
        self._newest = slice(n - max(1, min(num_newest, n)), n)
        self._center = np.eye(n) - 1.0 / n
        self._sign = sign
        self._crossed, self._products = np.nan_to_num(crossed), np.nan_to_num(products)
        found = sign * self._center @ self._crossed @ self._center
        self._values, self._vectors = np.linalg.eigh((found + found.T) / 2)
        self._rounding = ROUNDING * float(np.abs(self._crossed).max(initial=0.0))
        self._usual = max(float(np.median(np.diag(self._products))), 1e-300)
        self._inverses: dict[float, Floats] = {}

    @property
    def _mean(self) -> Floats:
        """Weights (n,) of the mean of the newest round's gradients."""
        found = np.zeros(len(self.rows))
        found[self._newest] = 1.0 / len(found[self._newest])
        return found

    @property
    def origin(self) -> int:
        """The row of the point that ways are measured from."""
        return self.rows[-1]

    def weights(self, along: Floats, ridge: float) -> Floats:
        """Of the gradients (n,) at a point, from their inner products (n,) with the way to it from the newest point."""
        ways = along[:, None] - self._crossed[:, self._newest]  # (n, newest), to the point from each of the newest
        moved = self._sign * self._inverse(ridge) @ ways
        squared = np.maximum((self._products @ moved * moved).sum(axis=0), 0.0) / self._usual
        shares = 1.0 / (NOISE + squared)
        shares = shares / shares.sum()
        found: Floats = moved @ shares
        if not np.isfinite(found).all():  # nothing is known of a way this long
            return self._mean
        found[self._newest] += shares
        return found

    def settle(self, weights: Floats, squares: Floats, most: float, newest: int) -> Way:
        """The way from a point to where the loss is least on the ways between the newest of the n points.

        Args:
            weights: of the gradients (n,) at that point.
            squares: squared distances (n, n) between the n points.
            most: no longer than this.
            newest: so many points.
        """
        slopes = self._sign * (weights @ self._crossed)
        found, part = np.zeros_like(slopes), slice(max(0, len(slopes) - newest), None)
        inside = self
        if part.start > 0:
            inside = Quadratic(self.rows[part], self._crossed[part, part], self._products[part, part], 1, self._sign)
        found[part] = -inside._inverse(SETTLING) @ slopes[part]
        length = math.sqrt(max(0.0, -0.5 * float(found @ squares @ found)))  # so, since the weights sum to 0
        if not math.isfinite(length):
            return Way(np.zeros_like(found), 0.0, 0.0, np.zeros_like(found))
        share = 1.0 if length <= most else most / length
        return Way(share * found, -share * float(slopes @ found), share, share * self._crossed @ found)

    def _inverse(self, ridge: float) -> Floats:
        """(n, n), K between centered gradients or points."""
        if ridge not in self._inverses:
            values, vectors = self._values, self._vectors
            least = max(ridge * float(values[-1]), self._rounding, 1e-150)
            inverse = np.where(values > 0, values / (values * values + least * least), 0.0)
            self._inverses[ridge] = self._center @ (vectors * inverse) @ vectors.T @ self._center
        return self._inverses[ridge]
