"""Generation on several real ranks: the same text, and clear ends when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import alive
from tests.serve.test_llm import MODELS, PROMPTS, scattered
from wavetrain import LLM, SamplingParams
from wavetrain.errors import InputError, RuntimeFailure
from wavetrain.models.folders import save_folder
from wavetrain.serve.workers import Workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

HOW = SamplingParams(temperature=0, max_tokens=7, logprobs=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_folder(scattered(name), base / name)
    return base


def generated(path: Path, **options: Any) -> list[tuple[list[int], float]]:
    with LLM(path, max_num_seqs=3, **options) as llm:
        found = [o.outputs[0] for o in llm.generate(PROMPTS, HOW)]
        assert llm.stats()["ranks"] == options.get("tensor_parallel_size", len(options.get("shares", (1,))))
        return [(o.token_ids, o.cumulative_logprob or 0.0) for o in found]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_write_the_text_of_one(name: str, folders: Path) -> None:
    one, two = generated(folders / name), generated(folders / name, tensor_parallel_size=2)
    assert [tokens for tokens, _ in two] == [tokens for tokens, _ in one]
    assert [p for _, p in two] == pytest.approx([p for _, p in one], abs=1e-4)


def test_a_kraken_on_any_number_of_ranks(folders: Path) -> None:
    one = generated(folders / "kraken", deterministic=True)
    four = generated(folders / "kraken", tensor_parallel_size=4)
    assert [tokens for tokens, _ in four] == [tokens for tokens, _ in one]
    for options in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"shares": (3, 1)}):
        assert generated(folders / "kraken", deterministic=True, **options) == one, "the same bits"
    uneven = generated(folders / "kraken", shares=(1, 2, 1))
    assert [tokens for tokens, _ in uneven] == [tokens for tokens, _ in one]


def test_sampled_text_and_how_much_was_hidden(folders: Path) -> None:
    params = SamplingParams(max_tokens=6, seed=4)
    with LLM(folders / "kraken", deterministic=True) as llm:
        alone = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    with LLM(folders / "kraken", tensor_parallel_size=2, deterministic=True, stats=True) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == alone
        found = llm.stats()["communication"]
    assert found["sums"] == 3  # one less than layers, and the head's
    assert found["exposed_ms"] >= 0
    assert len(found["by_sum"]) == 3


def test_a_rank_that_dies_while_generating(folders: Path) -> None:
    llm = LLM(folders / "kraken", tensor_parallel_size=2, max_model_len=48)
    assert llm._workers is not None
    victim = llm._workers._processes[0].pid

    def kill() -> None:
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    begin = time.monotonic()

    def go_on() -> None:
        while time.monotonic() - begin < 60:
            llm.generate(PROMPTS, SamplingParams(max_tokens=30))

    with pytest.raises(RuntimeFailure, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        go_on()
    thread.join()
    llm.close()


def test_the_rank_that_died_is_named_and_not_those_that_noticed(folders: Path) -> None:
    """Rank 1 hears of the end of rank 2 as well, and ends."""
    with LLM(folders / "kraken", shares=(2, 1, 1), max_model_len=48) as llm:
        assert llm._workers is not None
        victim = llm._workers._processes[1].pid
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RuntimeFailure, match=r"rank 2 was killed by signal 9 \(SIGKILL\)"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=30))


def test_threads_share_one_model(folders: Path) -> None:
    with LLM(folders / "kraken", tensor_parallel_size=2) as llm:
        expected = [llm.generate(prompt, HOW)[0].outputs[0].token_ids for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            found = list(pool.map(lambda prompt: llm.generate(prompt, HOW)[0].outputs[0].token_ids, PROMPTS))
        assert found == expected
        stream = llm.stream("wave", SamplingParams(max_tokens=20, temperature=0))
        next(stream)
    with pytest.raises(InputError, match="closed, or a rank of it has failed"):
        list(stream)


def test_a_rank_that_dies_while_it_loads(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Workers.__init__

    def kill_at_once(self: Workers, *args: Any, **options: Any) -> None:
        started(self, *args, **options)
        os.kill(self._processes[0].pid, signal.SIGKILL)

    monkeypatch.setattr(Workers, "__init__", kill_at_once)
    with pytest.raises(RuntimeFailure, match="rank 1 was killed by signal 9"):
        LLM(folders / "kraken", tensor_parallel_size=2)


def test_an_interrupted_step_ends_all(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C between two sums: the other rank waits for a sum that will never come, and hears of nothing."""
    llm = LLM(folders / "kraken", tensor_parallel_size=2)
    assert llm._workers is not None
    worker = llm._workers._processes[0].pid

    def interrupted(step: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._runner, "run", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("wave")
    assert time.monotonic() - begin < 60
    assert not alive(worker)
    with pytest.raises(InputError, match="closed, or a rank of it has failed"):
        llm.generate("wave")


def test_made_in_a_thread_that_ends(folders: Path) -> None:
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(LLM(folders / "kraken", tensor_parallel_size=2)))
    thread.start()
    thread.join()
    with made[0] as llm:
        assert llm.generate("wave", HOW)


def test_workers_end_with_their_rank_0(folders: Path, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import os, sys, wavetrain as wt\n"
        "llm = wt.LLM(sys.argv[1], tensor_parallel_size=2)\n"
        "print(llm.generate('wave', wt.SamplingParams(max_tokens=3))[0].outputs[0].token_ids)\n"
        "print(llm._workers._processes[0].pid, flush=True)\n"
        "if len(sys.argv) > 2: os._exit(0)\n"
    )
    for more in ((), ("at once",)):
        run = subprocess.run(
            [sys.executable, str(script), str(folders / "kraken"), *more], capture_output=True, text=True, timeout=120, check=True
        )
        worker = int(run.stdout.split()[-1])
        until = time.monotonic() + 20
        while alive(worker):
            assert time.monotonic() < until, "a worker outlived its rank 0"
            time.sleep(0.1)


def test_under_torchrun(folders: Path, tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(
        "import os, sys, wavetrain as wt\n"
        "llm = wt.LLM(sys.argv[1])\n"
        "llm.close()\n"
        "llm = wt.LLM(sys.argv[1])\n"  # a second meeting
        "if os.environ['RANK'] == '0':\n"
        "    try: llm.generate('')\n"
        "    except ValueError: pass\n"
        "else: llm.generate('')\n"  # ends when rank 0's call has
        "for prompt in ('wave', 'train'):\n"
        "    found = llm.generate(prompt, wt.SamplingParams(max_tokens=5, temperature=0))\n"
        "    if os.environ['RANK'] == '0': print(found[0].outputs[0].token_ids, flush=True)\n"
        "    else: assert found == []\n"
        "llm.close()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [*command, str(folders / "kraken")], capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    with LLM(folders / "kraken") as llm:
        params = SamplingParams(max_tokens=5, temperature=0)
        expected = [str(llm.generate(p, params)[0].outputs[0].token_ids) for p in ("wave", "train")]
    assert run.stdout.splitlines() == expected
