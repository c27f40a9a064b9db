"""Small language models trained on bytes of a text: what the quality benchmarks share.

Training them all takes hours: see :mod:`benchmarks.kept`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.kept import kept

from wavetrain.data.batches import Batches
from wavetrain.data.tokens import open_data
from wavetrain.models.config import ModelConfig
from wavetrain.models.registry import build_model
from wavetrain.runtime.train.distill import Distillation, distill, mean_loss

DATA = Path(os.environ.get("WAVETRAIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TEXTS = ("war-and-peace", "tinyshakespeare")
HELD_OUT = 0.05


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One model trained on one text."""

    text: str
    shape: dict[str, Any]
    """A model's config, as plain data."""
    seed: int
    steps: int
    lr: float
    batch: int = 8
    seq: int = 128


@lru_cache(maxsize=4)
def parts(text: str, seq: int) -> tuple[Any, Any, str]:
    """What is trained on, what is held out, and what it is called; without the file, the embedded corpus."""
    file = DATA / "text" / f"{text}.txt"
    data = open_data([file] if file.exists() else None)
    kept, held_out = data.split(HELD_OUT)
    return kept, held_out, text if file.exists() else "Python's standard library"


def learn(lesson: Lesson) -> float:
    """Bits per byte on what was held out, after training; one thread."""
    code = ("models/*.py", "data/*.py", "runtime/train/distill.py", "language.py")
    return kept(json.dumps(asdict(lesson), sort_keys=True), code, lambda: _learn(lesson))


def _learn(lesson: Lesson) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(lesson.seed)
    model = build_model(ModelConfig.from_dict(lesson.shape))
    kept, _, _ = parts(lesson.text, lesson.seq)
    batches = Batches(kept, batch=lesson.batch, seq=lesson.seq, seed=lesson.seed)
    distill(model, None, batches, how(lesson.steps, lesson.lr))
    return bits(model, lesson.text, lesson.seq)


def how(steps: int, lr: float, teacher_share: float = 0.0) -> Distillation:
    """Numbers of a training run; without a teacher's share, plain training."""
    return Distillation(steps=steps, lr=lr, warmup=max(1, min(50, steps // 5)), teacher_share=teacher_share)


def bits(model: Any, text: str, seq: int) -> float:
    """Bits per byte on what was held out, at most 65,536 bytes of it."""
    _, held_out, _ = parts(text, seq)
    batches = Batches(held_out, batch=16, seq=seq, shuffle=False)
    num = max(1, min(32, len(held_out) // (16 * seq)))
    model.eval()
    return mean_loss(model, batches, num) / math.log(2)
