"""Placement: the layouts worth a look for a number of ranks and replicas.

Slots of one device type are filled node by node, so what talks most stays together. What is left to choose is the order of the
types, and which way the table is filled:

    by rows       a rank's replicas side by side: reductions within nodes, messages between them; one type hosts whole ranks, so
                  slow devices get fewer layers
    by columns    a replica's ranks side by side: messages within nodes, reductions between them; one type hosts whole replicas,
                  so slow devices get fewer micro-batches

For small clusters every way to lay types out over the table is tried (up to the order of replicas, which does not matter).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final

import numpy as np

from wavetrain.cluster import NodeGroup
from wavetrain.plan.layout import Ints, Layout

MAX_ORDERS: Final = 24
"""Orders of device types that are tried: all of four types."""
MANY_SLOTS: Final = 64
"""Slots beyond which only the main orders of types are tried."""
MAX_TABLES: Final = 400
"""Tables of types that are tried one by one; beyond, rows and columns only."""


def num_slots(groups: Sequence[NodeGroup], tp: int) -> int:
    """Slots of ``tp`` devices that nodes have room for."""
    return sum(group.count * (group.gpus // tp) for group in groups)


def layouts(
    groups: tuple[NodeGroup, ...], tp: int, num_ranks: int, num_replicas: int, first: Sequence[int] | None = None
) -> Iterator[Layout]:
    """Layouts of num_ranks × num_replicas slots, those that are likely best first. All slots must be used.

    Args:
        groups: the nodes.
        tp: devices of a slot.
        num_ranks: rows.
        num_replicas: columns.
        first: number of every group's first node; default: one group after the other.
    """
    counts = [group.count * (group.gpus // tp) for group in groups]
    assert sum(counts) == num_ranks * num_replicas, "all slots are used"
    homes = _homes(groups, tp, first)
    seen: set[bytes] = set()
    for types in _tables(groups, counts, num_ranks, num_replicas):
        for by_rows in (True, False):
            node = _filled(types, homes, by_rows)
            key = (
                np.sort(np.concatenate((types, node)), axis=1).tobytes()
                if num_replicas < 64
                else types.tobytes() + node.tobytes()
            )
            if key in seen:
                continue
            seen.add(key)
            yield Layout(groups=groups, group=types, node=node, tp=np.full(types.shape, tp, dtype=np.int64))


def _homes(groups: Sequence[NodeGroup], tp: int, first: Sequence[int] | None) -> list[Ints]:
    """The node of every slot of every group, in order."""
    starts = first if first is not None else np.cumsum([0, *(g.count for g in groups)])[:-1].tolist()
    return [
        np.repeat(np.arange(start, start + group.count, dtype=np.int64), group.gpus // tp)
        for group, start in zip(groups, starts, strict=True)
    ]


def _tables(groups: Sequence[NodeGroup], counts: Sequence[int], num_ranks: int, num_replicas: int) -> Iterator[Ints]:
    """Tables of group numbers, (num_ranks, num_replicas)."""
    alike = _alike(groups)
    orders = list(_orders(alike))[:MAX_ORDERS] if sum(counts) <= MANY_SLOTS else _main_orders(groups)
    shape = (num_ranks, num_replicas)
    for order in orders:
        line = np.repeat(np.array(order, dtype=np.int64), [counts[g] for g in order])
        yield line.reshape(shape)
        if num_ranks > 1 and num_replicas > 1 and len(groups) > 1:
            yield np.ascontiguousarray(line.reshape(shape[::-1]).T)
    if len(set(alike)) > 1 and _num_tables(alike, counts) <= MAX_TABLES:
        yield from _all_tables(counts, shape)


def _alike(groups: Sequence[NodeGroup]) -> list[int]:
    """A number for every group; those that differ in the count of their nodes only share one."""
    kinds: dict[tuple[object, ...], int] = {}
    return [kinds.setdefault((g.device, g.gpus, g.intra, g.inter, g.flow_bandwidth), len(kinds)) for g in groups]


def _orders(alike: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Orders of the groups; groups that are alike stay in theirs."""
    if len(alike) > 6:
        yield tuple(range(len(alike)))
        yield tuple(reversed(range(len(alike))))
        return
    for order in permutations(range(len(alike))):
        if all(order.index(a) < order.index(b) for a in order for b in order if a < b and alike[a] == alike[b]):
            yield order


def _main_orders(groups: Sequence[NodeGroup]) -> list[tuple[int, ...]]:
    """Orders of many devices: as given; those that can hold most first (early ranks hold most in flight), or last; the fastest
    first.
    """
    given = tuple(range(len(groups)))
    by_memory = tuple(sorted(given, key=lambda g: -groups[g].device.memory_bytes))
    by_speed = tuple(sorted(given, key=lambda g: -groups[g].device.half_flops))
    return list(dict.fromkeys((by_memory, given, by_memory[::-1], by_speed)))


def _num_tables(alike: Sequence[int], counts: Sequence[int]) -> float:
    totals = [sum(c for a, c in zip(alike, counts, strict=True) if a == kind) for kind in set(alike)]
    return math.exp(min(700.0, math.lgamma(sum(totals) + 1) - sum(math.lgamma(t + 1) for t in totals)))


def _all_tables(counts: Sequence[int], shape: tuple[int, int]) -> Iterator[Ints]:
    """Every table with so many slots of every group, each column once whatever their order."""
    left = list(counts)
    line: list[int] = []
    total = sum(counts)
    seen: set[tuple[tuple[int, ...], ...]] = set()

    def extend() -> Iterator[Ints]:
        if len(line) == total:
            table = np.array(line, dtype=np.int64).reshape(shape)
            key = tuple(sorted(tuple(int(v) for v in column) for column in table.T))
            if key not in seen:
                seen.add(key)
                yield table
            return
        for group, count in enumerate(left):
            if count:
                left[group] -= 1
                line.append(group)
                yield from extend()
                line.pop()
                left[group] += 1

    yield from extend()


def _filled(types: Ints, homes: Sequence[Ints], by_rows: bool) -> Ints:
    """The node of every slot of a table: every type's own slots in order, along rows or along columns."""
    table = types if by_rows else types.T
    node = np.empty(table.shape, dtype=np.int64)
    for group, slots in enumerate(homes):
        here = table == group
        node[here] = slots[: int(here.sum())]
    return np.ascontiguousarray(node if by_rows else node.T)
