"""Distillation: a student learns to say what a teacher says, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from wavetrain.data.batches import Batches
from wavetrain.errors import DivergedError, InputError
from wavetrain.runtime.train.setup import lr_factor


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How a student learns."""

    steps: int = 500
    lr: float = 1e-3
    """The highest learning rate."""
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    teacher_share: float = 0.9
    """Of the loss: how much is the divergence from the teacher; the rest is the data's own next token. 0: no teacher is asked."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.teacher_share <= 1 or not self.lr > 0:
            raise InputError("steps must be at least 1, lr above 0, and teacher_share from 0 to 1")


def distill(
    student: nn.Module,
    teacher: nn.Module | None,
    batches: Batches,
    how: Distillation,
    *,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train ``student`` in place, on the likelihoods of ``teacher`` and on the data.

    Args:
        student: tokens (batch, seq) → logits (batch, seq, vocab).
        teacher: likewise, left as it is; None: the data alone, as any training.
        batches: inputs and targets.
        how: numbers.
        on_step: called with the step, from 1, and its loss in nats a token.

    Returns:
        ``loss`` of the last step, ``steps`` and ``seconds``.
    """
    matrices = [p for p in student.parameters() if p.dim() > 1]
    vectors = [p for p in student.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": how.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=how.lr, betas=(0.9, 0.95), fused=True)
    student.train()
    begin, loss = time.perf_counter(), math.nan
    for step in range(how.steps):
        for group in optimizer.param_groups:
            group["lr"] = how.lr * lr_factor(step, how.warmup, step / how.steps)
        inputs, targets = next(batches)
        cost = _loss(student, teacher, inputs, targets, how.teacher_share)
        cost.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(student.parameters(), how.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = float(cost.detach())
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} at step {step + 1}; lower the learning rate", step=step + 1, ranks=(0,))
        if on_step is not None:
            on_step(step + 1, loss)
    student.eval()
    return {"loss": loss, "steps": how.steps, "seconds": time.perf_counter() - begin}


def _loss(student: nn.Module, teacher: nn.Module | None, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
    logits = student(inputs).flatten(0, 1).float()
    own = cross_entropy(logits, targets.flatten())
    if teacher is None or share == 0:
        return own
    with torch.no_grad():
        wanted = log_softmax(teacher(inputs).flatten(0, 1).float(), -1)
    divergence = kl_div(log_softmax(logits, -1), wanted, log_target=True, reduction="batchmean")
    return share * divergence + (1 - share) * own


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Batches, num: int) -> float:
    """Nats a token over the first ``num`` batches of a stream."""
    total = 0.0
    for position in range(num):
        inputs, targets = batches.at(position)
        total += float(cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten()))
    return total / num
