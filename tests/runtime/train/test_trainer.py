"""The trainer, in one process: what it writes, how it goes on, and how it stops. Several ranks: tests/cli/test_train.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from wavetrain.cli.train import Settings, draw_run
from wavetrain.errors import DivergedError, InputError, UnknownNameError
from wavetrain.runtime import checkpoint
from wavetrain.runtime.train import setup
from wavetrain.runtime.train.config import TrainConfig, merge_settings, read_plan, saved_settings
from wavetrain.runtime.train.metrics import MetricsFile, read_metrics
from wavetrain.runtime.train.progress import clock
from wavetrain.runtime.train.report import measured_costs
from wavetrain.runtime.train.setup import lr_factor, prepare
from wavetrain.runtime.train.trainer import train
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.simulator import simulate

SMALL: dict[str, Any] = {
    "ranks": 1,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "seq": 16,
    "micro_batches": 2,
    "batch": 4,
    "steps": 6,
    "warmup": 2,
    "validate_every": 3,
    "validation_batches": 1,
    "checkpoint_every": 2,
    "quiet": True,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of six steps, with dropout, so that its random numbers matter."""
    out = tmp_path_factory.mktemp("run") / "whole"
    return out, train(TrainConfig(**SMALL, out=str(out), dropout=0.1), draw=draw_run)


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def test_a_run_leaves_metrics_pictures_and_a_checkpoint(finished: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record.keys() >= {"loss", "tokens_per_second", "step_seconds", "bubble", "lr", "grad_norm"}
        assert 0 <= record["bubble"] < 1
    assert [record["step"] for record in records if "validation_loss" in record] == [3, 6]
    assert records[0]["loss"] == pytest.approx(math.log(256), abs=0.5)
    assert records[-1]["loss"] < records[0]["loss"]
    assert (result["step"], result["stopped"], result["loss"]) == (6, "steps", records[-1]["loss"])
    assert result["validation_loss"] == records[-1]["validation_loss"]
    assert min(result["predicted_pipeline_seconds"], result["pipeline_seconds"], result["tokens_per_second"]) > 0
    assert (out / "loss.svg").read_text().startswith("<svg")
    assert "measured" in (out / "timeline.html").read_text()
    assert [folder.name for folder in sorted((out / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    checkpoint.verify(out / "checkpoints")
    json.dumps(result, allow_nan=False)


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, result = finished
    again = tmp_path / "again"
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "los')  # what a crash leaves
    resumed = train(TrainConfig(**SMALL, out=str(again), dropout=0.1, resume=True))
    assert losses(again) == losses(out)
    assert (resumed["steps_done"], resumed["loss"]) == (2, result["loss"])
    before, after = (checkpoint.read_model(folder / "checkpoints") for folder in (out, again))
    assert all(torch.equal(before[name], after[name]) for name in before)
    more = train(TrainConfig(**{**SMALL, "steps": 8}, out=str(again), dropout=0.1, resume=True))
    assert [record["step"] for record in read_metrics(again / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert more["step"] == 8


def test_a_damaged_checkpoint_is_passed_over(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, _ = finished
    again = tmp_path / "again"
    shutil.copytree(out, again)
    next((again / "checkpoints" / "step-00000006").glob("model-*")).write_bytes(b"")
    with pytest.warns(UserWarning, match="step-00000004 is used instead"):
        train(TrainConfig(**{**SMALL, "steps": 7}, out=str(again), dropout=0.1, resume=True))
    assert losses(again)[:4] == losses(out)[:4]
    assert [record["step"] for record in read_metrics(again / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_in_the_way_of_a_run(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, _ = finished
    changes: dict[str, Any]
    for changes, message in (
        ({"out": str(out)}, "holds a run already.*--resume"),
        ({"out": str(out), "resume": True}, "has done 6 of 6 steps"),
        ({"resume": True}, "no checkpoint in .* to resume from"),
        ({"batch": 1}, "a batch of 1 .* 2 micro-batches"),
        ({"ranks": 4, "schedule": "1f1b", "layers": 1}, "3 layers, but .* 4 stages"),
        ({"ranks": 3, "dp": 2}, "3 ranks cannot be shared by dp=2"),
        ({"optex": 3}, "a batch of 4 .* of optex=3 minibatches"),
        ({"tp": 3, "ranks": 3}, "2 heads cannot be split over tp=3"),
        ({"schedule": "1f1b", "waves": 2}, "1f1b takes no waves"),
        ({"schedule": "zb-wav"}, "did you mean 'zb-wave'"),
        ({"data": (str(tmp_path / "nothing.txt"),)}, "there is no file .*nothing.txt"),
        ({"vocab": 100}, "vocab is 100, .* take vocab=256"),
        ({"heads": 3}, "num_heads=3"),
        ({"model": "gtp"}, "did you mean 'gpt'"),
    ):
        config = TrainConfig(**{**SMALL, "out": str(tmp_path / "new"), **changes})
        with pytest.raises(InputError, match=message):
            prepare(config)
    for changes, message in (
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1, "minutes": 1.0}, "both"),
        ({"lr": math.nan}, "lr is nan"),
        ({"log": ("tensorbord",)}, "did you mean 'tensorboard'"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"optex": 0}, "optex is 0"),
        ({"optex": 4, "dp": 2, "ranks": 2}, "dp = 2: every replica is one point; take dp = 4, or dp = 1"),
        ({"optex": 2, "precision": "fp16"}, "optex with fp16"),
        ({"optex": 2, "tp": 2, "ranks": 2}, "optex = 2 with tp = 2"),
    ):
        with pytest.raises(InputError, match=message):
            TrainConfig(out="x", **changes)
    assert not (tmp_path / "new").exists()


def poison(monkeypatch: pytest.MonkeyPatch, at_call: int) -> None:
    """Let the loss of one micro-batch be NaN."""
    calls = []
    honest = torch.nn.functional.cross_entropy

    def loss(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return honest(*arguments) * (math.nan if len(calls) == at_call else 1.0)

    monkeypatch.setattr(setup, "cross_entropy", loss)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 2 * 2 + 1)  # the first micro-batch of step 3
    config = TrainConfig(**SMALL | {"validate_every": 0}, out=str(tmp_path))
    with pytest.raises(
        DivergedError, match=r"loss is nan at step 3: .*rank 0.* last good checkpoint is .*step-00000002"
    ) as caught:
        train(config)
    assert (caught.value.step, caught.value.ranks) == (3, (0,))
    assert len(losses(tmp_path)) == 2
    train(dataclasses.replace(config, resume=True))
    assert len(losses(tmp_path)) == 6


def test_or_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 2 * 2 + 1)
    train(TrainConfig(**SMALL | {"validate_every": 0}, out=str(tmp_path), stop_on_nan=False))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["loss"] is None, record.get("skipped", False)) for record in records] == [
        (False, False),
        (False, False),
        (True, True),
        (False, False),
        (False, False),
        (False, False),
    ]


def test_rounds_of_optex_learn_and_go_on_after_a_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(TrainConfig(**{**SMALL, "batch": 8}, out=str(out), optex=2))
    train(TrainConfig(**{**SMALL, "batch": 8, "steps": 12}, out=str(out), optex=2, resume=True), draw=draw_run)
    assert "steps taken" in (out / "rounds.svg").read_text()
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert all(1 <= record["accepted"] <= record["points"] <= 2 and record["grad_norm"] > 0 for record in records)
    assert records[-1]["loss"] < records[6]["loss"] < records[0]["loss"]
    more = train(TrainConfig(**{**SMALL, "steps": 13}, out=str(out), resume=True))
    assert more["step"] == 13, "what was saved is the state of AdamW: it goes on without OptEx too"


def test_a_file_named_stop_ends_the_run_after_its_step(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    result = train(TrainConfig(**SMALL, out=str(tmp_path)))
    assert (result["stopped"], result["step"]) == ("asked to stop", 1)
    assert result["checkpoint"].endswith("step-00000001")


def test_minutes_instead_of_steps(tmp_path: Path) -> None:
    result = train(TrainConfig(**SMALL | {"steps": None}, out=str(tmp_path), minutes=0.005))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert result["stopped"] == "minutes"
    assert records[-1]["elapsed_seconds"] >= 0.3
    assert all(record["elapsed_seconds"] < 0.3 for record in records[:-1])


@pytest.mark.parametrize("model", ["bert", "uneven"])
def test_other_models_and_loggers(model: str, tmp_path: Path) -> None:
    wide: dict[str, Any] = {"wide_layers": 1} if model == "uneven" else {}
    result = train(TrainConfig(**SMALL | {"steps": 2}, **wide, model=model, out=str(tmp_path), log=("tensorboard",)))
    assert result["loss"] == pytest.approx(math.log(256), abs=0.5)
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_resumes_to_the_bit(precision: str, tmp_path: Path) -> None:
    whole, part = (TrainConfig(**SMALL, out=str(tmp_path / name), precision=precision) for name in ("whole", "part"))
    train(whole)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-00000006")
    train(dataclasses.replace(part, resume=True))
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_data_of_files_too_short_to_hold_something_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("wave after wave " * 4)
    result = train(TrainConfig(**SMALL | {"steps": 2}, out=str(tmp_path / "out"), data=(str(tmp_path / "a.txt"),)))
    assert result["validation_loss"] is None


def test_a_plan_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[train]\nsteps = 7\nmicro-batches = 4\nlr = 1\ndata = "a.txt"\nrecompute = true\n')
    found = read_plan(plan)
    assert found == {"steps": 7, "micro_batches": 4, "lr": 1.0, "data": ("a.txt",), "recompute": True}
    config = merge_settings(found, {"out": "x", "minutes": 2.0})
    assert (config.steps, config.minutes, config.micro_batches) == (None, 2.0, 4)
    for text, message in (
        ("[train]\nmicro_batchs = 4\n", "did you mean 'micro_batches'"),
        ("[trian]\nsteps = 4\n", "did you mean 'train'"),
        ("[train]\nsteps = 'many'\n", "steps = 'many'; give a whole number"),
        ("[train]\nsteps = true\n", "give a whole number"),
        ("[train]\ndata = [1]\n", "give a list of texts"),
        ("[train\n", "not TOML"),
        ("train = 1\n", "write \\[train\\]"),
    ):
        plan.write_text(text)
        with pytest.raises(InputError, match=message):
            read_plan(plan)
    with pytest.raises(InputError, match="No such file"):
        read_plan(tmp_path / "nowhere.toml")


def test_a_resumed_run_takes_over_the_settings_that_were_saved() -> None:
    saved = TrainConfig(out="x", layers=4, waves=1, ranks=2, micro_batches=4, batch=8, steps=9, log=("wandb",)).to_dict()
    wanted = {"out": "y", "resume": True, "schedule": "1f1b", "minutes": 3.0}
    config = merge_settings(saved_settings(saved, wanted), wanted)
    assert (config.layers, config.batch, config.ranks, config.out, config.log) == (4, 8, 2, "y", ())
    assert (config.schedule, config.waves, config.steps, config.minutes) == ("1f1b", None, None, 3.0)
    assert merge_settings(saved_settings(saved, {"out": "y", "ranks": 4}), {"out": "y", "ranks": 4}).waves is None
    with pytest.raises(InputError, match="layers = 5, but the run to be resumed has 4"):
        saved_settings(saved, {"layers": 5})


def test_flags_are_the_fields_of_a_config() -> None:
    flags = {field.name for field in dataclasses.fields(Settings)} - {"no_stop_on_nan"}
    assert flags == {field.name for field in dataclasses.fields(TrainConfig)} - {"quiet"}
    assert Settings(no_stop_on_nan=True, steps=3).given() == {"stop_on_nan": False, "steps": 3}
    assert Settings(seed=0, dropout=0.0).given() == {"seed": 0, "dropout": 0.0}


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    factors = [lr_factor(step, 10, step / 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1, rel=0.01)
    assert factors.index(max(factors)) == 9
    assert lr_factor(100, 10, 1.0) == pytest.approx(0.1)
    assert lr_factor(0, 0, 0.0) == 1.0


def test_costs_of_a_timeline_give_the_timeline_again() -> None:
    costs = Costs.uniform(4, forward=0.1, backward_input=0.2, backward_weight=0.2, hop_latency=0.01)
    for name in ("zb-wave", "1f1b"):
        schedule = build(name, num_ranks=4, num_micro_batches=6)
        timeline = simulate(schedule, costs)
        assert simulate(schedule, measured_costs(schedule, [timeline])).makespan == pytest.approx(timeline.makespan)


def test_metrics_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "loss": math.inf})
    assert path.read_text() == '{"step": 1, "loss": null}\n'  # there before it is closed
    file.close()
    MetricsFile(path, after_step=0).close()
    assert read_metrics(path) == []


def test_the_clock() -> None:
    assert [clock(seconds) for seconds in (0, 61.6, 3723, -5)] == ["0:00", "1:02", "1:02:03", "0:00"]


def test_a_logger_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError):
        TrainConfig(out="x", log=("carrier pigeon",))
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(InputError, match=r"pip install 'wavetrain\[log\]'"):
            prepare(TrainConfig(**SMALL, out=str(tmp_path), log=("wandb",)))
