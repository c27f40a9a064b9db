"""Which estimate of a gradient to believe.

    last      the newest gradient again
    mean      the mean of the newest round's
    secant    a straight line through the newest two, along the way between them
    average   the mean of all that are known: what goes back and forth cancels
    zero      nothing: the optimizer coasts on its momentum
    gp        a Gaussian process whose length scale and noise predict each of the newest gradients best from all others
    quadratic a quadratic model of the loss, of the curvature that the newest points show

All give weights of known gradients. A :class:`Judge` sees what each was worth, lately, and chooses.

What is an estimate ĝ of a gradient g worth? Where predictions are good, the nearer the better: |ĝ − g|². Where none is good,
because of noise, what counts is how far a step along it takes the loss down: by ĝ·g − ρ/2·|ĝ|², in units of the rate, where ρ is
the rate times the curvature along such steps. Noise lies mostly where the loss is flat, and there ρ is far below 1: then a fresh,
noisy estimate is worth more than a stale average whose squared error is less. ρ is measured, along the steps that were proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.optim.history import History
from wavetrain.optim.process import Prior, Process, left_out_errors, typical_distance
from wavetrain.optim.quadratic import RIDGES, Quadratic

Floats = NDArray[np.float64]

LENGTHS: Final = (0.3, 1.0, 3.0, 10.0, 30.0)
NOISES: Final = (1e-6, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
SIMPLE: Final = ("last", "mean", "secant", "average", "zero")
ESTIMATORS: Final = ("gp", *SIMPLE)
FAR: Final = ("gp", "secant")
"""Those that ask how far a point is from others."""
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
CLEARLY: Final = 0.9
"""The process is believed instead of the quadratic model if its misfit is below this share of the model's; so is another ridge
instead of the first."""
SAYS: Final = 0.9
"""A misfit above which the quadratic model says next to nothing: an optimizer without momentum, which goes as far across a valley
as the gradient says, is then better off with the process."""
MIN_POINTS: Final = 3
"""Known gradients that it takes for a Gaussian process."""


@dataclass(frozen=True)
class Models:
    """All that is known before a gradient is predicted."""

    history: History
    rows: tuple[int, ...]
    """Of the known gradients, the oldest first."""
    num_newest: int
    """Of these, the gradients of the newest round."""
    process: Process | None
    """None of too few gradients."""
    quadratic: Quadratic | None
    ridge: float
    bends: bool
    """Whether a quadratic model is wanted."""

    def along(self, point: Tensor) -> Floats | None:
        """What the quadratic model asks of a point (d,)."""
        if self.quadratic is None:
            return None
        return self.history.along(self.quadratic.rows, point, self.quadratic.origin)

    def at(self, name: str, row: int, ridge: float | None = None) -> Floats:
        """Weights (n,) that an estimator gives the known gradients, at the point of a row; what it asks of it is measured if it
        was not yet, and nothing else.
        """
        along = None
        if name in FAR:
            self.history.measure(row)
        if name == "quadratic" and self.quadratic is not None:
            along = self.history.reach(self.quadratic.rows, row, self.quadratic.origin)
        return self.weights(name, self.history.squares[row], along, ridge)

    def weights(self, name: str, squares: Floats, along: Floats | None, ridge: float | None = None) -> Floats:
        """Weights (n,) that an estimator gives the known gradients, at a point with these squared distances (T,)."""
        n, found = len(self.rows), np.zeros(len(self.rows))
        squares = squares[list(self.rows)]
        if name == "gp" and self.process is not None:
            return self.process.weights(squares)
        if name == "quadratic" and self.quadratic is not None and along is not None:
            found[n - len(along) :] = self.quadratic.weights(along, self.ridge if ridge is None else ridge)
        elif name in ("gp", "quadratic", "mean"):
            newest = max(1, min(self.num_newest, n))
            found[n - newest :] = 1.0 / newest
        elif name == "average":
            found[:] = 1.0 / n
        elif name == "last" or (name == "secant" and n < 2):
            found[-1] = 1.0
        elif name == "secant":
            between = self.history.squares[self.rows[-1], self.rows[-2]]
            along_it = (squares[-2] - squares[-1] - between) / (2 * between) if between > 0 else 0.0
            found[-1], found[-2] = 1 + along_it, -along_it
        return found


class Judge:
    """Errors of estimators, of the priors of the Gaussian process, and of the ridges of the quadratic model.

    Args:
        kernel: of the process.
    """

    def __init__(self, kernel: str) -> None:
        self.curvature = 1.0
        """ρ, lately."""
        self.coasts = True
        """Whether the optimizer has momentum."""
        self.priors = tuple(Prior(length, noise, kernel) for length in LENGTHS for noise in NOISES)
        self.tried = Scores(len(ESTIMATORS))
        """What estimators predicted of each new gradient."""
        self.left_out = Scores(len(self.priors))
        """What priors would have predicted of each new gradient given all others."""
        self.fits = Scores(1 + len(RIDGES))
        """What the process, and quadratic models, predicted of each new gradient."""

    def best(self, *, bends: bool) -> str:
        """The estimator to predict with; with ``bends``, it may be the quadratic model."""
        if bends and self.bends:
            return "quadratic"
        costs = self.tried.costs(self.curvature)
        if costs[-1] < COASTING * costs[:-1].min():
            return "zero"
        return ESTIMATORS[int(costs[:-1].argmin())]

    @property
    def bends(self) -> bool:
        """Whether the quadratic model is to be believed, rather than the process."""
        least = self.fits.errors[1:].min()
        return bool(self.fits.errors[0] >= CLEARLY * least and (self.coasts or least <= SAYS * self.fits.weight))

    @property
    def blind(self) -> bool:
        """Whether no estimator says anything of gradients."""
        return bool(self.tried.errors[:-1].min() >= SAYS * self.tried.weight)

    @property
    def prior(self) -> Prior:
        """The best for the Gaussian process."""
        return self.priors[int(self.left_out.costs(self.curvature).argmin())]

    @property
    def ridge(self) -> float:
        """The best for the quadratic model."""
        errors = self.fits.errors[1:]
        best = int(errors.argmin())
        return RIDGES[best if errors[best] < CLEARLY * errors[0] else 0]

    def models(self, history: History, num_newest: int, *, bends: bool, sign: float = 1.0) -> Models:
        """What predicts, given all that is known; with ``bends``, the quadratic model too, of ``sign`` times the loss."""
        process = quadratic = None
        if len(history) >= MIN_POINTS:
            squares = history.between(history.rows)
            process = Process(self.prior, squares, typical_distance(squares))
            newest = history.newest
            if bends and len(newest) >= MIN_POINTS:
                crossed, products = history.crossed(newest, newest[-1]), history.products[np.ix_(newest, newest)]
                quadratic = Quadratic(newest, crossed, products, num_newest, sign)
        return Models(history, tuple(history.rows), num_newest, process, quadratic, self.ridge, bends)

    def hear(self, before: Models, new: Sequence[int]) -> tuple[float, ...]:
        """Learn from a round: how well what was known ``before`` it predicts the gradients of rows ``new``, which are known now.

        Returns:
            What steps are made with, the process or the quadratic model, was off by so much at each new point, |ĝ − g| / |g|;
            nothing where there was none.
        """
        history, known = before.history, list(before.rows)
        if not known:
            return ()
        inner, cross = history.products[np.ix_(known, known)], history.products[np.ix_(new, known)]
        own = history.products[new, new]

        def squares(name: str, ridge: float | None = None) -> tuple[Floats, Floats]:
            """|ĝ − g|² and |ĝ|² at each new point."""
            w = np.stack([before.at(name, row, ridge) for row in new])
            size = np.maximum((w @ inner * w).sum(axis=1), 0.0)
            return np.maximum(size - 2 * (w * cross).sum(axis=1) + own, 0.0), size

        found = [squares(name) for name in ESTIMATORS]
        whole = max(float(own.sum()), 1e-300)
        self.tried.add(*(np.array([float(one[i].sum()) / whole for one in found]) for i in (0, 1)))
        rival = found[0]
        if before.quadratic is not None:
            bent = [squares("quadratic", ridge) for ridge in RIDGES]
            misfits = np.array([_misfit(*one, own) for one in (found[0], *bent)])
            self.fits.add(misfits, misfits)
            if self.bends:
                rival = bent[RIDGES.index(self.ridge)]
        if len(history) >= MIN_POINTS:
            apart = history.between(history.rows)
            unit, products = typical_distance(apart), history.products[np.ix_(history.rows, history.rows)]
            which = [history.rows.index(row) for row in new]
            self.left_out.add(*left_out_errors(self.priors, apart, unit, products, which))
        return () if before.process is None else tuple(np.sqrt(rival[0] / np.maximum(own, 1e-300)).tolist())

    def feel(self, curvature: float) -> None:
        """Learn from the steps of a round: ρ along them."""
        self.curvature = MEMORY * self.curvature + (1 - MEMORY) * min(max(curvature, FLATTEST), STEEPEST)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers."""
        scores = {name: getattr(self, name).state_dict() for name in ("tried", "left_out", "fits")}
        return {**scores, "curvature": self.curvature}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        for name in ("tried", "left_out", "fits"):
            getattr(self, name).load_state_dict(state[name])
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


def _misfit(squared: Floats, size: Floats, own: Floats) -> float:
    """Mean of |ĝ − g|² / (|ĝ|² + |g|²): 0 if predictions are right, 1 if they say nothing, 2 if all is the other way round. No
    single gradient, however large, counts more than another.
    """
    return float((squared / np.maximum(size + own, 1e-300)).mean())
