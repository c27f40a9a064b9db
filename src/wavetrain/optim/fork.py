"""Fork: the state of a torch optimizer set aside, and brought back, so that steps can be tried."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

BRAKE: Final = 0.25
"""What is left of momentum that is braked."""


class Fork:
    """What ``optimizer`` remembers, at the time of the last :meth:`save`.

    Everything that a step may change is kept: the state of every parameter, and the values of its groups. Buffers are made
    once and used again.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Tensor, Any] = {}
        self._groups: list[dict[str, Any]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Set aside what it remembers now."""
        old = self._state
        self._state = {p: _copied(value, old.get(p)) for p, value in self._optimizer.state.items()}
        self._groups = [
            {k: _copied(v, None) for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self, *, groups: bool = True) -> None:
        """Bring it back; without ``groups``, not their values, which a scheduler may have changed since."""
        state = self._optimizer.state
        for p in [p for p in state if p not in self._state]:
            del state[p]
        for p, value in self._state.items():
            state[p] = _copied(value, state.get(p))
        if not groups:
            return
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            for k in [k for k in group if k != "params" and k not in values]:
                del group[k]
            for k, v in values.items():
                if not _same(group.get(k), v):
                    group[k] = _copied(v, None)

    @torch.no_grad()
    def brake(self) -> None:
        """Momentum that is set aside: less of it."""
        for value in self._state.values():
            buffer = value.get("momentum_buffer")
            if isinstance(buffer, Tensor):
                buffer.mul_(BRAKE)

    def held_bytes(self) -> int:
        """Bytes of what is set aside."""
        return sum(map(_bytes, self._state.values()))

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """What is set aside, parameters by their number."""
        number = {p: i for i, p in enumerate(self._parameters())}
        state = {number[p]: _copied(value, None) for p, value in self._state.items()}
        return {"state": state, "groups": [_copied(group, None) for group in self._groups]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, of an optimizer with the same parameters."""
        parameters = self._parameters()
        self._state = {parameters[int(i)]: _copied(value, None) for i, value in state["state"].items()}
        self._groups = [_copied(group, None) for group in state["groups"]]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _copied(value: Any, into: Any) -> Any:
    """A copy that shares nothing with ``value``; tensors go into those of ``into`` where they fit."""
    if isinstance(value, Tensor):
        if isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype and into.device == value.device:
            return into.copy_(value)
        return value.detach().clone()
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {k: _copied(v, known.get(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = into if isinstance(into, list | tuple) and len(into) == len(value) else [None] * len(value)
        return type(value)(_copied(v, part) for v, part in zip(value, parts, strict=True))
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and bool(a == b)
