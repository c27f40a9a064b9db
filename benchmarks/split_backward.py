"""The split backward's own cost: I and W together against one whole backward by ``torch.Tensor.backward``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.report import Report, Row, main
from torch import Tensor, nn

from wavetrain.models import GPT
from wavetrain.runtime.split import backward_input, edges_of, leaf_nodes

MOST = 1.05


def run(quick: bool) -> Report:
    """I + W."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, tokens, repeats = (64, 64, 3) if quick else (512, 512, 100)
    gpt = GPT(num_layers=2, hidden=hidden, num_heads=8, vocab=256, max_length=tokens, tied=False)
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        f"four Linear({hidden}, {hidden})": (
            nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(4))),
            torch.randn(tokens, hidden),
        ),
        f"an MLP with GELU and LayerNorm, {hidden}": (
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)),
            torch.randn(tokens, hidden),
        ),
        f"two GPT blocks, {hidden}": (gpt[1:3], torch.randn(4, tokens // 4, hidden)),
    }
    rows = []
    for label, (module, x) in cases.items():
        turns = _measure(module, x, repeats)
        whole, first, second = (statistics.median(t) for t in zip(*turns, strict=True))
        ratio = statistics.median((i + w) / b for b, i, w in turns)
        rows.append(
            Row(
                case=label,
                target="" if quick else f"≤ {MOST:.2f}×",
                measured=f"{ratio:.3f}× (I {first * 1e3:.2f} + W {second * 1e3:.2f} ms, B {whole * 1e3:.2f} ms)",
                limit="1.000×",
                distance=f"{ratio - 1:+.1%}",
                passed=True if quick else ratio <= MOST,
            )
        )
    return Report(
        name="split_backward",
        claim=f"I + W against B, {tokens} tokens, one thread.",
        rows=tuple(rows),
        notes=(
            f"The median over {repeats} turns of (I + W) / B, both measured within the turn, in changing order; B is torch's own "
            "whole backward. Seconds are medians of their own.",
        ),
    )


def _measure(module: nn.Module, x: Tensor, repeats: int) -> list[tuple[float, float, float]]:
    """Seconds of B, I and W, a turn each."""
    parameters = list(module.parameters())
    leaves = leaf_nodes(parameters)

    def whole() -> float:
        _, output = _forward(module, x)
        return _seconds(partial(torch.autograd.backward, [output], [torch.ones_like(output)]))

    def split() -> tuple[float, float]:
        given, output = _forward(module, x)
        flow, edges = torch.ones_like(output), edges_of([output])
        start = time.perf_counter()
        _, late = backward_input(edges, [flow], [given], parameters, leaves)
        first = time.perf_counter() - start
        return first, _seconds(late.finish)

    turns = []
    for turn in range(repeats + 2):
        if turn % 2:
            turns.append((whole(), *split()))
        else:
            halves = split()
            turns.append((whole(), *halves))
    return turns[2:]


def _forward(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    given = x.detach().requires_grad_()
    return given, module(given)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(run)
