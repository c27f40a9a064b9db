"""Launch: run a function in several ranks of this machine, and end them together.

    def main():
        pipe = wt.Pipeline(...)

    wt.launch(main, ranks=2)             # python train.py, or: torchrun --nproc-per-node 2 train.py

Each rank is a fresh process (``spawn``) that finds ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and the rest of what
``torch.distributed`` reads from ``env://``. The store that the ranks meet at is held by the launcher, on a port that it has
bound itself: there is no free port to guess, and none left behind. A single rank gets a process of its own as well: one code
path, one way to fail.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from threadpoolctl import threadpool_limits
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import InputError
from wavetrain.runtime import blackbox
from wavetrain.runtime.blackbox import Recorder
from wavetrain.runtime.supervise import OnPoll, end_all, supervise

MAX_RANKS: Final = 1024
_LAUNCHED: Final = "WAVETRAIN_LAUNCHED"
_RESULT: Final = "result.json"
_PR_SET_PDEATHSIG: Final = 1


def launch(
    main: Callable[..., Any],
    *,
    ranks: int,
    args: Sequence[Any] = (),
    timeout_seconds: float | None = None,
    grace_seconds: float = 5.0,
    on_poll: OnPoll | None = None,
) -> Any:
    """Run ``main(*args)`` in ``ranks`` processes of this machine and return what it returned on rank 0.

    Under torchrun ``main`` runs right here, in this rank, and its own result is returned. In a script without
    ``if __name__ == "__main__":`` the ranks come by this call as well while they import it: there it returns None.

    Args:
        main: a function at the top level of a file.
        ranks: how many processes.
        args: what ``main`` is called with; each rank gets a copy.
        timeout_seconds: how long all of it may take; None is for ever.
        grace_seconds: how long ranks may go on after one of them failed.
        on_poll: called a few times a second with the :class:`~wavetrain.runtime.blackbox.State` of the ranks.

    Returns:
        What ``main`` returned on rank 0 if that is made of numbers, strings, None, lists, tuples (they come back as lists)
        and dicts with string keys; None otherwise.

    Raises:
        RankFailedError: a rank raised or died. All others have been ended; the traceback is printed to stderr.
        StallError: ``timeout_seconds`` have passed.
        InputError: the ranks cannot be started as asked.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return None  # a child that imports the script; multiprocessing itself tells by this attribute
    _check_numbers(ranks, timeout_seconds, grace_seconds)
    if _LAUNCHED in os.environ:
        raise InputError("launch() was called inside a rank that launch() started; call it once, from the script")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_world(ranks)
        with guard():
            result = main(*args)
        if dist.is_initialized():  # else Gloo's threads may still hold tensors when the interpreter ends, which aborts it
            dist.destroy_process_group()
        return result
    _check_main(main)

    processes: list[BaseProcess] = []
    try:
        with blackbox.fresh_directory() as directory, _store() as port:
            try:
                _start(processes, ranks, _environment(ranks, port, directory), main, args)
                supervise(processes, directory, timeout_seconds=timeout_seconds, grace_seconds=grace_seconds, on_poll=on_poll)
                return _load_result(directory)
            finally:
                end_all(processes)
    except KeyboardInterrupt:
        print(f"interrupted: all {ranks} ranks were ended", file=sys.stderr, flush=True)
        raise


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Around a rank that no launcher of ours watches: say once what went wrong and where, then exit with code 1.

    An error that only says that another rank is gone is told in one line, without a traceback.
    """
    with contextlib.ExitStack() as stack:
        if not os.environ.get(blackbox.DIRECTORY_VARIABLE):  # so that this sees what the executor notes
            os.environ[blackbox.DIRECTORY_VARIABLE] = str(stack.enter_context(blackbox.fresh_directory()))
            stack.callback(os.environ.pop, blackbox.DIRECTORY_VARIABLE, None)
        recorder = Recorder.from_environment()
        try:
            yield
        except Exception as exc:
            failure = recorder.record_failure(exc)
            if failure.secondary:
                told = f"rank {failure.rank} ended {failure.doing}, because another rank was gone: {_first_line(failure.error)}\n"
            else:
                told = f"rank {failure.rank} failed {failure.doing}:\n{failure.traceback.rstrip()}\n"
            sys.stderr.write(told)  # in one piece: other ranks write there too
            sys.stderr.flush()
            raise SystemExit(1) from None


def _start(
    processes: list[BaseProcess], ranks: int, environment: Mapping[str, str], main: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Start the ranks into ``processes``, which the caller ends."""
    context = multiprocessing.get_context("spawn")
    with _interrupts_held():
        for rank in range(ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_rank, name=f"rank{rank}", args=(own, os.getpid(), main, tuple(args)))
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as exc:
                raise InputError(
                    f"main or its args cannot be sent to another process ({exc}); "
                    "main must be a function at the top level of a file, args plain values"
                ) from exc
            processes.append(process)


