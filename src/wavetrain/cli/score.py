"""``wavetrain score``: predictions against measured trials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wavetrain.cli.common import File, print_json
from wavetrain.cli.planning import Costing, console


@dataclass(frozen=True, kw_only=True)
class ScoreVerb(Costing):
    """How well step times and memory of measured runs are predicted, experiment by experiment; and a calibration of your own.

    wavetrain score trials.jsonl

    wavetrain score new.jsonl --calibrate-on mine.jsonl --save-calibration mine.toml

    Layer profiles and links are read from the folder of the trials, if --profiles names no other.
    """

    trials: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TRIALS")]
    """Measured runs, one JSON object a line."""
    calibrate_on: File = None
    """Fit the constants of devices on these trials first, starting from the calibration that comes along."""
    save_calibration: File = None
    """Write the fitted constants, for --calibration."""

    def run(self) -> int:
        """Predict, compare and print."""
        from wavetrain.errors import InputError
        from wavetrain.files import write_text
        from wavetrain.plan.calibration import Calibration
        from wavetrain.plan.fit import calibrate
        from wavetrain.plan.replay import Replay
        from wavetrain.plan.score import score
        from wavetrain.plan.trials import load_trials
        from wavetrain.profile import load_profiles

        if self.save_calibration is not None and self.calibrate_on is None:
            raise InputError("--save-calibration needs --calibrate-on: the trials to fit on")
        trials = load_trials(self.trials)
        profiles = load_profiles(self.profiles if self.profiles is not None else self.trials.parent)
        calibration = self.load_calibration()
        if self.calibrate_on is not None:
            known = load_trials(self.calibrate_on)
            other = load_profiles(self.profiles if self.profiles is not None else self.calibrate_on.parent)
            start = Calibration() if self.calibration is None else calibration
            calibration = calibrate(known, Replay(other, known), start)
            if self.save_calibration is not None:
                write_text(self.save_calibration, calibration.text())
        found = score(trials, Replay(profiles, trials), calibration)
        if self.json:
            print_json([s.to_dict() for s in found])
            return 0
        from rich.table import Table

        table = Table(title=f"{len(trials)} trials, {calibration.source}", title_justify="left")
        names = (
            "experiment",
            "n",
            "mean error",
            "median",
            "rank correlation",
            "first pick",
            "OOM precision",
            "recall",
            "memory error",
        )
        for name in names:
            table.add_column(name, justify="left" if name == "experiment" else "right")
        for s in found:
            shares = (_percent(s.mape), _percent(s.median_ape))
            table.add_row(
                s.experiment,
                str(s.n),
                *shares,
                _number(s.spearman, ".3f"),
                "" if s.top1_regret is None else f"{s.top1_regret:.3f}×",
                _number(s.oom_precision, ".2f"),
                _number(s.oom_recall, ".2f"),
                _percent(s.peak_mape),
            )
        console().print(table)
        return 0


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
