"""What passes between stages: a tensor, or tuples, lists and dicts of tensors, taken apart and put together again.

A :class:`Structure` is plain data, so that a rank can tell its neighbour once what a micro-batch of some shape looks like.
"""

from __future__ import annotations

import functools
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavetrain.errors import InputError

_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class Leaf(NamedTuple):
    """One tensor of a structure."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Leaf:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class Structure:
    """The shape of a value: its nesting, and its tensors in order."""

    nesting: Any
    """An int for a tensor (its place in the flat list), {"tuple" | "list": [...]}, {"dict": {...}} or {"value": ...}."""
    leaves: tuple[Leaf, ...]

    @functools.cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Of every tensor."""
        return tuple(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Put ``tensors`` back to where :func:`flatten` took them from."""
        return _build(self.nesting, tensors)

    def describe(self) -> str:
        """The tensors in words: ``float32 (4, 128, 256), bool (4, 128)``."""
        return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {leaf.shape}" for leaf in self.leaves) or "no tensor"

    def dump(self) -> bytes:
        """As JSON."""
        leaves = [[list(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.requires_grad] for leaf in self.leaves]
        return json.dumps({"nesting": self.nesting, "leaves": leaves}).encode()

    @classmethod
    def parse(cls, data: bytes) -> Structure:
        """Read what :meth:`dump` wrote."""
        try:
            raw = json.loads(data)
            leaves = tuple(Leaf(tuple(int(n) for n in s), _DTYPES[d], bool(g)) for s, d, g in raw["leaves"])
            _check(raw["nesting"], leaves)
            return cls(raw["nesting"], leaves)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"a neighbour sent a structure that cannot be read: {error}") from None


def flatten(value: Any, what: str) -> tuple[list[Tensor], Structure]:
    """Take ``value`` apart; ``what`` names it in an error."""
    tensors: list[Tensor] = []
    nesting = _nesting(value, tensors, what)
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
            raise InputError(f"{what} holds a tensor of {tensor.dtype}, which cannot be sent between ranks")
        if tensor.layout is not torch.strided:
            raise InputError(f"{what} holds a sparse tensor, which cannot be sent between ranks; give it as .to_dense()")
    return tensors, Structure(nesting, tuple(Leaf.of(t) for t in tensors))


def _nesting(value: Any, tensors: list[Tensor], what: str) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if type(value) in (tuple, list, torch.Size):  # others would lose what they are on the way to another rank
        return {"list" if type(value) is list else "tuple": [_nesting(v, tensors, what) for v in value]}
    if type(value) in (dict, OrderedDict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: _nesting(v, tensors, what) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise InputError(
        f"{what} is a {type(value).__name__}; what passes between layers must be a tensor, or plain tuples, lists and dicts (by "
        "string) of tensors"
    )


def _check(nesting: Any, leaves: Sequence[Leaf]) -> None:
    if any(n < 0 for leaf in leaves for n in leaf.shape) or _places(nesting) != list(range(len(leaves))):
        raise ValueError("its nesting does not fit its tensors")


def _places(nesting: Any) -> list[int]:
    """The tensors that a nesting names, in order; an error where it is none."""
    if type(nesting) is int:
        return [nesting]
    ((kind, inner),) = nesting.items()
    if kind == "value" and (inner is None or isinstance(inner, (bool, int, float, str))):
        return []
    if kind not in ("tuple", "list", "dict") or isinstance(inner, dict) != (kind == "dict"):
        raise ValueError(f"no such nesting: {kind}")
    return [place for n in (inner.values() if kind == "dict" else list(inner)) for place in _places(n)]


def _build(nesting: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(nesting, int):
        return tensors[nesting]
    ((kind, inner),) = nesting.items()
    if kind == "tuple":
        return tuple(_build(n, tensors) for n in inner)
    if kind == "list":
        return [_build(n, tensors) for n in inner]
    if kind == "dict":
        return {k: _build(n, tensors) for k, n in inner.items()}
    return inner
