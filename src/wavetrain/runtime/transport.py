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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.errors import InputError, PeerLostError, StallError
from wavetrain.runtime.courier import Courier
from wavetrain.runtime.program import Parcel
from wavetrain.runtime.structure import Structure


@dataclass(slots=True, eq=False)
class Arrived:
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

    def release(self, message: Arrived) -> None:
        """Give the memory of a received message back for later ones."""

    def finish(self) -> None:
        """End a step: wait for what is still on its way."""


class _Open(NamedTuple):
    """A transfer under way; the tensors are kept alive until it is over."""

    tensors: list[Tensor]
    works: list[dist.Work]
    parcel: Parcel


class DistributedTransport:
    """Messages over a torch.distributed process group.

    Methods without an underscore are for the computing thread. Those with ``_do`` are the courier's, and so is all state but
    ``_agreed``, by which a wrong message is refused at once, and ``_posted``, where the courier puts receives that are under
    way and the computing thread takes them out.

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
        self._told: set[Hashable] = set()
        self._waiting: dict[int, deque[tuple[Parcel, Hashable]]] = defaultdict(deque)
        self._posted: dict[Parcel, tuple[_Open, Structure]] = {}
        self._sent: dict[int, deque[_Open]] = defaultdict(deque)
        self._num_closed: dict[int, int] = defaultdict(int)
        self._pool: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        self._jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._courier = Courier(threaded=device.type == "cpu" and bool(channels))
        weakref.finalize(self, self._courier.close)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        self._jobs.append((self._do_post, (parcel, key)))

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        name = message_name(parcel, key)
        agreed = self._agreed.setdefault(name, structure)
        if agreed != structure:
            refuse_other_structure(parcel, structure, agreed)
        self._jobs.append((self._do_send, (parcel, name, tensors, structure)))

    def arrived(self, target: int, count: int) -> None:
        self._jobs.append((self._do_close, (target, count)))

    def release(self, message: Arrived) -> None:
        self._jobs.append((self._do_release, (message.tensors,)))

    def flush(self) -> None:
        self._courier.check()
        if self._jobs:
            self._courier.put(_do_all, self._jobs)
            self._jobs = []

    def receive(self, parcel: Parcel) -> Arrived:
        if parcel not in self._posted:
            self.flush()
            while not self._courier.call(self._posted.__contains__, parcel):
                self._learn(parcel.source)
        found = self._posted.pop(parcel)
        (tensors, works, _), structure = found
        for work in works:
            self._wait(work, parcel, parcel.source)
        return Arrived(tensors, structure)

    def finish(self) -> None:
        self.flush()
        self._courier.call(self._do_close_all)

    def _learn(self, source: int) -> None:
        """Wait for the structure of the first message from ``source`` whose shape was not seen, and post it."""
        parcel, key = self._courier.call(self._waiting[source].__getitem__, 0)
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._wait(self._courier.call(self._irecv, length, parcel), parcel, source)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._wait(self._courier.call(self._irecv, data, parcel), parcel, source)
        structure = Structure.parse(bytes(data.cpu().numpy()))
        self._courier.call(self._do_know, source, message_name(parcel, key), structure)

    def _do_post(self, parcel: Parcel, key: Hashable) -> None:
        self._waiting[parcel.source].append((parcel, key))
        self._do_post_known(parcel.source)

    def _do_know(self, source: int, name: Hashable, structure: Structure) -> None:
        self._structures[name] = structure
        self._do_post_known(source)

    def _do_post_known(self, source: int) -> None:
        """Post what waits from ``source``, up to the first message of a shape that was not seen: a channel keeps its order."""
        waiting = self._waiting[source]
        while waiting:
            parcel, key = waiting[0]
            structure = self._structures.get(message_name(parcel, key))
            if structure is None:
                return
            waiting.popleft()
            tensors = [self._buffer(leaf.shape, leaf.dtype) for leaf in structure.leaves]
            self._posted[parcel] = (_Open(tensors, [self._irecv(t, parcel) for t in tensors], parcel), structure)

    def _do_send(self, parcel: Parcel, name: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        ready = [t.contiguous() for t in tensors]
        if name not in self._told:
            self._told.add(name)
            ready = [*self._header(structure), *ready]
        group = self._groups[self._rank, parcel.target]
        try:
            works = [dist.isend(t, self._ranks[parcel.target], group=group) for t in ready]
        except RuntimeError as error:
            raise self._failure(error, parcel, parcel.target) from None
        self._sent[parcel.target].append(_Open(ready, [w for w in works if w is not None], parcel))

    def _do_close(self, target: int, count: int) -> None:
        """The first ``count`` messages of this step to ``target`` have arrived."""
        while self._sent[target] and self._num_closed[target] < count:
            self._do_close_oldest(target)

    def _do_close_all(self) -> None:
        for target, open_sends in self._sent.items():
            while open_sends:
                self._do_close_oldest(target)
            self._num_closed[target] = 0

    def _do_close_oldest(self, target: int) -> None:
        oldest = self._sent[target].popleft()
        self._num_closed[target] += 1
        for work in oldest.works:
            self._wait(work, oldest.parcel, target)

    def _do_release(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._pool[tuple(tensor.shape), tensor.dtype].append(tensor)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        free = self._pool[shape, dtype]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self._device)

    def _header(self, structure: Structure) -> list[Tensor]:
        data = torch.frombuffer(bytearray(structure.dump()), dtype=torch.uint8)
        return [t.to(self._device) for t in (torch.tensor([data.numel()]), data)]

    def _irecv(self, tensor: Tensor, parcel: Parcel) -> dist.Work:
        try:
            work = dist.irecv(tensor, self._ranks[parcel.source], group=self._groups[parcel.source, self._rank])
        except RuntimeError as error:
            raise self._failure(error, parcel, parcel.source) from None
        assert work is not None  # None only for ranks outside the group
        return work

    def _wait(self, work: dist.Work, parcel: Parcel, peer: int) -> None:
        try:
            work.wait(self._timeout)
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


def refuse_other_structure(parcel: Parcel, structure: Structure, agreed: Structure) -> NoReturn:
    """Say that a message is not what the neighbours agreed on for its shape of micro-batch."""
    raise InputError(
        f"{parcel.describe()} gives {structure.describe()}, but an earlier micro-batch of the same input shape gave "
        f"{agreed.describe()}; what a layer returns may depend on the shape of its input only"
    )


def message_name(parcel: Parcel, key: Hashable) -> Hashable:
    """What neighbours agree about: messages of one stage, direction, channel and shape of micro-batch look alike."""
    return (parcel.kind, parcel.stage, parcel.source, parcel.target, key)


def _do_all(jobs: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for job, args in jobs:
        job(*args)
