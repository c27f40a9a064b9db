"""Launching, with real ranks: results come back, failures are told once, and no process is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wavetrain.errors import InputError, PeerLostError, RankFailedError, StallError
from wavetrain.runtime.blackbox import Phase, Recorder, State
from wavetrain.runtime.launch import guard, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

LONG = 120.0
"""Seconds that something takes which is to be ended before."""


def gone(pid: int) -> bool:
    """Whether a process runs no more (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def rank_and_world() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


# ---- what comes back


def adds_up(start: int) -> dict[str, Any]:
    rank, world = rank_and_world()
    total = torch.tensor([float(start + rank)])
    dist.all_reduce(total, group=dist.new_group(list(range(world))))
    return {
        "total": total.item(),
        "pair": (rank, world),
        "threads": [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])],
        "port": int(os.environ["MASTER_PORT"]),
    }


def test_the_result_of_rank_0(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = launch(adds_up, ranks=2, args=(10,))
    assert (result["total"], result["pair"], result["threads"]) == (21.0, [0, 2], [1, 1])
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):  # the port is no longer held
        again.connect(("127.0.0.1", result["port"]))
    assert capfd.readouterr().err == ""
    assert "RANK" not in os.environ


def gives_back(value: object) -> object:
    return value


def test_one_rank_and_a_result_that_is_not_simple() -> None:
    assert launch(gives_back, ranks=1, args=({1, 2},)) is None


