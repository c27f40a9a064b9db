"""Predicted step times and memory against measured training runs, each predicted by a calibration that has not seen it.

Trials and layer profiles are those of ``WAVETRAIN_DATA`` (default: ``../shared/data`` beside the project). AMP's and Sailor's
are held out in five folds, vTrain's by whole model sizes. Without the data, trials are made up from known constants.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from benchmarks.report import Report, Row, main, percent

from wavetrain.plan.baselines import amp_model
from wavetrain.plan.calibration import Calibration, Constants, shipped
from wavetrain.plan.estimate import CostModel, Estimate
from wavetrain.plan.replay import Replay, trial_layout, trial_workload
from wavetrain.plan.score import Score, held_out, score, score_predictions, spearman
from wavetrain.plan.trials import Trial, load_trials
from wavetrain.profile import Profiles, load_profiles

FOLDS = 5
DATA = Path(os.environ.get("WAVETRAIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TIME = {
    "vtrain-single": 0.08,
    "vtrain-multi": 0.12,
    "gh200-GPT-Neo-2.7": 0.08,
    "gh200-OPT-350": 0.08,
    "homogeneous": 0.12,
    "het_cluster": 0.12,
    "het_model": 0.12,
}
RANKS = {"homogeneous": 0.95, "het_cluster": 0.9, "het_model": 0.9}
AMP = ("homogeneous", "het_cluster", "het_model")
OTHERS = {
    "homogeneous": "AMP's own: 47.6 %",
    "het_cluster": "AMP's own: 49.4 %",
    "het_model": "AMP's own: 16.4 %",
    "vtrain-single": "vTrain's own: 8.37 %",
    "vtrain-multi": "vTrain's own: 14.73 %",
    "gh200-GPT-Neo-2.7": "Sailor: 8.9 %",
    "gh200-OPT-350": "Sailor: 8.9 %",
}
NEUTRAL = Constants(
    compute=0.6,
    half_width=300.0,
    memory=0.7,
    scores=1.0,
    head=1.0,
    backward_moved=2.0,
    launch_forward=1e-3,
    launch_backward=1e-3,
    launch_tensor=1e-4,
    reduce=0.7,
    reduce_latency=3e-5,
    network=0.7,
    message=0.7,
    message_latency=1e-4,
    exposed=1.0,
    optimizer=1.0,
    step=1e-3,
    profile_overhead=1e-4,
    memory_extra=1.0,
)
"""What one might guess without a look at any trial: the other start of the fit, and what it is pulled to. Not tuned."""
MEMORY = 0.06
REGRET = 1.03
OOM = 0.8


def run(quick: bool) -> Report:
    """Accuracy of predictions."""
    if quick or not (DATA / "trials.jsonl").exists():
        return _made_up(quick)
    trials, profiles = load_trials(DATA / "trials.jsonl"), load_profiles(DATA)
    replay = Replay(profiles, trials)
    with ProcessPoolExecutor(2) as pool:
        predictions, neutral = pool.map(_held_out, (Constants(), NEUTRAL))
    scores = {s.experiment: s for s in score_predictions(trials, predictions, replay.ran)}
    rows = [row for name in TIME for row in _rows(scores[name])]
    failed = [(t.failed, not replay.ran(t, e)) for t, e in zip(trials, predictions, strict=True) if t.experiment in AMP]
    hits = sum(f and r for f, r in failed)
    recall, precision = hits / sum(f for f, _ in failed), hits / max(1, sum(r for _, r in failed))
    rows.append(
        Row(
            case="AMP's runs that failed",
            target=f"recall and precision ≥ {OOM}",
            measured=f"recall {recall:.2f}, precision {precision:.2f}",
            passed=recall >= OOM and precision >= OOM,
        )
    )
    for found in score_predictions(trials, neutral, replay.ran):
        assert found.mape is not None
        limit = TIME[found.experiment]
        rows.append(
            Row(
                case=f"{found.experiment}, from neutral constants: mean error of the step time",
                target=f"≤ {percent(limit, 0)}",
                measured=f"{percent(found.mape, 1)}, rank correlation {found.spearman or math.nan:.3f}",
                limit=OTHERS[found.experiment],
                passed=found.mape <= limit,
            )
        )
    rows += list(_published(trials, replay, profiles))
    return Report(
        name="accuracy",
        claim="Step times and memory of real training runs, predicted by a calibration that has not seen them.",
        rows=tuple(rows),
        notes=(
            "Five folds for AMP's and Sailor's trials, whole model sizes held out for vTrain's. First pick: the measured time of "
            "the trial that is predicted fastest over that of the fastest.",
            "One trial of het_cluster (tp 2, dp 2, pp 4, micro-batch 1: 2.8 s, where micro-batch 4 took 1.65 s and equal nodes "
            "of slower devices 1.74 s) is predicted at two thirds; it alone takes about 0.09 from the rank correlation there.",
            "Held out are the constants only. The form of the model was chosen with all of these trials in view, and so were the "
            "values that the fit starts from and is pulled to, but for the rows 'from neutral constants': those start "
            "from guesses made without any trial (NEUTRAL in this benchmark), and say what to expect of a new device.",
            "A stage without parameters counts as a predicted failure: two of AMP's trials have one, and both failed.",
        ),
    )


def _held_out(start: Constants) -> list[Estimate]:
    trials = load_trials(DATA / "trials.jsonl")
    return held_out(trials, Replay(load_profiles(DATA), trials), Calibration(default=start), _folds(trials))


def _folds(trials: Sequence[Trial]) -> list[list[Trial]]:
    folds: list[list[Trial]] = [[] for _ in range(FOLDS)]
    seen: dict[str, int] = {}
    sizes: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        if isinstance(trial.model, str):
            folds[seen.get(trial.experiment, 0) % FOLDS].append(trial)
            seen[trial.experiment] = seen.get(trial.experiment, 0) + 1
        else:
            sizes.setdefault((trial.model["hidden"], trial.model["layers"]), []).append(trial)
    return [*folds, *sizes.values()]


def _rows(found: Score) -> list[Row]:
    limit = TIME[found.experiment]
    assert found.mape is not None
    rows = [
        Row(
            case=f"{found.experiment}, {found.n} trials: mean error of the step time",
            target=f"≤ {percent(limit, 0)}",
            measured=f"{percent(found.mape, 1)} (median {percent(found.median_ape or 0, 1)})",
            limit=OTHERS[found.experiment],
            passed=found.mape <= limit,
        )
    ]
    if found.peak_mape is not None:
        rows.append(
            Row(
                case=f"{found.experiment}: mean error of the peak memory",
                target=f"≤ {percent(MEMORY, 0)}",
                measured=percent(found.peak_mape, 1),
                limit="Sailor: 5.9 %",
                passed=found.peak_mape <= MEMORY,
            )
        )
    if found.experiment in RANKS:
        least = RANKS[found.experiment]
        assert found.spearman is not None
        assert found.top1_regret is not None
        rows.append(
            Row(
                case=f"{found.experiment}: rank correlation",
                target=f"≥ {least}",
                measured=f"{found.spearman:.3f}",
                limit="1",
                distance=f"{1 - found.spearman:.3f}",
                passed=found.spearman >= least,
            )
        )
        rows.append(
            Row(
                case=f"{found.experiment}: first pick over the best trial",
                target=f"≤ {REGRET}×",
                measured=f"{found.top1_regret:.3f}×",
                limit="1×",
                passed=found.top1_regret <= REGRET,
            )
        )
    return rows


def _published(trials: Sequence[Trial], replay: Replay, profiles: Profiles) -> list[Row]:
    """For comparison: the calibration that is shipped, on the trials it was fitted on, and AMP's model as we re-created it."""
    rows = []
    for found in score(trials, replay, shipped()):
        rows.append(
            Row(
                case=f"{found.experiment}, as shipped (fitted on these trials)",
                measured=percent(found.mape or 0, 1) + " mean error",
            )
        )
    for name in AMP:
        mine = [t for t in trials if t.experiment == name and not t.failed]
        guesses = []
        for trial in mine:
            model = CostModel(workload=trial_workload(trial), calibration=Calibration(), profiles=profiles)
            guesses.append(
                amp_model(model, trial_layout(trial, profiles), trial.micro_batch, trial.num_micro_batches, trial.cut)[0]
            )
        measured = np.array([t.seconds for t in mine], dtype=np.float64)
        error = float(np.mean(np.abs(np.array(guesses) / measured - 1)))
        correlation = spearman(measured, np.array(guesses))
        rows.append(
            Row(
                case=f"{name}, AMP's cost model re-created",
                measured=f"{percent(error, 1)} mean error, rank correlation {correlation:.2f}",
                limit=OTHERS[name],
            )
        )
    return rows


