"""Local transport: messages between pipeline ranks of one machine, through Unix sockets.

Gloo knows TCP only: on one machine a message passes the loopback device, an event loop on either side and their wake-ups. A
Unix socket takes it from the sender's memory to the receiver's with one wake-up. Every channel (one direction between two
ranks) is a socket of its own, so its order is the order of its bytes:

    tag  [structure (JSON)]  tensors, one after another

The tag says what the message is, so that ranks which were given different batches are told so and cannot misread each other. The
structure comes with the first message of a shape only: from then on both ends know it.

All of it is done by the computing thread, between two actions, so it is short: one call of the kernel a message and as little as
can be around it. Sending never waits: what does not fit into the socket at once is sent by a thread. Small messages are kept by
the kernel until they are needed; large ones, which it would not take, are read ahead by a thread a source, as far as they were
posted. The sockets live in a folder of the user's own, which is gone as soon as all ranks are connected.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import struct
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.errors import InputError, PeerLostError, StallError
from wavetrain.runtime.program import Parcel
from wavetrain.runtime.structure import Structure
from wavetrain.runtime.transport import Arrived, DistributedTransport, Transport, refuse_other_structure

_NUMBER = struct.Struct("<q")
_TAG = struct.Struct("<cxxxiiIIq")
"""Kind, stage, micro-batch, what stands for the shape of the micro-batch, bytes of the structure, bytes of the tensors."""
_TIME = struct.Struct("@ll")
"""A ``timeval``: seconds, microseconds."""
_SOCKET_BYTES = 4 * 2**20
"""Asked for as a socket's buffer; the kernel may give less."""
_MAX_STRUCTURE_BYTES = 2**20
_LARGE_BYTES = 160 * 2**10
"""Messages above this do not fit into a socket of the usual size; a thread reads them ahead."""