def _rank(environment: Mapping[str, str], launcher_pid: int, main: Callable[..., Any], args: Sequence[Any]) -> None:
    """The whole life of a rank."""
    die_with(launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone in the terminal; the launcher sees to it
    _hold_interrupts(hold=False)
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    threadpool_limits(int(environment["OMP_NUM_THREADS"]))  # NumPy's: it has read the environment already
    recorder = Recorder.from_environment()
    try:
        result = main(*args)
        if recorder.rank == 0:
            _save_result(Path(environment[blackbox.DIRECTORY_VARIABLE]), result)
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        if code and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
        code = code & 0xFF or int(code != 0)
    except BaseException as exc:
        code = 1
        recorder.record_failure(exc)
    if code == 0:
        atexit._run_exitfuncs()
    # Not through the interpreter's own end: that joins threads and can hang while neighbours wait for the sockets to close, and
    # tearing Gloo's threads down at exit can abort a rank that has done all its work.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def die_with(launcher_pid: int) -> None:
    """Have the kernel kill this process when the launcher is gone, even by SIGKILL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher_pid:  # it was gone before we asked
            os._exit(1)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C back. Processes started meanwhile keep it back too, until they can ignore it without a traceback."""
    resource_tracker.ensure_running()  # else the first start() does, and lets interrupts through again
    _hold_interrupts(hold=True)
    try:
        yield
    finally:
        _hold_interrupts(hold=False)


def _hold_interrupts(*, hold: bool) -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """Hold the store that the ranks meet at; gives its port, of the loopback device, bound by ourselves."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield port
    finally:
        del store  # closes the port now, even if a traceback keeps this frame


def _environment(ranks: int, port: int, directory: Path) -> dict[str, str]:
    """What all ranks find in ``os.environ``, but for which of them they are."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    devices = {name for _, name in socket.if_nameindex()}
    environment = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's: rank 0 joins it instead of opening its own
        blackbox.DIRECTORY_VARIABLE: str(directory),
        _LAUNCHED: "1",
    }
    threads = os.environ.get("OMP_NUM_THREADS", "")
    environment["OMP_NUM_THREADS"] = threads if threads.isdecimal() and int(threads) else str(max(1, cores // ranks))
    if "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in devices:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _check_numbers(ranks: int, timeout_seconds: float | None, grace_seconds: float) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise InputError(f"ranks is {ranks!r}; give a whole number from 1 to {MAX_RANKS}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise InputError(f"timeout_seconds is {timeout_seconds!r}; give seconds above 0, or None for no limit")
    if not 0 <= grace_seconds < math.inf:
        raise InputError(f"grace_seconds is {grace_seconds!r}; give seconds, 0 or more")


def _check_world(ranks: int) -> None:
    world = os.environ["WORLD_SIZE"]
    if world != str(ranks):
        raise InputError(
            f"launch() was asked for {ranks} ranks, but torchrun started {world}; "
            f"type: torchrun --nproc-per-node {ranks} {sys.argv[0]} (or ranks={world} in the script)"
        )


def _check_main(main: Callable[..., Any]) -> None:
    """Refuse what a fresh process could not import."""
    if not callable(main):
        raise InputError(f"main is {main!r}; give a function")
    name = getattr(main, "__qualname__", "")
    file = getattr(sys.modules["__main__"], "__file__", None)
    if "<" in name:  # <lambda>, outer.<locals>.inner
        problem = f"main is {name}, which another process cannot import"
    elif getattr(main, "__module__", None) == "__main__" and not (file and Path(file).exists()):
        problem = f"{name} was typed at a prompt, where another process cannot import it from"
    else:
        return
    raise InputError(f"{problem}; move it to the top level of a file, e.g. `def main(): ...` in train.py, and launch that")


def _save_result(directory: Path, result: Any) -> None:
    if _is_simple(result):
        blackbox.write_atomically(directory / _RESULT, json.dumps(result))


def _load_result(directory: Path) -> Any:
    try:
        return json.loads((directory / _RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_simple(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, bool | int | float | str)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
