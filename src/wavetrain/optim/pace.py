"""Pace: at how many points of the way ahead gradients are asked for, of the N that a round can ask for.

Where predictions hold, at N points; where the way turns out another, at fewer, with several minibatches at each; at one point,
a round is one step with a batch N times larger. Down when half of a round's steps or less could be taken twice in a row, or
when losses rise instead of falling: then it is noise that holds them up, and a larger batch has less of it. Up after rounds in
which all steps could be taken, ever more carefully. As many steps are made past the last point as were predicted well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

WINDOW: Final = 6
LEAST_LOSSES: Final = 24
"""Rounds whose losses are compared with those of as many rounds before: the former, or those that have the latter. Half of it
where nothing predicts gradients."""
SURE: Final = 1.0
"""Standard errors by which losses must have risen to say that they have stopped falling: what noise does alone is no reason."""
LONGEST_PAUSE: Final = 48
FAR: Final = 4.0
"""Times the noise of a loss: three times what two of them usually differ by."""
STARTS: Final = 16
"""Rounds by whose first losses noise is measured."""
AHEAD: Final = 0.3
"""Relative errors of predictions with which steps are made past the last evaluated point."""
RISEN: Final = 2.0
"""Standard errors by which the losses of a round must be above the last one's to say that they have risen."""
USUAL: Final = 8
"""Rounds from which it is known how large gradients usually are; three of them at least."""
SPIKE: Final = 3.0
"""Times the usual norm: a gradient above is none to make a step with, for an optimizer that remembers how large they were."""
RARE: Final = 64
"""Rounds in which one as large has been seen before, which is then no spike: what is seldom learnt from, as rare cases, is not to
count for less each time."""
GROWS: Final = 1.25
"""Times the norm that was the largest in a round, in the next."""


