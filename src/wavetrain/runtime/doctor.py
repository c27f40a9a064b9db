"""What this machine can do, tried out: each check runs where it cannot hurt."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

import torch

from wavetrain.errors import WavetrainError
from wavetrain.runtime.launch import launch

_BF16: Final = "import torch; a = torch.randn(64, 64).bfloat16(); torch.isfinite(a @ a).all() or exit(3)"
_EXTRAS: Final = {"transformers": "hf", "tokenizers": "serve", "ortools": "solve", "tensorboard": "log", "wandb": "log"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    ok: bool | None
    """None: nothing to judge."""
    advice: str = ""


def examine() -> list[Finding]:
    """Look at this machine; takes some seconds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [
        Finding("Python", platform.python_version(), sys.version_info >= (3, 11), "wavetrain needs 3.11 or later"),
        Finding(
            "torch",
            torch.__version__,
            tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 13),
            "2.13 is tested",
        ),
        Finding("cores", f"{cores}, torch uses {torch.get_num_threads()}", None),
        Finding("GPUs", str(torch.cuda.device_count()), None, "GPU paths are written, and have not been run yet"),
        _bf16(),
        _ranks(),
    ]
    for name, extra in _EXTRAS.items():
        there = importlib.util.find_spec(name) is not None
        found = importlib.metadata.version(name) if there else "not installed"
        findings.append(Finding(name, found, None, "" if there else f"pip install 'wavetrain[{extra}]', if you need it"))
    return findings


def _bf16() -> Finding:
    """Some virtual CPUs claim instructions that they do not have: the product then ends the process."""
    done = subprocess.run([sys.executable, "-c", _BF16], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 0:
        return Finding("bf16 products on the CPU", "work", True)
    why = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return Finding(
        "bf16 products on the CPU",
        f"end the process ({why})",
        False,
        "stay with fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
    )


def _ranks() -> Finding:
    try:
        total = launch(_meet, ranks=2, timeout_seconds=120)
    except WavetrainError as error:
        return Finding("two ranks", f"cannot meet: {error}", False, "is the loopback device up?")
    return Finding("two ranks", "meet and add up" if total == 3.0 else f"add up to {total}", total == 3.0)


def _meet() -> float:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return float(value)
