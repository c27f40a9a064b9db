"""wavetrain generate, chat and convert, as a user types them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from wavetrain.models import GPT, Kraken
from wavetrain.models.folders import Folder, save_folder

from .command import ENVIRONMENT, WAVETRAIN, alive, answer, answer_json, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden": 32, "num_heads": 4, "vocab": 256, "max_length": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    save_folder(Kraken(**SHAPE, degree=2), base / "kraken")
    save_folder(GPT(**SHAPE), base / "gpt")
    return base


def test_one_prompt_is_continued(models: Path) -> None:
    first = answer("generate", models / "kraken", "def ", "--max-tokens", 8, "--seed", 3)
    assert first.startswith("def ")
    assert first == answer("generate", models / "kraken", "def ", "--max-tokens", 8, "--seed", 3)


def test_several_prompts_on_two_ranks(models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def \nclass \n")
    options = ("--max-tokens", 5, "--temperature", 0, "--logprobs", 1)
    one = answer_json("generate", models / "kraken", "def ", "class ", *options)
    two = answer_json(
        "generate", models / "kraken", "--prompts-from", tmp_path / "prompts.txt", "--ranks", 2, "--stats", *options
    )
    assert [o["token_ids"] for o in two["outputs"]] == [o["token_ids"] for o in one["outputs"]]
    assert two["stats"]["ranks"] == 2
    assert two["stats"]["communication"]["sums"] == 2
    assert two["outputs"][0]["cumulative_logprob"] < 0


def test_stats_in_the_terminal(models: Path) -> None:
    done = run("generate", models / "kraken", "def ", "--max-tokens", 4, "--ranks", 2, "--stats")
    assert done.returncode == 0
    assert "hidden behind compute" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "MODELS/kraken"), "there is no prompt"),
        (("generate", "MODELS/kraken", ""), "prompt is empty"),
        (("generate", "MODELS/kraken", "a", "--ranks", 3), "3 ranks cannot share a Kraken of degree 2"),
        (("generate", "MODELS/nothing", "a"), "there is no directory"),
        (("generate", "MODELS/kraken", "x" * 64), "shorten it by 1"),
        (("generate", "MODELS/kraken", "a", "--top-p", 2), "top_p is 2"),
        (("generate", "MODELS/kraken", "a", "--logprobs", 2), "--logprobs is shown with --json"),
        (("generate", "MODELS/kraken", "a", "--at-once", 0), "--at-once is 0"),
        (("convert", "MODELS/kraken", "--out", "MODELS/new", "--to", "gpt3"), "gpt2"),
        (("convert", "MODELS/kraken", "--out", "MODELS/gpt"), "holds a model already"),
        (("convert", "MODELS/kraken", "--out", "MODELS/new"), "only a gpt can become a Kraken"),
        (("convert", "MODELS/gpt", "--out", "MODELS/new", "--degree", 3), "divides the 4 kv heads"),
    ],
)
def test_what_is_refused(arguments: tuple[object, ...], words: str, models: Path) -> None:
    done = run(*(str(a).replace("MODELS", str(models)) for a in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_chat(models: Path) -> None:
    command = [*WAVETRAIN, "chat", str(models / "gpt"), "--max-tokens", "6"]
    talk = "hello\n/reset\n" + "long " * 40 + "\n/quit\n"
    done = subprocess.run(command, input=talk, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") >= 2


def test_ctrl_c_while_generating_leaves_nobody(models: Path) -> None:
    command = [*WAVETRAIN, "generate", str(models / "kraken"), "--ranks", "2", "--max-tokens", "60", *(["x"] * 400)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )
    workers: list[int] = []
    while not workers:
        assert process.poll() is None
        workers = [int(c) for c in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err or process.returncode == -signal.SIGINT
    until = time.monotonic() + 30  # one that was just being started ends when it finds nobody to follow
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_gpt_becomes_a_kraken(models: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("wave after wave after wave, " * 400)
    found = answer_json(
        *("convert", models / "gpt", "--to", "kraken", "--degree", 2, "--out", tmp_path / "kraken"),
        *("--data", tmp_path / "text.txt", "--steps", 30, "--batch", 8, "--seq", 32, "--teacher-share", 0.1, "--lr", 0.01),
    )
    assert found["kraken_bits_a_token"] < found["first_guess_bits_a_token"]
    assert Folder(tmp_path / "kraken").config.degree == 2
    assert answer("generate", tmp_path / "kraken", "wave", "--max-tokens", 4, "--ranks", 2).startswith("wave")
    written = answer_json("convert", models / "gpt", "--to", "gpt2", "--out", tmp_path / "gpt2")
    assert Folder(written["folder"]).values["model_type"] == "gpt2"
