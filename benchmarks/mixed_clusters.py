"""Plans for unlike machines, run for real: what was predicted, what was measured, and what was gained over an even split.

Emulated: ranks of the speed and links of real devices, in real processes with real messages, up to 16 of them; compute is
waiting. Real: two ranks that compute, one of them held to half of a core by a cgroup (where that is allowed). Network: two
ranks in network namespaces of their own, with a rate-limited link between them (where that is allowed).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.namespaces import Link, limited
from benchmarks.report import Report, Row, main, percent

from wavetrain.cluster import load_cluster
from wavetrain.models import GPT
from wavetrain.plan.calibration import shipped
from wavetrain.plan.cut import best_cut
from wavetrain.plan.estimate import CostModel
from wavetrain.plan.layout import even_cut
from wavetrain.plan.planner import make_plan
from wavetrain.plan.search import Candidate
from wavetrain.plan.shapes import Limits
from wavetrain.plan.sources import Sources
from wavetrain.plan.staging import stage
from wavetrain.runtime.launch import launch
from wavetrain.runtime.mesh import join
from wavetrain.runtime.pipeline import Pipeline
from wavetrain.runtime.profiling import measure_layers
from wavetrain.runtime.rehearsal import rehearse
from wavetrain.schedule.costs import Costs, square
from wavetrain.schedule.families import build
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.workload import load_workload

CLUSTERS = {
    "2 V100 + 2 T4, 10 Gbit/s": ("1 x 2 x V100-16 + 1 x 2 x T4-16", "gpt2-medium", 16),
    "4 A100 + 4 V100": ("1 x 4 x A100-80 + 1 x 4 x V100-16", "gpt2-large", 16),
    "8 A100 + 4 V100 + 4 T4": ("1 x 8 x A100-80 + 1 x 4 x V100-16 + 1 x 4 x T4-16", "gpt2-xl", 32),
}
STEP_SECONDS = 2.0
"""The planned step is scaled to about so long: 16 processes share two cores, which take their part of a shorter one."""
MESSAGE_BYTES = 65536.0
ERROR = 0.05
CGROUPS = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True)
class Side:
    """One way to split, with what it is predicted to take."""

    name: str
    schedule: Schedule
    costs: Costs
    predicted: float


def run(quick: bool) -> Report:
    """Emulated clusters, real compute, a real link."""
    rows: list[Row] = []
    notes: list[str] = []
    for name in list(CLUSTERS)[: 1 if quick else None]:
        rows += _emulated(name, quick)
    real, why = _real(quick)
    rows += real
    notes += [why] if why else []
    link, why = _network(quick)
    rows += link
    notes += [why] if why else []
    return Report(
        name="mixed_clusters",
        claim="Plans for unlike machines, run for real beside an even split.",
        rows=tuple(rows),
        notes=(
            "Even split: Megatron's even cut, on the same devices in the same order, with 1F1B. Both in turns, medians.",
            "Predicted without a look at this machine (its hops and overheads are part of the error).",
            *notes,
        ),
    )


def _near(ratio: float, quick: bool) -> bool:
    """Whether measured over predicted is as it should be; quick runs on a busy machine only say that it is not far off."""
    return 0.25 <= ratio <= 4 if quick else abs(ratio - 1) <= ERROR


def _emulated(name: str, quick: bool) -> list[Row]:
    words, preset, batch = CLUSTERS[name]
    cluster = load_cluster(words)
    model = CostModel(workload=load_workload(preset, precision="fp16"), calibration=shipped(), overlaps=True)
    limits = Limits(dp=(1,), tp=(1,), leave_out=False, recompute=("none", "full"), sharded_optimizer=(False,))
    plan = make_plan(model, cluster, batch, Sources(model=preset, cluster=words), limits).best
    schedule, costs = plan.pipeline()
    even = _even(plan.micro_batch, plan.recompute, model, words, batch)
    factor = (0.2 if quick else STEP_SECONDS) / simulate(schedule, costs).makespan
    sides = []
    for label, s, c in (("planned", schedule, costs), ("even", even.schedule, even.costs)):
        slow = c.scaled(factor, MESSAGE_BYTES / max(c.message_bytes[:-1]))
        sides.append(Side(label, s, slow, simulate(s, slow).makespan))
    measured = _rehearsed(sides, 1 if quick else 3)
    rows = []
    for side, seconds in zip(sides, measured, strict=True):
        error = seconds / side.predicted - 1
        rows.append(
            Row(
                case=f"{name}, {side.name} ({side.schedule.name}, {side.schedule.num_ranks} ranks): measured over predicted",
                target=f"within {percent(ERROR, 0)}",
                measured=f"{error:+.1%} ({side.predicted:.3f} → {seconds:.3f} s)",
                passed=_near(1 + error, quick),
            )
        )
    promised, gained = sides[1].predicted / sides[0].predicted, measured[1] / measured[0]
    rows.append(
        Row(
            case=f"{name}: planned over even split",
            target=f"{promised:.2f}× ± 5 %",
            measured=f"{gained:.2f}×",
            passed=_near(gained / promised, quick),
        )
    )
    return rows


def _even(micro_batch: int, recompute: Any, model: CostModel, words: str, batch: int) -> Side:
    """Megatron's even cut with 1F1B on the devices in the order of the cluster."""
    from wavetrain.plan.estimate import Strategy
    from wavetrain.plan.placement import layouts

    groups = load_cluster(words).groups
    ranks = sum(g.num_devices for g in groups)
    layout = next(lay for lay in layouts(groups, 1, ranks, 1) if (np.diff(lay.group[:, 0]) >= 0).all())
    strategy = Strategy(micro_batch=micro_batch, num_micro_batches=(batch // micro_batch,), recompute=recompute)
    cut = even_cut(model.workload.num_layers, ranks)
    found = stage(Candidate(layout=layout, cut=cut, strategy=strategy, estimate=model.estimate(layout, cut, strategy)), model)
    assert found is not None, "it fits"
    return Side("even", found.schedule, replace(found.costs, memory_cap=(math.inf,) * ranks), found.pipeline_seconds)


def _rehearsed(sides: Sequence[Side], rounds: int) -> list[float]:
    """Median step of every side, in turns."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for found, side in zip(seconds, sides, strict=True):
            found += rehearse(side.schedule, side.costs, steps=2, warmup=1).step_seconds
    return [statistics.median(found) for found in seconds]


# real compute: two ranks, the second held to half of a core


SHAPE: dict[str, Any] = {"num_layers": 10, "hidden": 256, "num_heads": 8, "vocab": 256, "max_length": 128}
COUNT = 8
QUOTA = 0.5


def _real(quick: bool) -> tuple[list[Row], str]:
    if not os.access(CGROUPS, os.W_OK) or os.geteuid() != 0:
        return [], "No cgroup may be made here: real compute with one slowed rank was not run."
    folder = CGROUPS / f"wavetrain-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("5000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(5000 * QUOTA)))
    except OSError as problem:
        shutil.rmtree(folder, ignore_errors=True)
        return [], f"No cgroup may be made here ({problem.strerror}): real compute with one slowed rank was not run."
    try:
        found = launch(_compute, ranks=2, args=(str(folder), 1 if quick else 12))
    finally:
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    rows = []
    for name in ("planned", "even"):
        error = found[f"{name} measured"] / found[f"{name} predicted"] - 1
        rows.append(
            Row(
                case=f"real compute, one rank at half a core, {name} {found[f'{name} cut']}: measured over predicted",
                target=f"within {percent(ERROR, 0)}",
                measured=f"{error:+.1%} ({found[f'{name} predicted']:.3f} → {found[f'{name} measured']:.3f} s)",
                passed=_near(1 + error, quick),
            )
        )
    promised = found["even predicted"] / found["planned predicted"]
    gained = found["even measured"] / found["planned measured"]
    rows.append(
        Row(
            case="real compute: planned over even split",
            target=f"{promised:.2f}× ± 5 %",
            measured=f"{gained:.2f}×",
            passed=_near(gained / promised, quick),
        )
    )
    low, high = min(found["drift"]), max(found["drift"])
    return rows, f"Real compute: between its steps, the layers took {low:.2f} to {high:.2f} of what they took before the first."


def _compute(folder: str, steps: int) -> dict[str, Any]:
    """On each of two ranks: measure the layers, cut by them, and run both cuts in turns, with more measurements between them.

    The speed of the machine drifts by more than the five percent in question, within minutes: the cut is chosen by the first
    measurement alone, but what a step should take is predicted from all of them.
    """
    join()
    rank = dist.get_rank()
    torch.set_num_threads(1)
    if rank == 1:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    torch.manual_seed(0)
    layers = list(GPT(**SHAPE))
    quick = steps == 1
    profiles = [_profile(layers, 1 if quick else 4)]
    both = profiles[0].sum(axis=2)
    cut = best_cut([both[0], both[1]], [np.zeros(len(layers))], COUNT)
    assert cut is not None
    cuts = {"planned": cut.points, "even": (0, len(layers) // 2, len(layers))}
    pipes = {
        name: Pipeline(
            GPT(**SHAPE), schedule="1f1b", num_micro_batches=COUNT, loss_fn=_loss, cut=[b - a for a, b in pairwise(points)]
        )
        for name, points in cuts.items()
    }
    inputs = torch.randint(0, 256, (4 * COUNT, 128))
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for step in range(steps + 1):
        for name, pipe in pipes.items():
            dist.barrier()
            begin = time.perf_counter()
            pipe.step(inputs, inputs)
            dist.barrier()
            if step >= 1:
                seconds[name].append(time.perf_counter() - begin)
            for parameter in pipe.parameters():
                parameter.grad = None
        if not quick and step >= 1 and step % 2 == 0:
            profiles.append(_profile(layers, 4))
    times = np.median(np.stack(profiles), axis=0)
    result: dict[str, Any] = {}
    for name, points in cuts.items():
        forward = [float(times[k, a:b, 0].sum()) for k, (a, b) in enumerate(pairwise(points))]
        backward = [float(times[k, a:b, 1].sum()) for k, (a, b) in enumerate(pairwise(points))]
        costs = replace(
            Costs.uniform(2),
            forward=tuple(forward),
            backward_input=tuple(b / 2 for b in backward),
            backward_weight=tuple(b / 2 for b in backward),
            divisible=False,
            latency=square(2, 3e-4),
        )
        result[f"{name} predicted"] = simulate(build("1f1b", num_ranks=2, num_micro_batches=COUNT), costs).makespan
        result[f"{name} measured"] = statistics.median(seconds[name])
        result[f"{name} cut"] = [b - a for a, b in pairwise(points)]
    result["drift"] = [float(p.sum() / profiles[0].sum()) for p in profiles]
    return result


def _profile(layers: Sequence[torch.nn.Module], repeats: int) -> Any:
    """Seconds of every layer on both ranks, measured at the same time: (2, num_layers, 2), forward and backward."""
    times = torch.zeros(2, len(layers), 2, dtype=torch.float64)
    dist.barrier()
    found = measure_layers(layers, torch.randint(0, 256, (4, 128)), repeats=repeats)
    for i, one in enumerate(found):
        times[dist.get_rank(), i] = torch.tensor([one.forward_seconds, one.backward_seconds])
    dist.all_reduce(times)
    return times.numpy()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# a real link between two network namespaces

RATE_MBIT = 200
NETWORK_BYTES = 2**20


def _network(quick: bool) -> tuple[list[Row], str]:
    with limited(RATE_MBIT) as (link, why):
        return ([], why) if link is None else (_over_link(link, quick), "")


def _link_costs() -> Costs:
    """Two ranks of 60 ms a micro-batch and direction, and messages of a mebibyte over the link."""
    costs = Costs.uniform(2, forward=0.06, backward_input=0.06, backward_weight=0.06)
    return replace(
        costs,
        message_bytes=(float(NETWORK_BYTES),) * 2,
        divisible=False,
        bandwidth=square(2, RATE_MBIT * 1e6 / 8),
    )


def _over_link(link: Link, quick: bool) -> list[Row]:
    costs = _link_costs()
    rows = []
    for name, count in (("1f1b", 8),) if quick else (("1f1b", 8), ("gpipe", 8)):
        predicted = simulate(build(name, num_ranks=2, num_micro_batches=count), costs).makespan
        free = simulate(build(name, num_ranks=2, num_micro_batches=count), replace(costs, bandwidth=square(2, math.inf))).makespan
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            script = Path(__file__).resolve()
            workers = []
            for rank in range(2):
                environment = {
                    **link.environment(rank),
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": link.address,
                    "MASTER_PORT": "29577",
                }
                command = link.command(rank, [sys.executable, str(script), "--link-rank", name, str(count), str(out)])
                workers.append(
                    subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                )
            errors = [worker.communicate(timeout=300)[1] for worker in workers]
            if any(worker.returncode for worker in workers):
                raise RuntimeError("\n".join(errors))
            seconds = statistics.median(json.loads(out.read_text()))
        error = seconds / predicted - 1
        rows.append(
            Row(
                case=f"{name} over a link of {RATE_MBIT} Mbit/s between two network namespaces: measured over predicted",
                target=f"within {percent(ERROR, 0)}",
                measured=f"{error:+.1%} ({predicted:.3f} → {seconds:.3f} s; with a free link {free:.3f} s)",
                passed=_near(1 + error, quick),
            )
        )
    return rows


def link_rank(name: str, count: int, out: str) -> None:
    """One rank of the rehearsal over the link: the costs' own links are free, the real one is not."""
    from wavetrain.runtime.rehearsal import rehearse_rank

    costs = replace(_link_costs(), bandwidth=square(2, math.inf))
    schedule = build(name, num_ranks=2, num_micro_batches=count)
    found = rehearse_rank((schedule,), costs, 5, 120.0)
    if os.environ["RANK"] == "0":
        run = found["runs"][0]
        ends = [max(moments[-1][2] for moments in ranks) for ranks in run["steps"]]
        Path(out).write_text(json.dumps([end - start for end, start in zip(ends, run["starts"], strict=True)][1:]))


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--link-rank":
        link_rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        os._exit(0)  # not through the interpreter's end, where a thread of Gloo's that is still there aborts it
    else:
        main(run)
