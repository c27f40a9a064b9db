"""Layouts: which devices compute which stage of which replica, and what lies between them.

A *slot* is ``tp`` devices of one node that share the layers of one pipeline rank in one replica. A layout is a table of slots:

               replica 0   replica 1
    rank 0     node 0      node 0         rows: along the pipeline
    rank 1     node 1      node 1         columns: copies of the model, each with its share of the batch

Messages go down a column and back up, gradients are reduced along a row. Whatever leaves a node shares the node's network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster import NodeGroup
from wavetrain.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Channel(NamedTuple):
    """What every message from one pipeline rank to the next goes through, in every replica: (num_ranks − 1, num_replicas)."""

    bandwidth: Floats
    """Bytes per second that one device's message gets beside the others."""
    latency: Floats
    crosses: NDArray[np.bool_]
    """Whether it leaves its node."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A table of slots, (num_ranks, num_replicas)."""

    groups: tuple[NodeGroup, ...]
    group: Ints
    """The node group of every slot."""
    node: Ints
    """The node of every slot; numbers stand for nodes of the whole cluster."""
    tp: Ints
    """Devices of every slot."""

    def __post_init__(self) -> None:
        if (
            self.group.ndim != 2
            or not self.group.size
            or self.group.shape != self.node.shape
            or self.group.shape != self.tp.shape
        ):
            raise InputError("a layout is a table of slots, with a group, a node and tp each")

    @property
    def num_ranks(self) -> int:
        return int(self.group.shape[0])

    @property
    def num_replicas(self) -> int:
        return int(self.group.shape[1])

    @property
    def num_devices(self) -> int:
        return int(self.tp.sum())

    @cached_property
    def columns(self) -> tuple[tuple[Ints, Ints], Ints]:
        """Replicas that are alike: ((group, tp) of every kind, each (num_ranks, num_kinds)), and the kind of every replica."""
        both = np.concatenate((self.group, self.tp))
        kinds, index = np.unique(both, axis=1, return_inverse=True)
        half = self.num_ranks
        return (kinds[:half], kinds[half:]), index.reshape(-1)

    @cached_property
    def channel(self) -> Channel:
        """Between neighbouring ranks of every replica."""
        per_group = _per_group(self.groups)
        before, after = self.group[:-1], self.group[1:]
        crosses = self.node[:-1] != self.node[1:]
        num_nodes = int(self.node.max()) + 1
        leaving = np.bincount(self.node[:-1][crosses], weights=self.tp[:-1][crosses], minlength=num_nodes)
        arriving = np.bincount(self.node[1:][crosses], weights=self.tp[1:][crosses], minlength=num_nodes)
        shared = np.minimum(
            per_group.network[before] / np.maximum(leaving[self.node[:-1]], 1),
            per_group.network[after] / np.maximum(arriving[self.node[1:]], 1),
        )
        network = np.minimum(np.minimum(shared, per_group.flow[before]), per_group.flow[after])
        return Channel(
            np.where(crosses, network, per_group.intra[before]),
            np.where(
                crosses,
                np.maximum(per_group.inter_latency[before], per_group.inter_latency[after]),
                per_group.intra_latency[before],
            ),
            crosses,
        )

    @cached_property
    def reduction(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Of every rank's gradients over the replicas: bytes per second of a ring, latency of a hop, whether it leaves a node.

        A ring passes every node of its row once, whatever the number of replicas there; there is one for each of the ``tp``
        devices of a slot, and all of them share the network with the rings of other ranks in the same node.
        """
        per_group = _per_group(self.groups)
        num_nodes = int(self.node.max()) + 1
        spans = (self.node != self.node[:, :1]).any(axis=1)
        rings = np.zeros(num_nodes)
        for k in np.flatnonzero(spans):
            nodes, first = np.unique(self.node[k], return_index=True)
            np.add.at(rings, nodes, self.tp[k][first])
        shared = per_group.network[self.group] / np.maximum(rings[self.node], 1)
        outside = np.minimum(shared, per_group.flow[self.group]).min(axis=1)
        inside = per_group.intra[self.group].min(axis=1)
        latency = np.where(
            spans, per_group.inter_latency[self.group].max(axis=1), per_group.intra_latency[self.group].max(axis=1)
        )
        return np.where(spans, outside, inside), latency, spans


class _PerGroup(NamedTuple):
    intra: Floats
    intra_latency: Floats
    network: Floats
    inter_latency: Floats
    flow: Floats


def _per_group(groups: tuple[NodeGroup, ...]) -> _PerGroup:
    return _PerGroup(
        np.array([g.intra.bandwidth for g in groups]),
        np.array([g.intra.latency for g in groups]),
        np.array([g.inter.bandwidth for g in groups]),
        np.array([g.inter.latency for g in groups]),
        np.array([g.flow_bandwidth for g in groups]),
    )


def even_cut(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """Boundaries as Megatron sets them: embedding and head aside, every rank gets as many layers, the first ones one more."""
    inner = num_layers - 2
    if inner < num_ranks:
        base, more = divmod(num_layers, num_ranks)
        if base == 0:
            raise InputError(f"{num_layers} layers cannot be cut into {num_ranks} stages")
        points = np.cumsum([0, *(base + (k < more) for k in range(num_ranks))])
        return tuple(int(p) for p in points)
    base, more = divmod(inner, num_ranks)
    points = np.cumsum([0, *(base + (k < more) for k in range(num_ranks))]) + 1
    return (0, *(int(p) for p in points[1:-1]), num_layers)
