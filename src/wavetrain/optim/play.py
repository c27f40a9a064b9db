"""One round of an OptEx: propose, evaluate, replay; or the paper's.

What stays from round to round is the optimizer's (:mod:`wavetrain.optim.optex`); what is here lives for one ``step()``, and
undoes itself where anything goes wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.errors import DivergedError
from wavetrain.optim.estimators import weights
from wavetrain.optim.evaluation import evaluate, is_finite
from wavetrain.optim.process import Prior, Process
from wavetrain.optim.rounds import Round
from wavetrain.optim.team import Shared

if TYPE_CHECKING:
    from wavetrain.optim.optex import OptEx

Floats = NDArray[np.float64]

NEAR: Final = 0.75
"""A replayed step is taken while an evaluated point is within this share of the way from the round's start."""
LEFT: Final = 0.5
"""What may be left of a rise of the loss after the next true step, as a share of what a step at the start would gain."""
EXPLODED: Final = 1e3
"""Times the squared gradient at the start: points beyond are of no use."""
PAPER: Final = Prior(0.1, 1e-3, "matern52")
"""Length scale (of points divided by the mean root of their norms) and noise of the published code."""


class Play:
    """One round of an :class:`OptEx`."""

    def __init__(self, of: OptEx, closure: Callable[[int], Any], seed: int) -> None:
        self.of, self.closure, self.seed = of, closure, seed
        self._taken: list[int] = []
        self._moved = False
        self.flat, self.history = of._flat, of._history
        self.estimate_seconds = self.evaluate_seconds = self.step_seconds = 0.0
        self.has: tuple[bool, ...] = ()
        """Which parameters got a gradient; until one is evaluated, all do."""
        self.gradient_norm = 0.0

    def auto(self) -> Round:
        of, history = self.of, self.history
        num_points = of._pace.num_points
        new = self._taken = history.take_rows(num_points)
        known, newest = list(history.rows), of._num_newest
        begin = time.perf_counter()
        process, name = of._judge.process(history), of._judge.best
        told = name if name != "gp" or process is None else str(of._judge.prior)
        self.estimate_seconds += time.perf_counter() - begin

        def predict(squares: Floats) -> Floats | None:
            return weights(name, process, history, known, newest, squares[known]) if known else None

        predicted = self._propose(new, predict)
        losses, good = self._evaluate(new)
        if not good:
            return self._skipped(losses, num_points)
        with np.errstate(over="ignore", invalid="ignore"):  # of a way that has exploded; what is no number is not believed
            return self._learn(losses, good, predicted, known, process, newest, told)

    def _learn(
        self,
        losses: list[float],
        good: list[int],
        predicted: Sequence[Floats | None],
        known: Sequence[int],
        process: Process | None,
        newest: int,
        told: str,
    ) -> Round:
        """The second half of a round: what the gradients say, and the steps that are made with them."""
        of, history = self.of, self.history
        begin = time.perf_counter()
        history.close(good)
        good = self._sane(good)
        self.gradient_norm = math.sqrt(float(history.products[good[0], good[0]]))
        cosines, errors = self._compare(predicted, known, good)
        slopes = self._slopes(good)
        curvature = self._curvature(slopes, predicted, known, good)
        if curvature is not None:
            of._judge.feel(curvature)
        of._judge.hear(history, known, process, newest, good)
        process = of._judge.process(history) if known else None
        of._num_newest = len(good)
        self.estimate_seconds += time.perf_counter() - begin
        accepted, drifts = self._replay(good, process)
        sign = -1.0 if any(group.get("maximize", False) for group in of.param_groups) else 1.0
        if known and accepted < len(good):
            accepted = self._go_further(accepted, [sign * loss for loss in losses], slopes, predicted, known, good, process)
        of._pace.hear(accepted, [sign * loss for loss in losses if math.isfinite(loss)])
        return self._told(told, losses, len(self._taken), accepted, cosines, errors, drifts)

    def paper(self) -> Round:
        of, history = self.of, self.history
        new = self._taken = history.take_rows(of.parallel)
        known = list(history.rows)
        begin = time.perf_counter()
        process = None
        if len(known) >= 2:
            unit = float(np.sqrt(history.sizes[known]).mean()) or 1.0
            process = Process(PAPER, history.between(known), unit, mean=False)
        self.estimate_seconds += time.perf_counter() - begin

        def predict(squares: Floats) -> Floats:
            return np.zeros(len(known)) if process is None else process.weights(squares[known])

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

    def _propose(self, new: list[int], predict: Callable[[Floats], Floats | None]) -> list[Floats | None]:
        """Points to evaluate, each a step from the one before with what is predicted there; the predictions, as weights."""
        of, flat, history = self.of, self.flat, self.history
        known = list(history.rows)
        begin = time.perf_counter()
        of._fork.save()
        flat.read(of._start)
        self._moved = True
        self.step_seconds += time.perf_counter() - begin
        predicted: list[Floats | None] = []
        for at, row in enumerate(new):
            begin = time.perf_counter()
            point = flat.read(of._work)
            squares = history.squares_to(point)
            history.put(row, point, squares)
            if of._proposed is not None:
                of._proposed[at].copy_(point)
            last = at + 1 == len(new)
            if not last:
                predicted.append(predict(squares))
            self.estimate_seconds += time.perf_counter() - begin
            if not last and predicted[-1] is not None:
                self._step(predicted[-1], known)
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
            if of._team.size is None:
                flat.write(history.points[row] if of._proposed is None else of._proposed[at])
            if of._team.size is not None and at == 0:  # ranks: all at once, each at the point of its own
                shared = self._shared(new)
            count = 0
            for i in indices:
                one = shared[i] if shared else of._team.share(self._one(i))[0]
                losses[i] = one.loss
                if not of._shards.all(is_finite(one.loss, one.gradient)):
                    continue
                self.has = tuple(a or b for a, b in zip(self.has or one.has, one.has, strict=True))
                count += 1
                if count == 1:
                    of._mean.copy_(one.gradient)
                else:
                    of._mean.add_(one.gradient)
            if not count:
                break
            history.gradients[row].copy_(of._mean.div_(count))
            good.append(row)
        of._has = self.has or of._has
        history.drop(new[len(good) :])
        self.evaluate_seconds += time.perf_counter() - begin
        if of._scaler is not None:
            _tell(of._scaler, overflowed=len(good) < len(new))
        overflowed = of._scaler is not None and math.isfinite(losses[0])
        if not good and not overflowed:
            raise DivergedError(
                f"round {of._round + 1}: no loss or gradient at its first point is a number (loss of minibatch 0: "
                f"{losses[0]:g}); the parameters and the optimizer are as they were before the round",
                step=of._round + 1,
                ranks=(),
            )
        return losses, good

    def _shared(self, new: list[int]) -> dict[int, Shared]:
        """Every rank's minibatch, each evaluated where it belongs."""
        of = self.of
        mine = next(i for i in range(of.parallel) if of._team.mine(i))
        at = mine % len(new)
        self.flat.write(self.history.points[new[at]] if of._proposed is None else of._proposed[at])
        return dict(enumerate(of._team.share(self._one(mine))))

    def _one(self, index: int) -> Shared:
        """One minibatch, where the parameters are; what goes wrong in the closure is kept, for the team to hear of it."""
        of = self.of
        scale = None if of._scaler is None else of._scaler.get_scale()
        try:
            done = evaluate(self.closure, index, self.seed + index, self.flat, of._work, scale)
        except Exception as error:
            return Shared(of._work, 0.0, (False,) * len(self.flat.parameters), error)
        return Shared(of._work, done.loss, done.has)

    def _skipped(self, losses: Sequence[float], num_points: int) -> Round:
        """A round that overflowed in fp16: nothing is done, the scaler has been told."""
        self.give_up()
        return self._told("zero", losses, num_points, 0, (), (), ())

    def give_up(self) -> None:
        """Everything as it was before the round, but for the oldest pairs of the history."""
        if self._moved:
            self._rewind()
        self.history.drop([row for row in self._taken if row not in self.history.rows])
        self.flat.forget_gradients()

    def _replay(self, good: list[int], process: Process | None) -> tuple[int, tuple[float, ...]]:
        """Steps from the start, as far as evaluated points are near: how many, and how near."""
        of, flat, history = self.of, self.flat, self.history
        self._rewind()
        drifts: list[float] = []
        accepted = 0
        if len(good) == len(self._taken) == 1:
            self._step_with(of._mean, math.sqrt(float(history.products[good[0], good[0]])))
            accepted = 1
        elif process is None or len(good) == 1:
            self._step(np.full(len(good), 1 / len(good)), good)
            accepted = 1
        else:
            for _ in good:
                begin = time.perf_counter()
                squares = history.squares_to(flat.read(of._work))
                if accepted:
                    moved = float(squares[good[0]])
                    drifts.append(math.sqrt(self._away(squares, good) / moved) if moved > 0 else 0.0)
                    if not drifts[-1] <= NEAR:
                        break
                found = process.weights(squares[history.rows])
                self.estimate_seconds += time.perf_counter() - begin
                self._step(found, history.rows)
                accepted += 1
        flat.forget_gradients()
        return accepted, tuple(drifts)

    def _go_further(
        self,
        accepted: int,
        losses: Sequence[float],
        slopes: Floats,
        predicted: Sequence[Floats | None],
        known: Sequence[int],
        good: list[int],
        process: Process | None,
    ) -> int:
        """Where the replay left the way that was proposed: end on that way instead, a true step from its furthest point that
        leaves the loss no higher; steps in all.

        Along the way the loss may rise, by r in all: predictions are right where the loss is flat, and wrong across valleys. That
        is no harm if the next true step takes it back. Of a quadratic function along whose steep directions the rate times the
        curvature is a, a rise of r makes the step's first-order gain 2·a·r larger than at the start, and after the step
        (1 − a)²·r of it is left.
        """
        of, rises = self.of, np.concatenate(([0.0], np.cumsum(slopes.mean(axis=1))))
        at_start = self._end_at(0, predicted, known, good, process)
        for at in range(len(good) - 1, accepted - 1, -1):
            if of._pace.first is None or not losses[at] <= of._pace.first:
                continue  # worse than where all began
            rise, gain = float(rises[at]), self._end_at(at, predicted, known, good, process)
            left = rise if rise <= 0 else rise * (1 - (gain - at_start) / (2 * rise)) ** 2
            if left <= LEFT * at_start:
                return at + 1
        return self._replay(good, process)[0]

    def _end_at(
        self, at: int, predicted: Sequence[Floats | None], known: Sequence[int], good: Sequence[int], process: Process | None
    ) -> float:
        """Go the proposed way up to its point ``at``, and a step from there; by how much that lowers the loss, to first order."""
        of, row = self.of, good[at]
        count, rising = self.flat.num_counted, any(group.get("maximize", False) for group in of.param_groups)
        self._rewind()
        for one in predicted[:at]:
            self._step(one, known)
        begin = time.perf_counter()
        of._mean.copy_(self.flat.read(of._work))
        self.estimate_seconds += time.perf_counter() - begin
        if process is None:
            self._step(np.ones(1), [row])
        else:
            self._step(process.weights(self.history.squares[row, self.history.rows]), self.history.rows)
        self.flat.forget_gradients()
        begin = time.perf_counter()
        moved = torch.sub(self.flat.read(of._work), of._mean, out=of._mean)[:count]
        fall = -float(self.history.gradients[row][:count].to(moved.dtype) @ moved)
        found = float(of._shards.total(np.array([-fall if rising else fall]))[0])
        self.estimate_seconds += time.perf_counter() - begin
        return found

    def _sane(self, good: list[int]) -> list[int]:
        """The points of a round up to the first where the way has exploded; the others are forgotten."""
        sizes = self.history.products[good, good]
        wild = np.flatnonzero(~(sizes <= EXPLODED * sizes[0]))
        if not len(wild):
            return good
        self.history.forget(good[int(wild[0]) :])
        return good[: int(wild[0])]

    def _away(self, squares: Floats, good: Sequence[int]) -> float:
        """The squared distance to the nearest known point, or to the way between two that were evaluated one after the other."""
        nearest = float(squares[self.history.rows].min())
        for a, b in pairwise(good):
            apart = float(self.history.squares[a, b])
            if apart > 0:
                share = min(max((squares[a] - squares[b] + apart) / (2 * apart), 0.0), 1.0)
                nearest = min(nearest, (1 - share) * squares[a] + share * squares[b] - share * (1 - share) * apart)
        return max(0.0, float(nearest))

    def _slopes(self, good: Sequence[int]) -> Floats:
        """Of every proposed step, how steeply the loss rises along it, where it begins and where it ends: (steps, 2).

        Their mean is what the step changes the loss by; exactly so for quadratic functions.
        """
        of, history = self.of, self.history
        count, rising = self.flat.num_counted, any(group.get("maximize", False) for group in of.param_groups)
        found = np.zeros((len(good) - 1, 2))
        for at in range(len(good) - 1):
            if of._proposed is None:
                begin, end = (history.points[row] for row in good[at : at + 2])
            else:
                begin, end = of._proposed[at], of._proposed[at + 1]
            moved = torch.sub(end, begin, out=of._work)[:count]
            for i, row in enumerate(good[at : at + 2]):
                found[at, i] = float(history.gradients[row][:count].to(moved.dtype) @ moved)
        return of._shards.total(-found if rising else found)

    def _curvature(
        self, slopes: Floats, predicted: Sequence[Floats | None], known: Sequence[int], good: Sequence[int]
    ) -> float | None:
        """The rate times the curvature along the proposed steps, of steps −rate·ĝ: Σ ĝ·H·ĝ·rate / Σ |ĝ|²; None if uphill."""
        products = self.history.products
        cross = size = 0.0
        for w, row in zip(predicted, good[: len(slopes)], strict=False):
            if w is None:
                return None
            cross += float(w @ products[row, known])
            size += float(w @ products[np.ix_(known, known)] @ w)
        down, bend = -float(slopes[:, 0].sum()), float((slopes[:, 1] - slopes[:, 0]).sum())
        return bend * cross / (down * size) if len(slopes) and down > 0 and cross > 0 and size > 0 else None

    def _rewind(self) -> None:
        """Parameters and optimizer as they were when the round began."""
        begin = time.perf_counter()
        self.flat.write(self.of._start)
        self.of._fork.restore()
        self.step_seconds += time.perf_counter() - begin

    def _step(self, found: Floats | None, rows: Sequence[int]) -> None:
        """A step of the inner optimizer with a sum of kept gradients."""
        assert found is not None
        begin = time.perf_counter()
        inner = self.history.products[np.ix_(rows, rows)]
        norm = math.sqrt(max(0.0, float(found @ inner @ found)))
        gradient = self.history.combine(found, rows, self.of._work)
        self.estimate_seconds += time.perf_counter() - begin
        self._step_with(gradient, norm)

    def _step_with(self, gradient: Tensor, norm: float) -> None:
        """A step of the inner optimizer with a gradient (d,) of this norm, which may be scaled down in place."""
        of = self.of
        begin = time.perf_counter()
        if of._clip_norm is not None and norm > of._clip_norm:
            gradient.mul_(of._clip_norm / norm)
        self.flat.lend_gradients(gradient, self.has or of._has)
        of.base.step()
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
