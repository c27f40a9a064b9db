"""The command line as a user has it: a process of its own, its exit code, and what it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

WAVETRAIN = (sys.executable, "-m", "wavetrain")
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
PATIENCE = 120


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``wavetrain`` with these arguments, run to its end."""
    command = [*WAVETRAIN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=PATIENCE, check=False)


def answer(*arguments: object, cwd: Path | None = None) -> str:
    """Its stdout, where all went well: exit code 0 and not a word on stderr."""
    done = run(*arguments, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def answer_json(*arguments: object, cwd: Path | None = None) -> Any:
    """Its stdout with ``--json``, which must be exactly one JSON value (NaN and Infinity are not JSON)."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(answer(*arguments, "--json", cwd=cwd), parse_constant=refuse)


def start(*arguments: object) -> subprocess.Popen[str]:
    """``wavetrain`` in a process group of its own that Ctrl-C can reach, even if the tests themselves run in the background."""
    return subprocess.Popen(
        [*WAVETRAIN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Ctrl-C: the exit code and the rest of what it writes. Nothing of its process group may be left."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return process.returncode, out, err
    raise AssertionError("a process outlived Ctrl-C")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
