"""One Kraken of degree 4 on 1, 2, 4 and unequal ranks: the same text, and a KV cache no larger than the standard model's."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.language import TEXTS, how, parts
from benchmarks.report import Report, Row, main

from wavetrain import LLM, SamplingParams
from wavetrain.data.batches import Batches
from wavetrain.models import Kraken
from wavetrain.models.config import DecoderShape, ModelConfig
from wavetrain.models.folders import save_folder
from wavetrain.models.sizes import PUBLISHED, kraken_like
from wavetrain.runtime.train.distill import distill

CLOSE = 1e-5
PROMPTS = ["In the beginning ", "The prince ", "x", "What is the cause of ", "She said "]


def run(quick: bool) -> Report:
    """Elastic degree."""
    torch.manual_seed(0)
    standard = ModelConfig(num_layers=3, hidden=64, num_heads=4, vocab=256, max_length=128)
    model = Kraken.like(standard, degree=4, mode="modern")
    batches = Batches(parts(TEXTS[0], 128)[0], batch=8, seq=64)
    distill(model, None, batches, how(5 if quick else 200, 3e-3))
    params = SamplingParams(max_tokens=8 if quick else 60, temperature=0, logprobs=1)
    found: dict[str, list[tuple[list[int], list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_folder(model, folder)
        for label, options in (
            ("1 rank", {}),
            ("2 ranks", {"tensor_parallel_size": 2}),
            ("4 ranks", {"tensor_parallel_size": 4}),
            ("3 ranks of 2, 1 and 1 sub-layers", {"shares": (2, 1, 1)}),
            ("1 rank, deterministic", {"deterministic": True}),
            ("2 ranks, deterministic", {"tensor_parallel_size": 2, "deterministic": True}),
            ("4 ranks, deterministic", {"tensor_parallel_size": 4, "deterministic": True}),
        ):
            with LLM(folder, **options) as llm:
                outputs = [o.outputs[0] for o in llm.generate(PROMPTS, params)]
            found[label] = [(o.token_ids, [p[t] for p, t in zip(o.logprobs or [], o.token_ids, strict=True)]) for o in outputs]
    rows = []
    for label, texts in found.items():
        exact = "deterministic" in label
        if label.startswith("1 rank"):
            continue
        base = found["1 rank, deterministic" if exact else "1 rank"]
        same = sum(a[0] == b[0] for a, b in zip(texts, base, strict=True))
        off = max(abs(x - y) for a, b in zip(texts, base, strict=True) for x, y in zip(a[1], b[1], strict=False))
        rows.append(
            Row(
                case=f"{label} against 1 rank: greedy text, log-probabilities",
                target="same text, same bits" if exact else f"same text, within {CLOSE:g}",
                measured=f"{same} of {len(texts)} texts the same, log-probabilities within {off:.1e}",
                passed=same == len(texts) and (off == 0 if exact else off <= CLOSE),
            )
        )
    for name, config in PUBLISHED.items():
        for degree in (2, 4, 5):
            if config.num_heads % degree:
                continue
            kraken = kraken_like(name, degree=degree, mode="modern")
            ratio = DecoderShape(kraken).num_kv_elements / DecoderShape(config).num_kv_elements
            paper = DecoderShape(kraken_like(name, degree=degree)).num_kv_elements / DecoderShape(config).num_kv_elements
            rows.append(
                Row(
                    case=f"{name}, N={degree}: KV cache of the modern Kraken over the standard model's",
                    target="≤ 1.00×",
                    measured=f"{ratio:.2f}× (paper mode {paper:.2f}×)",
                    passed=ratio <= 1,
                )
            )
    return Report(
        name="kraken_elastic",
        claim="A Kraken of degree 4 on any number of ranks.",
        rows=tuple(rows),
        notes=(f"{len(PROMPTS)} prompts of unlike lengths together, {params.max_tokens} tokens each, real processes.",),
    )


if __name__ == "__main__":
    main(run)
