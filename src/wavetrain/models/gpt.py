"""GPT: a decoder of pre-norm blocks with learned positions, as GPT-2.

embed → block0 → block1 → … → head
"""

from __future__ import annotations

from wavetrain.models.config import ModelConfig
from wavetrain.models.layers import Block, Head, LayeredModel, TokenEmbedding


class GPT(LayeredModel):
    """A GPT-2-like language model: tokens (batch, seq) int64 → logits (batch, seq, vocab).

    Args:
        num_layers: blocks.
        hidden: width.
        num_heads: heads a block; divides ``hidden``.
        vocab: tokens.
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
            name="gpt",
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
            f"block{i}": Block(
                hidden=hidden, num_heads=num_heads, mlp_ratio=mlp_ratio, dropout=dropout, causal=True, num_blocks=num_layers
            )
            for i in range(num_layers)
        }
        embed = TokenEmbedding(vocab=vocab, hidden=hidden, max_length=max_length, dropout=dropout)
        super().__init__(config, {"embed": embed, **blocks, "head": Head(hidden=hidden, vocab=vocab, tied=bool(config.tied))})
