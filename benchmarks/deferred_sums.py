"""What a sum over two ranks adds to the compute it hides behind: by wires, and by Gloo's threads.

Two ranks, one core each, on the loopback device. A sum is started, a product of about two milliseconds is computed, the sum is
waited for; the same without a sum is subtracted.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from benchmarks.report import Report, Row, main
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from wavetrain.runtime.launch import launch
from wavetrain.runtime.mesh import join
from wavetrain.serve.ranks import Team

SIZES = (768, 24_576, 98_304, 786_432)
"""fp32 numbers: of one token, 32, 128 and 1,024 tokens of GPT-2's width."""
KINDS = ("none", "wires", "Gloo")

Found = dict[str, dict[str, float]]
"""KB to kind to median seconds of a turn."""


def _ranks(repeats: int) -> Found:
    """One of two ranks; what the slower one took."""
    join()
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    team = Team(PrefixStore("sums", store), rank=rank, size=2, parts=(1, 1), max_rows=1)
    a, b = torch.randn(128, 768), torch.randn(768, 768)
    found: Found = {}
    with torch.inference_mode():
        for size in SIZES:
            part, copy = torch.randn(1, size), torch.empty(size)

            def gloo(part: Tensor = part, copy: Tensor = copy) -> Callable[[], object]:
                copy.copy_(part[0])
                work: Any = dist.all_reduce(copy, async_op=True)
                return lambda: work.wait()

            def wires(part: Tensor = part) -> Callable[[], object]:
                return team.start_sum(part).wait

            starts: dict[str, Callable[[], Callable[[], object]]] = {"none": lambda: lambda: None, "wires": wires, "Gloo": gloo}
            seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(repeats + 2):
                for kind in KINDS:
                    team.slowest(0.0)  # both begin together
                    begin = time.perf_counter()
                    wait = starts[kind]()
                    torch.mm(a, b)
                    wait()
                    took = team.slowest(time.perf_counter() - begin)
                    if turn > 1:
                        seconds[kind].append(took)
            found[f"{4 * size / 1024:,.0f}"] = {kind: statistics.median(all_) for kind, all_ in seconds.items()}
    team.close()
    return found


def run(quick: bool) -> Report:
    """Sums."""
    found = launch(_ranks, ranks=2, args=(3 if quick else 200,))
    rows = []
    for size, seconds in found.items():
        added = {kind: 1e3 * (seconds[kind] - seconds["none"]) for kind in KINDS[1:]}
        rows.append(
            Row(
                case=f"{size} KB behind {1e3 * seconds['none']:.2f} ms of compute",
                target="wires ≤ Gloo",
                measured=f"wires +{added['wires']:.2f} ms, Gloo +{added['Gloo']:.2f} ms",
                limit="+0 ms",
                passed=quick or added["wires"] <= added["Gloo"],
            )
        )
    return Report(
        name="deferred_sums",
        claim="What a sum over two ranks adds to the compute that it hides behind.",
        rows=tuple(rows),
        notes=("Medians of the slower rank's time, one core a rank, loopback; the three kinds take turns.",),
    )


if __name__ == "__main__":
    main(run)
