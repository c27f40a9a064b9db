"""Transformer blocks: the standard one, and two that leave more room for communication.

    standard    x ← x + Attention(norm(x));  x ← x + MLP(norm(x))              two sums over ranks, both waited for
    parallel    x ← x + Attention(norm(x)) + MLP(norm(x))                      one sum, waited for (GPT-J, PaLM)
    ladder      h_k reads the stream before h_{k−1} was added to it            two sums, each hidden behind the next branch
                (Ladder Residual, arXiv 2501.06589): x_k = x_{k−1} + h_k(x_{k−2})

Ranks share heads and the inner width of the MLP: each computes a part of the sum that a branch adds to x.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from wavetrain.models.attention import Attention, MakeLinear
from wavetrain.models.config import DecoderShape, ModelConfig
from wavetrain.models.context import Context, Done, Pending, whole_sequences
from wavetrain.models.layers import INIT_STD, MLP, Head, Layer, make_norm
from wavetrain.models.linear import Linear


class Block(Layer):
    """A pre-norm transformer block: x + Attention(LN(x)), then x + MLP(LN(x)); (batch, seq, hidden) → the same.

    Args:
        hidden: width of x.
        num_heads: attention heads; divides ``hidden``, unless ``head_dim`` is given.
        mlp_ratio: inner width of the MLP over ``hidden``.
        dropout: of the output of attention and MLP.
        causal: whether a token only sees those before it.
        num_blocks: blocks of the whole model; the deeper it is, the smaller the first steps of each.
        shape: the numbers of a decoder in any style, instead of heads and ratio.
    """

    def __init__(
        self,
        *,
        hidden: int,
        num_heads: int,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        causal: bool = True,
        num_blocks: int = 1,
        shape: DecoderShape | None = None,
    ) -> None:
        super().__init__()
        if shape is None:
            shape = DecoderShape(
                ModelConfig(num_layers=num_blocks, hidden=hidden, num_heads=num_heads, vocab=1, mlp_ratio=mlp_ratio)
            )
        config = shape.config
        self.causal = causal
        self.num_blocks = num_blocks
        self.dropout = nn.Dropout(dropout)
        self._make_parts(shape, bool(config.bias))
        self.reset_parameters()

    def _make_parts(self, shape: DecoderShape, bias: bool) -> None:
        config = shape.config

        def linear(inputs: int, outputs: int) -> nn.Module:
            return Linear(inputs, outputs, bias=bias)

        self.attention_norm = make_norm(str(config.norm), config.hidden, shape.norm_eps, bias=bias)
        self.attention = decoder_attention(shape, linear)
        self.mlp_norm = make_norm(str(config.norm), config.hidden, shape.norm_eps, bias=bias)
        self.mlp = MLP(config.hidden, shape.inner, gated=config.mlp == "swiglu", linear=linear)

    def reset_parameters(self) -> None:
        draw_branches(self.attention, self.mlp, self.num_blocks)
        for norm in (self.attention_norm, self.mlp_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(self, x: Any) -> Any:
        return self.run(x, whole_sequences(x.shape[-2], x.device, causal=self.causal))

    def run(self, x: Any, context: Context) -> Any:
        """The block on x (…, hidden), in any context."""
        x = x + self.dropout(_whole(self.attention(self.attention_norm(x), context), context))
        return x + self.dropout(_whole(self.mlp(self.mlp_norm(x)), context))

    def split_dims(self) -> dict[str, int]:
        columns = {"attention.qkv": 0, "mlp.up": 0, "mlp.gate": 0}  # outputs are shared
        dims = {f"{name}.{kind}": 0 for name in columns for kind in ("weight", "bias")}
        return dims | {"attention.out.weight": 1, "mlp.down.weight": 1}

    def added_once(self) -> tuple[str, ...]:
        """Parameters that belong into the sum once, not once a rank."""
        return ("attention.out.bias", "mlp.down.bias")

    def cost(self, batch: int, seq: int) -> float:
        attention, mlp = self.attention, self.mlp
        weights = sum(p.numel() for m in (attention, mlp) for p in m.parameters() if p.dim() > 1)
        seen = seq / 2 if self.causal else seq  # tokens that a token looks at, on average
        return float(batch * seq * (2 * weights + 4 * attention.num_heads * attention.head_dim * seen))


class ParallelBlock(Block):
    """x + Attention(norm(x)) + MLP(norm(x)), one norm for both: one sum over ranks instead of two."""

    def _make_parts(self, shape: DecoderShape, bias: bool) -> None:
        super()._make_parts(shape, bias)
        self.mlp_norm = None  # type: ignore[assignment]

    def run(self, x: Tensor, context: Context) -> Tensor:
        """The block on x (…, hidden), in any context."""
        normed = self.attention_norm(x)
        y: Tensor = x + self.dropout(_whole(self.attention(normed, context) + self.mlp(normed), context))
        return y


Rungs = Tensor | tuple[Tensor, Any]
"""x, or (x, late): what the last branch gave and x has not yet; of serving, a :class:`Pending`."""


class LadderBlock(Block):
    """Attention and MLP that each read the stream before the last branch's output has come: x, or (x, late) → (x, late)."""

    def forward(self, stream: Rungs) -> Rungs:
        x, late = _rungs(stream)
        x, last = self.run((x, late), whole_sequences(x.shape[-2], x.device, causal=self.causal))
        return x, last.wait()

    def run(self, stream: Rungs, context: Context) -> tuple[Tensor, Pending]:
        """The block in any context; ``late`` is given and returned as a :class:`Pending`."""
        x, late = _rungs(stream)
        branch = self.dropout(self.attention(self.attention_norm(x), context))
        if late is not None:
            x = x + late.wait()
        late = context.ranks.start_sum(branch[None], scratch=True)
        branch = self.dropout(self.mlp(self.mlp_norm(x)))
        x = x + late.wait()
        return x, context.ranks.start_sum(branch[None], scratch=True)


class LadderHead(Head):
    """Adds what the last branch gave, then norm and projection: (x, late) → (batch, seq, vocab)."""

    def forward(self, stream: Rungs) -> Tensor:
        x, late = _rungs(stream)
        assert late is not None
        return super().forward(x + late.wait())

    def run(self, stream: Rungs, context: Context, rows: Tensor) -> Tensor:
        x, late = _rungs(stream)
        assert late is not None
        return super().run(x + late.wait(), context, rows)


def _rungs(stream: Rungs) -> tuple[Tensor, Pending | None]:
    if isinstance(stream, Tensor):
        return stream, None
    x, late = stream
    return x, Done(late) if isinstance(late, Tensor) else late


def _whole(part: Tensor, context: Context) -> Tensor:
    """The sum of what all ranks computed, waited for."""
    return context.ranks.start_sum(part[None], scratch=True).wait()


def decoder_attention(shape: DecoderShape, linear: MakeLinear) -> Attention:
    """The attention of a decoder's block, or of one of its sub-layers."""
    return Attention(
        shape.config.hidden,
        shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        linear=linear,
    )


def draw_branches(attention: Attention, mlp: MLP, num_blocks: int) -> None:
    """Initial weights of a block: GPT-2's, smaller where they write to the residual stream of a deep model."""
    residual_std = INIT_STD / math.sqrt(2 * num_blocks)
    for linear, std in (
        (attention.qkv, INIT_STD),
        (attention.out, residual_std),
        (mlp.up, INIT_STD),
        (mlp.gate, INIT_STD),
        (mlp.down, residual_std),
    ):
        if linear is None:
            continue
        nn.init.normal_(linear.weight, std=std)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
