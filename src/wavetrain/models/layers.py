"""What all models begin and end with, and what a layer is.

Every layer takes one value and returns one, so that a model can be cut between any two of them:

    tokens (batch, seq) int64 → embed → (batch, seq, hidden) → block … → (batch, seq, hidden) → head → logits (batch, seq, vocab)

Dropout is applied to the embedding and to the output of each residual branch, not to attention probabilities: what is dropped is
then the same whether or not the heads are split over ranks, and attention stays on its fast path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.models.attention import MakeLinear
from wavetrain.models.config import ModelConfig
from wavetrain.models.context import Context
from wavetrain.models.linear import Linear

INIT_STD: Final = 0.02
"""Standard deviation of GPT-2's initial weights; those that write to the residual stream have 1/√(2·blocks) of it."""


Norm = nn.LayerNorm | nn.RMSNorm


class Layer(nn.Module):
    """A layer that knows what it costs and how it is initialised; derive from it to tell both of a layer of your own."""

    def cost(self, batch: int, seq: int) -> float:
        """FLOPs of the forward pass over ``batch`` sequences of ``seq`` tokens (a multiply and an add are two)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it costs")

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's default generator, which the caller seeds."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is initialised")

    def split_dims(self) -> dict[str, int]:
        """Name of a parameter → the dim along which ranks share it; what is not named is whole on every rank."""
        return {}

    def added_once(self) -> tuple[str, ...]:
        """Parameters that belong into a sum over ranks once, not once a rank: the first rank alone holds them."""
        return ()


class LayeredModel(nn.Sequential):
    """Named layers in order, and the config they were built of."""

    embed: TokenEmbedding
    head: Head

    def __init__(self, config: ModelConfig, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(OrderedDict(layers))
        self.config = config
        self.tie_weights()

    def __getitem__(self, index: slice | int) -> Any:
        """A layer, or for a slice an ``nn.Sequential`` of those layers under their names."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return super().__getitem__(index)

    def tie_weights(self) -> None:
        """Make the head's weight and the embedding's one Parameter again, if the model is tied.

        Needed after anything that replaces parameters one by one, as ``to_empty`` of a model on the meta device does.
        """
        if self.config.tied:
            self.head.projection.weight = self.embed.token.weight

    def reset_parameters(self) -> None:
        """Initialise all layers in order from torch's default generator."""
        self.tie_weights()
        for layer in self.children():
            if isinstance(layer, Layer):
                layer.reset_parameters()

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, a tied one counted once."""
        return sum(p.numel() for p in self.parameters())


class TokenEmbedding(Layer):
    """Token and learned position embedding, then dropout: (batch, seq) int64 → (batch, seq, hidden).

    ``learned``: whether there are position embeddings; not where positions are rotary.
    """

    def __init__(self, *, vocab: int, hidden: int, max_length: int, dropout: float = 0.0, learned: bool = True) -> None:
        super().__init__()
        self.max_length = max_length
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(max_length, hidden) if learned else None
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token.weight, std=INIT_STD)
        if self.position is not None:
            nn.init.normal_(self.position.weight, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens)
        seq = tokens.shape[1]
        if seq > self.max_length:
            raise InputError(
                f"a sequence has {seq} tokens, but the model was built for at most max_length={self.max_length}; "
                f"give shorter sequences, or build it with max_length={seq}"
            )
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position.weight[:seq]
        dropped: Tensor = self.dropout(x)
        return dropped

    def run(self, tokens: Tensor, context: Context) -> Tensor:
        """Tokens (tokens,) that stand where the context says → (tokens, hidden)."""
        x: Tensor = self.token(tokens)
        return x if self.position is None else x + self.position(context.positions)

    def cost(self, batch: int, seq: int) -> float:
        return float(batch * seq * self.token.embedding_dim)  # looking up is free, adding the position is not


class MLP(nn.Module):
    """hidden → inner → hidden, with GELU in its tanh form, or gated by SiLU (SwiGLU); (…, hidden) → the same.

    Args:
        hidden: width of x.
        inner: width in between.
        gated: SwiGLU: silu(gate(x)) · up(x) instead of gelu(up(x)).
        linear: how its projections are made.
    """

    def __init__(self, hidden: int, inner: int, *, gated: bool = False, linear: MakeLinear = nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.up: Any = linear(hidden, inner)
        self.gate: Any = linear(hidden, inner) if gated else None
        self.down: Any = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            y: Tensor = self.down(self.activate(self.up(x)))
        else:
            y = self.down(self.activate(self.gate(x)) * self.up(x))
        return y

    def activate(self, x: Tensor) -> Tensor:
        """What makes it more than a product, element by element."""
        return nn.functional.gelu(x, approximate="tanh") if self.gate is None else nn.functional.silu(x)


class Head(Layer):
    """Final norm and projection to logits: (batch, seq, hidden) → (batch, seq, vocab).

    When ``tied``, the projection's weight is the embedding's and is initialised by the embedding only.
    """

    def __init__(self, *, hidden: int, vocab: int, tied: bool, norm: Norm | None = None) -> None:
        super().__init__()
        self.tied = tied
        self.norm: Norm = nn.LayerNorm(hidden) if norm is None else norm
        self.projection: nn.Linear = Linear(hidden, vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        if not self.tied:
            nn.init.normal_(self.projection.weight, std=INIT_STD)

    def forward(self, x: Any) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits

    def run(self, x: Any, context: Context, rows: Tensor) -> Tensor:
        """What the last block gave, (tokens, hidden) → logits of the tokens ``rows``, (rows, vocab here)."""
        logits: Tensor = self.projection(self.norm(x[rows]))
        return logits

    def split_dims(self) -> dict[str, int]:
        return {"projection.weight": 0}

    def cost(self, batch: int, seq: int) -> float:
        return float(2 * batch * seq * self.projection.in_features * self.projection.out_features)


def make_norm(kind: str, hidden: int, eps: float, *, bias: bool) -> Norm:
    """A LayerNorm or RMSNorm of width ``hidden``."""
    return nn.RMSNorm(hidden, eps) if kind == "rms" else nn.LayerNorm(hidden, eps, bias=bias)


def check_tokens(tokens: Any) -> None:
    """Refuse what cannot be a batch of token numbers."""
    if not isinstance(tokens, Tensor):
        raise InputError(f"the embedding was given a {type(tokens).__name__}; give a tensor of token numbers, (batch, seq) int64")
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"the embedding was given a tensor of shape {tuple(tokens.shape)} and {tokens.dtype}; "
            "give token numbers of shape (batch, seq) and torch.int64"
        )
