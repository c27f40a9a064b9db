"""Trials: read as they are written down, refused with their line."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from wavetrain.errors import FormatError, InputError
from wavetrain.plan.trials import load_trials

from .worlds import trial, write_trials

STAGES = {
    "source": "sailor",
    "model": "OPT-350",
    "stages": [
        {"layers": [0, 12], "replicas": [{"device": "GH-96", "tp": 4}, {"device": "GH-96", "tp": 4}]},
        {"layers": [12, 26], "replicas": [{"device": "GH-96", "tp": 4}, {"device": "V100-16", "tp": 2}]},
    ],
}


def test_devices_are_counted_over_the_nodes(tmp_path: Path) -> None:
    nodes = [{"count": 1, "device": "V100-16", "gpus": 4, "inter_gbps": 10}, {"count": 1, "device": "T4-16", "gpus": 4}]
    found = load_trials(write_trials(tmp_path / "t.jsonl", [trial(nodes=nodes, tp=2, dp=2, pp=2, partition=[0, 5, 14])]))[0]
    assert [[slot.device.name for slot in row] for row in found.slots] == [["V100-16"] * 2, ["T4-16"] * 2]
    assert [[slot.node for slot in row] for row in found.slots] == [[0, 0], [1, 1]]
    assert found.cut == (0, 5, 14)
    assert found.num_micro_batches == 8
    assert found.groups[0].inter.bandwidth == 10e9 / 8


def test_stages_may_be_unlike(tmp_path: Path) -> None:
    given = {k: v for k, v in trial(**STAGES).items() if k not in ("nodes", "tp", "dp", "pp")}
    found = load_trials(write_trials(tmp_path / "t.jsonl", [given]))[0]
    assert [[(slot.device.name, slot.tp) for slot in row] for row in found.slots][1] == [("GH-96", 4), ("V100-16", 2)]
    assert found.cut == (0, 12, 26)
    assert (found.precision, found.gradient_bytes, found.recompute) == ("fp32", 4, "none")


def test_what_failed_has_no_time(tmp_path: Path) -> None:
    found = load_trials(write_trials(tmp_path / "t.jsonl", [trial(failed=True, seconds=None)]))[0]
    assert found.failed
    assert found.seconds is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seconds": -1}, "seconds"),
        ({"seconds": None}, "no seconds"),
        ({"global_batch": 0}, "global_batch"),
        ({"global_batch": 2}, "global batch"),
        ({"micro_batch": "2"}, "micro_batch"),
        ({"nodes": []}, "nodes"),
        ({"nodes": [{"device": "V1000"}]}, "V1000"),
        ({"tp": 64}, "devices"),
        ({"partition": [0, 5]}, "partition"),
        ({"partition": [0, 9, 5]}, "partition"),
        ({"model": 7}, "model"),
        ({"model": {"layers": 2, "hidden": 10, "heads": 3, "seq": 8}}, "heads"),
        ({"failed": "yes"}, "failed"),
        ({"precision": "int8"}, "precision"),
        ({"recompute": "some"}, "recompute"),
        ({"peak_bytes": 0}, "peak_bytes"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    path = write_trials(tmp_path / "t.jsonl", [trial(), trial() | change])
    with pytest.raises(FormatError, match=word) as raised:
        load_trials(path)
    assert raised.value.line == 2


def test_a_file_without_trials_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n\n")
    with pytest.raises(FormatError, match="no trials"):
        load_trials(tmp_path / "t.jsonl")
    with pytest.raises(InputError, match="none"):
        load_trials(tmp_path / "none.jsonl")


@pytest.mark.parametrize("seed", range(200))
def test_damaged_files_give_our_errors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    given = {k: v for k, v in trial(**STAGES).items() if k != "nodes"} if seed % 2 else trial()
    characters = list(json.dumps(given))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(characters))
        characters[at : at + rng.randint(0, 4)] = rng.choice(
            ["", "-", "1e999", "null", "[]", "{", '"', "\n", "9" * 40, "true", "é"]
        )
    path = tmp_path / "t.jsonl"
    path.write_text("".join(characters))
    with contextlib.suppress(FormatError):
        load_trials(path)
