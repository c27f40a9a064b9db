"""The black box: what a rank noted can be read by others, outlives it, and garbage harms no one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from wavetrain.errors import InputError, PeerLostError, StallError
from wavetrain.runtime.blackbox import DIRECTORY_VARIABLE, Phase, Recorder, fresh_directory, is_secondary, read, read_failures
from wavetrain.schedule.actions import Action


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ((Phase.COMPUTE, "B", 2, 1), "in B of stage 2, micro-batch 1"),
        ((Phase.RECEIVE, "F", 1, 3, 0), "waiting for F of stage 1, micro-batch 3 from rank 0"),
        ((Phase.SEND, "I", 0, 7, 5), "waiting to send I of stage 0, micro-batch 7 to rank 5"),
        ((Phase.RECEIVE,), "waiting for a message"),
        ((Phase.COLLECTIVE,), "in a collective"),
        ((Phase.SAVING,), "saving a checkpoint"),
        ((Phase.IDLE,), "outside a step"),
    ],
)
def test_a_note_in_words(tmp_path: Path, note: tuple[Phase, ...], words: str) -> None:
    for directory in (None, tmp_path):
        recorder = Recorder(0, directory)
        assert recorder.state().describe() == "before its first step"
        recorder.step = 4
        recorder.note(*note)  # type: ignore[arg-type]
        assert recorder.state().describe() == words
        assert recorder.state().step == 4
    assert [state.describe() for state in read(tmp_path)] == [words]


def test_what_others_read(tmp_path: Path) -> None:
    recorders = [Recorder(rank, tmp_path) for rank in (10, 2, 0)]
    recorders[1].note(Phase.COMPUTE, *Action("W", 3, 4))
    before = read(tmp_path)
    assert [state.rank for state in before] == [0, 2, 10]
    assert before[1].action == Action("W", 3, 4)
    assert before[1].peer is None
    assert before[1].pid == os.getpid()
    recorders[0].note(Phase.IDLE)
    after = read(tmp_path)
    assert [b.count - a.count for a, b in zip(before, after, strict=True)] == [0, 0, 1]
    assert after[2].time >= before[2].time


def test_a_second_recorder_of_a_process_goes_on_where_the_first_is(tmp_path: Path) -> None:
    first = Recorder(0, tmp_path)
    first.step = 7
    first.note(Phase.COMPUTE, "F", 0, 0)
    assert Recorder(0, tmp_path).state() == first.state()


def test_the_environment_says_which_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "made"))
    assert Recorder.from_environment().rank == 3
    assert [state.rank for state in read(tmp_path / "made")] == [3]
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    Recorder.from_environment().note(Phase.IDLE)
    monkeypatch.setenv(DIRECTORY_VARIABLE, "/proc/nowhere")
    with pytest.raises(InputError, match=r"/proc/nowhere cannot be written .* let WAVETRAIN_BLACKBOX name"):
        Recorder.from_environment()


def test_what_a_killed_process_noted_stays_and_the_next_run_starts_anew(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from wavetrain.runtime.blackbox import Phase, Recorder\n"
        "recorder = Recorder(1, sys.argv[1])\n"
        "recorder.note(Phase.COMPUTE, 'B', 2, 1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    (tmp_path / "rank1.json").write_text("{}")
    assert [state.describe() for state in read(tmp_path)] == ["in B of stage 2, micro-batch 1"]
    assert Recorder(1, tmp_path).state().describe() == "before its first step"
    assert not (tmp_path / "rank1.json").exists()


def test_garbage_is_left_out(tmp_path: Path) -> None:
    Recorder(0, tmp_path).note(Phase.COMPUTE, "F", 0, 0)
    good = (tmp_path / "rank0.state").read_bytes()
    noise = random.Random(0)
    garbage = [b"", b"x", bytes(len(good)), good[:-1], good[:-1] + b"\xff", b"\xff" * 10_000, noise.randbytes(4096)]
    garbage += [
        good[:at] + noise.randbytes(4) + good[at + 4 :] for at in range(0, 36, 4) if not 4 <= at < 8 and not 16 <= at < 32
    ]
    for rank, data in enumerate(garbage, start=1):
        (tmp_path / f"rank{rank}.state").write_bytes(data)
        (tmp_path / f"rank{rank}.json").write_bytes(data)
    for rank, text in enumerate(("[]", "3", "null", '{"time": "soon"}', "[" * 100_000, "{}"), start=100):
        (tmp_path / f"rank{rank}.json").write_text(text)
    (tmp_path / "rank50.state").mkdir()
    (tmp_path / "rank50.json").mkdir()
    (tmp_path / "rank50.state" / "rank0.state").write_bytes(good)
    os.mkfifo(tmp_path / "rank51.state")
    (tmp_path / "rank52.state").symlink_to(tmp_path / "nowhere")
    for name in ("rank.state", "rank-1.state", "rank٣.state", "rank007.state", "rank1.state.partial", "other"):
        (tmp_path / name).write_bytes(good)
    assert [(state.rank, state.describe()) for state in read(tmp_path)] == [(0, "in F of stage 0, micro-batch 0")]
    assert read_failures(tmp_path) == []
    assert read(tmp_path / "nowhere") == []
    assert read_failures(tmp_path / "rank0.state") == []


def fail(error: Exception) -> NoReturn:
    raise error


def test_a_failure_with_its_traceback_and_what_was_going_on(tmp_path: Path) -> None:
    recorder = Recorder(2, tmp_path)
    recorder.note(Phase.COMPUTE, "B", 2, 1)
    try:
        fail(KeyError("token"))
    except KeyError as exc:
        told = recorder.record_failure(exc)
    Recorder(0, tmp_path).record_failure(PeerLostError("rank 2 is gone", rank=2))
    first, second = read_failures(tmp_path)
    assert first == told
    assert (first.rank, first.error, first.secondary) == (2, "KeyError: 'token'", False)
    assert first.doing == "in B of stage 2, micro-batch 1"
    assert 'fail(KeyError("token"))' in first.traceback
    assert (second.rank, second.secondary) == (0, True)
    assert json.loads((tmp_path / "rank2.json").read_text())["type"] == "KeyError"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank0.state", "rank2.json", "rank2.state"]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_failures_that_are_hard_to_write_down(tmp_path: Path) -> None:
    Recorder(0, tmp_path).record_failure(UnprintableError())
    Recorder(1, tmp_path).record_failure(ValueError("x" * 10_000_000 + "\udcff"))
    assert {failure.type for failure in read_failures(tmp_path)} == {"UnprintableError", "ValueError"}


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24960."


def wrapped(cause: Exception) -> Exception:
    """An error raised while another was handled."""
    try:
        try:
            fail(cause)
        except Exception:
            raise ValueError("step 3 did not work") from None if str(cause) == "hidden" else cause
    except ValueError as exc:
        return exc


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (PeerLostError("rank 1 is gone", rank=1), True),
        (RuntimeError(GLOO), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8597: Connection reset by peer"), True),
        (wrapped(RuntimeError(GLOO)), True),
        (wrapped(KeyError("hidden")), False),
        (ValueError("boom"), False),
        (StallError("no message of rank 1 within 30 s"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_what_is_only_the_echo_of_another_ranks_end(error: Exception, secondary: bool) -> None:
    assert is_secondary(error) is secondary


def test_a_fresh_directory_goes_and_takes_what_killed_launchers_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # not in memory
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fresh_directory() as live, fresh_directory() as left:
        assert live.parent == tmp_path
        copy = left.with_name(left.name + "-of-a-killed-launcher")
        copy.mkdir()
        for old in (live, copy):
            Recorder(0, old)
            os.utime(old, (0, 0))
        with fresh_directory() as new:
            assert sorted(tmp_path.iterdir()) == sorted([live, left, new])
    assert list(tmp_path.iterdir()) == []
