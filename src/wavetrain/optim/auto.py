"""OptEx's own round: propose, evaluate, replay with what was learnt, and go on along the proposed way where that is better.

The replay makes steps from the start of the round with what all gradients, the new ones too, say of each point: by a quadratic
model of the loss where that predicts no worse than a Gaussian process, and says something if the inner optimizer has no momentum;
else by that process, as far as evaluated points are near. Then the round settles towards where the loss is least between points.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from wavetrain.optim.algebra import small
from wavetrain.optim.before import MOST_TRIES, Before
from wavetrain.optim.estimators import Models
from wavetrain.optim.fork import Fork
from wavetrain.optim.kind import kind_of
from wavetrain.optim.play import Floats, Play
from wavetrain.optim.process import Process
from wavetrain.optim.rounds import Round
from wavetrain.optim.settling import SLIGHT, Gone, strengths

NEAR: Final = 0.75
"""A replayed step is taken while an evaluated point is within this share of the way from the round's start."""
LEFT: Final = 0.5
"""What may be left of a rise of the loss after the next true step, as a share of what a step at the start would gain."""
TESTED: Final = 2.5
RETEST: Final = 4
"""Rounds, those lately counting more, after which a quadratic model that is clearly worse than the process is tried only every so
many rounds: it costs."""
FARTHEST: Final = 5.0
"""Times the way that a round's steps went, it goes no further in the end, so that a low rate, which keeps steps short, keeps this
way short."""
FARTHEST_COASTING: Final = 1.5
"""The same of an optimizer with momentum, which goes along valleys by itself, and has to be helped across only."""
NEWEST: Final = 14
"""Points between which rounds of SGD end, with momentum or without, and of other optimizers without: their steps are as long as
gradients are large, so that older points are further away."""
GROWN: Final = 2.0
"""Times the gradient at the start: a quadratic model that says that gradients grow beyond is not believed."""
SAME: Final = 1e-5
"""Of a squared gradient: inner products that differ by no more are of gradients that are the same but for rounding."""
ROUNDED: Final = 1e-4
"""Of the way that a round's steps went, what rounding of parameters may be: up to it, what gradients say of where a round settled
is reckoned; where parameters are larger beside their steps, it is measured."""
EXPLODED: Final = 1e3
"""Times the squared gradient at the start, or the usual one: points beyond are of no use."""


