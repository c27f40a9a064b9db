"""``examples/train_gpt.py``, started by itself and by torchrun: the same losses."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "train_gpt.py"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def run(*command: str, cwd: Path) -> list[float]:
    """The losses that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command, str(EXAMPLE), "12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    try:
        said, err = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said + err
    found = re.findall(r"^step +(\d+)  loss (\d+\.\d+)$", said, re.MULTILINE)
    assert [step for step, _ in found] == ["10", "12"], said
    return [float(loss) for _, loss in found]


def test_it_trains_whoever_starts_it(tmp_path: Path) -> None:
    alone = run(cwd=tmp_path)
    assert alone[-1] < 5.0
    assert run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", cwd=tmp_path) == alone
