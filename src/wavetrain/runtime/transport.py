"""Transport: messages between pipeline ranks over torch.distributed.

A *channel* is one direction between two ranks. Its messages keep the order in which the sender computes them (see
:mod:`wavetrain.runtime.program`), so nothing is tagged, and the two directions of a pair never wait for each other: on Gloo every
transfer is independent; on NCCL every channel has a communicator of its own (not run here: no GPU).

What a message looks like is agreed once for every shape of micro-batch: the first message of a shape on a channel is preceded
by its :class:`~wavetrain.runtime.structure.Structure`; from then on both ends know it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.errors import InputError, PeerLostError, StallError
from wavetrain.runtime.courier import Courier, Transfer
from wavetrain.runtime.program import Parcel
from wavetrain.runtime.structure import Structure


class Arrived(NamedTuple):
    """A received message."""

    tensors: list[Tensor]
    structure: Structure


class Transport(Protocol):
    """What the executor needs of a transport."""

    def post(self, parcel: Parcel, key: Hashable) -> None:
        """Get ready to receive ``parcel``; ``key`` stands for the shape of its micro-batch."""

    def receive(self, parcel: Parcel) -> Arrived:
        """Wait for ``parcel``, which was posted."""

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        """Hand ``parcel`` over; never waits for the receiver, who may be waiting for what this rank does next."""

    def flush(self) -> None:
        """Start what was posted and sent since the last time."""

    def arrived(self, target: int, count: int) -> None:
        """The first ``count`` messages of this step to ``target`` have arrived: let their memory go."""

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Give the memory of a received message back for later ones."""

    def finish(self) -> None:
        """End a step: wait for what is still on its way."""


class DistributedTransport:
    """Messages over a torch.distributed process group.

    Args:
        ranks: global rank of every pipeline rank.
        channels: (source, target) in pipeline ranks, the same on all ranks.
        rank: this pipeline rank.
        device: where received tensors live.
        timeout_seconds: how long a message may take before :class:`StallError`.
    """

    def __init__(
        self, ranks: Sequence[int], channels: Sequence[tuple[int, int]], rank: int, device: torch.device, timeout_seconds: float
    ) -> None:
        self._ranks, self._rank, self._device = ranks, rank, device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, int], dist.ProcessGroup | None] = dict.fromkeys(channels)
        if device.type == "cuda":  # not run here: untagged NCCL needs a communicator a direction, made by all ranks in one order
            self._groups = {(s, t): dist.new_group([ranks[s], ranks[t]]) for s, t in channels}
        self._structures: dict[Hashable, Structure] = {}
        self._agreed: dict[Hashable, Structure] = {}
        self._waiting: dict[int, deque[tuple[Parcel, Hashable]]] = defaultdict(deque)
        self._posted: dict[Parcel, tuple[Transfer, Structure]] = {}
        self._sent: dict[int, deque[tuple[Transfer, Parcel]]] = defaultdict(deque)
        self._num_closed: dict[int, int] = defaultdict(int)
        self._pool: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        self._courier = Courier(threaded=device.type == "cpu" and bool(channels))
        weakref.finalize(self, self._courier.close)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        self._waiting[parcel.source].append((parcel, key))
        self._post_known(parcel.source)

    def receive(self, parcel: Parcel) -> Arrived:
        while parcel not in self._posted:
            self._learn(parcel.source)
        transfer, structure = self._posted.pop(parcel)
        self._wait(transfer, parcel, parcel.source)
        return Arrived(transfer.tensors, structure)

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        ready = [t.contiguous() for t in tensors]
        name = _name(parcel, key)
        agreed = self._agreed.get(name)
        if agreed is None:
            self._agreed[name] = structure
            ready = [*self._header(structure), *ready]
        elif agreed != structure:
            raise InputError(
                f"{parcel.describe()} gives {structure.describe()}, but an earlier micro-batch of the same input shape gave "
                f"{agreed.describe()}; what a layer returns may depend on the shape of its input only"
            )
        target = parcel.target
        transfer = Transfer("send", ready, self._ranks[target], self._groups[self._rank, target])
        self._sent[target].append((self._courier.hand(transfer), parcel))

    def flush(self) -> None:
        self._courier.flush()

    def arrived(self, target: int, count: int) -> None:
        while self._sent[target] and self._num_closed[target] < count:
            self._close_oldest(target)

    def release(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._pool[tuple(tensor.shape), tensor.dtype].append(tensor)

    def finish(self) -> None:
        self.flush()
        for target, open_sends in self._sent.items():
            while open_sends:
                self._close_oldest(target)
            self._num_closed[target] = 0

    def _post_known(self, source: int) -> None:
        """Post what waits from ``source``, up to the first message of a shape that was not seen: a channel keeps its order."""
        waiting = self._waiting[source]
        while waiting:
            parcel, key = waiting[0]
            structure = self._structures.get(_name(parcel, key))
            if structure is None:
                return
            waiting.popleft()
            tensors = [self._buffer(leaf.shape, leaf.dtype) for leaf in structure.leaves]
            self._posted[parcel] = (self._begin(tensors, parcel), structure)

    def _learn(self, source: int) -> None:
        """Wait for the structure of the first message from ``source`` whose shape was not seen, and post it."""
        parcel, key = self._waiting[source][0]
        length = self._buffer((1,), torch.int64)
        self._wait(self._begin([length], parcel), parcel, source)
        data = self._buffer((int(length),), torch.uint8)
        self._wait(self._begin([data], parcel), parcel, source)
        self._structures[_name(parcel, key)] = Structure.parse(bytes(data.cpu().numpy()))
        self._post_known(source)

    def _header(self, structure: Structure) -> list[Tensor]:
        data = torch.frombuffer(bytearray(structure.dump()), dtype=torch.uint8)
        return [t.to(self._device) for t in (torch.tensor([data.numel()]), data)]

    def _begin(self, tensors: list[Tensor], parcel: Parcel) -> Transfer:
        """Begin to receive into ``tensors``."""
        source = parcel.source
        return self._courier.hand(Transfer("receive", tensors, self._ranks[source], self._groups[source, self._rank]))

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        free = self._pool[shape, dtype]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self._device)

    def _close_oldest(self, target: int) -> None:
        oldest, parcel = self._sent[target].popleft()
        self._num_closed[target] += 1
        self._wait(oldest, parcel, target)

    def _wait(self, transfer: Transfer, parcel: Parcel, peer: int) -> None:
        self.flush()
        try:
            transfer.wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(error, parcel, peer) from None

    def _failure(self, error: RuntimeError, parcel: Parcel, peer: int) -> PeerLostError | StallError:
        if "timed out" in str(error).lower():
            direction = "to arrive from" if peer == parcel.source else "to be taken by"
            return StallError(
                f"rank {self._rank} waited {self._timeout.total_seconds():g} s for {parcel.describe()}, {direction} rank {peer}"
            )
        why = str(error).splitlines()[0]
        return PeerLostError(f"rank {self._rank} lost rank {peer} during {parcel.describe()}: {why}", rank=peer)


def _name(parcel: Parcel, key: Hashable) -> Hashable:
    return (parcel.kind, parcel.stage, parcel.source, parcel.target, key)
