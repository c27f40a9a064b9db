"""The layers that the models are lists of: an embedding, blocks and a head.

Every layer takes one value and returns one, so that a model can be cut between any two of them:

    tokens (batch, seq) int64 → embed → (batch, seq, hidden) → block … → (batch, seq, hidden) → head → logits (batch, seq, vocab)

Dropout is applied to the embedding and to the output of each residual branch, not to attention probabilities: what is dropped is
then the same whether or not the heads are split over ranks, and attention stays on its fast path.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.models.config import ModelConfig

INIT_STD: Final = 0.02
"""Standard deviation of GPT-2's initial weights; those that write to the residual stream have 1/√(2·blocks) of it."""


class Layer(nn.Module):
    """A layer that knows what it costs and how it is initialised; derive from it to tell both of a layer of your own."""

    def cost(self, batch: int, seq: int) -> float:
        """FLOPs of the forward pass over ``batch`` sequences of ``seq`` tokens (a multiply and an add are two)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it costs")

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's default generator, which the caller seeds."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is initialised")


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


class TokenEmbedding(Layer):
    """Token and learned position embedding, then dropout: (batch, seq) int64 → (batch, seq, hidden)."""

    def __init__(self, *, vocab: int, hidden: int, max_length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.max_length = max_length
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token.weight, std=INIT_STD)
        nn.init.normal_(self.position.weight, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens)
        seq = tokens.shape[1]
        if seq > self.max_length:
            raise InputError(
                f"a sequence has {seq} tokens, but the model was built for at most max_length={self.max_length}; "
                f"give shorter sequences, or build it with max_length={seq}"
            )
        x: Tensor = self.dropout(self.token(tokens) + self.position.weight[:seq])
        return x

    def cost(self, batch: int, seq: int) -> float:
        return float(batch * seq * self.token.embedding_dim)  # looking up is free, adding the position is not


class Attention(nn.Module):
    """Multi-head self-attention with one projection for query, key and value.

    The rows of ``qkv.weight`` are laid out as (head, [query, key, value], head_dim): any contiguous part of whole heads computes
    those heads, so the number of heads here is read from the projection's output, not from the config.
    """

    def __init__(self, hidden: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden // num_heads
        self.causal = causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, seq, hidden) → the same; ``mask`` (batch, seq) bool is true where a token may be looked at."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # (batch, seq, heads here, 3, head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-2))  # each (batch, heads here, seq, head_dim)
        allowed = None if mask is None else mask[:, None, None, :]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=self.causal)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return mixed


class MLP(nn.Module):
    """hidden → mlp_ratio · hidden → hidden with GELU in its tanh form."""

    def __init__(self, hidden: int, mlp_ratio: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, mlp_ratio * hidden)
        self.down = nn.Linear(mlp_ratio * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
        return y


class Block(Layer):
    """A pre-norm transformer block: x + Attention(LN(x)), then x + MLP(LN(x)); (batch, seq, hidden) → the same.

    Args:
        hidden: width of x.
        num_heads: attention heads; divides ``hidden``.
        mlp_ratio: inner width of the MLP over ``hidden``.
        dropout: of the output of attention and MLP.
        causal: whether a token only sees those before it.
        num_blocks: blocks of the whole model; the deeper it is, the smaller the first steps of each.
    """

    def __init__(
        self, *, hidden: int, num_heads: int, mlp_ratio: int = 4, dropout: float = 0.0, causal: bool = True, num_blocks: int = 1
    ) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, num_heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, mlp_ratio)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        residual_std = INIT_STD / math.sqrt(2 * self.num_blocks)
        for linear, std in (
            (self.attention.qkv, INIT_STD),
            (self.attention.out, residual_std),
            (self.mlp.up, INIT_STD),
            (self.mlp.down, residual_std),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)
        self.attention_norm.reset_parameters()
        self.mlp_norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x)

    def transform(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The block on x (batch, seq, hidden); ``mask`` (batch, seq) bool is true where a token may be looked at."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y

    def cost(self, batch: int, seq: int) -> float:
        hidden, inner = self.mlp.up.in_features, self.mlp.up.out_features
        seen = seq / 2 if self.attention.causal else seq  # tokens that a token looks at, on average
        return float(batch * seq * (2 * hidden * (4 * hidden + 2 * inner) + 4 * hidden * seen))


class Head(Layer):
    """Final LayerNorm and projection to logits: (batch, seq, hidden) → (batch, seq, vocab).

    When ``tied``, the projection's weight is the embedding's and is initialised by the embedding only.
    """

    def __init__(self, *, hidden: int, vocab: int, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        self.norm = nn.LayerNorm(hidden)
        self.projection = nn.Linear(hidden, vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        if not self.tied:
            nn.init.normal_(self.projection.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits

    def cost(self, batch: int, seq: int) -> float:
        return float(2 * batch * seq * self.projection.in_features * self.projection.out_features)


def check_tokens(tokens: Any) -> None:
    """Refuse what cannot be a batch of token numbers."""
    if not isinstance(tokens, Tensor):
        raise InputError(f"the embedding was given a {type(tokens).__name__}; give a tensor of token numbers, (batch, seq) int64")
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"the embedding was given a tensor of shape {tuple(tokens.shape)} and {tokens.dtype}; "
            "give token numbers of shape (batch, seq) and torch.int64"
        )
