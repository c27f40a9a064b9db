"""What a layer costs relative to others, to cut a model into stages before anything was measured."""

from __future__ import annotations

from typing import Final

from torch import nn

from wavetrain.models.layers import Layer

LEAST_COST: Final = 1.0
"""FLOPs a token that every layer costs at least: no layer is free, and no stage's cost may be zero."""


def layer_cost(module: nn.Module, *, seq: int = 512) -> float:
    """Forward FLOPs a token of any layer.

    wavetrain's own layers (and yours, if they derive from :class:`wavetrain.models.Layer`) say it themselves. Of other modules it
    is two a weight of their matrices, embeddings counted as free (they look up and do not multiply): right for Linear layers, too
    little for convolutions and for attention over long sequences; measure where that matters.

    Args:
        module: the layer.
        seq: tokens a sequence, which attention's cost depends on.
    """
    return max(LEAST_COST, _flops(module, seq))


def _flops(module: nn.Module, seq: int) -> float:
    if isinstance(module, Layer):
        return module.cost(1, seq) / seq
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0.0
    own = sum(2.0 * p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)
    return own + sum(_flops(child, seq) for child in module.children())
