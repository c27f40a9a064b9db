"""Small problems that optimizers are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.02),
}


def network(seed: int = 0, *, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """Of two layers, 6 numbers in, 3 out."""
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.Tanh()]
    if norm:
        middle.insert(0, nn.BatchNorm1d(8))
    if dropout:
        middle.append(nn.Dropout(dropout))
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


class Task:
    """Minibatches of a made-up regression, the same for everyone who asks for the same round."""

    def __init__(self, model: nn.Module, size: int = 16, seed: int = 0) -> None:
        self.model, self.size, self.seed = model, size, seed
        self.teacher = network(1)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs (size, 6) and targets (size, 3)."""
        x = torch.randn(self.size, 6, generator=torch.Generator().manual_seed(1000 * self.seed + number))
        with torch.no_grad():
            return x, self.teacher(x)

    def loss(self, number: int) -> Tensor:
        """Of one minibatch."""
        x, y = self.batch(number)
        return nn.functional.mse_loss(self.model(x), y)


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
