"""What a block is told beside x: where its tokens stand, how they look back, and with whom the block is shared.

One definition of a block serves all uses:

    training       whole sequences (batch, seq, …), causal attention, one process           whole_sequences()
    serving        tokens of many sequences in a row (tokens, …), attention over a cache     wavetrain.serve
    many ranks     a rank holds a part of the weights; sums over ranks are asked of ``ranks``

A sum over ranks is *started* and *waited for*: a block that has other work in between hides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (…, heads, head_dim), k and v (…, kv heads, head_dim) → what was looked at, shaped as q."""


class Pending(Protocol):
    """A sum over ranks that is on its way."""

    def wait(self) -> Tensor:
        """The sum; the same tensor whenever it is asked for."""
        ...


@dataclass(frozen=True)
class Done:
    """A sum that is there already."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


class Ranks(Protocol):
    """The ranks that hold a model together."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def start_sum(self, parts: Tensor, *, scratch: bool = False) -> Pending:
        """Begin to add up (parts here, …) over this rank's parts, in their order, and over all ranks → (…).

        Until it is waited for, ``parts`` must not change. ``scratch``: the caller needs them no longer, and they may be
        overwritten.
        """
        ...


class Alone:
    """One process that holds the whole model."""

    size = 1
    rank = 0

    def start_sum(self, parts: Tensor, *, scratch: bool = False) -> Done:
        return Done(ordered_sum(parts))


def ordered_sum(parts: Tensor) -> Tensor:
    """(parts, …) → (…), added from the first to the last: the order never depends on how many there are."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(kw_only=True)
class Context:
    """What the blocks of one pass share."""

    positions: Tensor
    """Of the tokens in their sequences: (seq,) or (tokens,) int64."""
    attend: Attend
    ranks: Ranks = field(default_factory=Alone)
    _angles: dict[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotate(self, x: Tensor, theta: float) -> Tensor:
        """Turn the pairs (i, i + head_dim/2) of x (…, positions, heads, group, head_dim) by their position's angles, as Llama
        does.
        """
        head_dim = x.shape[-1]
        key = (head_dim, theta)
        if key not in self._angles:
            steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=x.device) / head_dim
            angles = self.positions.to(torch.float32)[:, None, None, None] * theta**-steps  # (positions, 1, 1, head_dim / 2)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            self._angles[key] = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        cos, sin = self._angles[key]
        return torch.addcmul(x * cos, x.roll(head_dim // 2, -1), sin)


def whole_sequences(seq: int, device: torch.device, *, causal: bool = True, mask: Tensor | None = None) -> Context:
    """The context of whole sequences: (…, seq, hidden), nothing before them.

    Args:
        seq: their length.
        device: of x.
        causal: whether a token only sees those before it.
        mask: (batch, seq) bool, true where a token may be looked at.
    """
    allowed = None if mask is None else mask[:, None, None, :]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = k.shape[-2] != q.shape[-2]
        mixed = scaled_dot_product_attention(
            _by_head(q), _by_head(k), _by_head(v), attn_mask=allowed, is_causal=causal, enable_gqa=grouped
        )
        return mixed.transpose(1, 2).reshape(q.shape)

    return Context(positions=torch.arange(seq, device=device), attend=attend)


def _by_head(part: Tensor) -> Tensor:
    """(…, seq, heads, head_dim) → (rows, heads, seq, head_dim)."""
    return part.flatten(0, -4).transpose(1, 2)
