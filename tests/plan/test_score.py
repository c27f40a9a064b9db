"""Scores and calibrations: what was put in comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.plan.calibration import Calibration
from wavetrain.plan.fit import calibrate
from wavetrain.plan.replay import Replay, trial_layout, trial_workload
from wavetrain.plan.score import held_out, score, spearman
from wavetrain.plan.trials import Trial, load_trials
from wavetrain.profile import Profiles

from .test_trials import STAGES
from .worlds import trial, write_trials

TRUTH = Calibration().changed("A100-80", compute=0.5, memory=0.6, launch_forward=3e-3, network=0.3)


def made(tmp_path: Path, truth: Calibration = TRUTH, noise: float = 0.0) -> list[Trial]:
    rows: list[dict[str, object]] = []
    for hidden in (1024, 2048, 4096):
        for tp, dp, pp in ((1, 8, 1), (1, 4, 2), (2, 2, 2), (4, 2, 1), (1, 2, 4)):
            for micro in (1, 2, 4):
                shape = {"layers": 12, "hidden": hidden, "heads": 16, "seq": 1024}
                rows.append(trial(id=f"{len(rows)}", model=shape, tp=tp, dp=dp, pp=pp, micro_batch=micro, experiment="made"))
    trials = load_trials(write_trials(tmp_path / "t.jsonl", rows))
    replay = Replay(Profiles(), trials)
    rng = np.random.default_rng(0)
    estimates = replay.predict(trials, truth)
    return [
        replace(t, seconds=e.seconds * float(np.exp(noise * rng.normal())), peak_bytes=e.peak_bytes)
        for t, e in zip(trials, estimates, strict=True)
    ]


def test_a_fit_finds_what_made_the_trials(tmp_path: Path) -> None:
    trials = made(tmp_path, noise=0.02)
    replay = Replay(Profiles(), trials)
    before = score(trials, replay, Calibration())[0]
    fitted = calibrate(trials, replay, Calibration())
    after = score(trials, replay, fitted)[0]
    assert before.mape is not None
    assert after.mape is not None
    assert before.mape > 0.2
    assert after.mape < 0.05
    assert after.spearman is not None
    assert after.spearman > 0.98
    assert fitted.of("A100-80").compute == pytest.approx(0.5, rel=0.35)
    assert fitted.of("T4-16") == Calibration().default, "what no trial says anything of stays"


def test_what_was_held_out_is_predicted(tmp_path: Path) -> None:
    trials = made(tmp_path, noise=0.02)
    replay = Replay(Profiles(), trials)
    folds = [trials[i::3] for i in range(3)]
    estimates = held_out(trials, replay, Calibration(), folds)
    errors = [abs(e.seconds / (t.seconds or 1) - 1) for t, e in zip(trials, estimates, strict=True)]
    assert float(np.mean(errors)) < 0.08


def test_a_perfect_prediction_has_a_perfect_score(tmp_path: Path) -> None:
    trials = made(tmp_path)
    found = score(trials, Replay(Profiles(), trials), TRUTH)[0]
    assert found.to_dict() == pytest.approx(
        {
            "experiment": "made",
            "n": 45,
            "mape": 0.0,
            "median_ape": 0.0,
            "spearman": 1.0,
            "top1_regret": 1.0,
            "oom_precision": None,
            "oom_recall": None,
            "peak_mape": 0.0,
        },
        abs=1e-9,
    )


def test_failures_are_recognised(tmp_path: Path) -> None:
    huge = {"layers": 48, "hidden": 16384, "heads": 16, "seq": 2048}
    rows = [
        trial(experiment="e", recompute="none"),
        trial(experiment="e", recompute="none", model=huge, failed=True, seconds=None),
        trial(experiment="e", recompute="none", failed=True, seconds=None),
    ]
    trials = load_trials(write_trials(tmp_path / "t.jsonl", rows))
    found = score(trials, Replay(Profiles(), trials), Calibration())[0]
    assert (found.oom_precision, found.oom_recall, found.n) == (1.0, 0.5, 1)


def test_an_experiment_that_could_not_have_fitted_recomputed(tmp_path: Path) -> None:
    huge = {"layers": 48, "hidden": 8192, "heads": 64, "seq": 2048}
    nodes = [{"count": 64, "device": "A100", "gpus": 8}]
    rows = [
        trial(experiment="big", model=huge, nodes=nodes, tp=4, dp=8, pp=16, micro_batch=8, global_batch=1536),
        trial(experiment="big"),
        trial(experiment="small"),
    ]
    trials = load_trials(write_trials(tmp_path / "t.jsonl", rows))
    together = Replay(Profiles(), trials).predict(trials, Calibration())
    alone = Replay(Profiles(), trials[1:2]).predict(trials[1:2], Calibration())
    assert together[1].seconds > 1.15 * alone[0].seconds
    assert together[2].seconds == pytest.approx(alone[0].seconds)


def test_nodes_are_filled_where_a_trial_does_not_name_them(tmp_path: Path) -> None:
    given = {k: v for k, v in trial(**STAGES).items() if k not in ("nodes", "tp", "dp", "pp")}
    found = load_trials(write_trials(tmp_path / "t.jsonl", [given]))[0]
    links = {("GH-96", "intra"): {4: 1e11}, ("GH-96", "inter"): {1: 1e10, 4: 4e10}}
    layout = trial_layout(found, Profiles(links=links))
    assert layout.node.tolist() == [[0, 1], [2, 3]], "four devices a node, as the links were measured"
    assert trial_workload(found).num_layers == 26
    with pytest.raises(UnknownNameError, match="OPT-350"):
        trial_workload(replace(found, model="OPT-35"))


def test_nothing_to_fit_is_refused(tmp_path: Path) -> None:
    trials = load_trials(write_trials(tmp_path / "t.jsonl", [trial(failed=True, seconds=None)]))
    with pytest.raises(InputError, match="nothing to fit"):
        calibrate(trials, Replay(Profiles(), trials), Calibration())


def test_ranks_of_equal_values_are_shared() -> None:
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0]), np.array([1.0])) is None
    assert spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) is None


def test_trials_of_our_own_are_json(tmp_path: Path) -> None:
    path = write_trials(tmp_path / "t.jsonl", [trial()])
    assert json.loads(path.read_text())["seconds"] == 0.5
