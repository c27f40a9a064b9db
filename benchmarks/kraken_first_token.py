"""Time to first token of Kraken, standard tensor parallel, parallel and Ladder blocks: two ranks, one core each."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.namespaces import LOOPBACK, limited
from benchmarks.report import Report, Row, main
from benchmarks.tensor_ranks import Job, Times, measure

from wavetrain.models.config import ModelConfig
from wavetrain.models.sizes import PUBLISHED, kraken_like, num_parameters

PAPER_GAIN = 1.356
"""The mean over models and contexts on the paper's hardware (arXiv 2408.07802)."""
NEAR_BOUND = 1.05
RATE_MBIT = 1000
STANDARD = "standard"
OTHERS = ("parallel", "Ladder")
KRAKENS = ("Kraken, modern", "Kraken, paper")


def shapes(quick: bool) -> dict[str, ModelConfig]:
    """Models of as many parameters: GPT-2's 124 M."""
    standard = PUBLISHED["gpt2"]
    if quick:
        standard = ModelConfig(num_layers=3, hidden=64, num_heads=4, vocab=256, max_length=128)
    values = {**standard.to_dict(), "bias": False}
    return {
        STANDARD: ModelConfig(**values),
        "parallel": ModelConfig(**{**values, "name": "parallel"}),
        "Ladder": ModelConfig(**{**values, "name": "ladder"}),
        KRAKENS[0]: kraken_like(standard, degree=2, mode="modern"),
        KRAKENS[1]: kraken_like(standard, degree=2, mode="paper"),
    }


def mean(times: Times, top: str, below: str) -> float:
    """The geometric mean over contexts of ``top`` over ``below``."""
    ratios = [names[top] / names[below] for names in times.values()]
    return math.prod(ratios) ** (1 / len(ratios))


def run(quick: bool) -> Report:
    """First tokens."""
    models = shapes(quick)
    contexts = (16, 64) if quick else (128, 512, 1024)
    job = Job(models={n: c.to_dict() for n, c in models.items()}, contexts=contexts, repeats=2 if quick else 5)
    rows: list[Row] = []
    notes = [
        "Compared are "
        + ", ".join(f"{name} ({num_parameters(config) / 1e6:.1f} M, width {config.hidden})" for name, config in models.items())
        + ": the same code, kernels and collectives; all take turns, and each case is a median.",
        "The bound is the same model with sums that do not wait for the other rank. First token: from rank 0's first word to the "
        "drawn token, one sequence, two processes with one thread and one core each.",
        "Sums hidden: under way while the model computed; exposed: the model waited for them, copied or added. CPU alone: what "
        "the same sums take of a rank's only core with nothing beside them; no overlap can hide that from the one core.",
    ]
    with limited(RATE_MBIT) as (link, why):
        if link is None or quick:
            notes.append(why or "A quick run is on loopback only.")
        else:
            rows += _rows(measure(link, job), link.label, PAPER_GAIN, quick)
    rows += _rows(measure(LOOPBACK, job), LOOPBACK.label, 1.0, quick)
    return Report(
        name="kraken_first_token",
        claim=f"Time to first token, 2 ranks, contexts {', '.join(map(str, contexts))}, fp32.",
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _rows(times: Times, label: str, gain: float, quick: bool) -> list[Row]:
    rows = []
    for case, names in times.items():
        context = case.split()[1]
        every = (STANDARD, *OTHERS, *KRAKENS)
        measured = ", ".join(f"{n} {_ms(names, n)} ({_ms(names, f'{n}, muted')})" for n in every)
        rows.append(Row(case=f"{label}, context {context}: ms (without communication)", measured=measured))
        measured = ", ".join(
            f"{n} {' / '.join(_ms(names, f'{n}, {kind}') for kind in ('hidden', 'exposed', 'messages'))}" for n in every
        )
        rows.append(Row(case=f"{label}, context {context}: ms of sums hidden / exposed / CPU alone", measured=measured))
    for kraken in KRAKENS:
        found = mean(times, STANDARD, kraken)
        best = mean(times, STANDARD, f"{kraken}, muted")
        rows.append(
            Row(
                case=f"{label}: {kraken} against standard tensor parallel, geometric mean",
                target=f"≥ {gain:.3f}×",
                measured=f"{found:.3f}×",
                limit=f"{best:.3f}×",
                distance=f"{best / found - 1:.1%}",
                passed=_verdict(found >= gain, found > 0.2, quick),
            )
        )
        bound = mean(times, kraken, f"{kraken}, muted")
        work = mean(times, f"{kraken}, messages", f"{kraken}, muted")
        rows.append(
            Row(
                case=f"{label}: {kraken} over its own no-communication bound, geometric mean",
                target=f"≤ {NEAR_BOUND:.2f}×",
                measured=f"{bound:.3f}× (CPU of its messages alone: {work:.1%} of the bound)",
                limit="1.000×",
                distance=f"{bound - 1:.1%}",
                passed=_verdict(bound <= NEAR_BOUND, bound < 50, quick),
            )
        )
        for rival in OTHERS if gain > 1 or quick else ():
            ratio = mean(times, rival, kraken)
            rows.append(
                Row(
                    case=f"{label}: {kraken} against {rival}, geometric mean",
                    target="≥ 1.000×",
                    measured=f"{ratio:.3f}×",
                    passed=_verdict(ratio >= 1, ratio > 0.2, quick),
                )
            )
    return rows


def _ms(names: dict[str, float], name: str) -> str:
    return f"{names[name] * 1e3:.1f}"


def _verdict(full: bool, rough: bool, quick: bool) -> bool:
    """A quick run, of tiny models on a busy machine, only fails by a factor."""
    return rough if quick else full


def models_as_data(quick: bool) -> dict[str, dict[str, Any]]:
    """The models of this comparison as plain data."""
    return {name: config.to_dict() for name, config in shapes(quick).items()}


if __name__ == "__main__":
    main(run)
