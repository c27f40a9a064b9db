"""Kraken: transformers whose communication hides behind compute (arXiv 2408.07802).

A layer holds N narrow sub-layers, one or more a rank, and N streams x_0 … x_{N−1} flow through it. Of sub-layer i:

    S    = Σ_j x_j                                 the one sum over ranks; started before, waited for after the attention
    y_i  = Attention_i(LN1(x_i))                   needs x_i only
    x_i' = x_i + y_i + MLP_i(LN2(S + y_i))         the residual does not take the sum

(S + y_i is the paper's m_i = a_i + Σ_{j≠i} x_j, with a_i = x_i + y_i.) In the first layer all x_i are the embedding, and LN2
reads x_i + y_i. The head reads LN_f(W_concat [x_0 … x_{N−1}]). A model of L layers has L − 1 hidden sums and one small one at its
head; a standard tensor-parallel transformer has 2·L that it waits for.

Only sums cross ranks. So the same weights run on any number of ranks up to N: a rank that holds several sub-layers adds their
x_i first.
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

from torch import Tensor, nn

from wavetrain.models.blocks import decoder_attention, draw_branches
from wavetrain.models.config import DecoderShape, ModelConfig, Style
from wavetrain.models.context import Alone, Context, Pending, Ranks, whole_sequences
from wavetrain.models.gpt import decoder_embedding
from wavetrain.models.layers import INIT_STD, Head, Layer, LayeredModel, make_norm
from wavetrain.models.sizes import kraken_like
from wavetrain.models.stacked import StackedLinear, StackedMLP, StackedNorm


class Kraken(LayeredModel):
    """A Kraken language model: tokens (batch, seq) int64 → logits (batch, seq, vocab).

    Without ``style`` it is the paper's: learned positions, tanh-GELU, LayerNorm, no biases. :meth:`like` chooses the numbers so
    that it has as many parameters as a standard model.

    Args:
        num_layers: blocks.
        hidden: d, width of each of the N streams.
        num_heads: heads of all sub-layers of a block; ``degree`` divides it.
        vocab: tokens.
        degree: N, sub-layers a block: the most ranks that can share the model.
        max_length: the longest sequence.
        mlp_ratio: inner width of a sub-layer's MLP over ``hidden``.
        dropout: of the embedding and of each residual branch.
        tied: whether ``head.projection.weight`` is the same Parameter as ``embed.token.weight``.
        style: grouped queries, rotary positions, RMSNorm, SwiGLU: see :class:`wavetrain.models.config.ModelConfig`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        hidden: int,
        num_heads: int,
        vocab: int,
        degree: int = 2,
        max_length: int = 1024,
        mlp_ratio: int = 2,
        dropout: float = 0.0,
        tied: bool = True,
        **style: Unpack[Style],
    ) -> None:
        config = ModelConfig(
            name="kraken",
            num_layers=num_layers,
            hidden=hidden,
            num_heads=num_heads,
            vocab=vocab,
            degree=degree,
            max_length=max_length,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            tied=tied,
            **style,
        )
        layers: dict[str, nn.Module] = {"embed": decoder_embedding(config)}
        for i in range(num_layers):
            layers[f"block{i}"] = KrakenBlock(DecoderShape(config), first=i == 0, last=i == num_layers - 1)
        layers["head"] = KrakenHead(DecoderShape(config))
        super().__init__(config, layers)

    @classmethod
    def like(cls, standard: ModelConfig | str, *, degree: int, mode: str = "paper", **style: Unpack[Style]) -> Kraken:
        """A Kraken of as many parameters as a standard model.

        Args:
            standard: the shape of a GPT, or the name of a published one (``"gpt2"``, ``"gpt2-medium"``, …).
            degree: N; divides the standard model's heads.
            mode: ``paper``: full d → d projections, heads of d·N/heads, learned positions, GELU; for GPT-2 of 124 M the published
                widths 678, 504 and 418. ``modern``: rotary positions and heads that a KV cache no larger than the standard
                model's can hold.
            style: anything else to choose instead.
        """
        return cls(**kraken_like(standard, degree=degree, mode=mode, **style).arguments())


