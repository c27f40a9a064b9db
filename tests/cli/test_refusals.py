"""What the verbs say to input that they cannot take: one or two lines on stderr, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .command import run

FILES = {
    "words.csv": "hello,world\n",
    "kind.csv": "0F0,0X0\n",
    "empty.csv": "",
    "gap.csv": "0F0,0B0,2F0,2B0\n",
    "two_homes.csv": "0F0,0B0\n0F1,0B1\n",
    "binary.csv": "\x00\x01\x02",
    "missing.csv": "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
    "twice.csv": "0F0,0F0,0B0\n",
    "deadlock.csv": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
    "broken.json": "{",
    "other.json": '{"format": "something else"}',
    "key.toml": "ranks = 2\nstages = 4\nforward = 1\nbackward_input = 1\nbackward_wait = 1\n",
    "negative.toml": "ranks = 2\nstages = 4\nforward = 1\nbackward_input = -1\nbackward_weight = 1\n",
    "text.toml": 'ranks = 2\nstages = 4\nforward = "fast"\nbackward_input = 1\nbackward_weight = 1\n',
    "few.toml": "ranks = 4\nstages = 4\nforward = 1\nbackward_input = 1\nbackward_weight = 1\n",
    "good.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def check(folder: Path, command: str, *phrases: str) -> None:
    """Exit code 2, nothing on stdout, at most two lines on stderr that hold all phrases."""
    done = run(*command.split(), cwd=folder)
    context = f"wavetrain {command}\n{done.stdout}{done.stderr}"
    assert done.returncode == 2, context
    assert done.stdout == "", context
    assert 1 <= len(done.stderr.splitlines()) <= 2, context
    assert done.stderr.startswith("wavetrain: "), context
    assert "Traceback" not in done.stderr, context
    for phrase in phrases:
        assert phrase in done.stderr, context


def test_counts(folder: Path) -> None:
    check(folder, "simulate --ranks 0", "0 ranks", "at least 1")
    check(folder, "simulate --schedule gpipe --micro-batches 0", "0 micro-batches", "at least 1")
    check(folder, "prove --ranks -3", "-3 ranks")
    check(folder, "simulate --waves 0", "0 waves")
    check(folder, "simulate --schedule interleaved --stages-per-rank 0", "0 stages per rank")
    check(folder, "simulate --schedule chimera --ranks 3", "even", "use 4")
    check(folder, "simulate --schedule 1f1b --waves 3", "takes no waves")
    check(folder, "simulate --ranks 1000 --micro-batches 100000", "too many actions")


def test_costs(folder: Path) -> None:
    check(folder, "simulate --forward -1", "forward", "0 or more")
    check(folder, "simulate --hop-latency -0.5", "latency", "0 or more")
    check(folder, "prove --backward-weight nan", "--backward-weight", "0 or more")
    check(folder, "simulate --forward 0 --backward-input 0 --backward-weight 0", "zero")
    check(folder, "simulate --memory-cap -1", "memory cap", "above 0")
    check(folder, "simulate --costs nowhere.toml", "nowhere.toml", "No such file")
    check(folder, "simulate --costs key.toml", "key.toml", "backward_wait", "did you mean 'backward_weight'")
    check(folder, "simulate --costs negative.toml", "negative.toml:4", "0 or more")
    check(folder, "simulate --costs text.toml", "text.toml:3", "not a number")
    check(folder, "simulate --costs few.toml --waves 2", "16 stages", "only name 4")
    check(folder, "simulate --costs few.toml --schedule 1f1b --forward 1", "--forward and --costs")
    check(folder, "simulate --costs few.toml --schedule 1f1b --ranks 8", "for 4 ranks, not 8")


def test_caps_say_the_least_that_works(folder: Path) -> None:
    check(folder, "simulate --schedule 1f1b --memory-cap 3", "on rank 0", "the least cap that works is 8", "auto")
    check(folder, "simulate --schedule 1f1b --micro-batches 4 --memory-cap 3", "the least cap that works is 4")
    check(folder, "simulate --memory-cap 0.5", "the least cap that works is 1")
    check(folder, "simulate --schedule auto --memory-cap 0.9", "the least cap that works is 1")
    check(folder, "prove --schedule gpipe --micro-batches 5 --memory-cap 4", "the least cap that works is 5")
    assert run("simulate", "--schedule", "1f1b", "--memory-cap", 8).returncode == 0
    assert run("simulate", "--schedule", "auto", "--ranks", 2, "--memory-cap", 1, "--iterations", 0).returncode == 0


def test_names_and_flags(folder: Path) -> None:
    check(folder, "simulate --schedule zb-wav", "unknown schedule 'zb-wav'", "did you mean 'zb-wave'")
    check(folder, "simulate --compare 1f1b hanoyo", "unknown schedule 'hanoyo'", "did you mean 'hanayo'")
    check(folder, "prove --schedule quantum", "unknown schedule 'quantum'", "known: gpipe, 1f1b")
    check(folder, "simulate --rank 4", "--rank", "did you mean --ranks")
    check(folder, "simulate --ranks four", "--ranks takes a whole number, not 'four'")
    check(folder, "simulate --ranks 2.5", "--ranks takes a whole number")
    check(folder, "prove --forward fast", "--forward takes a number, not 'fast'")
    check(folder, "simulate --schedule", "--schedule")
    check(folder, "simulate extra", "extra")
    check(folder, "simulat", "simulat")


def test_files_that_are_no_schedules(folder: Path) -> None:
    check(folder, "simulate --schedule nowhere.csv", "nowhere.csv", "No such file")
    check(folder, "prove --schedule kind.csv", "kind.csv:1", "cell 2, '0X0'", "like 0F0")
    check(folder, "simulate --schedule words.csv", "words.csv:1", "cell 1, 'hello'")
    check(folder, "prove --schedule empty.csv", "empty.csv", "empty")
    check(folder, "prove --schedule gap.csv", "stage 1 has no actions")
    check(folder, "prove --schedule two_homes.csv", "stage 0 is on rank 1 here, but on rank 0")
    check(folder, "prove --schedule binary.csv", "binary.csv:1")
    check(folder, "prove --schedule broken.json", "broken.json", "not JSON")
    check(folder, "prove --schedule other.json", "other.json", "not a schedule")
    check(folder, "simulate --schedule good.csv --ranks 5", "good.csv has 2 ranks, not 5")


def test_files_that_cannot_be_written(folder: Path) -> None:
    check(folder, "simulate --ranks 2 --save order.txt", "order.txt", ".csv", ".json")
    check(folder, "simulate --ranks 2 --save good.csv/order.csv", "cannot write good.csv/order.csv")
    check(folder, "simulate --ranks 2 --trace good.csv/trace.json", "cannot write good.csv/trace.json")
    check(folder, "simulate --ranks 2 --html good.csv/page.html", "cannot write good.csv/page.html")
    check(folder, "simulate --ranks 2 --schedule chimera --save order.csv", "2 routes", ".json")
    check(folder, "simulate --ranks 2 --save order.json --comms", "order.json", ".csv only")
    assert not (folder / "order.csv").exists()
    assert not list(folder.glob(".*"))


def test_schedules_that_cannot_run(folder: Path) -> None:
    refusals = {
        "missing.csv": ("missing", "rank 0 never does B of stage 0, micro-batch 1"),
        "twice.csv": ("duplicate", "rank 0 is to do F of stage 0, micro-batch 0, twice"),
        "deadlock.csv": ("deadlock", "rank 0 waits for B of stage 1, micro-batch 0, which rank 1 does only after F of stage 1"),
    }
    for file, (reason, phrase) in refusals.items():
        check(folder, f"simulate --schedule {file}", phrase)
        check(folder, f"view --schedule {file}", phrase)
        done = run("prove", "--schedule", file, cwd=folder)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith("refused: ")
        assert len(done.stdout.splitlines()) == 1
        assert phrase in done.stdout
        done = run("prove", "--schedule", file, "--json", cwd=folder)
        assert (done.returncode, done.stderr) == (1, "")
        found = json.loads(done.stdout)
        assert (found["proven"], found["reason"]) == (False, reason)
        assert phrase in found["message"]
    cycle = found["cycle"]
    assert [(w["rank"], w["action"], w["needs"]) for w in cycle] == [(0, "0B0", "1B0"), (1, "1F1", "0F1")]
    check(folder, "simulate --schedule good.csv --memory-cap 1", "rank 0 holds 2 micro-batches at F of stage 0, micro-batch 1")


def test_debug_shows_the_traceback(folder: Path) -> None:
    done = run("simulate", "--schedule", "zb-wav", "--debug")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("wavetrain.errors.UnknownNameError: unknown schedule 'zb-wav'")
