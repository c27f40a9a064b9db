"""Local transport: messages between pipeline ranks of one machine, through Unix sockets.

Gloo knows TCP only: on one machine a message passes the loopback device, an event loop on either side and their wake-ups. A
Unix socket takes it from the sender's memory to the receiver's with one wake-up (150 µs instead of 240 for 128 KiB, both ranks
asleep, on the machine it was written on). Every channel (one direction between two ranks) is a socket of its own, so its order
is the order of its bytes:

    structure's length (8 bytes, 0 if this shape was seen)  structure (JSON)  tensors, one after another

Sending never waits: what does not fit into the socket at once is sent by a thread. Small messages are kept by the kernel until
they are needed, large ones are read ahead by a thread a source, as far as they were posted. The sockets live in a folder of the
user's own, which is gone as soon as all ranks are connected.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.errors import InputError, PeerLostError, StallError
from wavetrain.runtime.program import Parcel
from wavetrain.runtime.structure import Structure
from wavetrain.runtime.transport import Arrived, DistributedTransport, Transport, message_name, refuse_other_structure

_KNOWN_TO_NUMPY = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32))
_LENGTH = struct.Struct("<q")
_SOCKET_BYTES = 4 * 2**20
"""Asked for as a socket's buffer; the kernel may give less."""
_MAX_STRUCTURE_BYTES = 2**20
_LARGE_BYTES = 160 * 2**10
"""Messages above this do not fit into a socket of the usual size; a thread reads them ahead."""


