"""Wires: a TCP connection between every two ranks, over which messages travel while their sender computes, without a thread.

A send copies into the kernel's buffer and returns; what arrives lies in the kernel's buffer until it is waited for. The kernel
moves the bytes meanwhile, and no thread is woken in the middle of a product. That is what a step of decoding needs, whose sums
are small: measured with one core a rank (benchmarks/deferred_sums.py; AMD EPYC, a virtual machine), a sum of 3 KB adds 0.2 ms to
the compute that it hides behind, by Gloo's threads 0.9 ms; one of 384 KB 0.4 instead of 1.3 ms, one of 3 MB 3.6 instead of 4.6.

A message that does not fit into the kernel's buffers moves on when it is waited for. Messages between two ranks keep their
order; each begins with its length, so that ranks that are out of step hear of it. A rank that ends closes its connections, and
who waits for it hears of that at once.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import PeerLostError, RuntimeFailure, StallError, WavetrainError

_LENGTH: Final = struct.Struct("<q")
_HELLO: Final = struct.Struct("<16sq")
"""What a rank that connects says first: the word that the other has left in the store, and its own number. It keeps out who came
by mistake, or cannot reach the store; who can, can read the word as well."""
_MOST_STRANGERS: Final = 64
"""Connections that have not yet said who they are."""
_PIECES: Final = 16
"""Buffers that one call of the kernel is given at most."""
_SILENT: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
"""Seconds, and tries, after which a machine that answers nothing at all is taken for gone."""
_LOOK_EVERY: Final = 1.0
"""Seconds after which a rank that waits looks whether the others still live."""
_STAMPS: Final = getattr(socket, "SO_TIMESTAMPNS", 35)
"""Linux: tell with received bytes when they arrived."""
_STAMP: Final = struct.Struct("@qq")


class Wires:
    """The connections of one rank.

    Args:
        store: where ranks leave their addresses.
        rank: this one.
        size: how many.
        local: whether all ranks are on this machine: then nothing listens beyond it.
        timeout_seconds: how long the others may take to connect, and to answer.
        watch: called now and then by who waits; raises if a rank is gone.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        local: bool,
        timeout_seconds: float,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.timeout_seconds, self.watch = timeout_seconds, watch or (lambda: None)
        self._wires: dict[int, _Wire] = {}
        until, host = time.monotonic() + timeout_seconds, "127.0.0.1"
        try:
            if not local:
                host = _own_address(store)
            with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
                word = secrets.token_bytes(16)
                store.set(f"wires/{rank}", f"{word.hex()} {listener.getsockname()[1]} {host}")
                for other in range(rank):
                    self._wires[other] = _Wire(other, self._connect(store, other, rank, until))
                self._accept(listener, word, range(rank + 1, size), until)
        except (OSError, RuntimeError) as error:
            self.close()
            if isinstance(error, WavetrainError):
                raise
            told = str(error).strip().partition("\n")[0]
            raise RuntimeFailure(f"rank {rank} at {host} could not meet the other {size - 1}: {told}") from error
        except BaseException:
            self.close()
            raise

    def _connect(self, store: Store, other: int, rank: int, until: float) -> socket.socket:
        word, port, host = store.get(f"wires/{other}").decode().split()
        connection = socket.create_connection((host, int(port)), timeout=max(0.1, until - time.monotonic()))
        connection.sendall(_HELLO.pack(bytes.fromhex(word), rank))
        return connection

    def _accept(self, listener: socket.socket, word: bytes, expected: range, until: float) -> None:
        """Connections of all ``expected`` ranks; who does not know the word is turned away, and holds up nobody."""
        strangers: dict[int, tuple[socket.socket, bytes]] = {}
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        listener.setblocking(False)
        try:
            while absent := [other for other in expected if other not in self._wires]:
                for number, _ in poll.poll(100):
                    if number == listener.fileno():
                        with contextlib.suppress(OSError):  # gone again
                            connection, _ = listener.accept()
                            connection.setblocking(False)
                            poll.register(connection.fileno(), select.POLLIN)
                            strangers[connection.fileno()] = (connection, b"")
                        continue
                    connection, said = strangers.pop(number)
                    try:
                        more = connection.recv(_HELLO.size - len(said))
                    except OSError:
                        more = b""
                    said += more
                    if more and len(said) < _HELLO.size and len(strangers) < _MOST_STRANGERS:
                        strangers[number] = (connection, said)
                        continue
                    poll.unregister(number)
                    known, other = _HELLO.unpack(said.ljust(_HELLO.size, b"\0"))
                    if more and hmac.compare_digest(known, word) and other in absent and other not in self._wires:
                        self._wires[other] = _Wire(other, connection)
                    else:
                        connection.close()
                self.watch()
                if time.monotonic() > until:
                    raise OSError(f"rank {', '.join(map(str, absent))} did not connect within {self.timeout_seconds:g} s")
        finally:
            for connection, _ in strangers.values():
                connection.close()

    def start(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Transfer:
        """Begin to send tensors, and to receive into others; all contiguous, on the CPU, by the rank they go to or come from.

        Until the transfer is waited for, what is sent must not change.
        """
        for other, tensor in received.items():
            self._wires[other].receive(tensor)
        for other, tensor in sent.items():
            self._wires[other].send(tensor)
        return Transfer(self, [self._wires[other] for other in {**sent, **received}])

    def stamp(self, *, on: bool = True) -> None:
        """Find out when messages arrive, where the kernel tells, or no longer: see :attr:`Transfer.arrived`."""
        for wire in self._wires.values():
            wire.stamp(on=on)

    def close(self) -> None:
        """Let the connections go."""
        for wire in self._wires.values():
            wire.close()
        self._wires = {}


class Transfer:
    """Messages that are under way."""

    def __init__(self, wires: Wires, ends: list[_Wire]) -> None:
        self._wires = wires
        self._goals = [(wire, wire.num_to_send, wire.num_to_receive) for wire in ends]
        self.arrived: float | None = None
        """When the last byte that was read with it had come, by ``time.time()``; None if nobody knows."""

    def wait(self, *, for_ever: bool = False) -> None:
        """Until all is handed to the kernel, and has come.

        Args:
            for_ever: whether the others may be silent for as long as they like.

        Raises:
            PeerLostError: a rank has ended.
            StallError: one is silent for too long.
        """
        until = time.monotonic() + self._wires.timeout_seconds
        while left := [goal[0] for goal in self._goals if not _reached(*goal)]:
            if sum(wire.go_on() for wire in left):
                until = time.monotonic() + self._wires.timeout_seconds
            elif not _wait_for(left):
                self._wires.watch()
                if time.monotonic() > until and not for_ever:
                    raise StallError(f"rank {left[0].other} has not answered within {self._wires.timeout_seconds:g} s")
        stamps = [wire.arrived for wire, _, _ in self._goals if wire.arrived is not None]
        self.arrived = max(stamps, default=None)


def _reached(wire: _Wire, sent: int, received: int) -> bool:
    return wire.num_sent >= sent and wire.num_received >= received


def _wait_for(wires: list[_Wire]) -> bool:
    """Sleep until one of them can go on, for a second at most."""
    poll = select.poll()
    for wire in wires:
        poll.register(wire.fileno(), (select.POLLIN if wire.waits else 0) | (select.POLLOUT if wire.full else 0))
    return bool(poll.poll(1000 * _LOOK_EVERY))


class _Wire:
    """The connection to one other rank."""

    def __init__(self, other: int, connection: socket.socket) -> None:
        self.other = other
        self.num_to_send = self.num_to_receive = self.num_sent = self.num_received = 0
        """Bytes, since the beginning."""
        self.arrived: float | None = None
        self._stamped = 0
        self._out: deque[memoryview] = deque()
        self._in: deque[tuple[memoryview, bytes | None]] = deque()
        """Where to receive into, and what it must then be, if that is known."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SILENT.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setblocking(False)
        self._connection = connection
        self.fileno = connection.fileno

    @property
    def waits(self) -> bool:
        """Whether something is to be received."""
        return bool(self._in)

    @property
    def full(self) -> bool:
        """Whether the kernel has not yet taken all that is to be sent."""
        return bool(self._out)

    def send(self, tensor: Tensor) -> None:
        """Begin to send; as much as the kernel takes at once is on its way."""
        data = _bytes_of(tensor)
        self._out += (memoryview(_LENGTH.pack(len(data))), data)
        self.num_to_send += _LENGTH.size + len(data)
        self._push()

    def receive(self, tensor: Tensor) -> None:
        """Begin to receive into a tensor."""
        data = _bytes_of(tensor)
        self._in += ((memoryview(bytearray(_LENGTH.size)), _LENGTH.pack(len(data))), (data, None))
        self.num_to_receive += _LENGTH.size + len(data)

    def go_on(self) -> bool:
        """Send and receive what can be at once; whether anything could."""
        moved = self._push()
        return self._pull() or moved

    def stamp(self, *, on: bool) -> None:
        self._stamped, self.arrived = 0, None
        with contextlib.suppress(OSError):  # not on this system
            self._connection.setsockopt(socket.SOL_SOCKET, _STAMPS, int(on))
            self._stamped = socket.CMSG_SPACE(_STAMP.size) if on else 0

    def close(self) -> None:
        self._connection.close()

    def _push(self) -> bool:
        moved = False
        while self._out:
            try:
                count = self._connection.sendmsg(list(islice(self._out, _PIECES)))
            except BlockingIOError:
                break
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from error
            self.num_sent += count
            moved = True
            while self._out and count >= len(self._out[0]):
                count -= len(self._out.popleft())
            if count:
                self._out[0] = self._out[0][count:]
        return moved

    def _pull(self) -> bool:
        moved = False
        while self._in:
            try:
                pieces = [piece for piece, _ in islice(self._in, _PIECES)]
                count, told, _, _ = self._connection.recvmsg_into(pieces, self._stamped)
            except BlockingIOError:
                break
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from error
            if count == 0:
                raise self._lost("it has closed the connection")
            if told and len(told[0][2]) >= _STAMP.size:
                seconds, nanoseconds = _STAMP.unpack_from(told[0][2])
                self.arrived = seconds + 1e-9 * nanoseconds
            self.num_received += count
            moved = True
            while self._in and count >= len(self._in[0][0]):
                piece, expected = self._in.popleft()
                count -= len(piece)
                if expected is not None and piece.obj != expected:
                    sizes = (_LENGTH.unpack(piece.obj)[0], _LENGTH.unpack(expected)[0])
                    raise RuntimeFailure(
                        f"ranks are out of step: rank {self.other} sent {sizes[0]} bytes where {sizes[1]} were expected; "
                        "all ranks must make the same calls, with the same version"
                    )
            if count:
                piece, expected = self._in[0]
                # what is left of a length that came in two pieces is still checked as a whole, by the object below
                self._in[0] = (piece[count:], expected)
        return moved

    def _lost(self, why: str) -> PeerLostError:
        return PeerLostError(f"rank {self.other} is gone: {why}", rank=self.other)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs of 3.11


def _own_address(store: Store) -> str:
    """The address at which other machines reach this one: of GLOO_SOCKET_IFNAME, or of the way to where ranks meet."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        import fcntl  # of Unix, as is choosing an interface by its name

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            try:
                found = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", interface[:15].encode()))  # SIOCGIFADDR
            except OSError as error:
                raise OSError(f"GLOO_SOCKET_IFNAME={interface} has no IPv4 address ({error.strerror})") from error
        return socket.inet_ntoa(found[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    master, address = getattr(store, "host", "127.0.0.1"), "127.0.0.1"
    for family, kind, _, _, at in socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as asked, contextlib.suppress(OSError):
            asked.connect(at)  # sends nothing, but chooses where it would be sent from
            address = str(asked.getsockname()[0])
            break
    if ipaddress.ip_address(address).is_loopback and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise OSError(
            f"{master} is {address} here, where other machines cannot reach it; name the interface that leads to them: "
            "GLOO_SOCKET_IFNAME=eth0"
        )
    return address
