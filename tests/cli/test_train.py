"""``wavetrain train`` with real ranks: runs, goes on under other plans, stops, and says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wavetrain.errors import InputError
from wavetrain.runtime.checkpoint import read_extra, verify

from .command import ENVIRONMENT, PATIENCE, answer, answer_json, run, start

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SHAPE = ("--layers", 6, "--hidden", 16, "--heads", 2, "--seq", 16)
PLAN = ("--waves", 2, "--micro-batches", 4, "--batch", 8, "--checkpoint-every", 3, "--validate-every", 0, "--warmup", 2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of six steps in two ranks."""
    out = tmp_path_factory.mktemp("trained") / "run"
    found = answer_json("train", "--out", out, "--steps", 6, *SHAPE, *PLAN)
    assert (found["step"], found["stopped"], found["out"]) == (6, "steps", str(out))
    for key in ("loss", "validation_loss", "tokens_per_second", "step_seconds", "bubble", "predicted_bubble"):
        assert isinstance(found[key], float), key
    for key in ("metrics", "loss_curve", "timeline", "checkpoint"):
        assert Path(found[key]).exists(), key
    assert found["sample"].startswith("def ")
    return out


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def stopped_after_three(trained: Path, folder: Path) -> Path:
    """A copy of the run as if it had been killed after its first checkpoint, with metrics that are ahead of it."""
    copy = folder / "copy"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return copy


def test_what_is_in_the_checkpoint(trained: Path) -> None:
    verify(trained / "checkpoints")
    extra = read_extra(trained / "checkpoints")
    assert (extra["step"], extra["data_position"], extra["model"]["num_layers"], extra["config"]["waves"]) == (6, 6, 6, 2)
    assert (trained / "timeline.html").read_text().count('"source":"') == 2


def test_the_same_plan_goes_on_to_the_bit(trained: Path, tmp_path: Path) -> None:
    copy = stopped_after_three(trained, tmp_path)
    found = answer_json("train", "--out", copy, "--resume")
    assert found["steps_done"] == 3
    assert losses(copy) == losses(trained)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (("--ranks", 4, "--waves", 1), "4 pipeline ranks, zb-wave"),
        (("--ranks", 1, "--schedule", "1f1b"), "1 pipeline ranks, 1f1b"),
        (("--ranks", 4, "--dp", 2, "--micro-batches", 2), "2 pipeline ranks, dp 2, zb-wave"),
    ],
    ids=["P=4 W=1", "P=1", "dp=2"],
)
def test_another_plan_goes_on_alike(trained: Path, tmp_path: Path, plan: tuple[object, ...], told: str) -> None:
    """Saved by two ranks in two waves; the losses are those of the run that was never stopped."""
    copy = stopped_after_three(trained, tmp_path)
    said = answer("train", "--out", copy, "--resume", *plan)
    for phrase in (told, "from step 3", "bubble"):
        assert phrase in said
    assert losses(copy) == pytest.approx(losses(trained), abs=1e-6)


