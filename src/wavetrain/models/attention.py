"""Self-attention with one projection for queries, keys and values, whole or a part of its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wavetrain.models.context import Context

MakeLinear = Callable[[int, int], nn.Module]
"""(inputs, outputs) → a layer of weights (…, outputs, inputs)."""


class Attention(nn.Module):
    """Multi-head self-attention: (…, hidden) → the same.

    The rows of ``qkv.weight`` are laid out as (kv head, [its queries, key, value], head_dim): any contiguous part of whole kv
    heads computes those heads, so the number of heads here is read from the projection's output, not from the config.

    Args:
        hidden: width of x.
        num_heads: query heads.
        kv_heads: heads of keys and values; divides ``num_heads``; None: as many.
        head_dim: width of a head; None: hidden / num_heads.
        rope_theta: the base of rotary angles; None: positions are none of its business.
        linear: how its two projections are made.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = None,
        linear: MakeLinear = nn.Linear,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kv_heads = kv_heads or num_heads
        self.group = num_heads // self.kv_heads
        self.head_dim = head_dim or hidden // num_heads
        self.rope_theta = rope_theta
        self.qkv: Any = linear(hidden, (num_heads + 2 * self.kv_heads) * self.head_dim)
        self.out: Any = linear(num_heads * self.head_dim, hidden)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(…, hidden) → the same; where the heads are shared by ranks, this rank's part of the sum."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))  # (…, kv heads here, group + 2, head_dim)
        if self.rope_theta is None:
            q, k, v = qkv.split_with_sizes((self.group, 1, 1), -2)  # one split: its backward is one copy
        else:
            turned, v = qkv.split_with_sizes((self.group + 1, 1), -2)
            q, k = context.rotate(turned, self.rope_theta).split_with_sizes((self.group, 1), -2)
        q, k, v = q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)  # (…, heads or kv heads here, head_dim)
        mixed: Tensor = self.out(context.attend(q, k, v).flatten(-2))
        return mixed
