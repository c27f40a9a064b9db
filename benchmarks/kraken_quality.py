"""Quality at equal size: Kraken, GPT, parallel and Ladder blocks trained on the same bytes with the same seeds."""

from __future__ import annotations

import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.language import TEXTS, Lesson, learn, parts
from benchmarks.namespaces import LOOPBACK, limited
from benchmarks.report import Report, Row, main
from benchmarks.tensor_ranks import Job, measure

from wavetrain.files import write_text
from wavetrain.models.config import ModelConfig
from wavetrain.models.sizes import kraken_like, num_parameters
from wavetrain.view.chart import line_chart

MOST = 1.01
"""Of GPT's bits per byte."""
SIZES = {
    "1 M": (ModelConfig(num_layers=5, hidden=128, num_heads=4, vocab=256, max_length=128), 300, 3e-3),
    "6 M": (ModelConfig(num_layers=8, hidden=256, num_heads=8, vocab=256, max_length=128), 100, 2e-3),
}
"""The standard model, steps of 1,024 bytes, learning rate: the same for all models of a size."""
SEEDS = 3
ROTARY = "GPT, rotary"
"""The positions of modern Krakens: the control that is like them in all else."""
PLOT = Path(__file__).resolve().parent / "plots" / "kraken_quality.svg"


def models(standard: ModelConfig) -> dict[str, ModelConfig]:
    """Models of as many parameters."""
    values = {**standard.to_dict(), "bias": False}
    rotary = {"positions": "rotary"}
    return {
        "GPT": ModelConfig(**values),
        ROTARY: ModelConfig(**{**values, **rotary}),
        "parallel": ModelConfig(**{**values, "name": "parallel"}),
        "Ladder": ModelConfig(**{**values, "name": "ladder"}),
        **{f"Kraken N={n}, {mode}": kraken_like(standard, degree=n, mode=mode) for n in (2, 4) for mode in ("paper", "modern")},
    }


def run(quick: bool) -> Report:
    """Bits per byte."""
    sizes = {"tiny": (ModelConfig(num_layers=2, hidden=32, num_heads=4, vocab=256, max_length=128), 8, 3e-3)} if quick else SIZES
    texts, seeds = (TEXTS[:1], 1) if quick else (TEXTS, SEEDS)
    rows: list[Row] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for size, (standard, steps, lr) in sizes.items():
            configs = models(standard)
            lessons = {
                (name, text, seed): Lesson(text=text, shape=config.to_dict(), seed=seed, steps=steps, lr=lr)
                for seed in range(seeds)
                for text in texts
                for name, config in configs.items()
            }
            found = dict(zip(lessons, pool.map(learn, lessons.values()), strict=True))
            rows += _rows(size, configs, texts, seeds, found, quick)
            if size == list(sizes)[-1] and not quick:
                last = configs, {name: _mean(found, name, texts, seeds) for name in configs}
    if not quick:
        rows += _plot(*last)
    return Report(
        name="kraken_quality",
        claim="Bits per byte on held-out text, models of equal size on the same bytes.",
        rows=tuple(rows),
        notes=(
            f"{seeds} seeds; texts: {', '.join(parts(t, 128)[2] for t in texts)}; sequences of 128 bytes, 8 a step, AdamW, "
            + "; ".join(f"{size}: {steps} steps, rate {lr:g}" for size, (_, steps, lr) in sizes.items())
            + ". Spread: the standard deviation over seeds, mean of the texts.",
            "Most of what modern Krakens gain over GPT is their rotary positions. Against a GPT with the same positions (learned "
            "for paper, rotary for modern) nothing but the architecture differs.",
            *(() if quick else (f"[Quality against time to first token](plots/{PLOT.name}), two ranks, context 128.",)),
        ),
    )


def _mean(found: dict[tuple[str, str, int], float], name: str, texts: tuple[str, ...], seeds: int) -> float:
    return statistics.mean(found[name, text, seed] for text in texts for seed in range(seeds))


def _rows(
    size: str,
    configs: dict[str, ModelConfig],
    texts: tuple[str, ...],
    seeds: int,
    found: dict[tuple[str, str, int], float],
    quick: bool,
) -> list[Row]:
    base = _mean(found, "GPT", texts, seeds)
    rows = []
    for name, config in configs.items():
        spreads = [statistics.stdev([found[name, text, s] for s in range(seeds)]) if seeds > 1 else 0.0 for text in texts]
        each = ", ".join(f"{text} {statistics.mean(found[name, text, s] for s in range(seeds)):.4f}" for text in texts)
        mean = _mean(found, name, texts, seeds)
        rows.append(
            Row(
                case=f"{size}, {name} ({num_parameters(config) / 1e6:.3f} M, width {config.hidden})",
                measured=f"{mean:.4f} ± {statistics.mean(spreads):.4f} ({each}); {mean / base:.4f}× GPT",
            )
        )
    for n in (2, 4):
        modes = {mode: _mean(found, f"Kraken N={n}, {mode}", texts, seeds) for mode in ("paper", "modern")}
        alike = {"paper": modes["paper"] / base, "modern": modes["modern"] / _mean(found, ROTARY, texts, seeds)}
        for what, ratios in (
            ("GPT", {mode: mean / base for mode, mean in modes.items()}),
            ("a GPT with the same positions", alike),
        ):
            best = min(ratios, key=lambda mode: ratios[mode])
            rows.append(
                Row(
                    case=f"{size}: best Kraken of N={n} ({best}) against {what}",
                    target=f"≤ {MOST:.2f}×",
                    measured=", ".join(f"{mode} {ratio:.4f}×" for mode, ratio in ratios.items()),
                    passed=ratios[best] < 2 if quick else ratios[best] <= MOST,
                )
            )
    return rows


def _plot(configs: dict[str, ModelConfig], quality: dict[str, float]) -> list[Row]:
    """Time to first token of the larger models, beside their quality."""
    two = {name: config for name, config in configs.items() if config.degree in (None, 2)}
    job = Job(models={n: c.to_dict() for n, c in two.items()}, contexts=(128,), repeats=15)
    with limited(1000) as (link, _):
        times = measure(link or LOOPBACK, job)["first 128"]
        label = (link or LOOPBACK).label
    points = {name: [(1e3 * times[name], quality[name])] for name in two}
    chart = line_chart(
        points,
        title="Quality against time to first token",
        x_label=f"ms, 2 ranks, {label}",
        y_label="bits per byte",
        y_from_zero=False,
    )
    write_text(PLOT, chart)
    return [
        Row(case=f"6 M, {name}: time to first token, 2 ranks, {label}, context 128", measured=f"{1e3 * times[name]:.2f} ms")
        for name in two
    ]


if __name__ == "__main__":
    main(run)
