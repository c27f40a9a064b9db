"""The other ranks of this machine: fresh processes that hold their part of a model and follow rank 0.

Each is ``python -m wavetrain.serve.workers`` with its orders as JSON on stdin: no function of the caller's script is imported, so
the script needs no guard. It ends when rank 0 says so, when rank 0 is gone, or when it fails: then what it wrote to stderr is
shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import PeerLostError, RankFailedError, RuntimeFailure, WavetrainError

_MARK = "wavetrain worker: "
_LOST_A_PEER = 3
"""The exit code of a worker that ended since another rank was gone."""


class Workers:
    """Ranks 1 … size − 1, and the store that all meet at.

    Args:
        size: ranks, this one among them.
        orders: what every worker is told, plain data.
    """

    def __init__(self, size: int, orders: Mapping[str, Any]) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        self.store: Store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes]] = []
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size))}
        try:
            for rank in range(1, size):
                errors = tempfile.TemporaryFile()  # noqa: SIM115  # read after the worker's end
                self._errors.append(errors)
                process = subprocess.Popen(
                    [sys.executable, "-m", "wavetrain.serve.workers"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for rank 0, which tells the others
                )
                self._processes.append(process)
                assert process.stdin is not None
                own = {**orders, "rank": rank, "size": size, "port": port}
                process.stdin.write(json.dumps(own).encode() + b"\n")
                process.stdin.flush()  # and stays open: its end tells the worker that this process has ended
        except BaseException:
            self.end(0)
            raise

    def watch(self) -> None:
        """Raise what ended a worker, if one has ended."""
        if any(process.poll() for process in self._processes):
            failure = self.failure(1.0)
            assert failure is not None
            raise failure

    def failure(self, wait_seconds: float = 2.0) -> RuntimeFailure | None:
        """Why a worker is gone, if one is: the first cause, not that of those who ended since another had."""
        until = time.monotonic() + wait_seconds
        while True:
            ended = {rank: code for rank, process in enumerate(self._processes, 1) if (code := process.poll())}
            first = [rank for rank, code in ended.items() if code != _LOST_A_PEER]
            late = time.monotonic() > until
            if first or (late and ended):
                rank = next(iter(first or ended))
                return self._describe(rank, ended[rank])
            if late:
                return None
            time.sleep(0.05)

    def _describe(self, rank: int, code: int) -> RuntimeFailure:
        errors = self._errors[rank - 1]
        errors.seek(0)
        told = errors.read()[-20_000:].decode(errors="replace").strip()
        if code < 0:
            name = signal.Signals(-code).name
            return RankFailedError(f"rank {rank} was killed by signal {-code} ({name})", rank=rank, cause=f"signal {-code}")
        last = told.rsplit(_MARK, 1)[-1].strip().splitlines() if told else []
        cause = last[-1] if last else f"exit code {code}"
        return RankFailedError(f"rank {rank} failed: {cause}", rank=rank, cause=cause)

    def end(self, grace_seconds: float = 5.0) -> None:
        """Wait for the workers' end, and end those that do not."""
        until = time.monotonic() + grace_seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for errors in self._errors:
            errors.close()
        self._errors, self._processes = [], []


def work(orders: Mapping[str, Any]) -> None:
    """The whole life of a worker."""
    from wavetrain.serve.parts import Part, Request

    store = TCPStore("127.0.0.1", int(orders["port"]), is_master=False)
    part = Part.load(Request(**orders["request"]), store, rank=int(orders["rank"]), size=int(orders["size"]), local=True)
    part.runner.follow()
    part.team.close()


def _end_with_rank_0() -> None:
    """Wait for the end of what rank 0 says, which is its own end, however it came about."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> int:
    """Read the orders and follow them."""
    told = sys.stdin.buffer.readline()
    if not told:
        return 1  # rank 0 was gone before it could say anything
    orders = json.loads(told)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        work(orders)
    except WavetrainError as error:
        print(f"{_MARK}{error}", file=sys.stderr)
        return _LOST_A_PEER if isinstance(error, PeerLostError) else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not through the interpreter's end: Gloo's threads may still hold tensors
