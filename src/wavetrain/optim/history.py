"""History: the last T points and their gradients, with the few numbers between them that estimators need.

Kept are the gradients (T, d), the points (T, c) at the coordinates that distances are measured on (all of them, or a sample),
and three T × T matrices: squared distances between points, inner products of gradients, and of gradients with the ways between
points. A new pair costs one pass over either; nothing is made anew. What is predicted is always a sum of kept gradients, so that
how wrong it was is found from inner products alone.
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
MATRICES: Final = ("squares", "products", "ways", "sizes", "onward")
NAMES: Final = ("gradients", "points", *MATRICES, "rows", "sampled", "slots", "whole")
"""Of what is saved."""
_AT_ONCE: Final = 1 << 20
"""Coordinates that are made wide at once; also of all points, on a device that is no CPU."""
_IN_CACHE: Final = 1 << 16
"""Coordinates of which the way to a point fits into a cache."""
_ALL_IN_CACHE: Final = 1 << 15
"""Coordinates of which the ways to all points do."""


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
        num_whole: so many of the newest points are kept with all their coordinates; None: as many as there are pairs.
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
        num_whole: int | None = None,
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
        self.ways: Floats = np.full((capacity, capacity), math.inf)
        """Inner products of gradient i with the way from its own point to point j; infinite where they were not measured."""
        self.sizes: Floats = np.zeros(capacity)
        """Norms of points."""
        self.onward: Floats = np.full(capacity, math.inf)
        """Inner products of gradient i with the way from its own point to where the last round ended; infinite where they are not
        known."""
        self.rows: list[int] = []
        """Rows in use, the oldest first."""
        self._stride = _ALL_IN_CACHE if device.type == "cpu" else _AT_ONCE
        self._wide = torch.promote_types(torch.promote_types(dtype, gradient_dtype or dtype), torch.float32)
        """In which sums are made."""
        self._share = self._num_counted / max(1, width)
        self._num_whole = capacity if num_whole is None else min(num_whole, capacity)
        self.whole: Tensor | None = None
        """The newest points, all their coordinates (num_whole, d), where ``points`` lack some."""
        if width < num_coordinates:
            self.whole = torch.zeros(self._num_whole, num_coordinates, device=device, dtype=dtype)
        self.slots: dict[int, int] = {}
        """Rows of ``whole`` by the row of the pair, the oldest first; the same on all ranks, even if there is no ``whole``."""

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, rows: Sequence[int], others: Sequence[int] | None = None) -> Floats:
        """Squared distances (n, m) of points of ``rows`` to those of ``others``, or to each other."""
        return self.squares[np.ix_(rows, rows if others is None else others)]

    def squares_to(self, point: Tensor) -> Floats:
        """Squared distances (T,) of ``point`` (d,) to all rows; those of rows that were never written to mean nothing."""
        return self._shards.total(self._squares(self.chosen(point), self.points))

    def seen(self, point: Tensor, rows: Sequence[int], origin: int, only: int | None = None) -> tuple[Floats, Floats]:
        """:meth:`squares_to` and :meth:`along` of a point, by one sum over the ranks; of distances, that to one row ``only``."""
        squares = self._squares(self.chosen(point), self.points if only is None else self.points[only : only + 1])
        found = self._shards.total(np.concatenate([squares, self._along(rows, point, origin)]))
        return found[: len(squares)], found[len(squares) :]

    def _squares(self, chosen: Tensor, points: Tensor) -> Floats:
        # straight sums of squared differences: by way of inner products, close points would lose all their digits
        found = np.zeros(len(points))
        for first in range(0, len(chosen), self._stride):
            part = slice(first, first + self._stride)
            far = torch.linalg.vector_norm(self._widened(points[:, part]) - self._widened(chosen[part]), dim=1)
            found += far.double().cpu().numpy() ** 2
        return self._share * found

    def chosen(self, point: Tensor) -> Tensor:
        """Of a vector (d,), the coordinates (c,) that distances are measured on."""
        return point[: self._num_counted] if self.sampled is None else point.index_select(0, self.sampled)

    def combine(self, weights: Floats, rows: Sequence[int], out: Tensor) -> Tensor:
        """Σ weights[j] · gradient of rows[j], into ``out`` (d,)."""
        if out.dtype == self.gradients.dtype and out.dtype in WIDE and weights.any():
            every = np.zeros(self.capacity)
            every[list(rows)] = weights
            for i, run in enumerate(_runs(np.flatnonzero(every).tolist())):  # one pass over these rows, nothing made anew
                w = torch.as_tensor(every[run], device=out.device, dtype=out.dtype)
                torch.addmv(out, self.gradients[run].t(), w, beta=int(i > 0), out=out)
            return out
        out.zero_()
        for row, weight in zip(rows, weights.tolist(), strict=True):
            out.add_(self.gradients[row], alpha=weight)
        return out

    def way(self, weights: Floats, rows: Sequence[int], out: Tensor) -> Tensor:
        """Σ weights[j] · (point of rows[j] − point of rows[−1]), of the newest, into ``out`` (d,): 0, to the bit, where these are
        the same.
        """
        points, places, chosen = self._places(rows)
        origin, w = self.point(rows[-1]), torch.as_tensor(weights, device=out.device, dtype=out.dtype)
        if chosen is None:
            w = torch.empty_like(w).index_copy_(0, places, w)
        for first in range(0, len(out), self._stride):
            part = slice(first, first + self._stride)
            ways = (
                points[:, part] - origin[part] if chosen is None else points[:, part].index_select(0, chosen).sub_(origin[part])
            )
            torch.mv(ways.t(), w, out=out[part])
        return out

    def _places(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The newest points, where among them those of ``rows`` are, and the same again where these are not all."""
        points = self.points if self.whole is None else self.whole
        places = torch.tensor(rows if self.whole is None else [self.slots[row] for row in rows], device=points.device)
        return points, places, None if len(places) == len(points) else places

    def inner(self, *pairs: tuple[Tensor, Tensor]) -> Floats:
        """Inner products of vectors: of all coordinates (d,), or of those that distances are measured on (c,); from these, and of
        the coordinates here.
        """
        each = [[x if len(x) == self.points.shape[1] else self.chosen(x) for x in pair] for pair in pairs]
        found: Floats = self._share * np.array([float(self._widened(x) @ self._widened(y)) for x, y in each])
        return found

    def point(self, row: int) -> Tensor:
        """One of the newest points (d,)."""
        return self.points[row] if self.whole is None else self.whole[self.slots[row]]

    @property
    def newest(self) -> list[int]:
        """Rows in use whose points are kept with all coordinates, the oldest first."""
        rows = self.rows[-self._num_whole :]
        known = [row for row in rows if row in self.slots]
        return rows[len(rows) - len(known) :]

    @property
    def reached(self) -> list[int]:
        """Rows in use, the oldest first, whose points are still there with all coordinates, after new ones were put."""
        return [row for row in self.rows if row in self.slots]

    def along(self, rows: Sequence[int], point: Tensor, origin: int) -> Floats:
        """Inner products (n,) of the gradients of ``rows`` with the way to ``point`` (d,) from that of row ``origin``."""
        return self._shards.total(self._along(rows, point, origin))

    def _along(self, rows: Sequence[int], point: Tensor, origin: int) -> Floats:
        start, found = self.point(origin), np.zeros(self.capacity)
        runs = _runs(rows)
        for first in range(0, self._num_counted, _IN_CACHE):
            part = slice(first, min(first + _IN_CACHE, self._num_counted))
            way = self._widened(point[part] - start[part])  # first of all: of inner products with points no digit would be left
            for run in runs:
                found[run] += (self._widened(self.gradients[run, part]) @ way).double().cpu().numpy()
        return found[list(rows)]

    def crossed(self, rows: Sequence[int], origin: int) -> Floats:
        """Inner products (n, n): of the gradient of rows[i] with the way to the point of rows[j] from that of row ``origin``."""
        lacking = [row for row in rows if not np.isfinite(self.ways[row, list(rows)]).all()]
        if lacking:
            self.ways[np.ix_(lacking, rows)] = self._shards.total(self._ways(lacking, rows))
        return self.ways[np.ix_(rows, rows)] - self.ways[list(rows), origin][:, None]

    def reach(self, rows: Sequence[int], row: int, origin: int) -> Floats:
        """:meth:`along` of the point of ``row``, measured if it was not yet.

        Such ways follow each other from round to round, each no longer than a round goes: no digit is lost but by the sum.
        """
        rows = list(rows)
        if not np.isfinite(self.ways[rows, row]).all():
            self.ways[rows, row] = self.ways[rows, origin] + self.along(rows, self.point(row), origin)
        found: Floats = self.ways[rows, row] - self.ways[rows, origin]
        return found

    def measure(self, row: int) -> None:
        """Distances of the point of a row, if they were not measured yet."""
        if self.squares[row, row] != 0:
            self._set_squares(row, self._shards.total(self._squares(self.points[row], self.points)))

    def _set_squares(self, row: int, squares: Floats) -> None:
        self.squares[row, :] = squares
        self.squares[:, row] = squares
        self.squares[row, row] = 0.0

    def end(self, rows: Sequence[int], along: Floats, origin: int) -> None:
        """The round ended at a point with these :meth:`along`."""
        self.onward[list(rows)] = self.ways[list(rows), origin] + along

    def _ways(self, rows: Sequence[int], others: Sequence[int]) -> Floats:
        """Of the coordinates here: inner products (n, m) of the gradients of ``rows`` with the ways from their own points to
        those of ``others``, which they are among.
        """
        points, places, chosen = self._places(others)
        start, found = self.point(others[-1]), np.zeros((len(rows), len(others)))
        for first in range(0, self._num_counted, self._stride):
            part = slice(first, min(first + self._stride, self._num_counted))
            inside = points[:, part] if chosen is None else points[:, part].index_select(0, chosen)
            ways = self._widened(inside - start[part])
            found += (self._widened(_picked(self.gradients[:, part], rows)) @ ways.t()).double().cpu().numpy()
        if chosen is None:
            found = found[:, places.tolist()]
        own = found[range(len(rows)), [list(others).index(row) for row in rows]]
        return found - own[:, None]

    def take_rows(self, count: int) -> list[int]:
        """Rows to write to: free ones first, then the oldest, which are forgotten."""
        free = [i for i in range(self.capacity) if i not in self.rows][:count]
        oldest, self.rows = self.rows[: count - len(free)], self.rows[count - len(free) :]
        return free + oldest

    def put(self, row: int, point: Tensor, *, ended: bool = False) -> None:
        """The point (d,) of a row that was taken, and whether it is where the last round ended. Its gradient is not known yet,
        nor how far it is from others: that is measured when it is asked for, or by :meth:`close`.
        """
        self.points[row].copy_(self.chosen(point))
        free = [i for i in range(self._num_whole) if i not in self.slots.values()]
        slot = self.slots.pop(row, None)
        if slot is None:
            slot = free[0] if free else self.slots.pop(next(iter(self.slots)))
        self.slots[row] = slot
        if self.whole is not None:
            self.whole[slot].copy_(point)
        self.squares[row, :] = self.squares[:, row] = math.inf
        self.onward[row] = math.inf
        self.ways[row, :] = math.inf
        self.ways[:, row] = self.onward if ended else math.inf

    def close(
        self, rows: Sequence[int], others: Sequence[int] = (), known: Sequence[int] = (), also: Sequence[float] = ()
    ) -> Floats:
        """The gradients of ``rows`` have been written: take them in, as the newest.

        With ``others``, of the newest points and ``rows`` among them, also what the new gradients say of the ways to these; with
        ``known``, the rows of a model, what their gradients say of the ways to the new points.

        Returns:
            Sums over the ranks of the numbers ``also``, which cross together with the others.
        """
        sizes = [float(torch.linalg.vector_norm(self.point(row)[: self._num_counted])) ** 2 for row in rows]
        far = [row for row in rows if self.squares[row, row] != 0]
        ahead = [row for row in rows if not np.isfinite(self.ways[list(known), row]).all()]
        local = [
            self._products(rows),
            np.array(sizes),
            self._ways(rows, others) if others else np.zeros((len(rows), 0)),
            np.array([self._squares(self.points[row], self.points) for row in far]),
            np.array([self._along(known, self.point(row), known[-1]) for row in ahead]),
            np.array(also, dtype=np.float64),
        ]
        summed = self._shards.total(np.concatenate([part.ravel() for part in local]))
        parts = np.split(summed, np.cumsum([part.size for part in local])[:-1])
        products, squared, ways, squares, along, found = (part.reshape(one.shape) for part, one in zip(parts, local, strict=True))
        self.products[list(rows), :] = products
        self.products[:, list(rows)] = products.T
        self.sizes[list(rows)] = np.sqrt(squared)
        if others:
            self.ways[np.ix_(rows, others)] = ways
        for row, one in zip(far, squares, strict=True):
            self._set_squares(row, one)
        for row, one in zip(ahead, along, strict=True):
            self.ways[list(known), row] = self.ways[list(known), known[-1]] + one
        self.rows += rows
        return found

    def _products(self, rows: Sequence[int]) -> Floats:
        """Inner products (n, T) of the gradients of ``rows`` with all, of the coordinates here."""
        counted = self.gradients[:, : self._num_counted]
        new, size = _picked(counted, rows), counted.shape[1] if counted.dtype == self._wide else _AT_ONCE
        found = np.zeros((len(rows), self.capacity))
        for first in range(0, counted.shape[1], max(1, size)):
            part = slice(first, first + size)
            found += (self._widened(new[:, part]) @ self._widened(counted[:, part]).t()).double().cpu().numpy()
        return found

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
        small = {name: torch.from_numpy(getattr(self, name).copy()) for name in MATRICES}
        places = {"rows": list(self.rows), "slots": [list(one) for one in self.slots.items()]}
        given = {"sampled": self.sampled, "whole": self.whole}
        return {**tensors, **small, **places, **{name: None if one is None else one.clone() for name, one in given.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, of a history of the same sizes."""
        self.gradients.copy_(state["gradients"])
        self.points.copy_(state["points"])
        for name in MATRICES:
            setattr(self, name, state[name].numpy().copy())
        self.rows = list(state["rows"])
        self.slots = dict(state["slots"])
        if self.whole is not None:
            self.whole.copy_(state["whole"])
        if self.sampled is not None:
            self.sampled.copy_(state["sampled"])

    def _widened(self, x: Tensor) -> Tensor:
        """X in the type that sums are made in; itself if it is of that."""
        return x.to(self._wide)


def _picked(x: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows; without a copy where they follow each other."""
    return x[rows[0] : rows[-1] + 1] if list(rows) == list(range(rows[0], rows[-1] + 1)) else x[list(rows)]


def _runs(rows: Sequence[int]) -> list[slice]:
    """Rows in the order of memory, those that follow each other together."""
    ordered = sorted(rows)
    begins = [i for i, row in enumerate(ordered) if i == 0 or row != ordered[i - 1] + 1]
    return [slice(ordered[a], ordered[b - 1] + 1) for a, b in zip(begins, [*begins[1:], len(ordered)], strict=True)]
