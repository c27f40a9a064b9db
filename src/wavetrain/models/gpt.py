"""GPT-2-like decoders and the two variants that are compared with Kraken.

embed → block0 → block1 → … → head
"""

from __future__ import annotations

from typing import Unpack

from torch import nn

from wavetrain.models.blocks import Block, LadderBlock, LadderHead, ParallelBlock
from wavetrain.models.config import DecoderShape, ModelConfig, Style
from wavetrain.models.layers import Head, LayeredModel, TokenEmbedding, make_norm


class GPT(LayeredModel):
    """A GPT-2-like language model: tokens (batch, seq) int64 → logits (batch, seq, vocab).

    Args:
        num_layers: blocks.
        hidden: width.
        num_heads: heads a block; divides ``hidden``, unless ``head_dim`` is given.
        vocab: tokens.
        max_length: the longest sequence.
        mlp_ratio: inner width of an MLP over ``hidden``.
        dropout: of the embedding and of each residual branch.
        tied: whether ``head.projection.weight`` is the same Parameter as ``embed.token.weight``.
        style: grouped queries, rotary positions, RMSNorm, SwiGLU, no biases: see :class:`wavetrain.models.config.ModelConfig`.
    """

    _NAME = "gpt"
    _BLOCK: type[Block] = Block
    _HEAD: type[Head] = Head

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
        **style: Unpack[Style],
    ) -> None:
        config = ModelConfig(
            name=self._NAME,
            num_layers=num_layers,
            hidden=hidden,
            num_heads=num_heads,
            vocab=vocab,
            max_length=max_length,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            tied=tied,
            **style,
        )
        shape = DecoderShape(config)
        layers: dict[str, nn.Module] = {"embed": decoder_embedding(config)}
        for i in range(num_layers):
            layers[f"block{i}"] = self._BLOCK(
                hidden=hidden, num_heads=num_heads, dropout=dropout, num_blocks=num_layers, shape=shape
            )
        norm = make_norm(str(config.norm), hidden, shape.norm_eps, bias=bool(config.bias))
        layers["head"] = self._HEAD(hidden=hidden, vocab=vocab, tied=tied, norm=norm)
        super().__init__(config, layers)


class Parallel(GPT):
    """A GPT whose attention and MLP run side by side, as in GPT-J and PaLM; arguments as of :class:`GPT`."""

    _NAME = "parallel"
    _BLOCK = ParallelBlock


class Ladder(GPT):
    """A GPT with Ladder Residual: a branch does not wait for the one before it; arguments as of :class:`GPT`."""

    _NAME = "ladder"
    _BLOCK = LadderBlock
    _HEAD = LadderHead


def decoder_embedding(config: ModelConfig) -> TokenEmbedding:
    """The embedding of a decoder."""
    return TokenEmbedding(
        vocab=config.vocab,
        hidden=config.hidden,
        max_length=config.max_length,
        dropout=config.dropout,
        learned=config.positions == "learned",
    )
