"""A model in parts: which of its weights a rank holds, and the model of just those.

Every layer says along which dim ranks share each of its weights (:meth:`wavetrain.models.layers.Layer.split_dims`). Standard
blocks are shared as Megatron does: whole kv heads with their queries, and a part of the MLP's inner width; Kraken's by whole
sub-layers, evenly or not; of all, the head's rows by vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wavetrain.errors import CheckpointError, InputError
from wavetrain.models.config import DECODERS, DecoderShape, ModelConfig
from wavetrain.models.layers import Head, Layer, LayeredModel
from wavetrain.models.registry import build_model

Read = Callable[[str], Tensor]
"""Name of a weight → the whole of it."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How ranks share a decoder."""

    counts: tuple[int, ...]
    """Parts of its blocks that each rank holds: sub-layers of a Kraken, one each of any other."""
    whole_head: bool = False
    """Whether every rank computes the logits of all tokens: to the bit those of one rank."""

    @property
    def size(self) -> int:
        return len(self.counts)

    def cut(self, size: int, rank: int) -> slice:
        """The part of a dim of ``size`` that a rank holds of a block."""
        total, begin = sum(self.counts), sum(self.counts[:rank])
        return slice(size * begin // total, size * (begin + self.counts[rank]) // total)

    def vocabulary(self, vocab: int, rank: int) -> slice:
        """The tokens whose logits a rank computes; the last rank may have fewer."""
        if self.whole_head:
            return slice(0, vocab)
        each = -(-vocab // self.size)
        return slice(min(vocab, each * rank), min(vocab, each * (rank + 1)))


def share(config: ModelConfig, size: int, counts: Sequence[int] | None = None) -> Sharing:
    """How ``size`` ranks share a decoder.

    Args:
        config: the model's shape.
        size: ranks.
        counts: of a Kraken, sub-layers that each rank holds; None: all the same number.
    """
    if config.name not in DECODERS:
        raise InputError(f"a model of kind {config.name!r} cannot generate; those that can: {', '.join(DECODERS)}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"the model is to be shared by {size!r} ranks; give a whole number of at least 1")
    degree = config.degree
    if degree is None:
        if counts is not None:
            raise InputError(f"only a Kraken can be shared unevenly, not a model of kind {config.name!r}; leave the shares out")
        shape = DecoderShape(config)
        for count, what in ((shape.kv_heads, "kv heads"), (shape.inner, "columns of the MLP")):
            if count % size:
                fitting = [n for n in range(1, count + 1) if shape.kv_heads % n == 0 and shape.inner % n == 0]
                raise InputError(f"{size} ranks cannot share {count} {what}; take {', '.join(map(str, fitting[:8]))} ranks")
        return Sharing(counts=(1,) * size)
    if counts is None:
        if degree % size:
            fitting = [n for n in range(1, degree + 1) if degree % n == 0]
            uneven = "" if size > degree else f", or say how many each holds, e.g. shares {' '.join(_uneven(degree, size))}"
            raise InputError(
                f"{size} ranks cannot share a Kraken of degree {degree} evenly; take {', '.join(map(str, fitting))} ranks{uneven}"
            )
        return Sharing(counts=(degree // size,) * size)
    if len(counts) != size or sum(counts) != degree or any(type(n) is not int or n < 1 for n in counts):
        raise InputError(
            f"shares {tuple(counts)} of {size} ranks do not hold the {degree} sub-layers; give {size} whole numbers above 0 "
            f"that add up to {degree}"
        )
    return Sharing(counts=tuple(counts))


def _uneven(degree: int, size: int) -> list[str]:
    return [str(degree // size + (i < degree % size)) for i in range(size)]


def build_part(
    config: ModelConfig, sharing: Sharing, rank: int, read: Read, *, device: torch.device, dtype: torch.dtype
) -> LayeredModel:
    """The model of a rank, for inference: every weight read, checked, and cut.

    Args:
        config: the whole model's shape.
        sharing: of the ranks.
        rank: this one.
        read: gives a whole weight; only its part is kept.
        device: where weights go.
        dtype: of all weights.
    """
    with torch.device("meta"):
        model = build_model(config)
    places = Counter(id(p) for layer in model.children() for _, p in layer.named_parameters(remove_duplicate=False))
    kept: dict[int, Tensor] = {}  # a weight that is used at two places (tied) is read once; of others only the part stays
    made: dict[int, nn.Parameter] = {}  # and is one Parameter, where it is whole at both places
    for layer_name, layer in model.named_children():
        assert isinstance(layer, Layer)
        dims = layer.split_dims()
        once = layer.added_once()
        for name, parameter in list(layer.named_parameters(remove_duplicate=False)):
            owner, _, leaf = name.rpartition(".")
            module = layer.get_submodule(owner)
            if name in once and rank > 0:
                setattr(module, leaf, None)
                continue
            whole = kept[id(parameter)] if id(parameter) in kept else _checked(read, f"{layer_name}.{name}", parameter)
            if id(parameter) in made and (name not in dims or sharing.size == 1):
                setattr(module, leaf, made[id(parameter)])
                continue
            part = whole
            if name in dims and sharing.size > 1:
                vocab = isinstance(layer, Head) and name == "projection.weight"
                size = whole.shape[dims[name]]
                cut = sharing.vocabulary(size, rank) if vocab else sharing.cut(size, rank)
                part = whole.narrow(dims[name], cut.start, cut.stop - cut.start)
            if not (isinstance(layer, Head) and config.tied and name == "projection.weight"):
                part = part.to(device=device, dtype=dtype, copy=True).contiguous()
            own = nn.Parameter(part, requires_grad=False)
            if places[id(parameter)] > 1:
                kept[id(parameter)] = part if part.shape == whole.shape else whole
                if part.shape == whole.shape:
                    made[id(parameter)] = own
            setattr(module, leaf, own)
    return model.eval()


def _checked(read: Read, name: str, parameter: Tensor) -> Tensor:
    whole = read(name)
    if tuple(whole.shape) != tuple(parameter.shape):
        raise CheckpointError(
            f"{name} has shape {tuple(whole.shape)} in the checkpoint, but the model of its config has {tuple(parameter.shape)}"
        )
    if not whole.is_floating_point():
        raise CheckpointError(f"{name} is of {whole.dtype} in the checkpoint; weights are floating-point numbers")
    return whole
