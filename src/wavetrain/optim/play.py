"""What every round of an OptEx does: propose points, evaluate them, make steps, and undo itself where anything goes wrong.

What stays from round to round is the optimizer's (:mod:`wavetrain.optim.optex`); what is here lives for one ``step()``. The two
kinds of rounds are :mod:`wavetrain.optim.auto` and :mod:`wavetrain.optim.paper`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.errors import DivergedError
from wavetrain.optim.evaluation import evaluate
from wavetrain.optim.rounds import Round
from wavetrain.optim.team import Group, Shared
from wavetrain.optim.threads import Threads

if TYPE_CHECKING:
    from wavetrain.optim.optex import OptEx

Floats = NDArray[np.float64]


class Play(ABC):
    """One round of an :class:`OptEx`; see :meth:`run`."""

    def __init__(self, of: OptEx, closure: Callable[[int], Any], seed: int) -> None:
        self.of, self.closure, self.seed = of, closure, seed
        self._taken: list[int] = []
        self._moved = self._clipped = self._ended = False
        self._summed: tuple[bytes, tuple[int, ...], float, float] | None = None
        """What the optimizer's ``_sum`` holds: weights, of which rows, and its :meth:`_print`."""
        self.flat, self.whole, self.history = of._flat, of._whole, of._history
        self.estimate_seconds = self.evaluate_seconds = self.step_seconds = 0.0
        self.has: tuple[bool, ...] = ()
        """Which parameters got a gradient; until one is evaluated, all do."""
        self.gradient_norm = 0.0

    @abstractmethod
    def run(self) -> Round:
        """Do it: N gradients, up to N steps."""

    @property
    def _may_recover(self) -> bool:
        """Whether the last round is to be taken back, where this one begins at no number."""
        return False

    def _propose(self, new: list[int], predict: Callable[[int], Floats | None]) -> list[Floats | None]:
        """Points to evaluate, each a step from the one before with what is predicted there; the predictions, as weights.

        Args:
            new: the rows they go to.
            predict: given the row of a point, predicts.
        """
        of, flat = self.of, self.flat
        known = list(self.history.rows)
        begin = time.perf_counter()
        of._fork.save()
        flat.read(of._start)
        if self.whole is not flat:
            self.whole.read(of._whole_start)
        self._moved = True
        self.step_seconds += time.perf_counter() - begin
        predicted: list[Floats | None] = []
        for at, row in enumerate(new):
            begin = time.perf_counter()
            self.history.put(row, of._start if at == 0 else flat.read(of._work), ended=at == 0)
            found = predict(row) if at + 1 < len(new) else None
            self.estimate_seconds += time.perf_counter() - begin
            if at + 1 < len(new):
                predicted.append(found)
            if found is not None:
                self._step(found, known)
        return predicted

    def _evaluate(self, new: list[int]) -> tuple[list[float], list[int]]:
        """The losses of all minibatches, and the rows whose gradients are numbers, up to the first that is not.

        A minibatch whose loss or gradient is no number is left out of the mean at its point.
        """
        of, flat, history = self.of, self.flat, self.history
        begin = time.perf_counter()
        shared: dict[int, Shared] = {}
        losses: list[float] = [math.nan] * of.parallel
        good: list[int] = []
        for at, row in enumerate(new):
            indices = range(at, of.parallel, len(new))
            if at == 0 and of._threads is not None:  # threads: all at once, each with a model of its own
                shared = self._threaded(of._threads, new)
            elif at == 0 and isinstance(of._team, Group):  # ranks: all at once, each at the point of its own
                shared = self._shared(of._team, new)
            if not shared:
                flat.write(self._point(new, at))
            elif at == 0:
                losses = [shared[i].loss for i in range(of.parallel)]
            count = 0
            for i in indices:
                one = shared[i] if shared else self._agreed(of._team.share(self._one(i)))[0]
                losses[i] = one.loss
                if not one.finite:
                    continue
                self.has = tuple(a or b for a, b in zip(self.has or one.has, one.has, strict=True))
                count += 1
                if len(indices) == 1 < len(new):
                    history.gradients[row].copy_(one.gradient)
                elif count == 1:
                    of._mean.copy_(one.gradient)
                else:
                    of._mean.add_(one.gradient)
            if not count:
                break
            if not len(indices) == 1 < len(new):
                history.gradients[row].copy_(of._mean.div_(count))
            good.append(row)
        of._has = self.has or of._has
        history.drop(new[len(good) :])
        self.evaluate_seconds += time.perf_counter() - begin
        if of._scaler is not None:
            _tell(of._scaler, overflowed=len(good) < len(new))
        overflowed = of._scaler is not None and math.isfinite(losses[0])
        if not good and not overflowed and not self._may_recover:
            raise DivergedError(
                f"round {of._round + 1}: no loss or gradient at its first point is a number (loss of minibatch 0: "
                f"{losses[0]:g}); the parameters and the optimizer are as they were before the round",
                step=of._round + 1,
                ranks=(),
            )
        return losses, good

    def _shared(self, team: Group, new: list[int]) -> dict[int, Shared]:
        """Every rank's minibatch, each evaluated where it belongs."""
        which = [i % len(new) for i in range(self.of.parallel)]
        team.place([self._point(new, at) for at in range(len(new))], which, self.of._whole_start, self.whole)
        return dict(enumerate(self._agreed(team.share(self._one(team.rank)))))

    def _threaded(self, threads: Threads, new: list[int]) -> dict[int, Shared]:
        """Every minibatch, evaluated by threads."""
        of = self.of
        points = [self._point(new, i % len(new)) for i in range(of.parallel)]
        found = threads.evaluate(self.closure, points, self._scale)
        return {i: of._team.share(one)[0] for i, one in enumerate(found)}

    def _agreed(self, shared: list[Shared]) -> list[Shared]:
        """What is a number here but not on a rank that holds other parameters is none; a minibatch is of all or of these."""
        if self.whole is not self.flat:
            return shared
        fine = self.of._shards.all([one.finite for one in shared])
        return [replace(one, finite=finite) for one, finite in zip(shared, fine, strict=True)]

    def _point(self, new: list[int], at: int) -> Tensor:
        """The proposed point ``at`` (d,)."""
        return self.history.point(new[at])

    @property
    def _scale(self) -> float | None:
        return None if self.of._scaler is None else self.of._scaler.get_scale()

    def _one(self, index: int) -> Shared:
        """One minibatch, where the parameters are; what goes wrong in the closure is kept, for the team to hear of it."""
        of = self.of
        try:
            done = evaluate(self.closure, index, self.seed + index, self.whole, of._gradient, self._scale)
        except Exception as error:
            return Shared(of._gradient, 0.0, (False,) * len(self.whole.parameters), error)
        finally:
            self.whole.forget_gradients()
        return Shared(of._gradient, done.loss, done.has, finite=done.finite)

    def _skipped(self, losses: Sequence[float], num_points: int) -> Round:
        """A round that overflowed in fp16: nothing is done, the scaler has been told."""
        self.give_up()
        return self._told("zero", losses, num_points, 0, (), (), ())

    def give_up(self) -> None:
        """Everything as it was before the round, but for the oldest pairs of the history."""
        if self._moved:
            if self.whole is not self.flat:
                self.whole.write(self.of._whole_start)
            self._rewind()
        if self._ended:
            self.history.onward.fill(math.inf)
            self.of._settling.gone = None
        self.history.drop([row for row in self._taken if row not in self.history.rows])
        self.flat.forget_gradients()

    def _rewind(self) -> None:
        """Parameters and optimizer as they were when the round began."""
        begin = time.perf_counter()
        self.flat.write(self.of._start)
        self.of._fork.restore()
        self.step_seconds += time.perf_counter() - begin

    def _step(self, found: Floats | None, rows: Sequence[int], most: float = math.inf) -> float:
        """A step of the inner optimizer with a sum of kept gradients, scaled down to the norm ``most`` if it is above.

        What was summed up for the step before is used again if it is the same, as it is where predictions do not depend on the
        point, and if nobody has written to it since, as optimizers and their hooks may.

        Returns:
            The norm of the sum, before it was scaled.
        """
        assert found is not None
        of = self.of
        begin = time.perf_counter()
        norm = self._norm(found, rows)
        if self._largest < min(norm, most):
            most, self._clipped = self._largest, True
        scale = most / norm if most < norm < math.inf else 1.0
        asked = ((found * scale).tobytes(), tuple(rows))
        too_large = norm == math.inf > most  # their squares are more than float32 holds
        same = self._summed is not None and self._summed[:2] == asked and self._summed[2:] == self._print()
        if too_large or not same:
            self.history.combine(found * scale, rows, of._sum)
            if too_large:
                counted = of._sum[: self.flat.num_counted].double()
                whole = math.sqrt(of._shards.total(np.array([float(counted @ counted)]))[0])
                of._sum.mul_(most / max(whole, most))
            self._summed = (*asked, *self._print())
        self.estimate_seconds += time.perf_counter() - begin
        self._step_with(of._sum)
        return norm

    @property
    def _largest(self) -> float:
        """The norm of the largest gradient that steps are to be made with."""
        return min(math.inf if self.of._clip_norm is None else self.of._clip_norm, self.of._pace.largest)

    def _norm(self, found: Floats, rows: Sequence[int]) -> float:
        """Of a sum of kept gradients; infinite where its square is no number."""
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(found @ self.history.products[np.ix_(rows, rows)] @ found)
        return math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.inf

    def _print(self) -> tuple[float, float]:
        """Two numbers that change when the sum is written to."""
        summed = self.of._sum
        return float(summed @ summed), float(summed @ self.of._start)

    def _step_with(self, gradient: Tensor) -> None:
        """A step of the inner optimizer with a gradient (d,)."""
        begin = time.perf_counter()
        self.flat.lend_gradients(gradient, self.has or self.of._has)
        self.of.base.step()
        self.step_seconds += time.perf_counter() - begin

    def _compare(
        self, predicted: Sequence[Floats | None], known: Sequence[int], good: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Cosines and relative errors of what was predicted, from inner products."""
        products = self.history.products
        cosines, errors = [], []
        for w, row in zip(predicted, good, strict=False):
            if w is None:
                continue
            own, cross = float(products[row, row]), float(w @ products[row, known])
            size = float(w @ products[np.ix_(known, known)] @ w)
            cosines.append(cross / math.sqrt(own * size) if own > 0 and size > 0 else 0.0)
            errors.append(math.sqrt(max(0.0, size - 2 * cross + own) / own) if own > 0 else 0.0)
        return tuple(cosines), tuple(errors)

    def _told(
        self,
        estimator: str,
        losses: Sequence[float],
        num_points: int,
        accepted: int,
        cosines: tuple[float, ...],
        errors: tuple[float, ...],
        drifts: tuple[float, ...],
    ) -> Round:
        return Round(
            number=self.of._round + 1,
            losses=tuple(losses),
            estimator=estimator,
            num_points=num_points,
            num_accepted=accepted,
            cosines=cosines,
            relative_errors=errors,
            drifts=drifts,
            gradient_norm=self.gradient_norm,
            estimate_seconds=self.estimate_seconds,
            evaluate_seconds=self.evaluate_seconds,
            step_seconds=self.step_seconds,
        )


def _tell(scaler: torch.amp.GradScaler, *, overflowed: bool) -> None:
    """A scaler how the round went: down at once where a gradient was no number, up after as many good rounds as it says."""
    tracked = scaler.state_dict()
    if not tracked:
        return
    good = 0 if overflowed else tracked["_growth_tracker"] + 1
    grown = good >= tracked["growth_interval"]
    factor = tracked["backoff_factor"] if overflowed else tracked["growth_factor"] if grown else 1.0
    scaler.load_state_dict({**tracked, "scale": tracked["scale"] * factor, "_growth_tracker": 0 if grown else good})
