"""A model of unequal layers: a narrow transformer, a widening, a wide one.

    embed → narrow0 … → widen → wide0 … → head

After TransGAN, whose 12 narrow and 12 wide layers are the uneven workload of AMP (arXiv 2210.07297, section 5): an equal number
of layers a stage is far from an equal amount of work. Here it is a causal language model, so that it trains on the same data.
"""

from __future__ import annotations

from torch import Tensor, nn

from wavetrain.models.blocks import Block
from wavetrain.models.config import ModelConfig
from wavetrain.models.layers import INIT_STD, Head, Layer, LayeredModel, TokenEmbedding


class Uneven(LayeredModel):
    """A narrow-then-wide language model: tokens (batch, seq) int64 → logits (batch, seq, vocab).

    Args:
        num_layers: narrow blocks.
        hidden: width of the narrow blocks.
        num_heads: heads of the narrow blocks; divides ``hidden``.
        vocab: tokens.
        wide_layers: wide blocks.
        wide_hidden: width of the wide blocks; None: twice ``hidden``.
        wide_heads: heads of the wide blocks; divides ``wide_hidden``; None: twice ``num_heads``.
        max_length: the longest sequence.
        mlp_ratio: inner width of an MLP over the block's width.
        dropout: of the embedding and of each residual branch.
    """

    def __init__(
        self,
        *,
        num_layers: int = 12,
        hidden: int,
        num_heads: int,
        vocab: int,
        wide_layers: int = 12,
        wide_hidden: int | None = None,
        wide_heads: int | None = None,
        max_length: int = 1024,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
    ) -> None:
        config = ModelConfig(
            name="uneven",
            num_layers=num_layers,
            hidden=hidden,
            num_heads=num_heads,
            vocab=vocab,
            wide_layers=wide_layers,
            wide_hidden=wide_hidden,
            wide_heads=wide_heads,
            max_length=max_length,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
        )
        wide = config.wide_hidden or 0  # filled in and checked by the config
        heads = config.wide_heads or 0

        def blocks(name: str, count: int, width: int, num_heads: int) -> dict[str, Layer]:
            return {
                f"{name}{i}": Block(
                    hidden=width,
                    num_heads=num_heads,
                    mlp_ratio=mlp_ratio,
                    dropout=dropout,
                    causal=True,
                    num_blocks=num_layers + wide_layers,
                )
                for i in range(count)
            }

        super().__init__(
            config,
            {
                "embed": TokenEmbedding(vocab=vocab, hidden=hidden, max_length=max_length, dropout=dropout),
                **blocks("narrow", num_layers, hidden, num_heads),
                "widen": Widen(hidden, wide),
                **blocks("wide", wide_layers, wide, heads),
                "head": Head(hidden=wide, vocab=vocab, tied=False),
            },
        )


class Widen(Layer):
    """LayerNorm and a projection from the narrow stream to the wide one: (batch, seq, narrow) → (batch, seq, wide)."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(narrow)
        self.projection = nn.Linear(narrow, wide)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        nn.init.normal_(self.projection.weight, std=INIT_STD)
        nn.init.zeros_(self.projection.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.projection(self.norm(x))
        return y

    def cost(self, batch: int, seq: int) -> float:
        return float(2 * batch * seq * self.projection.in_features * self.projection.out_features)
