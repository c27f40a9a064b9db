"""Keys and values of all tokens so far, and attention over them.

The cache is (blocks, 2, rows, kv heads here, capacity, head_dim); a sequence has one row of it, running sequences the first rows.
It begins small and is doubled when a sequence grows out of it, up to the model's longest. All that attention knows of where keys
and values lie is in this file: a paged cache changes it and no other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wavetrain.models.stacked import as_alone
from wavetrain.serve.steps import Row, Step

_FIRST_CAPACITY = 256
_STEP = 16
"""A capacity is a multiple of this: every head's keys and values then begin on 64 bytes."""


def _whole(capacity: int) -> int:
    return -(-capacity // _STEP) * _STEP


class KVCache:
    """The cache of one rank.

    Args:
        num_blocks: of the model.
        num_rows: sequences that run at once.
        kv_heads: on this rank, of all its sub-layers.
        head_dim: width of a head.
        max_length: the longest sequence.
        one_by_one: attend in every sub-layer on its own: how a kernel adds up may depend on how many heads it is given.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_rows: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        one_by_one: bool = False,
    ) -> None:
        self.max_length = max_length
        self._one_by_one = one_by_one
        self._store = torch.zeros(
            num_blocks, 2, num_rows, kv_heads, _whole(min(_FIRST_CAPACITY, max_length)), head_dim, dtype=dtype, device=device
        )

    @property
    def num_bytes(self) -> int:
        """Memory that it takes now."""
        return self._store.numel() * self._store.element_size()

    def prepare(self, step: Step) -> StepAttention:
        """Make room for a step, and give the attention of its blocks."""
        for source, target in step.moves:
            self._store[:, :, target] = self._store[:, :, source]
        capacity = self._store.shape[4]
        if step.longest > capacity:
            shape = list(self._store.shape)
            shape[4] = _whole(min(self.max_length, max(step.longest, 2 * capacity)))
            grown = self._store.new_zeros(shape)
            grown[:, :, :, :, :capacity] = self._store
            self._store = grown
        return StepAttention(self._store, step, one_by_one=self._one_by_one)


class StepAttention:
    """Attention of one step; ``block`` says whose keys and values are meant."""

    def __init__(self, store: Tensor, step: Step, *, one_by_one: bool = False) -> None:
        self.block = 0
        self._one_by_one = one_by_one
        self._store = store
        self._rows = step.rows
        self._decodes = step.decodes
        device = store.device
        starts = [row.start for row in step.rows]
        if step.decodes:
            self._longest = step.longest
            self._row_index = torch.arange(len(step.rows), device=device)
            self.positions = torch.tensor(starts, dtype=torch.int64, device=device)
            self._mask: Tensor | None = None
            if min(starts) != max(starts):
                self._mask = (torch.arange(self._longest, device=device) <= self.positions[:, None])[:, None, None]
        else:
            self.positions = torch.cat([torch.arange(r.start, r.start + r.count, device=device) for r in step.rows])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Q (tokens, heads, head_dim), k, v (tokens, kv heads, head_dim), or those of sub-layers, stacked before; as q."""
        keys, values = self._store[self.block]  # each (rows, kv heads, capacity, head_dim)
        if q.dim() == 3:
            return self._attend(q, k, v, keys, values)
        streams = len(q)
        if self._one_by_one:
            every = zip(q, k, v, keys.chunk(streams, 1), values.chunk(streams, 1), strict=True)
            return torch.stack([self._attend(as_alone(a), as_alone(b), as_alone(c), *held) for a, b, c, *held in every])
        if streams == 1:
            return self._attend(q[0], k[0], v[0], keys, values)[None]
        q, k, v = (part.transpose(0, 1).flatten(1, 2) for part in (q, k, v))  # (tokens, streams · heads, head_dim)
        return torch.unflatten(self._attend(q, k, v, keys, values), 1, (streams, -1)).transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._decodes:
            return self._decode(q, k, v, keys, values)
        parts, first = [], 0
        for row in self._rows:
            own = slice(first, first + row.count)
            parts.append(self._row(q[own], k[own], v[own], keys[row.slot], values[row.slot], row))
            first += row.count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One token a row: query heads that share a kv head are the rows of one small product."""
        num, kv_heads = len(q), keys.shape[1]
        keys[self._row_index, :, self.positions] = k
        values[self._row_index, :, self.positions] = v
        queries = torch.unflatten(q, 1, (kv_heads, -1))  # (rows, kv heads, group, head_dim)
        mixed = scaled_dot_product_attention(
            queries, keys[:num, :, : self._longest], values[:num, :, : self._longest], attn_mask=self._mask
        )
        return mixed.flatten(1, 2)

    def _row(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, row: Row) -> Tensor:
        """Several tokens of one sequence."""
        end = row.start + row.count
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # (kv heads, tokens, head_dim)
        keys[:, row.start : end] = k
        values[:, row.start : end] = v
        mask = None
        if row.start:
            k, v = keys[:, :end], values[:, :end]
            ahead = torch.arange(end, device=q.device) <= torch.arange(row.start, end, device=q.device)[:, None]
            mask = ahead[None, None]
        mixed = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[0] != q.shape[1]
        )
        return mixed[0].transpose(0, 1)
