"""A Kraken from a standard GPT: its weights as a first guess, to be trained further by :mod:`wavetrain.runtime.train.distill`.

Sub-layer i gets what rank i of N would hold of the standard model: an N-th of its heads, and of the inner width of its MLP. The
embedding is divided by N, so that the sum S of all streams is what the standard residual stream is:

    standard:  x = e + Σ_l Σ_i (A_i + M_i)            Kraken:  x_i = e/N + Σ_l (A_i + M_i),   S = Σ_i x_i

MLPs then read what they read before, but for the attention of the other sub-layers in the same layer; attention reads an N-th of
the stream instead of all of it: that is what training has to mend. W_concat is the identity for each stream, and the final norm
is scaled by N, since it meets the smaller embedding in the (tied) head. Biases are left out: Kraken has none.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from wavetrain.errors import InputError
from wavetrain.models.config import DecoderShape, ModelConfig
from wavetrain.models.kraken import Kraken
from wavetrain.models.layers import LayeredModel


def converted_config(standard: ModelConfig, degree: int) -> ModelConfig:
    """The shape of the Kraken that a standard model becomes."""
    if standard.name != "gpt":
        raise InputError(f"only a gpt can become a Kraken, not a model of kind {standard.name!r}")
    shape = DecoderShape(standard)
    for count, what in ((shape.kv_heads, "kv heads"), (shape.inner, "columns of the MLP")):
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 2 or count % degree:
            raise InputError(f"degree is {degree!r}; take a number of at least 2 that divides the {count} {what}")
    return dataclasses.replace(
        standard, name="kraken", degree=degree, inner=shape.inner // degree, head_dim=shape.head_dim, bias=False, mlp_ratio=2
    )


@torch.no_grad()
def kraken_from(standard: LayeredModel, degree: int) -> Kraken:
    """A Kraken of ``degree`` sub-layers with the weights of a standard GPT; ``standard`` is left as it is."""
    model = Kraken(**converted_config(standard.config, degree).arguments())
    given = dict(standard.named_parameters())
    tied = bool(standard.config.tied)
    for name, parameter in model.named_parameters():
        if name == "head.concat.weight":
            parameter.copy_(torch.eye(parameter.shape[1]).expand_as(parameter))
            continue
        weight = given[name]
        if name.startswith("block"):
            parameter.copy_(_stacked(name, weight, degree).view_as(parameter))
        elif name.startswith("embed"):
            parameter.copy_(weight / degree)
        elif name == "head.norm.weight":
            parameter.copy_(weight * degree if tied else weight)
        else:
            parameter.copy_(weight)
    return model


def _stacked(name: str, weight: Tensor, degree: int) -> Tensor:
    """A block's weight as (N, …)."""
    if weight.dim() == 1:
        return weight.expand(degree, -1).contiguous()  # a norm, for each sub-layer the same
    if ".out." in name or ".down." in name:
        return torch.unflatten(weight, 1, (degree, -1)).transpose(0, 1).contiguous()  # inputs are shared out
    return torch.unflatten(weight, 0, (degree, -1)).contiguous()
