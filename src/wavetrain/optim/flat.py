"""Flat: all trained parameters of an optimizer as one vector of d numbers, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from wavetrain.errors import InputError

WHOLE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""
EXACT: Final = 1 << 53
"""Whole numbers below are exact as float64."""


class Flat:
    """The parameters of ``groups`` that require gradients, in order, as slices of a vector.

    Args:
        groups: ``param_groups`` of a torch optimizer.
        held_elsewhere: those that other ranks count: they come last.
        owners: of parameters, by their ``id``, the rank that keeps their history: in the order of ranks, then.
        rank: only the parameters of this owner, if any.

    Raises:
        InputError: none is trained, or they are of several devices or types.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        held_elsewhere: Sequence[Tensor] = (),
        owners: Mapping[int, int] | None = None,
        rank: int | None = None,
    ) -> None:
        self._elsewhere = {id(p) for p in held_elsewhere}
        self._owners, self._rank = owners or {}, rank
        self.parameters: list[Tensor] = self._trained(groups)
        kinds = {(p.device, p.dtype) for group in groups for p in group["params"] if p.requires_grad}
        if not kinds:
            raise InputError("the optimizer holds no parameter that requires a gradient")
        if len(kinds) > 1:
            named = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
            raise InputError(f"OptEx takes parameters of one type on one device; these are {named}")
        self.device, self.dtype = next(iter(kinds))
        if not self.dtype.is_floating_point:
            raise InputError(f"OptEx takes parameters of real numbers; these are {self.dtype}")
        self._others: list[Tensor] = [p for group in groups for p in group["params"] if not p.requires_grad]
        number = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self._groups = [number[id(p)] for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        self.num_coordinates = sum(self.sizes)
        self.num_counted = sum(p.numel() for p in self.parameters if id(p) not in self._elsewhere)
        """The first so many coordinates count in distances and inner products."""

    def _trained(self, groups: Sequence[dict[str, Any]]) -> list[Tensor]:
        found = [p for group in groups for p in group["params"] if p.requires_grad]
        if self._rank is not None:
            found = [p for p in found if self._owners.get(id(p)) == self._rank]
        return sorted(found, key=lambda p: (id(p) in self._elsewhere, self._owners.get(id(p), 0)))

    def same(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether ``groups`` still train exactly these parameters."""
        now = self._trained(groups)
        same = len(now) == len(self.parameters) and all(a is b for a, b in zip(now, self.parameters, strict=True))
        return same and all(p.device == self.device and p.dtype == self.dtype for p in now)

    def empty(self) -> Tensor:
        """A vector (d,)."""
        return torch.empty(self.num_coordinates, device=self.device, dtype=self.dtype)

    @torch.no_grad()
    def read(self, out: Tensor) -> Tensor:
        """The parameters' values into ``out`` (d,)."""
        return torch.cat([p.reshape(-1) for p in self.parameters], out=out) if self.parameters else out

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """``values`` (d,) into the parameters."""
        for part, p in zip(torch.split(values, self.sizes), self.parameters, strict=True):
            p.copy_(part.view_as(p))

    def versions(self) -> tuple[int, ...]:
        """Numbers that change when a parameter is written to."""
        return tuple(p._version for p in self.parameters)

    @torch.no_grad()
    def bits(self) -> float:
        """A number that differs if any bit of the parameters does: the sum of their values, read as whole numbers."""
        kind = WHOLE[self.dtype.itemsize]
        sums = [p.reshape(-1).view(kind).sum() for p in self.parameters]
        return float(int(torch.stack(sums).sum()) % EXACT) if sums else 0.0

    @torch.no_grad()
    def checksum(self, work: Tensor) -> tuple[float, float]:
        """Two numbers that differ if parameters do; their values are in ``work`` (d,) then."""
        values = self.read(work)
        return float(values.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(values, dtype=torch.float64))

    def by_group(self, values: Sequence[float], where: Tensor | None) -> Tensor:
        """Of each coordinate in ``where`` (c,), or of all that are counted, the value of its group."""
        each = torch.tensor(values, device=self.device, dtype=self.dtype)
        if len(values) == 1:
            return each
        where = torch.arange(self.num_counted, device=self.device) if where is None else where
        ends = torch.tensor(self.sizes, device=self.device, dtype=torch.long).cumsum(0)
        groups = torch.tensor(self._groups, device=self.device, dtype=torch.long)
        return each[groups[torch.searchsorted(ends, where, right=True)]]

    def forget_gradients(self) -> None:
        """No parameter has a gradient, nor has a frozen one that was left from before."""
        for p in (*self.parameters, *self._others):
            p.grad = None

    @torch.no_grad()
    def read_gradients(self, out: Tensor) -> tuple[bool, ...]:
        """The gradients into ``out`` (d,), zeros where there is none; which parameters have one.

        Raises:
            InputError: one is sparse.
        """
        has = []
        for i, (part, p) in enumerate(zip(torch.split(out, self.sizes), self.parameters, strict=True)):
            has.append(p.grad is not None)
            if p.grad is None:
                part.zero_()
            elif p.grad.is_sparse:
                raise InputError(
                    f"the gradient of parameter {i}, of shape {tuple(p.shape)}, is sparse: OptEx keeps gradients as one dense "
                    "vector; make the embedding with sparse=False"
                )
            else:
                part.copy_(p.grad.reshape(-1))
        return tuple(has)

    def lend_gradients(self, values: Tensor, has: Sequence[bool]) -> None:
        """Parts of ``values`` (d,) as the parameters' gradients; None where ``has`` says no.

        Without a copy, but for parameters in another order of memory (channels_last): fused optimizers take both as they lie.
        """
        for part, p, there in zip(torch.split(values, self.sizes), self.parameters, has, strict=True):
            if not there:
                p.grad = None
            elif p.is_contiguous():
                p.grad = part.view_as(p)
            else:
                p.grad = torch.empty_like(p).copy_(part.view(p.shape))