class _Agreed(NamedTuple):
    """What both ends of a channel know of the messages of one stage and shape of micro-batch."""

    structure: Structure
    total_bytes: int
    key: int
    """Stands for the shape of the micro-batch."""
    pool: list[_Buffer]
    """Memory for such messages that is free, at the receiving end."""

    def tag(self, parcel: Parcel, structure_bytes: int = 0) -> bytes:
        kind, stage, micro_batch, _, _ = parcel
        return _TAG.pack(kind.encode(), stage, micro_batch, self.key, structure_bytes, self.total_bytes)


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._queue: SimpleQueue[tuple[list[memoryview], list[Tensor]] | threading.Event | None] = SimpleQueue()
        # changed by the sending thread only, and by the channel's own only: equal where nothing waits
        self._num_queued = 0
        self._num_done = 0
        self.agreed: dict[Hashable, _Agreed] = {}
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="sender", daemon=True).start()

    def send(self, head: bytes, tensors: Sequence[Tensor], num_bytes: Sequence[int]) -> None:
        """Send ``head`` and the memory of ``tensors``."""
        pieces, total = [memoryview(head)], len(head)
        kept = []
        for tensor, count in zip(tensors, num_bytes, strict=True):
            ready = tensor if tensor.is_contiguous() else tensor.contiguous()
            pieces.append(_bytes_of(ready, count))
            kept.append(ready)
            total += count
        if self._num_queued == self._num_done:  # nothing waits: try at once
            try:
                count = self._end.sendmsg(pieces, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
            except OSError as error:
                self.error = error
                return
            if count == total:
                return
            pieces = _after(count, pieces)
        self._num_queued += 1
        self._queue.put((pieces, kept))

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
                    for piece in item[0]:
                        self._end.sendall(piece)
                except OSError as error:
                    self.error = error
            del item
            self._num_done += 1
        self._end.close()


@dataclass(slots=True, eq=False)
class _Buffer(Arrived):
    """A received message in memory that goes back to where it was taken from."""

    views: list[memoryview] = field(default_factory=list)
    home: list[_Buffer] = field(default_factory=list)


class _Incoming:
    """The receiving end of a channel. Reads what was posted, in order: when it is needed, or ahead in a thread.

    The kernel keeps small messages until they are needed, and to read them then is quicker than to wake a thread. Once a large
    message was seen, a thread reads ahead.
    """

    def __init__(self, end: socket.socket, timeout_seconds: float, pools: dict[Hashable, list[_Buffer]]) -> None:
        self._end, self._timeout, self._pools = end, timeout_seconds, pools
        self._known: dict[Hashable, _Agreed] = {}
        self._tag = memoryview(bytearray(_TAG.size))
        self._posted: deque[tuple[Parcel, Hashable]] = deque()
        self._ready: dict[Parcel, _Buffer] = {}
        self._wanted: SimpleQueue[tuple[Parcel, Hashable] | None] | None = None
        self._read_ones: SimpleQueue[tuple[Parcel, _Buffer | Exception]] = SimpleQueue()
        self._saw_large = False
        self._limit(timeout_seconds)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        if self._wanted is None:
            self._posted.append((parcel, key))
        else:
            self._wanted.put((parcel, key))

    def receive(self, parcel: Parcel) -> _Buffer:
        """Wait for a message that was posted; TimeoutError if it took too long."""
        if self._saw_large and self._wanted is None:
            self._read_ahead()
        while (found := self._ready.pop(parcel, None)) is None:
            if self._wanted is None:
                first, key = self._posted.popleft()
                read: _Buffer | Exception = self._read(first, key)
            else:
                try:
                    first, read = self._read_ones.get(timeout=self._timeout)
                except Empty:
                    raise TimeoutError from None
            if isinstance(read, Exception):
                self._read_ones.put((first, read))  # whoever asks next is told as well
                raise read
            if first == parcel:
                return read
            self._ready[first] = read
        return found

    def close(self) -> None:
        if self._wanted is not None:
            self._wanted.put(None)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        if self._wanted is None:
            self._end.close()

    def _limit(self, seconds: float) -> None:
        """Let the kernel end a read that takes too long: a timeout of Python's own would take two calls a read."""
        whole = int(seconds)
        self._end.settimeout(None)
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(whole, int((seconds - whole) * 1e6)))

    def _read_ahead(self) -> None:
        self._limit(0)  # a thread may wait: who waits for it has the limit
        self._wanted = SimpleQueue()
        while self._posted:
            self._wanted.put(self._posted.popleft())
        threading.Thread(target=self._run, args=(self._wanted,), name="receiver", daemon=True).start()

    def _run(self, wanted: SimpleQueue[tuple[Parcel, Hashable] | None]) -> None:
        while (item := wanted.get()) is not None:
            try:
                self._read_ones.put((item[0], self._read(*item)))
            except Exception as error:  # whatever it is, who waits for the message is to be told
                self._read_ones.put((item[0], error))
                break
            del item
        self._end.close()

    def _read(self, parcel: Parcel, key: Hashable) -> _Buffer:
        known = self._known.get((parcel.kind, parcel.stage, key))
        if known is None:
            known = self._learn(parcel, key)
            count = _TAG.size
            buffer = self._buffer(known)
        else:
            buffer = self._buffer(known)
            if not known.total_bytes:  # it is not sent
                return buffer
            count = self._receive([self._tag, *buffer.views])
            if count < _TAG.size:
                self._fill(self._tag[count:])
                count = _TAG.size
            if self._tag != known.tag(parcel):
                _refuse_tag(parcel, self._tag)
        for view in _after(count - _TAG.size, buffer.views):
            self._fill(view)
        return buffer

    def _buffer(self, known: _Agreed) -> _Buffer:
        if known.pool:
            buffer = known.pool.pop()
            buffer.structure = known.structure
            return buffer
        tensors = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in known.structure.leaves]
        views = [_bytes_of(t, n) for t, n in zip(tensors, known.structure.num_bytes, strict=True)]
        return _Buffer(tensors, known.structure, [v for v in views if v], known.pool)

    def _learn(self, parcel: Parcel, key: Hashable) -> _Agreed:
        """Read the tag of a message and its structure, which both ends know from then on."""
        self._fill(self._tag)
        structure_bytes = _TAG.unpack(self._tag)[4]
        if not 0 < structure_bytes <= _MAX_STRUCTURE_BYTES:
            _refuse_tag(parcel, self._tag)
        structure = Structure.parse(bytes(self._exactly(structure_bytes)))
        pool = self._pools.setdefault(tuple((leaf.shape, leaf.dtype) for leaf in structure.leaves), [])
        known = _Agreed(structure, sum(structure.num_bytes), _short(key), pool)
        if self._tag != known.tag(parcel, structure_bytes):
            _refuse_tag(parcel, self._tag)
        self._known[parcel.kind, parcel.stage, key] = known
        self._saw_large = self._saw_large or known.total_bytes > _LARGE_BYTES
        return known

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            view = view[self._receive([view]) :]

    def _receive(self, views: list[memoryview]) -> int:
        """Read what is there into ``views``, at least one byte; how many bytes it was."""
        try:
            count = self._end.recvmsg_into(views)[0]
        except BlockingIOError:
            raise TimeoutError from None
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        return count


