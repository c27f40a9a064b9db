"""Settling: how far a round goes, after its steps, towards where the loss is least on the ways between known points.

The quadratic model says which way δ that is, and by how much the loss falls along it at first: a = −ĝ·δ. After a share s of it
the loss would still fall by a·(1 − s). What it does there, b = −g·δ, the next round's first gradient g says, whose noise the
model has not seen. So of the fall that was promised, s + b / a was there: all of it where the model is right, nothing where it
has fitted noise. The next round goes as far as lately was worth it.

Where weights decay, the loss alone does not say where they are to end: no settling where decay pulls as much as a tenth of what
the loss does. Decay that is part of the gradient, of strength λ, pulls by λ·θ·δ, against a; decay beside it, by what it moved
weights along δ, against what rounds moved them in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

MOST: Final = 0.75
"""How much of the way is gone."""
WORTH: Final = 0.5
"""What was there of the fall that was promised, lately, from which the whole of it is gone; below, less."""
MEMORY: Final = 0.8
"""How much a round still counts a round later."""
SLIGHT: Final = 0.1
"""Of what the loss does to weights along the way, what decay may do."""
BESIDE: Final = (Muon, Adafactor)
"""Optimizers whose decay is no part of the gradient; others say so of each group, or not."""
KNOWN: Final = (*BESIDE, SGD, ASGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop)
"""Optimizers of which it is known how weights decay."""


@dataclass(frozen=True)
class Gone:
    """A way that the last round went in the end."""

    way: Tensor
    """δ, all of it, at the coordinates (c,) that distances are measured on."""
    fall: float
    """a, by which the loss was to fall along it."""
    share: float
    """s, of the way that takes a to 0."""


class Settling:
    """What settling was worth, and the way that was gone last."""

    def __init__(self) -> None:
        self._worth = self._weight = 1.0
        self._pulled = self._moved = 0.0
        self.gone: Gone | None = None

    @property
    def share(self) -> float:
        """Of the way to the least loss, what is to be gone."""
        return MOST * min(1.0, max(0.0, self._worth / self._weight / WORTH))

    def hear(self, fall: float) -> None:
        """Learn from the next round how much the loss still falls along the whole way, from where it was gone to."""
        gone, self.gone = self.gone, None
        if gone is not None and gone.fall > 0 and not np.isnan(fall):
            was_there = gone.share + fall / gone.fall
            self._worth = MEMORY * self._worth + min(max(was_there, -1.0), 2.0)
            self._weight = MEMORY * self._weight + 1.0

    def slight(self, pulled: float, moved: float) -> bool:
        """Whether decay beside the gradient does little: by what it, and the round in all, moved weights along the way."""
        self._pulled = MEMORY * self._pulled + pulled
        self._moved = MEMORY * self._moved + moved
        return abs(self._pulled) <= SLIGHT * abs(self._moved)

    def state_dict(self, *, gone: bool = True) -> dict[str, Any]:
        """Plain values and a tensor; without ``gone``, not what is known of the last way."""
        last = self.gone if gone else None
        way, told = ([], []) if last is None else ([last.way.clone()], [last.fall, last.share])
        return {"numbers": [self._worth, self._weight, self._pulled, self._moved], "way": way, "told": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self._worth, self._weight, self._pulled, self._moved = state["numbers"]
        if state["way"]:
            self.gone = Gone(state["way"][0].clone(), *state["told"])


def decays(base: Optimizer) -> bool:
    """Whether weights of any group do."""
    return any(_decay(group) != 0 for group in base.param_groups)


def strengths(base: Optimizer) -> tuple[list[float], list[float]]:
    """Of every group: λ of decay that is part of the gradient, and the share that decay beside it takes of weights in a step.

    Of optimizers that are not :data:`KNOWN`, all is taken to be part of the gradient.
    """
    inside, taken = [], []
    for group in base.param_groups:
        beside = isinstance(base, BESIDE) or bool(group.get("decoupled_weight_decay"))
        inside.append(0.0 if beside else _decay(group))
        taken.append(_decay(group) * float(group.get("lr", 1.0)) if beside else 0.0)
    return inside, taken


def _decay(group: Mapping[str, Any]) -> float:
    return float(group.get("weight_decay") or 0.0)
