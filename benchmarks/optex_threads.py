"""The four gradients of a round, evaluated one after another, by threads, or by ``torch.vmap``: seconds of the same work.

Networks of benchmarks/optex_networks.py and a GPT of a million parameters; every way has all cores.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.optex_networks import task_of
from benchmarks.report import Report, Row, main
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from wavetrain.models import GPT
from wavetrain.optim import OptEx

PARALLEL = 4


def run(quick: bool) -> Report:
    """Ways to evaluate."""
    torch.manual_seed(0)
    cases: list[tuple[str, nn.Module, Tensor, Tensor, int]] = []
    for name in ("MNIST",) if quick else ("MNIST", "Shakespeare"):
        cases += [(name, *task_of(name), batch) for batch in ((32,) if quick else (128, 1024))]
    if not quick:
        tokens = torch.randint(256, (1000, 65))
        gpt = GPT(num_layers=4, hidden=128, num_heads=4, vocab=256, max_length=64)
        cases.append(("GPT of a million", gpt, tokens[:, :-1], tokens[:, 1:], 32))
    rows = [_case(*case, repeats=1 if quick else 9, quick=quick) for case in cases]
    return Report(
        name="optex_threads",
        claim=f"Seconds in which {PARALLEL} gradients at {PARALLEL} points are computed, {torch.get_num_threads()} cores.",
        rows=tuple(rows),
        notes=(
            "One after another and threads: what OptEx says evaluation took, of the same rounds; medians, in turns. "
            "vmap: torch.func.vmap over stacked copies of the model, without OptEx.",
        ),
    )


def _case(name: str, model: nn.Module, x: Tensor, y: Tensor, batch: int, *, repeats: int, quick: bool) -> Row:
    chosen = [torch.randint(len(x), (batch,)) for _ in range(PARALLEL)]

    def loss(i: int, model: Any) -> Tensor:
        return nn.functional.cross_entropy(model(x[chosen[i]]).flatten(0, -2), y[chosen[i]].flatten())

    def optex(threads: int) -> Callable[[], float]:
        own = copy.deepcopy(model)
        opt = OptEx(torch.optim.SGD(own.parameters(), lr=1e-3), parallel=PARALLEL, model=own, threads=threads)

        def once() -> float:
            opt.step(loss)
            return opt.stats.last.evaluate_seconds

        return once

    ways = {"one after another": optex(1), "threads": optex(torch.get_num_threads()), "vmap": _vmap(model, x, y, chosen)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap tells that attention has no batching rule
        for turn in range(repeats + 2):
            for way, once in ways.items():
                took = once()
                if turn > 1 or quick:
                    seconds[way].append(took)
    median = {way: statistics.median(all_) for way, all_ in seconds.items()}
    ratio = median["one after another"] / median["threads"]
    return Row(
        case=f"{name}, minibatches of {batch}: threads against one after another",
        target="≥ 1×",
        measured=f"{ratio:.2f}× (" + ", ".join(f"{way} {1e3 * s:.0f} ms" for way, s in median.items()) + ")",
        limit=f"{min(PARALLEL, torch.get_num_threads())}×, if one after another used one core",
        passed=ratio > 0.05 if quick else ratio >= 1,
    )


def _vmap(model: nn.Module, x: Tensor, y: Tensor, chosen: list[Tensor]) -> Callable[[], float]:
    stacked, _ = stack_module_state([copy.deepcopy(model) for _ in chosen])
    xs, ys = torch.stack([x[rows] for rows in chosen]), torch.stack([y[rows] for rows in chosen])

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x,)).flatten(0, -2), y.flatten())

    def once() -> float:
        begin = time.perf_counter()
        vmap(grad_and_value(loss))(stacked, xs, ys)
        return time.perf_counter() - begin

    return once


if __name__ == "__main__":
    main(run)
