"""Scores: how well predictions agree with measured trials, experiment by experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavetrain.plan.calibration import Calibration
from wavetrain.plan.estimate import Estimate
from wavetrain.plan.fit import calibrate
from wavetrain.plan.replay import Replay
from wavetrain.plan.trials import Trial

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one experiment. Errors are fractions: 0.08 is 8 %. None where the trials cannot say."""

    experiment: str
    n: int
    """Trials that ran."""
    mape: float | None
    """Mean absolute error of the predicted step time."""
    median_ape: float | None
    spearman: float | None
    """Correlation of the ranks of predicted and measured times."""
    top1_regret: float | None
    """Measured time of the predicted best over the best measured: 1.0 is perfect."""
    oom_precision: float | None
    """Of trials that were predicted to fail, the share that did."""
    oom_recall: float | None
    """Of trials that failed, the share that was predicted to."""
    peak_mape: float | None
    """Mean absolute error of the predicted peak memory."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def score(trials: Sequence[Trial], replay: Replay, calibration: Calibration) -> list[Score]:
    """Scores of all experiments in ``trials``, in the order of their names."""
    return score_predictions(trials, replay.predict(trials, calibration), replay.ran)


def score_predictions(
    trials: Sequence[Trial], predictions: Sequence[Estimate], ran: Callable[[Trial, Estimate], bool]
) -> list[Score]:
    """Scores of predictions, one a trial."""
    pairs = sorted(zip(trials, predictions, strict=True), key=lambda pair: pair[0].experiment)
    return [_one(name, list(members), ran) for name, members in groupby(pairs, key=lambda pair: pair[0].experiment)]


def held_out(trials: Sequence[Trial], replay: Replay, start: Calibration, folds: Sequence[Sequence[Trial]]) -> list[Estimate]:
    """Predictions of every trial by a calibration that was fitted on all others but those of its fold."""
    found: dict[int, Estimate] = {}
    for fold in folds:
        out = {id(trial) for trial in fold}
        devices = frozenset(slot.device.name for trial in fold for row in trial.slots for slot in row)
        fitted = calibrate([trial for trial in trials if id(trial) not in out], replay, start, devices)
        for trial, estimate in zip(fold, replay.predict(fold, fitted), strict=True):
            found[id(trial)] = estimate
    return [found[id(trial)] for trial in trials]


def _one(name: str, pairs: list[tuple[Trial, Estimate]], ran: Callable[[Trial, Estimate], bool]) -> Score:
    done = [(trial, estimate) for trial, estimate in pairs if trial.seconds is not None]
    measured = np.array([trial.seconds for trial, _ in done], dtype=np.float64)
    predicted = np.array([estimate.seconds for _, estimate in done])
    errors = np.abs(predicted / measured - 1)
    refused = {id(trial) for trial, estimate in pairs if not ran(trial, estimate)}
    failed = {id(trial) for trial, _ in pairs if trial.failed}
    peaks = [abs(e.peak_bytes / t.peak_bytes - 1) for t, e in done if t.peak_bytes is not None]
    return Score(
        experiment=name,
        n=len(done),
        mape=float(errors.mean()) if done else None,
        median_ape=float(np.median(errors)) if done else None,
        spearman=spearman(measured, predicted),
        top1_regret=float(measured[predicted.argmin()] / measured.min()) if done else None,
        oom_precision=len(refused & failed) / len(refused) if refused else None,
        oom_recall=len(refused & failed) / len(failed) if failed else None,
        peak_mape=float(np.mean(peaks)) if peaks else None,
    )


def spearman(a: Floats, b: Floats) -> float | None:
    """Correlation of ranks; equal values share their mean rank. None for less than two values, or if all of a side are equal."""
    if len(a) < 2:
        return None
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size else None


def _ranks(values: Floats) -> Floats:
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[index.reshape(-1)]
    return ranks