class Auto(Play):
    """A round that tunes itself."""

    def run(self) -> Round:
        of, history = self.of, self.history
        num_points = of._pace.num_points
        new = self._taken = history.take_rows(num_points)
        begin = time.perf_counter()
        self._kind = kind_of(of.base, of._shards if self.whole is self.flat else None)
        of._judge.coasts, of._pace.moving = self._kind.coasts, of._moving_losses or not self._kind.one_way
        due = of._judge.bends or of._judge.fits.weight < TESTED or of._round % RETEST == 0
        bends = num_points > 1 and due and self._kind.one_way
        with small():
            before = of._judge.models(history, of._num_newest, bends=bends, sign=self._kind.sign)
            name = of._judge.best(bends=bends)
        told = str(of._judge.prior) if name == "gp" and before.process is not None else name
        if name == "quadratic" and before.quadratic is None:
            told = "mean" if before.rows else "zero"
        self._most, self._may_settle, self._has_settled = math.inf, False, False
        self.estimate_seconds += time.perf_counter() - begin

        def predict(row: int) -> Floats | None:
            with small():
                return self._limited(before.at(name, row), before) if before.rows else None

        predicted = self._propose(new, predict)
        losses, good = self._evaluate(new)
        if not good and not self._may_recover:
            return self._skipped(losses, num_points)
        start = self._kind.sign * _mean(losses[::num_points])
        if not good or (self._may_take_back and of._pace.astray(start)):
            return self._take_back(losses)
        if of._before is not None and of._before.num_tries >= MOST_TRIES:
            of._pace.largest = math.inf  # shorter steps were no help
        with small():
            found = self._learn(losses, good, predicted, before, told, start)
        self._remember(good[0], found.num_accepted + self._has_settled)
        return found

    def _limited(self, found: Floats, before: Models) -> Floats:
        """What is predicted at one point after another, where there is a quadratic model: no gradient larger than those before
        it, since a model whose curvature is wrong leads ever further astray.
        """
        if before.quadratic is None:
            return found
        norm, most = self._norm(found, before.rows), self._most
        self._most = min(norm, most)
        return found * (most / norm) if most < norm < math.inf else found

    @property
    def _largest(self) -> float:
        """Of optimizers that remember how large gradients were, also no more than is usual: after one that is thirty times as
        large, Adam would be slow for a thousand steps.
        """
        most = super()._largest
        return most if self._kind.proportional or self.of.parallel == 1 else min(most, self.of._pace.usual_at_most)

    @property
    def _may_take_back(self) -> bool:
        """Not with one minibatch a round, which is the inner optimizer and nothing else, nor where a scaler does it; nor where
        the one step that would be made instead is no other than was made.
        """
        of, before = self.of, self.of._before
        if before is None or of.parallel == 1 or of._scaler is not None:
            return False
        return before.num_tries < (MOST_TRIES if self._kind.proportional else int(before.num_moves > 1))

    @property
    def _may_recover(self) -> bool:
        """Where this round begins at no number, the last is taken back once, if one step might have ended elsewhere."""
        before = self.of._before
        return self._may_take_back and before is not None and before.num_tries == 0 and before.num_moves > 1

    @property
    def _moored(self) -> bool:
        """Whether not the loss is to say where parameters here end; nor where some got no gradient."""
        return self._kind.moored or not all(self.has)

    def _remember(self, row: int, num_moves: int) -> None:
        """Where this round began, for the next one to know; what was remembered before is written over in turn."""
        of = self.of
        spare = of._before or Before(self.flat.empty(), Fork(of.base), row, 0)
        of._before = Before(of._start, of._fork, row, num_moves)
        of._start, of._fork = spare.start, spare.fork

    def _take_back(self, losses: list[float]) -> Round:
        """Undo the last round as well as this one, and make one step from where it began, with what is known of the gradient."""
        of, history = self.of, self.history
        before = of._before
        assert before is not None
        before.num_tries += 1
        if self._kind.proportional:
            before.fork.brake()
        of._settling.hear(-math.inf)
        history.drop(self._taken)
        history.onward.fill(math.inf)
        begin = time.perf_counter()
        self.flat.write(before.start)
        before.fork.restore(groups=False)
        self.step_seconds += time.perf_counter() - begin
        made = before.row in history.rows
        if made:
            process = of._judge.models(history, of._num_newest, bends=False).process
            rows = [before.row] if process is None else history.rows
            found = np.ones(1) if process is None else process.weights(history.squares[before.row, rows])
            norm = self._step(before.shorter * found, rows)
        self.flat.forget_gradients()
        of._pace.slow_down(min(norm, self._largest) if made and self._kind.proportional else math.inf)
        return replace(self._told("zero", losses, len(self._taken), int(made), (), (), ()), took_back=True)

    def _learn(
        self,
        losses: list[float],
        good: list[int],
        predicted: Sequence[Floats | None],
        before: Models,
        told: str,
        start: float,
    ) -> Round:
        """The second half of a round, which began at the loss ``start``: what the gradients say, and steps with them."""
        of, history, known = self.of, self.history, before.rows
        begin = time.perf_counter()
        others, model = [*(history.reached if before.bends else ()), *good], before.quadratic
        also = (self._still_falls(good[0]), float(self._moored))
        fall, moored = history.close(good, others, () if model is None else model.rows, also).tolist()
        history.onward.fill(math.inf)
        self._ended = True
        of._settling.hear(fall)
        self._may_settle = not moored
        good = self._sane(good)
        self.gradient_norm = math.sqrt(float(history.products[good[0], good[0]]))
        between = history.products[np.ix_(good, good)]
        same = len(self._taken) == len(good) > 1 and bool(np.ptp(between) <= SAME * between[0, 0])
        cosines, errors = self._compare(predicted, known, good)
        slopes = self._slopes(good)
        curvature = self._curvature(slopes, predicted, known, good)
        if curvature is not None:
            of._judge.feel(curvature)
        off = of._judge.hear(before, good)
        of._pace.see(off)
        of._num_newest = len(good)
        after = of._judge.models(history, len(good), bends=before.bends, sign=self._kind.sign) if known else None
        self.estimate_seconds += time.perf_counter() - begin
        heard = [self._kind.sign * loss for loss in losses if math.isfinite(loss)]
        if after is not None and after.quadratic is not None and len(good) > 1 and of._judge.bends:
            of._pace.trust(heard, errors, coasts=self._kind.coasts)
            accepted = self._bend(after, good)
            of._pace.hear(len(self._taken), heard, start, self.gradient_norm, blind=of._judge.blind, same=same)
            return self._told(told, losses, len(self._taken), accepted, cosines, errors, ())
        process = None if after is None else after.process
        accepted, drifts = self._replay(good, process)
        sign = self._kind.sign
        if known and accepted < len(good):
            accepted = self._go_further(accepted, [sign * loss for loss in losses], slopes, predicted, known, good, process)
        if after is not None and len(good) > 1 and accepted:
            self._settle(after, good[0], accepted)
        of._pace.hear(accepted, heard, start, self.gradient_norm, blind=of._judge.blind, same=same)
        return self._told(told, losses, len(self._taken), accepted, cosines, errors, drifts)

    def _bend(self, models: Models, good: Sequence[int]) -> int:
        """Steps from the start with what the quadratic model says of the gradient: how many.

        None is made with a larger gradient than the one at the start, as in :meth:`_replay`.
        """
        of, flat = self.of, self.flat
        self._rewind()
        count, least = 0, math.inf
        while count < (of._pace.num_trusted if len(good) == len(self._taken) else min(of._pace.num_trusted, len(good))):
            begin = time.perf_counter()
            squares = self.history.squares[good[0]]
            if count:
                found = models.weights("quadratic", squares, models.along(flat.read(of._work)))
            else:
                found = models.at("quadratic", good[0])
            norm = self._norm(found, models.rows)
            self.estimate_seconds += time.perf_counter() - begin
            if not norm <= GROWN * least:
                break
            self._step(found, models.rows, max(least, self.gradient_norm))
            least, count = min(least, norm), count + 1
        flat.forget_gradients()
        if count:
            self._settle(models, good[0], count, min(1.0, of._pace.num_trusted / of._pace.limit))
        return count

    def _still_falls(self, first: int) -> float:
        """By how much, of the coordinates here, the loss falls along the way that the last round went in the end, as the gradient
        of row ``first`` says, where this round began; not known of none.
        """
        gone = self.of._settling.gone
        if gone is None:
            return math.nan
        way = gone.way.to(self.flat.device)
        return -self._kind.sign * float(self.history.inner((self.history.gradients[first], way))[0])

    def _settle(self, models: Models, start: int, num_steps: int, share: float = 1.0) -> None:
        """From where ``num_steps`` from row ``start`` ended, a share of the way to where the quadratic model says that the loss
        is least, on the ways between known points, as far as lately was worth it.

        Steps go back and forth across valleys; there, the points on either side say where the bottom is. The inner optimizer's
        state stays as it is.
        """
        of, quadratic = self.of, models.quadratic
        if quadratic is None or not (of._settles and self._may_settle) or self._clipped:
            return
        begin = time.perf_counter()
        end, rows = self.flat.read(of._work), quadratic.rows
        moved, along = self.history.seen(end, rows, quadratic.origin, only=start)
        found = quadratic.weights(along, models.ridge)
        kind, share = self._kind, share * of._settling.share
        most = (FARTHEST_COASTING if kind.coasts else FARTHEST) * math.sqrt(max(0.0, float(moved[0])))
        newest = len(rows) if kind.coasts and not kind.proportional else NEWEST
        way = quadratic.settle(found, self.history.between(rows), most, newest)
        if way.fall > 0:
            whole = self.history.way(way.weights, rows, of._mean)
            chosen = self.history.chosen(whole)
            if self._decay_is_slight(chosen, way.fall, end, num_steps):
                if share > 0:
                    self.flat.write(end.add_(whole, alpha=share))
                    self._has_settled, along = True, along + share * way.along
                of._settling.gone = Gone(chosen.clone(), way.fall, share * way.share)
        rounding = torch.finfo(self.flat.dtype).eps * float(self.history.sizes[start])
        if rounding <= ROUNDED * math.sqrt(max(0.0, float(moved[0]))):
            self.history.end(rows, along, quadratic.origin)
        self.estimate_seconds += time.perf_counter() - begin

    def _decay_is_slight(self, along: Tensor, fall: float, end: Tensor, num_steps: int) -> bool:
        """Whether decay of weights does little along a way (c,) from the point ``end`` (d,), beside what the loss does."""
        of, history, flat = self.of, self.history, self.flat
        if not self._kind.decays:
            return True
        found = strengths(of.base)
        start, at = history.chosen(of._start), history.chosen(end)
        inside, taken = (flat.by_group(each, history.sampled) * at for each in found)
        local = history.inner((inside, along), (taken, along), (at - start, along))
        force, pulled, moved = of._shards.total(local).tolist()
        return abs(force) <= SLIGHT * fall and of._settling.slight(num_steps * pulled, moved)

    def _replay(self, good: list[int], process: Process | None) -> tuple[int, tuple[float, ...]]:
        """Steps from the start, as far as evaluated points are near: how many, and how near.

        None is made with a larger gradient than the one at the start, as it was evaluated or as it is estimated: those of points
        that overshot are larger, and optimizers that remember the size of gradients (Adam for a thousand steps) would be slow
        for all that time.
        """
        of, flat, history = self.of, self.flat, self.history
        self._rewind()
        drifts: list[float] = []
        accepted, most = 0, math.inf
        if len(good) == len(self._taken) == 1:  # the mean itself, not rounded as the history may be
            if self.gradient_norm > self._largest:
                of._mean.mul_(self._largest / self.gradient_norm)
            self._step_with(of._mean)
            accepted = 1
        elif process is None or len(good) == 1:
            self._step(np.full(len(good), 1 / len(good)), good)
            accepted = 1
        else:
            while accepted < len(good) + of._pace.num_ahead:
                begin = time.perf_counter()
                squares = history.squares_to(flat.read(of._work))
                if 0 < accepted < len(good):
                    moved = float(squares[good[0]])
                    drifts.append(math.sqrt(self._away(squares, good) / moved) if moved > 0 else 0.0)
                    if not drifts[-1] <= NEAR:
                        break
                found = process.weights(squares[history.rows])
                self.estimate_seconds += time.perf_counter() - begin
                norm = self._step(found, history.rows, most)
                most = min(most, max(norm, self.gradient_norm))
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
            if of._pace.lost_all(losses[at]):
                continue
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
        count = self.flat.num_counted
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
        found = float(of._shards.total(np.array([self._kind.sign * fall]))[0])
        self.estimate_seconds += time.perf_counter() - begin
        return found

    def _sane(self, good: list[int]) -> list[int]:
        """The points of a round up to the first where the way has exploded; the others are forgotten."""
        products = self.history.products
        sizes, usual = products[good, good], float(np.median(products[self.history.rows, self.history.rows]))
        wild = np.flatnonzero(~(sizes <= EXPLODED * max(float(sizes[0]), usual)))
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
        begins, ends, ways = good[:-1], good[1:], self.history.ways
        return self._kind.sign * np.stack([ways[begins, ends], -ways[ends, begins]], axis=1)

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


def _mean(losses: Sequence[float]) -> float:
    """Of those that are numbers."""
    return float(np.mean(finite)) if (finite := [loss for loss in losses if math.isfinite(loss)]) else math.nan