class _Slot:
    """A receive: the lock is free once the message is there, or never will be."""

    __slots__ = ("error", "key", "lock", "parcel", "structure", "tensors")

    def __init__(self, parcel: Parcel, key: Hashable) -> None:
        self.parcel, self.key = parcel, key
        self.lock = threading.Lock()
        self.lock.acquire()
        self.tensors: list[Tensor] = []
        self.structure: Structure | None = None
        self.error: Exception | None = None


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._queue: SimpleQueue[list[memoryview] | threading.Event | None] = SimpleQueue()
        # changed by the sending thread only, and by the channel's own only: equal where nothing waits
        self._num_queued = 0
        self._num_done = 0
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="sender", daemon=True).start()

    def send(self, pieces: list[memoryview]) -> None:
        if self._num_queued == self._num_done:  # nothing waits: try at once
            while pieces:
                try:
                    count = self._end.send(pieces[0], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except OSError as error:
                    self.error = error
                    return
                if count == len(pieces[0]):
                    pieces.pop(0)
                else:
                    pieces[0] = pieces[0][count:]
        if pieces:
            self._num_queued += 1
            self._queue.put(pieces)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all is handed to the kernel; False if it took too long."""
        if self._num_queued == self._num_done:
            return True
        done = threading.Event()
        self._num_queued += 1
        self._queue.put(done)
        return done.wait(timeout_seconds)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self.error is None:
                try:
                    for piece in item:
                        self._end.sendall(piece)
                except OSError as error:
                    self.error = error
            del item
            self._num_done += 1
        self._end.close()


class _Incoming:
    """The receiving end of a channel. Reads what was posted, in order: when it is needed, or ahead in a thread.

    The kernel keeps small messages until they are needed, and to read them then is quicker than to wake a thread. Once a large
    message was seen, a thread reads ahead.
    """

    def __init__(self, end: socket.socket, buffer: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self._end, self._buffer = end, buffer
        self._structures: dict[Hashable, Structure] = {}
        self._posted: deque[_Slot] = deque()
        self._queue: SimpleQueue[_Slot | None] | None = None
        self._failed: Exception | None = None

    def post(self, slot: _Slot) -> None:
        if self._queue is None:
            self._posted.append(slot)
        else:
            self._queue.put(slot)

    def wait(self, slot: _Slot, timeout_seconds: float) -> bool:
        """Wait until ``slot`` is filled, or has an error; False if that took too long."""
        if self._queue is None:
            self._end.settimeout(timeout_seconds)
            while slot.structure is None and slot.error is None and self._posted:
                self._fill_slot(self._posted.popleft())
            if any(_num_bytes(s) > _LARGE_BYTES for s in self._structures.values()):
                self._read_ahead()
        return not isinstance(slot.error, TimeoutError) and slot.lock.acquire(timeout=timeout_seconds)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        if self._queue is None:
            self._end.close()

    def _read_ahead(self) -> None:
        self._end.settimeout(None)
        self._queue = SimpleQueue()
        for slot in self._posted:
            self._queue.put(slot)
        threading.Thread(target=self._run, args=(self._queue,), name="receiver", daemon=True).start()

    def _run(self, queue: SimpleQueue[_Slot | None]) -> None:
        while (slot := queue.get()) is not None:
            self._fill_slot(slot)
            del slot
        self._end.close()

    def _fill_slot(self, slot: _Slot) -> None:
        try:
            if self._failed is None:
                self._read(slot)
        except Exception as error:  # whatever it is, who waits for the message is to be told
            self._failed = error
        slot.error = self._failed
        slot.lock.release()

    def _read(self, slot: _Slot) -> None:
        name = message_name(slot.parcel, slot.key)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 <= length <= _MAX_STRUCTURE_BYTES:
            raise InputError(f"{slot.parcel.describe()} came with a structure of {length} bytes")
        if length:
            self._structures[name] = Structure.parse(bytes(self._exactly(length)))
        structure = self._structures[name]
        slot.tensors = [self._buffer(leaf.shape, leaf.dtype) for leaf in structure.leaves]
        for tensor in slot.tensors:
            if tensor.numel():
                self._fill(_bytes_of(tensor))
        slot.structure = structure

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._end.recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError("the connection was closed")
            view = view[count:]


class LocalTransport:
    """Messages through Unix sockets. All ranks of the pipeline must be on one machine and call this at the same time.

    Args:
        group: of the pipeline; its ranks are the pipeline ranks.
        channels: (source, target) in pipeline ranks, the same on all ranks.
        rank: this pipeline rank.
        timeout_seconds: how long a message may take before :class:`StallError`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, channels: Sequence[tuple[int, int]], rank: int, timeout_seconds: float
    ) -> None:
        self._rank, self._timeout = rank, timeout_seconds
        self._pool: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        self._agreed: dict[Hashable, Structure] = {}
        self._slots: dict[Parcel, _Slot] = {}
        outgoing, incoming = _connect(group, channels, rank, timeout_seconds)
        self._outgoing = {target: _Outgoing(end) for target, end in outgoing.items()}
        pool = self._pool
        self._incoming = {source: _Incoming(end, lambda s, d: _take(pool, s, d)) for source, end in incoming.items()}
        for close in (*(c.close for c in self._outgoing.values()), *(c.close for c in self._incoming.values())):
            weakref.finalize(self, close)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        slot = self._slots[parcel] = _Slot(parcel, key)
        self._incoming[parcel.source].post(slot)

    def receive(self, parcel: Parcel) -> Arrived:
        slot = self._slots.pop(parcel)
        if not self._incoming[parcel.source].wait(slot, self._timeout):
            raise StallError(
                f"rank {self._rank} waited {self._timeout:g} s for {parcel.describe()}, to arrive from rank {parcel.source}"
            )
        if slot.error is not None:
            raise self._lost(slot.error, parcel, parcel.source)
        assert slot.structure is not None
        return Arrived(slot.tensors, slot.structure)

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        name = message_name(parcel, key)
        agreed = self._agreed.get(name)
        header = b""
        if agreed is None:
            self._agreed[name] = structure
            header = structure.dump()
        elif agreed is not structure and agreed != structure:
            refuse_other_structure(parcel, structure, agreed)
        channel = self._outgoing[parcel.target]
        if channel.error is not None:
            raise self._lost(channel.error, parcel, parcel.target)
        channel.send([memoryview(_LENGTH.pack(len(header)) + header), *(_bytes_of(t.contiguous()) for t in tensors if t.numel())])

    def flush(self) -> None:
        """Nothing is put off."""

    def arrived(self, target: int, count: int) -> None:
        """Messages are the kernel's, or a thread's, as soon as they are sent."""

    def release(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._pool[tuple(tensor.shape), tensor.dtype].append(tensor)

    def finish(self) -> None:
        for target, channel in self._outgoing.items():
            if not channel.drain(self._timeout):
                raise StallError(f"rank {self._rank} waited {self._timeout:g} s for rank {target} to take its messages")

    def _lost(self, error: Exception, parcel: Parcel, peer: int) -> Exception:
        if not isinstance(error, OSError):
            return error
        return PeerLostError(f"rank {self._rank} lost rank {peer} during {parcel.describe()}: {error}", rank=peer)


def open_transport(
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    channels: Sequence[tuple[int, int]],
    rank: int,
    device: torch.device,
    timeout_seconds: float,
) -> Transport:
    """The quickest way between the ranks of a pipeline: Unix sockets where all share one machine, else ``torch.distributed``.

    All ranks of ``group`` must call it; the rest as for :class:`~wavetrain.runtime.transport.DistributedTransport`.
    """
    if channels and device.type == "cpu" and on_one_machine(group):
        return LocalTransport(group, channels, rank, timeout_seconds)
    return DistributedTransport(ranks, channels, rank, device, timeout_seconds)


def _connect(
    group: dist.ProcessGroup | None, channels: Sequence[tuple[int, int]], rank: int, timeout_seconds: float
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connected sockets, by target and by source."""
    folder = Path(_share(tempfile.mkdtemp(prefix="wavetrain-") if rank == 0 else "", group))
    sources = [s for s, t in channels if t == rank]
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(timeout_seconds)
    try:
        listener.bind(str(folder / str(rank)))
        listener.listen(max(1, len(sources)))
        dist.barrier(group=group)
        outgoing, incoming = {}, {}
        for target in (t for s, t in channels if s == rank):
            end = socket.socket(socket.AF_UNIX)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            end.connect(str(folder / str(target)))
            end.sendall(_LENGTH.pack(rank))
            outgoing[target] = end
        for _ in sources:
            end, _ = listener.accept()
            end.settimeout(None)
            (source,) = _LENGTH.unpack(end.recv(_LENGTH.size, socket.MSG_WAITALL))
            incoming[source] = end
        dist.barrier(group=group)
    finally:
        listener.close()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return outgoing, incoming


def _share(text: str, group: dist.ProcessGroup | None) -> str:
    """What the first rank gives, on all."""
    data = torch.zeros(4096, dtype=torch.uint8)
    raw = os.fsencode(text)
    data[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return os.fsdecode(bytes(data.tolist()).rstrip(b"\0"))


def on_one_machine(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of ``group`` run on one machine, where Unix sockets exist."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    mine = torch.zeros(256, dtype=torch.uint8)
    raw = name.encode()[:256]
    mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    all_names = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_names, mine, group=group)
    return hasattr(socket, "AF_UNIX") and all(torch.equal(n, mine) for n in all_names)


def _take(pool: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        return pool[shape, dtype].pop()
    except IndexError:
        return torch.empty(shape, dtype=dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, which the view keeps alive."""
    if tensor.dtype in _KNOWN_TO_NUMPY and tensor.dim():
        return memoryview(tensor.detach().numpy()).cast("B")  # type: ignore[arg-type]
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _num_bytes(structure: Structure) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in structure.leaves)
