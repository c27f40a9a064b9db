"""Micro-batches: a batch split into the parts that flow, what they look like, and what each of them counts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from wavetrain.errors import InputError
from wavetrain.runtime.structure import flatten

IGNORED = -100
"""A target of whole numbers that does not count, as in ``torch.nn.functional.cross_entropy``."""


def split_batch(batch: Any, number: int, what: str) -> list[Any]:
    """``batch`` as ``number`` micro-batches.

    A list (not a tuple) of ``number`` things is taken as it is: micro-batches of any sizes. Anything else is split along the
    first dim of its tensors, as evenly as can be.
    """
    if isinstance(batch, list):
        if len(batch) != number:
            raise InputError(f"{what} are a list of {len(batch)} micro-batches, but the schedule has {number}")
        return batch
    tensors, structure = flatten(batch, what)
    sizes = {t.shape[0] if t.dim() else 0 for t in tensors}
    if len(sizes) != 1:
        raise InputError(f"{what} must have one size along their first dim, to be split; they are {structure.describe()}")
    (size,) = sizes
    if size < number:
        raise InputError(f"{what} hold {size} samples, which cannot be split into {number} micro-batches")
    parts = [t.tensor_split(number) for t in tensors]
    return [structure.unflatten([p[m] for p in parts]) for m in range(number)]


def num_samples(batch: Any) -> int:
    """The size of a batch along the first dim of its tensors, which :func:`split_batch` has found to be one."""
    return int(flatten(batch, "a batch")[0][0].shape[0])


def shape_key(micro_batch: Any) -> Hashable:
    """What stands for the shape of a micro-batch: equal for those that look alike to every layer."""
    tensors, structure = flatten(micro_batch, "inputs")
    return (repr(structure.nesting), tuple((tuple(t.shape), t.dtype) for t in tensors))


def count_targets(targets: Any) -> float:
    """How many targets a micro-batch has: elements of the first tensor, without those that are to be ignored."""
    tensors, _ = flatten(targets, "targets")
    if not tensors:
        return 1.0
    first: Tensor = tensors[0]
    if first.dtype in (torch.int64, torch.int32):
        return float((first != IGNORED).sum())
    return float(first.numel())
