"""How weights learn from a batch: by a step of AdamW, or by a round of OptEx with several steps.

    ByStep     batch ─► pipe.step ─► unscale ─► clip ─► AdamW
    ByRound    N minibatches ─► N × pipe.step at N points of the way ahead ─► up to N steps of AdamW

The N minibatches of a round are evaluated by N replicas at once, or by one pipeline one after another; the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from wavetrain.data.batches import Batches
from wavetrain.errors import DivergedError
from wavetrain.optim.optex import OptEx
from wavetrain.runtime.pipeline import Pipeline
from wavetrain.runtime.scaling import LossScale
from wavetrain.runtime.train.config import TrainConfig

_FIRST_SCALE: Final = 2.0**16


@dataclass(frozen=True)
class Learned:
    """What came of a batch."""

    loss: float
    norm: float
    """Of the gradients; of a round, at its first point."""
    good: bool
    """Whether all are numbers, and the weights have changed."""
    expected: bool = False
    """Where not good: no surprise, as the range of fp16 is small and the scale can fall."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """More for the metrics."""


class Learner(Protocol):
    """Turns batches into better weights."""

    optimizer: torch.optim.Optimizer
    """Whose state is saved."""

    def learn(self) -> Learned:
        """From the next batch."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain data of where it is, beside weights and optimizer."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state` was taken, weights and optimizer loaded already."""
        ...


def make_learner(pipe: Pipeline, optimizer: torch.optim.Optimizer, batches: list[Batches], config: TrainConfig) -> Learner:
    """As the config says; ``batches`` are those of this rank: one, or those of all minibatches of a round."""
    if config.optex is None:
        return ByStep(pipe, optimizer, batches[0], config)
    return ByRound(pipe, optimizer, batches, config)


class ByStep:
    """One step for every batch."""

    def __init__(self, pipe: Pipeline, optimizer: torch.optim.Optimizer, batches: Batches, config: TrainConfig) -> None:
        self.optimizer = optimizer
        self._pipe, self._batches, self._clip = pipe, batches, config.clip
        self._scaled = config.precision == "fp16"
        self._scale = LossScale(value=_FIRST_SCALE if self._scaled else 1.0)

    def learn(self) -> Learned:
        pipe, scale = self._pipe, self._scale
        loss = float(pipe.step(*next(self._batches), loss_scale=scale.value))
        expected = self._scaled and scale.value > 1.0 and math.isfinite(loss)
        in_range = scale.update(pipe.unscale_(scale.value)) if self._scaled else True
        norm = float(pipe.clip_grad_norm_(self._clip))
        good = in_range and math.isfinite(loss) and math.isfinite(norm)
        if good:
            self.optimizer.step()
        return Learned(loss, norm, good, expected)

    def state(self) -> dict[str, Any]:
        return {"data_position": self._batches.position, "loss_scale": [self._scale.value, self._scale.num_good]}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._batches.position = int(state["data_position"])
        if self._scaled and "loss_scale" in state:
            value, num_good = state["loss_scale"]
            self._scale = LossScale(value=float(value), num_good=int(num_good))


class ByRound:
    """Up to N steps for every N minibatches. What is known of gradients is not saved: after a resume it is learnt anew."""

    def __init__(self, pipe: Pipeline, optimizer: torch.optim.Optimizer, batches: list[Batches], config: TrainConfig) -> None:
        self.optimizer = optimizer
        self._pipe, self._batches, self._config = pipe, batches, config
        self._position = 0
        self._optex = self._make()

    def _make(self) -> OptEx:
        mesh = self._pipe.mesh
        return OptEx(
            self.optimizer,
            parallel=self._config.optex,
            process_group=mesh.group("dp"),
            shard_group=mesh.group("pp"),
            held_elsewhere=self._pipe.parameters_held_before(),
            clip_norm=self._config.clip,
        )

    def learn(self) -> Learned:
        pipe, number = self._pipe, self._pipe.num_steps

        def loss_of(minibatch: int) -> Tensor:
            pipe.num_steps = number  # all minibatches of a round belong to one step
            return pipe.step(*self._batches[minibatch % len(self._batches)].at(position), replica=minibatch)

        position, self._position = self._position, self._position + 1
        try:
            loss = self._optex.step(loss_of)
        except DivergedError:
            return Learned(math.nan, math.nan, good=False)
        found = self._optex.stats.last
        figures = {
            "points": found.num_points,
            "accepted": found.num_accepted,
            "estimator": found.estimator,
            "cosine": sum(found.cosines) / len(found.cosines) if found.cosines else None,
            "estimate_share": found.estimate_share,
        }
        return Learned(loss, found.gradient_norm, good=True, figures=figures)

    def state(self) -> dict[str, Any]:
        return {"data_position": self._position}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._position = int(state["data_position"])
        self._optex = self._make()