def test_two_launches_at_the_same_time() -> None:
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda start=start: results.update({start: launch(adds_up, ranks=2, args=(start,))}))
        for start in (0, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {start: result["total"] for start, result in results.items()} == {0: 1.0, 100: 201.0}


# ---- what is told when a rank fails


def fails_in_an_action() -> None:
    Recorder.from_environment().note(Phase.COMPUTE, "B", 2, 1)
    raise LookupError("no such token")


def raises_on_rank_1() -> None:
    rank, _ = rank_and_world()
    if rank == 1:
        fails_in_an_action()
    dist.recv(torch.empty(1), 1)


def test_an_exception_is_told_once_and_its_echo_not_at_all(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(raises_on_rank_1, ranks=2)
    assert str(caught.value) == "rank 1 failed in B of stage 2, micro-batch 1: LookupError: no such token"
    assert (caught.value.rank, caught.value.cause) == (1, "LookupError: no such token")
    err = capfd.readouterr().err
    assert err.startswith("rank 1 failed in B of stage 2, micro-batch 1:\nTraceback")
    assert err.count("Traceback") == 1
    assert 'raise LookupError("no such token")' in err
    assert err.endswith("\nLookupError: no such token\n")


def waits_for(victim: int) -> None:
    rank, _ = rank_and_world()
    recorder = Recorder.from_environment()
    dist.barrier()
    if rank == victim:
        recorder.step = 5
        recorder.note(Phase.COMPUTE, "B", 2, 1)
        time.sleep(LONG)
    recorder.note(Phase.RECEIVE, "F", 1, 3, victim)
    try:
        dist.recv(torch.empty(1), victim)
    except RuntimeError:
        if rank == (victim + 1) % 3:
            raise ValueError("an echo that does not look like one") from None
        raise


def test_a_random_rank_is_killed_while_the_others_wait_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    victim = random.randrange(3)
    pids: set[int] = set()
    killed: list[float] = []

    def kill(states: Sequence[State]) -> None:
        busy = [state for state in states if state.phase is not Phase.IDLE]
        if len(busy) == 3 and not killed:
            pids.update(state.pid for state in busy)
            assert busy[(victim + 1) % 3].describe() == f"waiting for F of stage 1, micro-batch 3 from rank {victim}"
            os.kill(busy[victim].pid, signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(RankFailedError) as caught:
        launch(waits_for, ranks=3, args=(victim,), on_poll=kill)
    assert time.monotonic() - killed[0] < 10
    assert caught.value.rank == victim
    assert str(caught.value) == (
        f"rank {victim} was killed by signal 9 in B of stage 2, micro-batch 1 (step 5; SIGKILL: out of memory, or kill -9)"
    )
    assert all(gone(pid) for pid in pids)
    assert capfd.readouterr().err == ""


def exits_while_its_neighbour_is_stubborn(file: str) -> None:
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(file).write_text(str(os.getpid()))
        time.sleep(LONG)
    until(Path(file).exists, "the neighbour is there")
    sys.exit(3)


def test_an_exit_code_and_a_neighbour_that_will_not_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pid"
    with pytest.raises(RankFailedError, match=r"^rank 1 exited with code 3 before its first step$") as caught:
        launch(exits_while_its_neighbour_is_stubborn, ranks=2, args=(str(file),), grace_seconds=0.5)
    assert caught.value.cause == "exit code 3"
    assert gone(int(file.read_text()))
    assert capfd.readouterr().err == ""


def leaves_early() -> None:
    rank, _ = rank_and_world()
    dist.barrier()
    if rank == 0:
        dist.recv(torch.empty(1), 1)


def test_a_rank_that_finished_too_early_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed before its first step \(rank 1 had already finished\): Runtime"):
        launch(leaves_early, ranks=2)


def sleeps() -> None:
    Recorder.from_environment().note(Phase.RECEIVE, "F", 1, 3, 1)
    time.sleep(LONG)


def test_the_time_is_up() -> None:
    with pytest.raises(StallError, match=r"(?s)after timeout_seconds=4.*rank 0: (waiting for F of stage 1, m|before main began)"):
        launch(sleeps, ranks=1, timeout_seconds=4)


def test_what_the_hook_raises_ends_the_run() -> None:
    pids: list[int] = []

    def stop(states: Sequence[State]) -> None:
        if states:
            pids.append(states[0].pid)
            raise StallError("rank 0 does not move")

    with pytest.raises(StallError, match="does not move"):
        launch(sleeps, ranks=1, on_poll=stop)
    assert gone(pids[0])


# ---- what cannot be launched


def nested() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(("main", "name"), [(lambda: None, "<lambda>"), (nested(), "nested.<locals>.inner")])
def test_a_main_that_no_child_can_find(main: Callable[[], None], name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*move it to the top level of a file"):
        launch(main, ranks=2)


def test_a_main_typed_at_a_prompt() -> None:
    code = "from wavetrain.runtime.launch import launch\ndef main(): ...\nlaunch(main, ranks=2)\n"
    run = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60, check=False)
    assert "main was typed at a prompt" in run.stderr


def test_args_that_cannot_be_sent() -> None:
    with pytest.raises(InputError, match=r"cannot be sent to another process .*args plain values"):
        launch(gives_back, ranks=2, args=(threading.Lock(),))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks is 0; give a whole number from 1"),
        ({"ranks": 2.0}, "ranks is 2.0"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": 1_000_000}, "ranks is 1000000"),
        ({"ranks": 1, "timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"ranks": 1, "grace_seconds": float("nan")}, "grace_seconds is nan"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        launch(gives_back, **options)


def test_a_world_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"asked for 2 ranks, but torchrun started 3; type: torchrun --nproc-per-node 2 "):
        launch(gives_back, ranks=2)


# ---- whole scripts

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from wavetrain.runtime.launch import launch

def main(directory):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    open(f"{directory}/{rank}", "a").write(f"{os.getpid()}\\n")
    total = torch.ones(1)
    dist.all_reduce(total)
    if "wait" in sys.argv and rank == 0:
        dist.recv(total, 1)
    if "wait" in sys.argv:
        time.sleep(120)
    return total.item()

if __name__ == "__main__":
    print("launching", flush=True)
"""
UNGUARDED = SCRIPT + "result = launch(main, ranks=2, args=(sys.argv[1],))\nif result: sys.stdout.write(f'result {result}\\n')\n"
GUARDED = SCRIPT + "    launch(main, ranks=2, args=(sys.argv[1],))\n"
MISPLACED = (
    "from wavetrain.runtime.launch import launch\nif __name__ == '__main__':\n    def main(): ...\n    launch(main, ranks=1)\n"
)


def script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


def pids(directory: Path) -> list[int]:
    """Of both ranks, as they noted them; empty before they did."""
    noted = [(directory / rank).read_text().split() for rank in "01" if (directory / rank).exists()]
    return [int(pid) for pids in noted for pid in pids] if len(noted) == 2 else []


@pytest.mark.parametrize("starter", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["python", "torchrun"])
def test_a_script_without_a_guard_runs_main_once_a_rank(tmp_path: Path, starter: list[str]) -> None:
    command = [sys.executable, *starter, str(script(tmp_path, UNGUARDED)), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("result 2.0") == (2 if starter else 1)
    assert len(set(pids(tmp_path))) == len(pids(tmp_path)) == 2
    assert "Traceback" not in run.stderr


def test_a_main_that_the_ranks_do_not_find_in_the_script(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(script(tmp_path, MISPLACED))], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "rank 0 exited with code 1 before main began" in last
    assert "put main at the top level of a file" in last


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, str(script(tmp_path, GUARDED)), str(tmp_path), "wait"]) as launcher:
        until(lambda: bool(pids(tmp_path)), "the ranks are there")
        launcher.kill()
    until(lambda: all(gone(pid) for pid in pids(tmp_path)), "the ranks are gone", seconds=10)


@pytest.mark.parametrize("early", [True, False], ids=["while ranks start", "while ranks run"])
def test_an_interrupt_is_told_in_one_line(tmp_path: Path, early: bool) -> None:
    with subprocess.Popen(
        [sys.executable, str(script(tmp_path, GUARDED)), str(tmp_path), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "launching\n"
        if early:
            time.sleep(0.5)
        else:
            until(lambda: bool(pids(tmp_path)), "the ranks are there")
        os.killpg(launcher.pid, signal.SIGINT)  # as the terminal does: to everyone
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == -signal.SIGINT  # the shell's 130
    assert err.count("interrupted: all 2 ranks were ended\n") == 1
    assert err.count("Traceback") == 1, err  # python's own, of the script that did not catch it
    assert all(gone(pid) for pid in pids(tmp_path))


# ---- without a launcher of ours


def test_the_guard_tells_what_failed_and_where(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end, guard():
        fails_in_an_action()
    assert end.value.code == 1
    err = capfd.readouterr().err
    assert err.startswith("rank 1 failed in B of stage 2, micro-batch 1:\nTraceback")
    assert err.endswith("LookupError: no such token\n")
    assert "WAVETRAIN_BLACKBOX" not in os.environ


def test_the_guard_tells_an_echo_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit), guard():
        raise PeerLostError("rank 1 is gone", rank=1)
    assert capfd.readouterr().err == (
        "rank 0 ended before its first step, because another rank was gone: PeerLostError: rank 1 is gone\n"
    )


def test_the_guard_lets_results_exits_and_interrupts_through() -> None:
    with guard():
        pass
    with pytest.raises(KeyboardInterrupt), guard():
        raise KeyboardInterrupt
    with pytest.raises(SystemExit, match="4"), guard():
        sys.exit(4)
