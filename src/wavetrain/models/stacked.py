"""Layers of N sub-layers side by side: their weights are stacked on a leading axis, and so is what flows through them.

Without gradients the sub-layers are computed one after the other, each by the product that it would be alone: what one of them
computes then does not depend, to the bit, on how many others sit on the same rank. With gradients it is one batched product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from wavetrain.models.linear import FEW_ROWS, product


class StackedLinear(nn.Module):
    """N linear layers without bias: (N, …, inputs) → (N, …, outputs); ``weight`` is (N, outputs, inputs)."""

    bias = None

    def __init__(self, num: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as ``nn.Linear`` does; who holds it draws anew."""
        nn.init.uniform_(self.weight, -(self.weight.shape[2] ** -0.5), self.weight.shape[2] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        num, outputs, _ = self.weight.shape
        if num == 1:
            return product(x[0], self.weight[0])[None]
        if torch.is_grad_enabled():
            return torch.bmm(x.flatten(1, -2), self.weight.mT).view(num, *x.shape[1:-1], outputs)
        if x[0].numel() <= FEW_ROWS * x.shape[-1]:
            return torch.stack([product(part, weight) for part, weight in zip(x, self.weight, strict=True)])
        y = x.new_empty(num, *x.shape[1:-1], outputs)
        for part, weight, out in zip(x, self.weight, y, strict=True):
            torch.mm(part.flatten(0, -2), weight.mT, out=out.view(-1, outputs))
        return y


class StackedNorm(nn.Module):
    """N LayerNorms without bias, or RMSNorms: (N, …, hidden) → the same; ``weight`` is one vector, (N · hidden,)."""

    def __init__(self, kind: str, num: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.kind, self.hidden, self.eps = kind, hidden, eps
        self.weight = nn.Parameter(torch.empty(num * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.view(-1, self.hidden)
        if len(weights) == 1 or not torch.is_grad_enabled():
            parts = [self._norm(part, weight) for part, weight in zip(x, weights, strict=True)]
            return parts[0][None] if len(parts) == 1 else torch.stack(parts)
        return self._norm(x, None) * weights.view(-1, *(1,) * (x.dim() - 2), self.hidden)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self.kind == "rms":
            return rms_norm(x, (self.hidden,), weight, self.eps)
        return layer_norm(x, (self.hidden,), weight, None, self.eps)
