"""History: the last T points and their gradients, with the few numbers between them that estimators need.

Kept are the gradients (T, d), the points (T, c) at the coordinates that distances are measured on (all of them, or a sample),
and two T × T matrices: squared distances between points, and inner products of gradients. A new pair costs one pass over
either; nothing is made anew. What is predicted is always a sum of kept gradients, so that how wrong it was is found from inner
products alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.optim.team import Shards

Floats = NDArray[np.float64]
WIDE: Final = (torch.float32, torch.float64)
NAMES: Final = ("gradients", "points", "squares", "products", "sizes", "rows", "sampled")
"""Of what is saved."""
_AT_ONCE: Final = 1 << 20
"""Coordinates that are made wide at once."""


class History:
    """Of at most ``capacity`` pairs of d numbers.

    Args:
        capacity: T.
        num_coordinates: d.
        device: where the numbers are.
        dtype: of points.
        gradient_dtype: in which gradients are kept.
        sampled: coordinates (c,) that distances are measured on; None for all.
        shards: who holds the other coordinates; distances and inner products are sums over all of them.
        num_counted: of the coordinates here, the first so many; the others are counted by another rank.
    """

    def __init__(
        self,
        capacity: int,
        num_coordinates: int,
        device: torch.device,
        dtype: torch.dtype,
        sampled: Tensor | None = None,
        gradient_dtype: torch.dtype | None = None,
        shards: Shards | None = None,
        num_counted: int | None = None,
    ) -> None:
        self.capacity = capacity
        self._shards = shards or Shards(None, device)
        self.sampled = sampled
        self._num_counted = num_coordinates if num_counted is None else num_counted
        width = self._num_counted if sampled is None else len(sampled)
        self.gradients = torch.zeros(capacity, num_coordinates, device=device, dtype=gradient_dtype or dtype)
        self.points = torch.zeros(capacity, width, device=device, dtype=dtype)
        self.squares: Floats = np.zeros((capacity, capacity))
        """Squared distances between points."""
        self.products: Floats = np.zeros((capacity, capacity))
        """Inner products of gradients."""
        self.sizes: Floats = np.zeros(capacity)
        """Norms of points."""
        self.rows: list[int] = []
        """Rows in use, the oldest first."""
        self._share = self._num_counted / max(1, width)

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, rows: Sequence[int], others: Sequence[int] | None = None) -> Floats:
        """Squared distances (n, m) of points of ``rows`` to those of ``others``, or to each other."""
        return self.squares[np.ix_(rows, rows if others is None else others)]

    def squares_to(self, point: Tensor) -> Floats:
        """Squared distances (T,) of ``point`` (d,) to all rows; those of rows that were never written to mean nothing."""
        chosen = _wide(self._chosen(point))
        # straight sums of squared differences: by way of inner products, close points would lose all their digits
        far = torch.stack([torch.dist(_wide(row), chosen) for row in self.points])
        return self._shards.total(self._share * far.double().cpu().numpy() ** 2)

    def _chosen(self, point: Tensor) -> Tensor:
        return point[: self._num_counted] if self.sampled is None else point[self.sampled]

    def combine(self, weights: Floats, rows: Sequence[int], out: Tensor) -> Tensor:
        """Σ weights[j] · gradient of rows[j], into ``out`` (d,)."""
        if out.dtype == self.gradients.dtype and out.dtype in WIDE and weights.any():
            every = np.zeros(self.capacity)
            every[list(rows)] = weights
            used = np.flatnonzero(every)
            span = slice(int(used[0]), int(used[-1]) + 1)
            w = torch.as_tensor(every[span], device=out.device, dtype=out.dtype)
            return torch.addmv(out, self.gradients[span].t(), w, beta=0, out=out)  # one pass over these rows, nothing made anew
        out.zero_()
        for row, weight in zip(rows, weights.tolist(), strict=True):
            out.add_(self.gradients[row], alpha=weight)
        return out

    def take_rows(self, count: int) -> list[int]:
        """Rows to write to: free ones first, then the oldest, which are forgotten."""
        free = [i for i in range(self.capacity) if i not in self.rows][:count]
        oldest, self.rows = self.rows[: count - len(free)], self.rows[count - len(free) :]
        return free + oldest

    def put(self, row: int, point: Tensor, squares: Floats) -> None:
        """The point (d,) of a row that was taken, with its :meth:`squares_to`; its gradient is not known yet."""
        self.points[row].copy_(self._chosen(point))
        self.squares[row, :] = squares
        self.squares[:, row] = squares
        self.squares[row, row] = 0.0
        own = np.array([float(torch.linalg.vector_norm(point[: self._num_counted])) ** 2])
        self.sizes[row] = math.sqrt(float(self._shards.total(own)[0]))

    def close(self, rows: Sequence[int]) -> None:
        """The gradients of ``rows`` have been written: take them in, as the newest."""
        counted, span = self.gradients[:, : self._num_counted], slice(rows[0], rows[0] + len(rows))
        new = (
            counted[span] if list(rows) == list(range(span.start, span.stop)) else counted[list(rows)]
        )  # a copy where it must be
        size = counted.shape[1] if counted.dtype in WIDE else _AT_ONCE
        found = np.zeros((len(rows), self.capacity))
        for first in range(0, counted.shape[1], max(1, size)):
            part = slice(first, first + size)
            found += (_wide(new[:, part]) @ _wide(counted[:, part]).t()).double().cpu().numpy()
        found = self._shards.total(found)
        self.products[list(rows), :] = found
        self.products[:, list(rows)] = found.T
        self.rows += rows

    def forget(self, rows: Sequence[int]) -> None:
        """Rows that were closed, as if they had not been."""
        self.rows = [row for row in self.rows if row not in rows]
        self.drop(rows)

    def drop(self, rows: Sequence[int]) -> None:
        """Rows that were taken and will not be closed."""
        for row in rows:
            self.gradients[row].zero_()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        tensors = {"gradients": self.gradients.clone(), "points": self.points.clone()}
        small = {name: torch.from_numpy(getattr(self, name).copy()) for name in ("squares", "products", "sizes")}
        return {**tensors, **small, "rows": list(self.rows), "sampled": None if self.sampled is None else self.sampled.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, of a history of the same sizes."""
        self.gradients.copy_(state["gradients"])
        self.points.copy_(state["points"])
        for name in ("squares", "products", "sizes"):
            setattr(self, name, state[name].numpy().copy())
        self.rows = list(state["rows"])
        if self.sampled is not None:
            self.sampled.copy_(state["sampled"])


def _wide(x: Tensor) -> Tensor:
    """X in a type that sums can be made in; itself if it is of one."""
    return x if x.dtype in WIDE else x.float()