def _made_up(quick: bool) -> Report:
    """Trials made from known constants: the fit must find its way back to predictions of them."""
    truth = Calibration().changed("A100-80", compute=0.5, memory=0.6, launch_forward=3e-3, network=0.3)
    lines: list[str] = []
    for hidden in (1024, 4096):
        for tp, dp, pp in ((1, 8, 1), (1, 4, 2), (2, 2, 2), (4, 2, 1), (1, 2, 4)):
            for micro in (1, 4):
                shape = {"layers": 12, "hidden": hidden, "heads": 16, "seq": 1024}
                nodes = [{"count": 2, "device": "A100", "gpus": 4}]
                values = {"model": shape, "nodes": nodes, "tp": tp, "dp": dp, "pp": pp, "micro_batch": micro, "global_batch": 32}
                lines.append(json.dumps({"id": str(len(lines)), "experiment": "made up", "seconds": 1.0, **values}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trials.jsonl"
        path.write_text("\n".join(lines))
        trials = load_trials(path)
    replay = Replay(Profiles(), trials)
    rng = np.random.default_rng(0)
    noise = np.exp(0.02 * rng.normal(size=len(trials)))
    measured = [
        replace(t, seconds=e.seconds * float(n)) for t, e, n in zip(trials, replay.predict(trials, truth), noise, strict=True)
    ]
    replay = Replay(Profiles(), measured)
    predictions = held_out(measured, replay, Calibration(), [measured[i::3] for i in range(3)])
    found = score_predictions(measured, predictions, replay.ran)[0]
    assert found.mape is not None
    return Report(
        name="accuracy",
        claim="Step times of made-up runs, predicted by a calibration that has not seen them (the measured ones are not here).",
        rows=(
            Row(
                case=f"{found.n} runs made from known constants with 2 % noise: mean error",
                target="≤ 8 %",
                measured=percent(found.mape, 1),
                passed=found.mape <= 0.08,
            ),
        ),
        notes=("Set WAVETRAIN_DATA to the folder of trials.jsonl for the real ones.",) if not quick else (),
    )


if __name__ == "__main__":
    main(run)
