"""Kind: what the inner optimizer of a round is like, as all ranks that hold parts of the model agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.optim import ASGD, SGD, Optimizer

from wavetrain.optim.settling import KNOWN, decays
from wavetrain.optim.team import Shards

COASTS: Final = 0.5
"""The share of its last step that an optimizer repeats, from which it is said to have momentum."""
PROPORTIONAL: Final = (SGD, ASGD)
"""Optimizers whose steps are as long as gradients are large. Others make no shorter step with a smaller gradient, and longer ones
later, for what they remember of it."""


@dataclass(frozen=True)
class Kind:
    """Of an inner optimizer; the same on all ranks."""

    coasts: bool
    """Whether all groups have momentum: then the way ahead is mostly decided by the past, and a gradient that is wrong across a
    valley does no more harm than the next can mend. Without, steps go as far across as the gradient says."""
    one_way: bool
    """Whether all groups go down, or all up: else there is no loss to have a model of."""
    sign: float
    """Of losses, so that less is better."""
    proportional: bool
    """Whether a smaller gradient makes a shorter step."""
    decays: bool
    """Whether weights of any group do."""
    moored: bool
    """Whether not the loss is to say where parameters end: where nobody knows how they decay, or where some have a rate of 0,
    since ways between points of before would move them."""


def kind_of(base: Optimizer, shards: Shards | None) -> Kind:
    """What ``base`` is like, together with those of ``shards``; None where all have the same groups."""
    groups = base.param_groups
    rates = [group.get("lr") for group in groups]
    here = (
        not all(_momentum(group) >= COASTS for group in groups),
        any(group.get("maximize", False) for group in groups),
        not all(group.get("maximize", False) for group in groups),
        not isinstance(base, PROPORTIONAL),
        decays(base),
        any(rate is not None and float(rate) == 0 for rate in rates) or (decays(base) and type(base) not in KNOWN),
    )
    numbers = np.array(here, dtype=np.float64)
    brief, up, down, normed, shrinks, moored = (numbers if shards is None else shards.total(numbers)) > 0
    return Kind(
        coasts=not brief,
        one_way=not (up and down),
        sign=-1.0 if up else 1.0,
        proportional=not normed,
        decays=bool(shrinks),
        moored=bool(moored),
    )


def _momentum(group: Mapping[str, Any]) -> float:
    """What a group of an optimizer's parameters calls so; 0 of none."""
    betas = group.get("betas")
    given = betas[0] if isinstance(betas, tuple | list) and betas else group.get("momentum", 0.0)
    return float(given) if isinstance(given, int | float | Tensor) else 0.0