Streams = Tensor | tuple[Tensor, Pending]
"""x (N here, …, hidden), and among several ranks the sum over all N streams, on its way."""


class KrakenBlock(Layer):
    """N sub-layers: (N here, batch, seq, hidden) → the same; the first block takes (batch, seq, hidden)."""

    def __init__(self, shape: DecoderShape, *, first: bool, last: bool) -> None:
        super().__init__()
        config = shape.config
        norm = partial(StackedNorm, str(config.norm), shape.streams, config.hidden, shape.norm_eps)
        linear = partial(StackedLinear, shape.streams)
        self.first, self.last = first, last
        self.num_blocks = config.num_layers
        self.attention_norm = norm()
        self.attention = decoder_attention(shape, linear)
        self.mlp_norm = norm()
        self.mlp = StackedMLP(config.hidden, shape.inner, gated=config.mlp == "swiglu", linear=linear)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_branches(self.attention, self.mlp, self.num_blocks)
        self.attention_norm.reset_parameters()
        self.mlp_norm.reset_parameters()

    @property
    def num_here(self) -> int:
        """Sub-layers that this rank holds."""
        return len(self.attention.qkv.weight)

    def forward(self, x: Tensor) -> Tensor:
        found = self.run(x, whole_sequences(x.shape[-2], x.device))
        assert isinstance(found, Tensor)
        return found

    def run(self, stream: Streams, context: Context) -> Streams:
        """The sub-layers of this rank, in any context: (N here, …, hidden) → the same.

        Among several ranks, x comes with the sum over its streams, which was started as soon as x was there, and leaves with the
        next.
        """
        x, total = stream if isinstance(stream, tuple) else (stream, None)
        if self.first:
            x = x.expand(self.num_here, *x.shape)
        elif total is None:
            total = context.ranks.start_sum(x)
        y = self.dropout(self.attention(self.attention_norm(x), context))
        x = x + y
        seen = x if total is None else total.wait() + y
        x = x + self.dropout(self.mlp(self.mlp_norm(seen)))
        return x if self.last or context.ranks.size == 1 else (x, context.ranks.start_sum(x))

    def split_dims(self) -> dict[str, int]:
        return {name: 0 for name, _ in self.named_parameters()}

    def cost(self, batch: int, seq: int) -> float:
        weights = sum(p.numel() for p in self.parameters() if p.dim() > 1)
        attention = 4 * self.num_here * self.attention.num_heads * self.attention.head_dim * seq / 2
        return float(batch * seq * (2 * weights + attention))


class KrakenHead(Head):
    """W_concat, final norm and projection: (N here, batch, seq, hidden) → (batch, seq, vocab).

    ``concat.weight`` is (N, hidden, hidden).
    """

    def __init__(self, shape: DecoderShape) -> None:
        config = shape.config
        super().__init__(
            hidden=config.hidden,
            vocab=config.vocab,
            tied=bool(config.tied),
            norm=make_norm(str(config.norm), config.hidden, shape.norm_eps, bias=False),
        )
        self.concat = StackedLinear(shape.streams, config.hidden, config.hidden)
        nn.init.normal_(self.concat.weight, std=INIT_STD)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "concat"):  # not while the base class is made
            nn.init.normal_(self.concat.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return self._logits(x, Alone())

    def run(self, x: Tensor, context: Context, rows: Tensor) -> Tensor:
        return self._logits(x[:, rows], context.ranks)

    def _logits(self, x: Tensor, ranks: Ranks) -> Tensor:
        logits: Tensor = self.projection(self.norm(ranks.start_sum(self.concat(x), scratch=True).wait()))
        return logits

    def split_dims(self) -> dict[str, int]:
        return {**super().split_dims(), "concat.weight": 0}

    def cost(self, batch: int, seq: int) -> float:
        return super().cost(batch, seq) + 2.0 * batch * seq * self.concat.weight.numel()