class Pace:
    """Of rounds with up to ``limit`` points.

    Args:
        limit: N.
        moving: losses of different rounds cannot be compared, so that nothing is concluded from their rising.
    """

    def __init__(self, limit: int, *, moving: bool = False) -> None:
        self.limit = limit
        self.moving = moving
        self.num_points = limit
        self._window = max(WINDOW, -(-LEAST_LOSSES // limit))
        self._good = 0
        self._bad = 0
        self._pause = 2
        self._losses: list[list[float]] = []
        self._ahead = (0, 0)
        self._trusted = 0
        self.first: float | None = None
        """The mean loss of the first round."""
        self._spread = 0.0
        """Of its losses: most of its points are the same, or close, so that it is noise."""
        self._exact = False
        """Whether there was none: its gradients, all of the same point, were the same."""
        self._starts: list[float] = []
        """Losses that rounds began with, the oldest first."""
        self._norms: list[float] = []
        """Of the gradients that rounds began with, the oldest first; where all losses of a round are above those of the last one,
        which then led astray, no more than is usual."""
        self.largest = math.inf
        """The norm of the largest gradient to make a step with, after a round that was taken back."""

    @property
    def num_ahead(self) -> int:
        """Steps that may be made past the last evaluated point: as many as were predicted well in this round and the last."""
        return min(self._ahead)

    @property
    def num_trusted(self) -> int:
        """Steps that the quadratic model is trusted with: no more than there are points, but for those past the last."""
        count = max(1, min(self._trusted, self.num_points))
        return count + (self.num_ahead if count == self.limit else 0)

    def trust(self, losses: Sequence[float], errors: Sequence[float], *, coasts: bool = False) -> None:
        """After a round with these N losses, whose gradients were predicted with these relative errors, point by point: the first
        step is made by itself, since the first gradients are those of the steepest slopes, and say little of what follows; then
        twice as many with every round, or one more than gradients were predicted well. Half as many when losses have risen.

        Without noise, of an optimizer that ``coasts``, N from the second round on: its momentum has spread that round's points
        along the way, and their gradients are exact.
        """
        if self._rose(losses):
            self._trusted = max(1, self._trusted // 2)
        elif coasts and self._exact and self._trusted <= 1:
            self._trusted = self.limit
        else:
            self._trusted = min(self.limit, max(1, 2 * self._trusted, _num_good(errors) + 1))

    def _rose(self, losses: Sequence[float]) -> bool:
        """Whether losses are surely above those of the round before, or above where all began."""
        if self.moving or self.first is None or not self._losses:
            return False
        now, last = np.array(losses), np.array(self._losses[-1])
        within = [np.var(one, ddof=1) for one in (*self._losses[-STARTS:], losses) if len(one) > 1]  # N are too few by themselves
        spread = math.sqrt(sum(within) / max(1, len(within)) * (1 / len(now) + 1 / len(last)))
        return bool(not now.mean() <= min(last.mean() + RISEN * spread, self.first))

    @property
    def usual_at_most(self) -> float:
        """Norms of gradients that are no spikes, as those go that rounds lately began with; infinite until that is known."""
        usual = float(np.median(self._norms[-USUAL:])) if len(self._norms) > 2 else 0.0
        return max(SPIKE * usual, *self._norms) if usual > 0 else math.inf

    def see(self, off: Sequence[float]) -> None:
        """Learn how wrong predictions were at the points of a round, in order."""
        self._ahead = (self._ahead[1], _num_good(off))

    def hear(
        self,
        accepted: int,
        losses: Sequence[float],
        start: float,
        norm: float = 0.0,
        *,
        blind: bool = False,
        same: bool = False,
    ) -> None:
        """Learn from a round: how many steps could be taken, the N losses, the loss and the norm of the gradient at its first
        point, whether nothing predicts gradients, and whether all gradients were the same.
        """
        now = self.num_points
        self._starts = [*self._starts[-STARTS + 1 :], float(start)]
        overshot = not self.moving and bool(self._losses) and min(losses, default=0.0) > max(self._losses[-1])
        self._norms = [*self._norms[-RARE + 1 :], min(float(norm), self.usual_at_most if overshot else math.inf)]
        self.largest *= GROWS
        if self.first is None:
            self.first, self._spread, self._exact = float(np.mean(losses)), float(np.ptp(losses)), same
        if now > 1 and 2 * accepted <= now:
            self._good, self._bad = 0, self._bad + 1
        else:
            self._bad = 0
            self._good += accepted >= now
        if self._bad >= 2:
            self._down()
        elif now < self.limit and self._good >= self._pause:
            self.num_points, self._good = min(self.limit, 2 * now), 0
        self._losses = [*self._losses[-2 * self._window + 1 :], [float(loss) for loss in losses]]
        window = -(-self._window // 2) if blind else self._window
        if self.num_points > 1 and len(self._losses) >= 2 * window and self._stalled(window):
            self._down(stalled=True)
            self._losses = []

    def lost_all(self, loss: float) -> bool:
        """Whether a loss is no better than where all began, or no number."""
        if self.moving:
            return not math.isfinite(loss)
        return self.first is None or not loss <= self.first

    def astray(self, start: float) -> bool:
        """Whether a round that begins with this loss shows that the last one led astray: by more than noise, it is above where
        all began, and above where the last round did.
        """
        if self.moving or self.first is None or not self._starts:
            return False
        return start > max(self.first, self._starts[-1]) + FAR * self._noise

    @property
    def _noise(self) -> float:
        """Of a loss at the same point: the losses of two rounds that follow each other usually differ by no less."""
        apart = np.abs(np.diff(self._starts))
        return max(self._spread, float(np.median(apart))) if len(apart) else self._spread

    def start_anew(self) -> None:
        """Losses of before say nothing of those to come."""
        self.first, self._spread, self._exact, self.largest = None, 0.0, False, math.inf
        self._losses, self._starts, self._norms = [], [], []

    def slow_down(self, norm: float) -> None:
        """After a round that was taken back, and a step with a gradient of this norm instead: fewer points, and for some rounds
        none much larger.
        """
        self.largest = norm if norm > 0 else math.inf
        self._down()

    def _down(self, *, stalled: bool = False) -> None:
        """Fewer points; and twice as many good rounds until there are more, where losses stalled or a single point is left."""
        if stalled or self.num_points == 2:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self.num_points = max(1, self.num_points // 2)
        self._good = self._bad = 0

    def _stalled(self, window: int) -> bool:
        if self.moving:
            return False
        last = self._losses[-2 * window :]
        before, after = (np.concatenate(part) for part in (last[:window], last[window:]))
        spread = np.sqrt(before.var() / len(before) + after.var() / len(after))
        return bool(after.mean() >= before.mean() + SURE * spread)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "num_points": self.num_points,
            "counts": [self._good, self._bad, self._pause],
            "losses": self._losses,
            "ahead": list(self._ahead),
            "trusted": self._trusted,
            "first": [self.first, self._spread],
            "exact": self._exact,
            "starts": self._starts,
            "norms": self._norms,
            "largest": self.largest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.num_points = state["num_points"]
        self._good, self._bad, self._pause = state["counts"]
        self._losses = [list(one) for one in state["losses"]]
        self._ahead = (state["ahead"][0], state["ahead"][1])
        self._trusted = state["trusted"]
        self.first, self._spread = state["first"]
        self._exact = state["exact"]
        self._starts = list(state["starts"])
        self._norms = list(state["norms"])
        self.largest = state["largest"]


def _num_good(errors: Sequence[float]) -> int:
    """Relative errors up to the first that is no good."""
    return next((i for i, one in enumerate(errors) if not one <= AHEAD), len(errors))