def test_a_run_that_diverges(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[train]\nlayers = 3\nhidden = 16\nlr = 1e30\nclip = 1e30\nsteps = 9\ncheckpoint-every = 1\nwarmup = 0\n")
    done = run("train", plan, "--out", tmp_path / "out", "--heads", 2, "--seq", 16, "--validate-every", 0)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for phrase in ("wavetrain: the loss is nan at step 2", "rank", "last good checkpoint is", "step-00000001"):
        assert phrase in done.stderr
    assert len(losses(tmp_path / "out")) == 1


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("train", "--out", out, "--steps", 100000, *SHAPE, *PLAN, "--checkpoint-every", 0)
    try:
        end = time.monotonic() + PATIENCE
        while not (out / "metrics.jsonl").exists() or len(losses_so_far(out)) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        said, err = process.communicate(timeout=PATIENCE)
        end = time.monotonic() + 10  # the last of its helpers goes a moment after it
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(process.pid, 0)
                assert time.monotonic() < end, "a process outlived Ctrl-C"
                time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 130
    assert "stopping after this step" in err
    assert f"go on with: wavetrain train --resume --out {out}" in err
    assert "checkpoint" in said
    assert read_extra(out / "checkpoints")["step"] == len(losses(out))
    assert not (out / "stop").exists()


def losses_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


def test_under_torchrun_it_runs_in_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "wavetrain"]
    arguments = ["train", "--out", tmp_path / "out", "--steps", 2, "--json", *SHAPE, *PLAN]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        said, err = process.communicate(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert json.loads(said)["step"] == 2
    assert len(losses(tmp_path / "out")) == 2


REFUSALS: list[tuple[str, tuple[str, ...]]] = [
    ("--step 3", ("did you mean --steps",)),
    ("--steps many", ("--steps takes a whole number",)),
    ("--steps 0", ("steps is 0", "at least 1")),
    ("--steps 3 --minutes 1", ("both given",)),
    ("--heads 3", ("hidden=256", "num_heads=2 or 4")),
    ("--schedule zb-wav", ("did you mean 'zb-wave'",)),
    ("--ranks 16 --layers 4", ("layers", "stages")),
    ("--batch 2", ("a batch of 2", "4 micro-batches")),
    ("--data nowhere.txt", ("there is no file nowhere.txt",)),
    ("--model gtp", ("did you mean 'gpt'",)),
    ("--resume", ("--resume needs --out",)),
    ("--resume --out nowhere", ("no checkpoint in nowhere/checkpoints",)),
    ("--stop-on-nan --no-stop-on-nan", ("both given",)),
    ("--log tensorbord", ("did you mean 'tensorboard'",)),
    ("bad.toml", ("bad.toml", "did you mean 'micro_batches'")),
    ("nowhere.toml", ("nowhere.toml: No such file",)),
]


def refused(*arguments: object, cwd: Path) -> str:
    done = run("train", *arguments, cwd=cwd)
    context = f"wavetrain train {arguments}\n{done.stdout}{done.stderr}"
    assert done.returncode == 2, context
    assert done.stdout == "", context
    assert 1 <= len(done.stderr.splitlines()) <= 2, context
    assert done.stderr.startswith("wavetrain: "), context
    return done.stderr


def test_refusals_that_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nmicro-batchs = 4\n")
    for flags, phrases in REFUSALS:
        if flags.split()[0] in ("--heads", "--schedule", "--ranks", "--batch", "--data", "--model", "--resume"):
            continue
        said = refused(*flags.split(), cwd=tmp_path)
        assert all(phrase in said for phrase in phrases), said
    assert not (tmp_path / "runs").exists()


def test_refusals_before_a_rank_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch already: what the command line would print."""
    import tyro

    from wavetrain.cli.train import Train

    monkeypatch.chdir(tmp_path)
    for flags, phrases in REFUSALS:
        if flags.split()[0] in ("--heads", "--schedule", "--ranks", "--batch", "--data", "--model", "--resume"):
            verb: Any = tyro.cli(Train, args=flags.split(), config=(tyro.conf.FlagCreatePairsOff,))
            with pytest.raises(InputError) as caught:
                verb.run()
            assert all(phrase in str(caught.value) for phrase in phrases), str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_refusal_that_needs_torch_is_short_too(trained: Path) -> None:
    said = refused("--out", trained, "--resume", cwd=trained)
    assert "has done 6 of 6 steps; give more --steps" in said


def test_help_teaches_with_examples() -> None:
    text = answer("train", "--help")
    assert text.count("wavetrain train") >= 3
    for flag in (
        "--ranks",
        "--dp",
        "--tp",
        "--schedule",
        "--waves",
        "--micro-batches",
        "--data",
        "--minutes",
        "--resume",
        "--log",
    ):
        assert flag in text
