"""Linear layers that are quick for a few rows, and for odd widths, too.

A step of decoding multiplies all weights by a handful of rows. MKL then neither uses all threads nor the memory's full speed; a
batch of products, each of a part of the outputs, does. Measured on two cores of an AMD EPYC, GPT-2's shapes: 1.3 to 1.9 times as
fast for 1 to 8 rows, 1.2 to 1.5 times for 32, no difference from about 64 on.

Of many rows MKL stores the result tile by tile, and slowly where a row does not begin on a vector: a width of 678, as the paper
has it, runs at 50 to 60 Gflop/s on one core of that machine, and at 65 to 85 once rows of the result are spaced evenly.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FEW_ROWS: Final = 64
MANY_WEIGHTS: Final = 1 << 18
"""From so many weights on a product is worth several threads."""
MANY_OUTPUTS: Final = 16_384
_VECTOR: Final = 16
"""Elements: rows are spaced by a multiple of it where their length is odd."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply: x (…, inputs) times weight (outputs, inputs) → (…, outputs), as ``torch.nn.functional.linear`` up to rounding."""
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = x.numel() // max(1, inputs)
    parts = 16 if outputs >= MANY_OUTPUTS else 8
    if (
        torch.is_grad_enabled()
        or x.device.type != "cpu"
        or weight.numel() < MANY_WEIGHTS
        or type(weight) not in (Tensor, nn.Parameter)  # a DTensor, or what else knows its own product
        or x.dtype != weight.dtype  # within autocast, which knows linear, but no product into given memory
    ):
        return linear(x, weight, bias)
    if rows > FEW_ROWS and bias is None and outputs % (_VECTOR // 2):
        y = spaced(x, *x.shape[:-1], outputs)
        torch.mm(x.reshape(rows, inputs), weight.mT, out=y.view(rows, outputs))
        return y
    if rows > FEW_ROWS or (torch.get_num_threads() == 1 and outputs < MANY_OUTPUTS):
        return linear(x, weight, bias)
    even = outputs // parts * parts
    given = x.reshape(rows, inputs)
    found = torch.bmm(given.expand(parts, rows, inputs), weight[:even].view(parts, even // parts, inputs).mT)
    y = found.transpose(0, 1).reshape(rows, even)
    if even < outputs:
        y = torch.cat((y, linear(given, weight[even:])), 1)
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], outputs)


def spaced(like: Tensor, *shape: int) -> Tensor:
    """An empty tensor like another whose rows begin on vectors; contiguous only where their length is even."""
    return like.new_empty(*shape[:-1], -(-shape[-1] // _VECTOR) * _VECTOR)[..., : shape[-1]]


class Linear(nn.Linear):
    """``nn.Linear`` by :func:`product`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)