def _refuse_tag(parcel: Parcel, tag: memoryview) -> NoReturn:
    kind, stage, micro_batch, _, _, total_bytes = _TAG.unpack(tag)
    sent = Parcel("F" if kind == b"F" else "B", stage, micro_batch, parcel.source, parcel.target)
    raise InputError(
        f"rank {parcel.target} waited for {parcel.describe()}, and rank {parcel.source} sent {sent.describe()} ({total_bytes:,} "
        "bytes) of another batch: both must be given batches of the same shapes and call the same methods (step, evaluate, "
        "predict) in the same order"
    )


def _short(key: Hashable) -> int:
    """A number that stands for ``key``, the same in all processes."""
    return zlib.crc32(repr(key).encode())


class LocalTransport:
    """Messages through Unix sockets.

    Args:
        outgoing: connected sockets, by target.
        incoming: connected sockets, by source.
        rank: this pipeline rank.
        timeout_seconds: how long a message may take before :class:`StallError`.
    """

    def __init__(
        self,
        outgoing: Mapping[int, socket.socket],
        incoming: Mapping[int, socket.socket],
        rank: int,
        timeout_seconds: float,
    ) -> None:
        self._rank, self._timeout = rank, timeout_seconds
        pools: dict[Hashable, list[_Buffer]] = {}
        self._outgoing = {target: _Outgoing(end) for target, end in outgoing.items()}
        self._incoming = {source: _Incoming(end, timeout_seconds, pools) for source, end in incoming.items()}
        for close in (*(c.close for c in self._outgoing.values()), *(c.close for c in self._incoming.values())):
            weakref.finalize(self, close)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        self._incoming[parcel.source].post(parcel, key)

    def receive(self, parcel: Parcel) -> Arrived:
        try:
            return self._incoming[parcel.source].receive(parcel)
        except TimeoutError:
            raise StallError(
                f"rank {self._rank} waited {self._timeout:g} s for {parcel.describe()}, to arrive from rank {parcel.source}"
            ) from None
        except OSError as error:
            raise self._lost(error, parcel, parcel.source) from None

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        channel = self._outgoing[parcel.target]
        agreed = channel.agreed.get((parcel.kind, parcel.stage, key))
        if agreed is None:
            agreed = _Agreed(structure, sum(structure.num_bytes), _short(key), [])
            channel.agreed[parcel.kind, parcel.stage, key] = agreed
            told = structure.dump()
            channel.send(agreed.tag(parcel, len(told)) + told, tensors, structure.num_bytes)
        else:
            if agreed.structure is not structure and agreed.structure != structure:
                refuse_other_structure(parcel, structure, agreed.structure)
            if agreed.total_bytes:  # else the receiver does not wait for it: it may be done and gone
                channel.send(agreed.tag(parcel), tensors, structure.num_bytes)
        if channel.error is not None:
            raise self._lost(channel.error, parcel, parcel.target)

    def flush(self) -> None:
        """Nothing is put off."""

    def arrived(self, target: int, count: int) -> None:
        """Messages are the kernel's, or a thread's, as soon as they are sent."""

    def release(self, message: Arrived) -> None:
        assert isinstance(message, _Buffer), "it was received here"
        message.home.append(message)

    def finish(self) -> None:
        for target, channel in self._outgoing.items():
            if not channel.drain(self._timeout):
                raise StallError(f"rank {self._rank} waited {self._timeout:g} s for rank {target} to take its messages")

    def _lost(self, error: Exception, parcel: Parcel, peer: int) -> Exception:
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
        return LocalTransport(*_connect(group, channels, rank, timeout_seconds), rank, timeout_seconds)
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
            end.sendall(_NUMBER.pack(rank))
            outgoing[target] = end
        for _ in sources:
            end, _ = listener.accept()
            end.settimeout(None)
            (source,) = _NUMBER.unpack(end.recv(_NUMBER.size, socket.MSG_WAITALL))
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


@functools.cache
def _memory(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes


def _bytes_of(tensor: Tensor, num_bytes: int) -> memoryview:
    """The memory of a contiguous tensor, which must be kept alive by other means.

    Through numpy it would take three times as long, and some types (bfloat16) are unknown there.
    """
    return memoryview(_memory(num_bytes).from_address(tensor.data_ptr()))


def _after(count: int, pieces: Sequence[memoryview]) -> list[memoryview]:
    """What is left of ``pieces`` without their first ``count`` bytes."""
    left = []
    for piece in pieces:
        if count < piece.nbytes:
            left.append(piece[count:])
        count = max(0, count - piece.nbytes)
    return left
