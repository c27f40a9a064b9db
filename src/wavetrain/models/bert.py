"""BERT-like encoder for masked-language modelling: every token sees every other.

    embed → block0 → block1 → … → head

Where sequences are padded, give ``(tokens, mask)`` instead of ``tokens``: the mask then travels beside x from layer to layer.
Batches come from :class:`wavetrain.data.MaskedLM` and :func:`wavetrain.data.collate_masked`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.models.blocks import Block
from wavetrain.models.config import ModelConfig
from wavetrain.models.context import whole_sequences
from wavetrain.models.layers import INIT_STD, Head, LayeredModel, TokenEmbedding

Stream = Tensor | tuple[Tensor, Tensor]
"""x, or (x, mask): mask (batch, seq) bool is true for real tokens and false for padding."""


class BERT(LayeredModel):
    """A masked-language model: tokens (batch, seq) int64, or (tokens, mask), → logits (batch, seq, vocab).

    The blocks are pre-norm, as of GPT, and there are no segment embeddings and no next-sentence task.

    Args:
        num_layers: blocks.
        hidden: width.
        num_heads: heads a block; divides ``hidden``.
        vocab: tokens, the mask token included.
        max_length: the longest sequence.
        mlp_ratio: inner width of an MLP over ``hidden``.
        dropout: of the embedding and of each residual branch.
        tied: whether ``head.projection.weight`` is the same Parameter as ``embed.token.weight``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        hidden: int,
        num_heads: int,
        vocab: int,
        max_length: int = 1024,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        config = ModelConfig(
            name="bert",
            num_layers=num_layers,
            hidden=hidden,
            num_heads=num_heads,
            vocab=vocab,
            max_length=max_length,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            tied=tied,
        )
        blocks = {
            f"block{i}": MaskedBlock(
                hidden=hidden, num_heads=num_heads, mlp_ratio=mlp_ratio, dropout=dropout, causal=False, num_blocks=num_layers
            )
            for i in range(num_layers)
        }
        embed = MaskedEmbedding(vocab=vocab, hidden=hidden, max_length=max_length, dropout=dropout)
        super().__init__(
            config, {"embed": embed, **blocks, "head": MaskedHead(hidden=hidden, vocab=vocab, tied=bool(config.tied))}
        )


class MaskedEmbedding(TokenEmbedding):
    """Token and position embedding that passes a padding mask on."""

    def forward(self, stream: Stream) -> Stream:  # type: ignore[override]
        tokens, mask = unpack(stream)
        if mask is None:
            return super().forward(tokens)
        if mask.shape != tokens.shape or mask.dtype != torch.bool:
            raise InputError(
                f"the padding mask has shape {tuple(mask.shape)} and {mask.dtype}, but the tokens {tuple(tokens.shape)}; "
                "give one torch.bool a token, true for real tokens"
            )
        return super().forward(tokens), mask


class MaskedBlock(Block):
    """A block whose tokens look at all tokens that the mask allows, and which passes the mask on."""

    def forward(self, stream: Stream) -> Stream:
        x, mask = unpack(stream)
        y = self.run(x, whole_sequences(x.shape[1], x.device, causal=False, mask=mask))
        return y if mask is None else (y, mask)


class MaskedHead(Head):
    """BERT's masked-language head: LayerNorm, Linear, GELU, LayerNorm, projection with a bias a token."""

    def __init__(self, *, hidden: int, vocab: int, tied: bool) -> None:
        nn.Module.__init__(self)
        self.tied = tied
        self.norm = nn.LayerNorm(hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.dense_norm = nn.LayerNorm(hidden)
        self.projection = nn.Linear(hidden, vocab)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.dense_norm.reset_parameters()
        nn.init.normal_(self.dense.weight, std=INIT_STD)
        nn.init.zeros_(self.dense.bias)
        nn.init.zeros_(self.projection.bias)

    def forward(self, stream: Stream) -> Tensor:
        x, _ = unpack(stream)
        y = self.dense_norm(nn.functional.gelu(self.dense(self.norm(x)), approximate="tanh"))
        logits: Tensor = self.projection(y)
        return logits

    def cost(self, batch: int, seq: int) -> float:
        return super().cost(batch, seq) + 2.0 * batch * seq * self.dense.in_features * self.dense.out_features


def unpack(stream: Any) -> tuple[Tensor, Tensor | None]:
    """Split a stream into x and its mask, or None."""
    if isinstance(stream, Tensor):
        return stream, None
    if isinstance(stream, (tuple, list)) and len(stream) == 2 and all(isinstance(part, Tensor) for part in stream):
        return stream[0], stream[1]
    raise InputError(f"a BERT layer was given a {type(stream).__name__}; give a tensor, or a pair (tensor, padding mask)")
