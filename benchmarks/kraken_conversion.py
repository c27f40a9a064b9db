"""A GPT becomes a Kraken: bits per byte after a short distillation, against the same budget from scratch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.language import TEXTS, bits, how, parts
from benchmarks.report import Report, Row, main

from wavetrain.data.batches import Batches
from wavetrain.models.config import ModelConfig
from wavetrain.models.conversion import kraken_from
from wavetrain.models.registry import build_model
from wavetrain.runtime.train.distill import distill

TEXT, SEQ = TEXTS[0], 128


def run(quick: bool) -> Report:
    """Conversion."""
    torch.manual_seed(0)
    layers, width, steps, budget = (2, 32, 8, 4) if quick else (5, 128, 800, 200)
    shape = ModelConfig(num_layers=layers, hidden=width, num_heads=4, vocab=256, max_length=SEQ, bias=False)
    kept, _, name = parts(TEXT, SEQ)

    def batches(seed: int) -> Batches:
        return Batches(kept, batch=16, seq=SEQ, seed=seed)

    teacher = build_model(shape)
    distill(teacher, None, batches(0), how(steps, 3e-3))
    rows = [Row(case=f"the GPT, {steps} steps", measured=f"{bits(teacher, TEXT, SEQ):.4f} bits per byte")]
    student = kraken_from(teacher, 2)
    rows.append(Row(case="Kraken N=2 with its weights, not trained", measured=f"{bits(student, TEXT, SEQ):.4f} bits per byte"))
    scratch = build_model(student.config)
    found = {}
    for label, model, share in (("distilled", student, 0.9), ("from scratch", scratch, 0.0)):
        distill(model, teacher, batches(1), how(budget, 3e-3 if share == 0 else 1e-3, share))
        found[label] = bits(model, TEXT, SEQ)
        rows.append(Row(case=f"Kraken N=2 {label}, {budget} steps", measured=f"{found[label]:.4f} bits per byte"))
    rows.append(
        Row(
            case="distilled against from scratch, the same steps",
            target="below 1",
            measured=f"{found['distilled'] / found['from scratch']:.4f}×",
            passed=found["distilled"] < found["from scratch"] * (1.1 if quick else 1.0),
        )
    )
    return Report(
        name="kraken_conversion",
        claim=f"A GPT of {teacher.num_parameters / 1e6:.2f} M parameters, trained on {name}, becomes a Kraken.",
        rows=tuple(rows),
        notes=("A step is 16 sequences of 128 bytes for both; a distilled step also runs the teacher forward.",),
    )


if __name__ == "__main__":
    main(run)
