"""The planning verbs as a user has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .command import answer, answer_json, run

CLUSTER = """
[[nodes]]
count = 2
device = "V100-16"
gpus = 2
inter_gbps = 25
price = 6.0
[[nodes]]
count = 1
device = "T4-16"
gpus = 2
inter_gbps = 25
price = 1.0
"""
MODEL = 'name = "small"\nlayers = 10\nhidden = 512\nheads = 8\nseq = 256\nvocab = 1000\nprecision = "fp16"\n'
TRIAL = {
    "id": "a",
    "experiment": "mine",
    "model": {"layers": 12, "hidden": 1024, "heads": 16, "seq": 1024},
    "nodes": [{"count": 1, "device": "A100", "gpus": 8}],
    "global_batch": 16,
    "micro_batch": 1,
    "tp": 1,
    "dp": 8,
    "pp": 1,
    "seconds": 0.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planning")
    (path / "cluster.toml").write_text(CLUSTER)
    (path / "model.toml").write_text(MODEL)
    planned = ("plan", "--model", "model.toml", "--cluster", "cluster.toml", "--global-batch", 12)
    (path / "plan.json").write_text(json.dumps(answer_json(*planned, "--html", "plan.html", "--what-if", cwd=path)))
    return path


def test_a_plan_is_made_and_written(folder: Path) -> None:
    found = json.loads((folder / "plan.json").read_text())
    best = found["plans"][0]
    assert best["predicted_seconds"] == min(p["predicted_seconds"] for p in found["plans"])
    assert best["between"][0] < best["predicted_seconds"] < best["between"][1]
    assert sum(best["parts"].values()) == pytest.approx(best["predicted_seconds"], rel=1e-6)
    assert found["bound_seconds"] <= best["predicted_seconds"] * 1.2
    assert found["explanation"]["what_ifs"]
    assert found["explanation"]["pareto"]
    assert (folder / "plan.toml").exists()
    page = (folder / "plan.html").read_text()
    assert "<html" in page.lower()
    assert "<dt>binds</dt>" in page
    assert "Megatron&#x27;s rule" in page


def test_the_plan_is_shown(folder: Path) -> None:
    text = answer(
        "plan", "--model", "model.toml", "--cluster", "cluster.toml", "--global-batch", 12, "--out", "other.toml", cwd=folder
    )
    for word in ("seconds", "ranks along the pipeline", "where the time goes", "Megatron's rule", "written to other.toml"):
        assert word in text


def test_plans_are_explained_and_compared(folder: Path) -> None:
    text = answer("explain", "plan.toml", cwd=folder)
    assert "what if" in text
    assert "without the T4-16" in text
    found = answer_json("compare", "plan.toml", "plan.toml", cwd=folder)
    assert found["ratio"] == 1
    assert not found["told_apart"]
    assert "as long" in answer("compare", "plan.toml", "plan.toml", cwd=folder)


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed"])
def test_plans_are_exported(folder: Path, name: str) -> None:
    done = run("export", "plan.toml", "--to", name, cwd=folder)
    assert done.returncode == 0
    assert done.stdout
    found = answer_json("export", "plan.toml", "--to", name, cwd=folder)
    assert found["text"] == done.stdout
    assert len(found["warnings"]) == done.stderr.count("warning:")


def test_a_plan_is_rehearsed(folder: Path) -> None:
    found = answer_json("rehearse", "plan.toml", "--time-scale", 2, "--message-scale", 0.02, "--steps", 1, cwd=folder)
    plan = json.loads((folder / "plan.json").read_text())["plans"][0]
    assert found["ranks"] == plan["pp"]
    assert found["measured_seconds"] > 0
    refused = run("rehearse", "plan.toml", "--ranks", 4, cwd=folder)
    assert refused.returncode == 2
    assert "plan" in refused.stderr


def test_flags_of_megatron_are_looked_over(folder: Path) -> None:
    flags = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 1 --global-batch-size 12"
    )
    done = run("lint", "--megatron", flags, "--cluster", "cluster.toml", cwd=folder)
    assert done.returncode == 0, done
    assert "note: a step is predicted to take" in done.stdout
    wrong = run(
        "lint", "--megatron", f"{flags} --tensor-model-parallel-size 4", "--cluster", "cluster.toml", "--json", cwd=folder
    )
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout)["findings"][0]["level"] == "error"


def test_trials_are_scored_and_calibrated_on(folder: Path) -> None:
    rows = [TRIAL | {"id": str(i), "micro_batch": m, "seconds": 0.05 * (3 + i)} for i, m in enumerate((1, 2))]
    (folder / "trials.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = answer_json("score", "trials.jsonl", cwd=folder)
    keys = {"experiment", "n", "mape", "median_ape", "spearman", "top1_regret", "oom_precision", "oom_recall", "peak_mape"}
    assert [set(row) for row in found] == [keys]
    fitted = answer_json(
        *("score", "trials.jsonl", "--calibrate-on", "trials.jsonl", "--save-calibration", "mine.toml"), cwd=folder
    )
    assert fitted[0]["mape"] <= found[0]["mape"]
    again = answer_json("score", "trials.jsonl", "--calibration", "mine.toml", cwd=folder)
    assert again[0]["mape"] == pytest.approx(fitted[0]["mape"], rel=1e-3)
    assert "mine" in answer("score", "trials.jsonl", cwd=folder)


def test_this_machine_is_profiled_planned_for_and_trained_on(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('layers = 2\nhidden = 32\nheads = 2\nseq = 16\nvocab = 256\nprecision = "fp32"\n')
    measured = answer_json("profile", "--model", "m.toml", "--micro-batches", 1, 2, "--repeats", 1, "--out", "p", cwd=tmp_path)
    assert measured["layers"] == 4
    assert measured["link_bytes_per_second"] > 0
    planned = answer_json(
        *("plan", "--model", "m.toml", "--cluster", "1 x 2 x CPU-core", "--global-batch", 8, "--profiles", "p", "--pp", 2),
        cwd=tmp_path,
    )
    assert planned["plans"][0]["pp"] == 2
    trained = answer_json("train", "plan.toml", "--steps", 1, "--out", "run", cwd=tmp_path)
    assert trained["step"] == 1


def test_layers_of_ones_own_are_profiled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(1, 8)\n"
    )
    found = answer_json("profile", "--layers-from", "mine:build", "--no-link", "--repeats", 1, "--out", "p", cwd=tmp_path)
    assert found["layers"] == 2
    assert found["parameter_bytes"] == 288


def test_devices_are_listed() -> None:
    assert "p3.8xlarge" in answer("plan", "--devices")
    assert "A100-80" in answer_json("plan", "--devices")["devices"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("plan",), "--model"),
        (("plan", "--model", "gpt2-xxl", "--cluster", "detect", "--global-batch", 8), "gpt2-xl"),
        (("plan", "--model", "gpt2", "--cluster", "2 x p3.8xlrge", "--global-batch", 8), "p3.8xlarge"),
        (("plan", "--model", "gpt2", "--cluster", "detect", "--global-batch", 0), "global-batch"),
        (("plan", "--model", "gpt2", "--cluster", "detect", "--global-batch", 8, "--schedules", "zb-wavy"), "zb-wave"),
        (("plan", "--model", "gpt3-175b", "--cluster", "1 x 1 x T4-16", "--global-batch", 8), "cannot be split"),
        (("plan", "--model", "gpt2-xl", "--cluster", "1 x 1 x T4-16", "--global-batch", 8), "GB more"),
        (("plan", "--model", "none.json", "--cluster", "detect", "--global-batch", 8), "none.json"),
        (("explain", "none.toml"), "none.toml"),
        (("score", "none.jsonl"), "none.jsonl"),
        (("export", "none.toml", "--to", "megatron"), "none.toml"),
        (("profile",), "--model or --layers-from"),
        (("profile", "--layers-from", "nothing"), "module:function"),
        (("profile", "--layers-from", "no_such_module_xyz:build"), "no_such_module_xyz"),
        (("lint", "--megatron", "--fp16", "--cluster", "detect"), "--num-layers"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], word: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done
    assert word in done.stderr
    assert "Traceback" not in done.stderr
