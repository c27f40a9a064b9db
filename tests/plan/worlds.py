"""Small models and clusters for the tests of planning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wavetrain.cluster import Cluster, cluster_from_text
from wavetrain.plan.calibration import Calibration
from wavetrain.plan.estimate import CostModel
from wavetrain.workload import Shape, Workload

MIXED = """
[[nodes]]
count = 1
device = "V100-16"
gpus = 4
inter_gbps = 10
[[nodes]]
count = 1
device = "T4-16"
gpus = 2
inter_gbps = 10
"""


def workload(layers: int = 6, hidden: int = 512, **values: Any) -> Workload:
    shape = Shape(layers=layers, hidden=hidden, heads=8, seq=256, vocab=1000, **values)
    return shape.workload(f"small-{layers}x{hidden}", "fp16")


def model(layers: int = 6, hidden: int = 512, *, overlaps: bool = True) -> CostModel:
    return CostModel(workload=workload(layers, hidden), calibration=Calibration(), overlaps=overlaps)


def mixed() -> Cluster:
    return cluster_from_text(MIXED)


def even(nodes: int = 2, gpus: int = 2, device: str = "V100-16", gbps: float = 25) -> Cluster:
    return cluster_from_text(f'[[nodes]]\ncount = {nodes}\ndevice = "{device}"\ngpus = {gpus}\ninter_gbps = {gbps}\n')


def trial(**values: Any) -> dict[str, Any]:
    return {
        "id": "t",
        "experiment": "e",
        "model": {"layers": 12, "hidden": 1024, "heads": 16, "seq": 1024},
        "nodes": [{"count": 2, "device": "A100", "gpus": 4}],
        "global_batch": 32,
        "micro_batch": 2,
        "tp": 1,
        "dp": 4,
        "pp": 2,
        "schedule": "1f1b",
        "seconds": 0.5,
        "failed": False,
    } | values


def write_trials(path: Path, trials: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(t) + "\n" for t in trials))
    return path
