"""A quadratic model of the loss around the newest points: how the gradient bends along the way, from inner products alone.

    ĝ(θ) = ḡ + H (θ − θ̄),     H = Y K Yᵀ,     K = (Sᵀ Y)⁺

ḡ and θ̄ are the means of the newest round, which average the noise of its minibatches. S are points and Y their gradients, both
less their means: of a quadratic function Y = H S, and where H has few large eigenvalues, as the loss of a network has, Y K Yᵀ is
H (Nyström's approximation, made from gradients that were needed anyway). It sees across valleys, where distance alone cannot tell
the steep directions from the flat ones. Sᵀ Y is made symmetric; of its eigenvalues λ, those below 0 are noise, or where the loss
bends down, and count as none; the others as λ / (λ² + (ρ·λₘₐₓ)²): the larger ρ, the less noise there is, and the less curvature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGES: Final = (0.02, 0.002, 0.1, 0.5)
"""Values of ρ that are tried, the first until anything is known."""

ROUNDING: Final = 1e-6
"""Eigenvalues below this share of the inner products they are made from are rounding."""


class Quadratic:
    """Of n gradients and points.

    Args:
        rows: where the history keeps them, the oldest first.
        crossed: inner products (n, n) of gradient i with the way from the newest point to point j.
        num_newest: of the n, those of the newest round.
        sign: −1 where the loss is to be made large: there it bends down where it is steep.
    """

    def __init__(self, rows: Sequence[int], crossed: Floats, num_newest: int, sign: float = 1.0) -> None:
        self.rows = list(rows)
        n = len(self.rows)
        self._num_newest = max(1, min(num_newest, n))
        self._center = np.eye(n) - 1.0 / n
        self._sign = sign
        found = sign * self._center @ crossed @ self._center
        self._values, self._vectors = np.linalg.eigh(np.nan_to_num(found + found.T) / 2)
        self._rounding = ROUNDING * float(np.abs(np.nan_to_num(crossed)).max(initial=0.0))
        self._mean: Floats = crossed[:, n - self._num_newest :].mean(axis=1)

    @property
    def origin(self) -> int:
        """The row of the point that ways are measured from."""
        return self.rows[-1]

    def weights(self, along: Floats, ridge: float) -> Floats:
        """Of the gradients (n,) at a point, from their inner products (n,) with the way to it from the newest point."""
        values, vectors = self._values, self._vectors
        least = max(ridge * float(values[-1]), self._rounding, 1e-150)
        inverse = np.where(values > 0, values / (values * values + least * least), 0.0)
        turned = self._center @ (along - self._mean)
        found: Floats = self._sign * self._center @ (vectors @ (inverse * (vectors.T @ turned)))
        found[len(found) - self._num_newest :] += 1.0 / self._num_newest
        return found
