"""Rounds: what OptEx did, for metrics and plots."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from wavetrain.errors import InputError

KEPT: Final = 10_000
"""Rounds that are remembered."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One call of ``step``."""

    number: int
    """From 1 on."""
    losses: tuple[float, ...]
    """Of its minibatches, in order, each at the point where it was evaluated."""
    estimator: str
    """What predicted gradients; of a Gaussian process, as it was tuned."""
    num_points: int
    """Different points at which gradients were asked for."""
    num_accepted: int
    """Steps that were taken, more than N where predictions are good; 0 if a gradient in fp16 was no number and the round was
    left out."""
    cosines: tuple[float, ...]
    """Of predicted and true gradients, at every point from which a step was proposed."""
    relative_errors: tuple[float, ...]
    """|predicted − true| / |true|, at the same points."""
    gradient_norm: float
    """Of the true gradient at the round's first point, the mean over its minibatches; 0 where the round was left out."""
    drifts: tuple[float, ...]
    """How far from the nearest evaluated point each step but the first began, as a share of the way from the round's start."""
    estimate_seconds: float
    """Of predicting, and of all work with the history."""
    evaluate_seconds: float
    """Of true losses and gradients."""
    step_seconds: float
    """Of the inner optimizer's steps, and of setting its state aside."""
    took_back: bool = False
    """Whether the round before turned out to have led astray: its steps were undone, and one was made in their place."""

    @property
    def loss(self) -> float:
        """Mean of all minibatches whose loss is a number."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else math.nan

    @property
    def estimate_share(self) -> float:
        """Of the round's time, the part for estimation."""
        whole = self.estimate_seconds + self.evaluate_seconds + self.step_seconds
        return self.estimate_seconds / whole if whole > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Rounds:
    """The latest rounds, the oldest first."""

    def __init__(self) -> None:
        self._rounds: deque[Round] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._rounds)

    def __getitem__(self, index: int) -> Round:
        return self._rounds[index]

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds)

    @property
    def last(self) -> Round:
        """The newest.

        Raises:
            InputError: there was none yet.
        """
        if not self._rounds:
            raise InputError("no round has been done yet: call step() first")
        return self._rounds[-1]

    def add(self, one: Round) -> None:
        """Remember a round."""
        self._rounds.append(one)

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """(round, number) pairs of points, steps and the mean cosine of predictions, as :func:`wavetrain.view.chart.line_chart`
        takes them.
        """
        shown = {"points asked for": "num_points", "steps taken": "num_accepted"}
        found = {name: [(float(r.number), float(getattr(r, key))) for r in self] for name, key in shown.items()}
        found["cosine of predictions"] = [(float(r.number), sum(r.cosines) / len(r.cosines)) for r in self if r.cosines]
        return found

    def save(self, path: str | Path) -> None:
        """As JSON lines, a round each."""
        Path(path).write_text("".join(json.dumps(_plain(one.to_dict())) + "\n" for one in self._rounds), encoding="utf-8")


def _plain(value: Any) -> Any:
    """What is no number as null: JSON has no other word for it."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
