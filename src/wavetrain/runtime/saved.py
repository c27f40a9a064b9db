"""What autograd keeps of a forward pass, let go piece by piece.

Autograd frees what it saved when a backward pass is over. A split backward has two: after I, only what W reads is still needed
(the inputs of linear layers, not the queries, keys and scores of attention), but autograd holds all of it until the graph is
gone. So everything that is saved goes through a box here, and I empties the boxes that W will not open.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from wavetrain.runtime.torch_private import version_of


class _Box:
    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)


class Saved(saved_tensors_hooks):
    """A context for a forward pass; knows every tensor that autograd saves within it."""

    def __init__(self) -> None:
        self._boxes: list[_Box] = []
        self._opened: set[int] | None = None
        super().__init__(self._pack, self._unpack)

    def keep_only(self, nodes: Iterable[Node]) -> None:
        """Let go what none of ``nodes`` has saved."""
        opened = self._opened = set[int]()
        for node in nodes:
            for name in _saved_names(type(node)):
                getattr(node, name, None)  # reading it opens its boxes
        self._opened = None
        for box in self._boxes:
            if id(box) not in opened:
                box.tensor = None
        self._boxes = []

    def _pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor)
        self._boxes.append(box)
        return box

    def _unpack(self, box: Any) -> Tensor:
        if self._opened is not None:
            self._opened.add(id(box))
        assert box.tensor is not None, "W reads only what was kept for it"
        if version_of(box.tensor) != box.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(box.tensor.shape)} that the backward pass needs was changed by an operation in place; "
                "use the operation that makes a new tensor"
            )
        return box.tensor  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    """The attributes by which a node of a kind shows the tensors that it has saved."""
    names = (n for n in dir(kind) if n.startswith("_saved_") or n == "saved_tensors")
    return tuple(n for n in names if not n.endswith(("_sym_sizes", "_sym_strides")))
