"""Which estimate of a gradient to believe.

    last      the newest gradient again
    mean      the mean of the newest round's
    secant    a straight line through the newest two, along the way between them
    average   the mean of all that are known: what goes back and forth cancels
    zero      nothing: the optimizer coasts on its momentum
    gp        a Gaussian process whose length scale and noise predict each of the newest gradients best from all others

All give weights of known gradients. A :class:`Judge` sees what each was worth, lately, and chooses.

What is an estimate ĝ of a gradient g worth? Where predictions are good, the nearer the better: |ĝ − g|². Where none is good,
because of noise, what counts is how far a step along it takes the loss down: by ĝ·g − ρ/2·|ĝ|², in units of the rate, where ρ is
the rate times the curvature along such steps. Noise lies mostly where the loss is flat, and there ρ is far below 1: then a fresh,
noisy estimate is worth more than a stale average whose squared error is less. ρ is measured, along the steps that were proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from wavetrain.optim.history import History
from wavetrain.optim.process import Prior, Process, left_out_errors, typical_distance

Floats = NDArray[np.float64]

LENGTHS: Final = (0.3, 1.0, 3.0, 10.0, 30.0)
NOISES: Final = (1e-6, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
SIMPLE: Final = ("last", "mean", "secant", "average", "zero")
ESTIMATORS: Final = ("gp", *SIMPLE)
MEMORY: Final = 0.8
"""How much of a round's errors still counts a round later."""
COASTING: Final = 0.5
"""Coasting is believed only if its squared error is below this share of all others': under noise its error is the least of all,
but it is short of every step that follows."""
FLATTEST: Final = 0.05
STEEPEST: Final = 2.0
"""Bounds of ρ: above 2, a step would take the loss up."""
GOOD: Final = 0.1
"""A squared error, over the squared gradient, below which predictions are good."""
MIN_POINTS: Final = 3
"""Known gradients that it takes for a Gaussian process."""


class Judge:
    """Errors of estimators, and of the priors of the Gaussian process.

    Args:
        kernel: of the process.
    """

    def __init__(self, kernel: str) -> None:
        self.curvature = 1.0
        """ρ, lately."""
        self.priors = tuple(Prior(length, noise, kernel) for length in LENGTHS for noise in NOISES)
        self.tried = Scores(len(ESTIMATORS))
        """What estimators predicted of each new gradient."""
        self.left_out = Scores(len(self.priors))
        """What priors would have predicted of each new gradient given all others."""

    @property
    def best(self) -> str:
        """The estimator to predict with."""
        costs = self.tried.costs(self.curvature)
        if costs[-1] < COASTING * costs[:-1].min():
            return "zero"
        return ESTIMATORS[int(costs[:-1].argmin())]

    @property
    def prior(self) -> Prior:
        """The best for the Gaussian process."""
        return self.priors[int(self.left_out.costs(self.curvature).argmin())]

    def process(self, history: History) -> Process | None:
        """The Gaussian process given all that is known; None of too little."""
        if len(history) < MIN_POINTS:
            return None
        squares = history.between(history.rows)
        return Process(self.prior, squares, typical_distance(squares))

    def hear(
        self, history: History, before: Sequence[int], process: Process | None, num_newest: int, new: list[int]
    ) -> tuple[float, ...]:
        """Learn from a round: rows ``before`` were known, ``num_newest`` of them of one round; ``new`` are now known as well.

        Returns:
            What the Gaussian process was off by at each new point, |ĝ − g| / |g|; nothing where there was none.
        """
        if not before:
            return ()
        off: tuple[float, ...] = ()
        inner, cross = history.products[np.ix_(before, before)], history.products[np.ix_(new, before)]
        own = history.products[new, new]
        squares, whole = history.between(new, before), max(float(own.sum()), 1e-300)
        errors, sizes = np.zeros(len(ESTIMATORS)), np.zeros(len(ESTIMATORS))
        for i, name in enumerate(ESTIMATORS):
            w = np.stack([weights(name, process, history, before, num_newest, row) for row in squares])
            size = np.einsum("qi,ij,qj->q", w, inner, w)
            squared = size - 2 * (w * cross).sum(axis=1) + own
            errors[i] = max(0.0, float(squared.sum())) / whole
            if name == "gp" and process is not None:
                off = tuple(np.sqrt(np.maximum(squared, 0.0) / np.maximum(own, 1e-300)).tolist())
            sizes[i] = max(0.0, float(size.sum())) / whole
        self.tried.add(errors, sizes)
        if len(history) < MIN_POINTS:
            return off
        squares = history.between(history.rows)
        unit, products = typical_distance(squares), history.products[np.ix_(history.rows, history.rows)]
        which = [history.rows.index(row) for row in new]
        self.left_out.add(*left_out_errors(self.priors, squares, unit, products, which))
        return off

    def feel(self, curvature: float) -> None:
        """Learn from the steps of a round: ρ along them."""
        self.curvature = MEMORY * self.curvature + (1 - MEMORY) * min(max(curvature, FLATTEST), STEEPEST)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers."""
        return {"tried": self.tried.state_dict(), "left_out": self.left_out.state_dict(), "curvature": self.curvature}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.tried.load_state_dict(state["tried"])
        self.left_out.load_state_dict(state["left_out"])
        self.curvature = float(state["curvature"])


class Scores:
    """How several ways to predict did lately, weighted by age."""

    def __init__(self, count: int) -> None:
        self.errors: Floats = np.zeros(count)
        """Σ |ĝ − g|² / Σ |g|² of a round's predictions ĝ, summed over rounds."""
        self.sizes: Floats = np.zeros(count)
        """The same of |ĝ|²."""
        self.weight = 0.0
        """Of all rounds together."""

    def add(self, errors: Floats, sizes: Floats) -> None:
        """Learn from a round."""
        self.errors = MEMORY * self.errors + np.minimum(np.nan_to_num(errors, nan=1e6), 1e6)
        self.sizes = MEMORY * self.sizes + np.minimum(np.nan_to_num(sizes, nan=1e6), 1e6)
        self.weight = MEMORY * self.weight + 1.0

    def costs(self, curvature: float) -> Floats:
        """The less the better; where none is good, |g|² − 2·ĝ·g + ρ·|ĝ|²."""
        if self.errors.min() <= GOOD * self.weight:
            return self.errors
        return self.errors + (curvature - 1.0) * self.sizes

    def state_dict(self) -> dict[str, Any]:
        """Tensors and a number."""
        numbers = {"errors": torch.from_numpy(self.errors.copy()), "sizes": torch.from_numpy(self.sizes.copy())}
        return {**numbers, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.errors, self.sizes = state["errors"].numpy().copy(), state["sizes"].numpy().copy()
        self.weight = float(state["weight"])


def weights(
    name: str, process: Process | None, history: History, known: Sequence[int], num_newest: int, squares: Floats
) -> Floats:
    """Weights (n,) that an estimator gives the gradients of rows ``known``, at a point with these squared distances (n,)."""
    n = len(known)
    found = np.zeros(n)
    if name == "gp" and process is not None:
        return process.weights(squares)
    if name in ("gp", "mean"):
        newest = max(1, min(num_newest, n))
        found[n - newest :] = 1.0 / newest
    elif name == "average":
        found[:] = 1.0 / n
    elif name == "last" or (name == "secant" and n < 2):
        found[-1] = 1.0
    elif name == "secant":
        between = history.squares[known[-1], known[-2]]
        along = (squares[-2] - squares[-1] - between) / (2 * between) if between > 0 else 0.0
        found[-1], found[-2] = 1 + along, -along
    return found
