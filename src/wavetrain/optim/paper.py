"""The round as published (Shu et al., NeurIPS'24, Algorithm 1), with the constants of the public code."""

from __future__ import annotations

import math
import time
from typing import Final

import numpy as np

from wavetrain.optim.play import Floats, Play
from wavetrain.optim.process import Prior, Process
from wavetrain.optim.rounds import Round

PAPER: Final = Prior(0.1, 1e-3, "matern52")
"""Length scale (of points divided by the mean root of their norms) and noise of the published code."""


class Paper(Play):
    """A round that ends with a true step from the last point, or from the one with the least loss or gradient."""

    def run(self) -> Round:
        of, history = self.of, self.history
        new = self._taken = history.take_rows(of.parallel)
        known = list(history.rows)
        begin = time.perf_counter()
        process = None
        if len(known) >= 2:
            unit = float(np.sqrt(history.sizes[known]).mean()) or 1.0
            process = Process(PAPER, history.between(known), unit, mean=False)
        self.estimate_seconds += time.perf_counter() - begin

        def predict(row: int) -> Floats:
            if process is None:
                return np.zeros(len(known))
            history.measure(row)
            return process.weights(history.squares[row, known])

        predicted = self._propose(new, predict)
        losses, good = self._evaluate(new)
        if not good:
            return self._skipped(losses, len(new))
        begin = time.perf_counter()
        history.close(good)
        self.gradient_norm = math.sqrt(float(history.products[good[0], good[0]]))
        cosines, errors = self._compare(predicted, known, good)
        self.estimate_seconds += time.perf_counter() - begin
        chosen = len(good) - 1
        if of._select == "loss":
            chosen = int(np.argmin(losses[: len(good)]))
        elif of._select == "gradient":
            chosen = int(np.argmin(history.products[good, good]))
        self._rewind()
        for at in range(chosen):  # the same way again, up to the point that was chosen
            self._step(predicted[at], known)
        self._step(np.ones(1), [good[chosen]])
        self.flat.forget_gradients()
        return self._told("gp" if process is not None else "zero", losses, len(new), chosen + 1, cosines, errors, ())
