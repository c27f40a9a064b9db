"""Two ranks that share models, each pinned to a core: seconds of first tokens and of decoding, with and without messages.

All models take turns in one pair of processes; weights are drawn at random, since time does not depend on them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.namespaces import Link
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from wavetrain.models.config import ModelConfig
from wavetrain.models.registry import build_model
from wavetrain.models.sharding import build_part, share
from wavetrain.serve.ranks import Solo, Team
from wavetrain.serve.runner import Runner
from wavetrain.serve.sampling import Candidates
from wavetrain.serve.steps import Row as StepRow
from wavetrain.serve.steps import Step

PORT = 29633


@dataclass(frozen=True, kw_only=True)
class Job:
    """What two ranks measure."""

    models: dict[str, dict[str, Any]]
    """Name to a model's config, as plain data."""
    contexts: tuple[int, ...] = ()
    """Tokens of a prompt whose first token is timed."""
    batches: tuple[int, ...] = ()
    """Sequences that are decoded together."""
    decode_steps: int = 16
    """A turn; of one sequence, whose steps are short, four times as many."""
    prompt: int = 128
    """Tokens of the prompts of those."""
    repeats: int = 7


Times = dict[str, dict[str, float]]
"""Case (``"first 512"``, ``"decode 8"``) to name to median seconds. Beside ``"name"`` of a model is ``"name, muted"``, without
communication; of first tokens also ``"name, hidden"`` and ``"name, exposed"``: of its sums, behind compute and in its way; and
``"name, messages"``: CPU seconds of the same sums with no compute beside them."""


def measure(link: Link, job: Job) -> Times:
    """Run two ranks over a link."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        spec = json.dumps({**asdict(job), "address": link.address, "local": not link.spaces})
        workers = [
            subprocess.Popen(
                link.command(rank, [sys.executable, str(Path(__file__).resolve()), str(rank), spec, str(out)]),
                env=link.environment(rank),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            errors = [worker.communicate(timeout=3600)[1] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(worker.returncode for worker in workers):
            raise RuntimeError("\n".join(errors))
        found: Times = json.loads(out.read_text())
        return found


class Muted(Solo):
    """A rank among others that does not wait for them: what would be summed is this rank's part alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, found: Candidates, num: int) -> Candidates:
        return found


def rank_main(rank: int, spec: dict[str, Any], out: Path) -> None:
    """One of the two ranks."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = TCPStore(spec["address"], PORT, is_master=rank == 0, wait_for_workers=False)
    rows = max([1, *spec["batches"]])
    length = max([*spec["contexts"], spec["prompt"] + 4 * spec["decode_steps"] + 1])
    team = Team(store, rank=rank, size=2, parts=(1, 1), max_rows=rows, local=spec["local"])
    runners: dict[str, Runner] = {}
    for name, shape in spec["models"].items():
        config = ModelConfig.from_dict(shape)
        sharing = share(config, 2)
        model = build_part(config, sharing, rank, random_weights(config), device=torch.device("cpu"), dtype=torch.float32)
        runners[name] = Runner(model, sharing, team, max_rows=rows, max_length=length)
        muted = Runner(model, sharing, Muted(rank, 2), max_rows=rows, max_length=length)
        muted.cache = runners[name].cache
        runners[f"{name}, muted"] = muted
    barrier = Step((StepRow(0, 0, 1),), (0,))

    def timed(runner: Runner, step: Step) -> float:
        """Rank 0 tells the step, all run it; seconds until the last has done it, which without messages nobody waits for."""
        _tell(team, barrier)  # all begin together
        begin = time.perf_counter()
        _tell(team, step)
        runner.run(step)
        return team.slowest(time.perf_counter() - begin)

    found: dict[str, dict[str, list[float]]] = {}
    for context in spec["contexts"]:
        step = Step((StepRow(0, 0, context),), tuple(i % 200 for i in range(context)))
        for turn in range(spec["repeats"] + 1):
            for name in rotated(list(runners), turn):
                seconds = timed(runners[name], step)
                if turn:
                    found.setdefault(f"first {context}", {}).setdefault(name, []).append(seconds)
        for name, runner in runners.items():
            if "muted" not in name:
                for kind, seconds in sums(team, runner, step, spec["models"][name]).items():
                    found[f"first {context}"][f"{name}, {kind}"] = [seconds]
    for batch in spec["batches"]:
        prompt = spec["prompt"]
        for turn in range(spec["repeats"] + 1):
            for name in rotated(list(runners), turn):
                runner = runners[name]
                fill = Step(tuple(StepRow(i, 0, prompt) for i in range(batch)), (7,) * (batch * prompt))
                if turn == 0:
                    _tell(team, fill)
                    runner.run(fill)
                    continue
                steps = [
                    Step(tuple(StepRow(i, prompt + n, 1) for i in range(batch)), (9,) * batch)
                    for n in range(spec["decode_steps"] * (4 if batch == 1 else 1))
                ]
                seconds = sum(timed(runner, step) for step in steps)
                found.setdefault(f"decode {batch}", {}).setdefault(name, []).append(seconds / len(steps))
    if rank == 0:
        medians = {case: {name: statistics.median(all_) for name, all_ in names.items()} for case, names in found.items()}
        out.write_text(json.dumps(medians))
    team.close()


def sums(team: Team, runner: Runner, step: Step, shape: dict[str, Any]) -> dict[str, float]:
    """What the sums of a step take: see :data:`Times`."""
    team.count_traffic()
    for _ in range(3):
        _tell(team, step)
        runner.run(step)
    assert team.traffic is not None
    told = team.traffic.summary()
    part = torch.zeros(1, len(step.tokens), shape["hidden"])
    begin = time.process_time()
    for _ in range(told["sums"] - 1):  # all but that of the head, which is of one token
        team.start_sum(part).wait()
    cpu = team.slowest(time.process_time() - begin)
    team.count_traffic(on=False)
    return {"hidden": 1e-3 * told["hidden_ms"], "exposed": 1e-3 * told["exposed_ms"], "messages": cpu}


def _tell(team: Team, step: Step) -> None:
    if team.rank == 0:
        team.send_step(step)
    else:
        team.receive_step()


def rotated(names: list[str], turn: int) -> list[str]:
    """Everyone is first, and last, as often as the others."""
    at = turn % len(names)
    return names[at:] + names[:at]


def random_weights(config: ModelConfig) -> Any:
    """Weights by name, drawn as they are asked for."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in build_model(config).named_parameters(remove_duplicate=False)}

    def read(name: str) -> Tensor:
        return torch.ones(shapes[name]) if "norm" in name else torch.randn(shapes[name]) * 0.02

    return read


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)
