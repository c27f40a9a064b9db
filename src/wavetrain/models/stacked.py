"""Layers of N sub-layers side by side: their weights are stacked on a leading axis, and so is what flows through them.

With gradients it is one batched product; without, the sub-layers are computed one after the other. After :func:`make_exact` what
one of them computes does not depend, to the bit, on how many others sit on the same rank. Kernels choose how they add up by the
address they are given, and compute the last few elements of a tensor differently from the others (measured with MKL and ATen on
AVX2); so every sub-layer is given memory that begins as a new tensor's does, and is computed by calls of its own.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from wavetrain.models.layers import MLP
from wavetrain.models.linear import FEW_ROWS, product, spaced

_ALIGNMENT: Final = 64
"""Bytes; of every tensor that torch makes on a CPU."""


def make_exact(model: nn.Module) -> None:
    """Compute without gradients so that a sub-layer's bits do not depend on those beside it; slower."""
    for layer in model.modules():
        if isinstance(layer, StackedLinear | StackedNorm | StackedMLP):
            layer.exact = True


def as_alone(x: Tensor) -> Tensor:
    """X as a tensor of its own would lie in memory: contiguous and aligned; a copy only where it is neither."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


class StackedLinear(nn.Module):
    """N linear layers without bias: (N, …, inputs) → (N, …, outputs); ``weight`` is (N, outputs, inputs)."""

    bias = None
    exact = False

    def __init__(self, num: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as ``nn.Linear`` does; who holds it draws anew."""
        nn.init.uniform_(self.weight, -(self.weight.shape[2] ** -0.5), self.weight.shape[2] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        num, outputs, _ = self.weight.shape
        if self.exact and not torch.is_grad_enabled():
            return torch.stack([product(as_alone(part), as_alone(own)) for part, own in zip(x, self.weight, strict=True)])
        if num == 1:
            return product(x, self.weight[0])
        if torch.is_grad_enabled():
            return torch.bmm(x.flatten(1, -2), self.weight.mT).view(num, *x.shape[1:-1], outputs)
        if x[0].numel() <= FEW_ROWS * x.shape[-1] or x.dtype != self.weight.dtype:
            return torch.stack([product(part, weight) for part, weight in zip(x, self.weight, strict=True)])
        y = spaced(x, num, *x.shape[1:-1], outputs)
        for part, weight, out in zip(x, self.weight, y, strict=True):
            torch.mm(part.flatten(0, -2), weight.mT, out=out.view(-1, outputs))
        return y


class StackedNorm(nn.Module):
    """N LayerNorms without bias, or RMSNorms: (N, …, hidden) → the same; ``weight`` is one vector, (N · hidden,)."""

    exact = False

    def __init__(self, kind: str, num: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.kind, self.hidden, self.eps = kind, hidden, eps
        self.weight = nn.Parameter(torch.empty(num * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        exact = self.exact and not torch.is_grad_enabled()
        if len(self.weight) == self.hidden and not exact:
            return self._norm(x, self.weight)
        weights = self.weight.view(-1, self.hidden)
        if not torch.is_grad_enabled():
            alone = as_alone if exact else lambda part: part
            return torch.stack([self._norm(alone(part), alone(weight)) for part, weight in zip(x, weights, strict=True)])
        return self._norm(x, None) * weights.view(-1, *(1,) * (x.dim() - 2), self.hidden)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self.kind == "rms":
            return rms_norm(x, (self.hidden,), weight, self.eps)
        return layer_norm(x, (self.hidden,), weight, None, self.eps)


class StackedMLP(MLP):
    """The MLPs of N sub-layers: (N, …, hidden) → the same."""

    exact = False

    def activate(self, x: Tensor) -> Tensor:
        if self.exact and not torch.is_grad_enabled():
            return torch.stack([super(StackedMLP, self).activate(as_alone(part)) for part in x])
        return super().activate(x)
