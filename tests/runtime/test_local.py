"""Messages between ranks of one machine, through real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wavetrain.errors import InputError, PeerLostError, StallError
from wavetrain.runtime.local import LocalTransport
from wavetrain.runtime.program import Parcel
from wavetrain.runtime.structure import flatten

Pair = tuple[LocalTransport, LocalTransport]


def connect(timeout_seconds: float = 30.0) -> Pair:
    """Transports of rank 0 and rank 1."""
    there, back = socket.socketpair(socket.AF_UNIX), socket.socketpair(socket.AF_UNIX)
    first = LocalTransport({1: there[0]}, {1: back[1]}, 0, timeout_seconds)
    return first, LocalTransport({0: back[0]}, {0: there[1]}, 1, timeout_seconds)


@pytest.fixture
def pair() -> Pair:
    return connect()


def forward(micro_batch: int, stage: int = 0) -> Parcel:
    return Parcel("F", stage, micro_batch, 0, 1)


def back(micro_batch: int) -> Parcel:
    return Parcel("B", 1, micro_batch, 1, 0)


def send(transport: LocalTransport, parcel: Parcel, value: object, key: object = "k") -> None:
    transport.send(parcel, key, *flatten(value, "a test"))


def exchange(pair: Pair, values: list[object], keys: list[object]) -> list[object]:
    for i, (value, key) in enumerate(zip(values, keys, strict=True)):
        pair[1].post(forward(i), key)
        send(pair[0], forward(i), value, key)
    arrived = [pair[1].receive(forward(i)) for i in range(len(values))]
    return [a.structure.unflatten(a.tensors) for a in arrived]


TENSORS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(3, 4),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "bool": lambda: torch.tensor([True, False]),
    "int64": lambda: torch.arange(7),
    "complex64": lambda: torch.randn(2, dtype=torch.complex64),
    "a single number": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "not contiguous": lambda: torch.randn(4, 5).T,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(pair: Pair, name: str) -> None:
    tensor = TENSORS[name]()
    (arrived,) = exchange(pair, [tensor], ["k"])
    assert isinstance(arrived, Tensor)
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived, tensor)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 300), max_size=3), st.sampled_from((torch.float32, torch.int32, torch.uint8))),
        min_size=1,
        max_size=8,
    )
)
def test_messages_of_many_shapes_keep_their_order(shapes: list[tuple[list[int], torch.dtype]]) -> None:
    values: list[object] = [{"x": torch.randint(0, 200, s).to(d), "n": (i,)} for i, (s, d) in enumerate(shapes)]
    keys: list[object] = [(tuple(s), d, i) for i, (s, d) in enumerate(shapes)]
    for value, found in zip(values, exchange(connect(), values, keys), strict=True):
        assert isinstance(found, dict)
        assert isinstance(value, dict)
        assert found["n"] == value["n"]
        assert torch.equal(found["x"], value["x"])


@pytest.mark.parametrize("side", [8, 2000], ids=["kept by the kernel", "larger than a socket"])
def test_both_sides_may_send_before_either_receives(pair: Pair, side: int) -> None:
    for i in range(3):
        send(pair[0], forward(i), torch.full((side, side), float(i)))
        send(pair[1], back(i), torch.full((side, side), -float(i)))
    for i in range(3):
        pair[0].post(back(i), "k")
        pair[1].post(forward(i), "k")
    for i in (0, 2, 1):  # a message may be used later than it was sent
        assert pair[0].receive(back(i)).tensors[0].eq(-i).all()
        assert pair[1].receive(forward(i)).tensors[0].eq(i).all()
    pair[0].finish()
    pair[1].finish()


def test_memory_that_was_given_back_is_used_again(pair: Pair) -> None:
    addresses = set()
    for i in range(5):
        pair[1].post(forward(i), "k")
        send(pair[0], forward(i), torch.full((64,), float(i)))
        arrived = pair[1].receive(forward(i))
        assert arrived.tensors[0].eq(i).all()
        addresses.add(arrived.tensors[0].data_ptr())
        pair[1].release(arrived)
    assert len(addresses) == 1


def test_memory_in_use_is_not_used_again(pair: Pair) -> None:
    first, second = exchange(pair, [torch.zeros(64), torch.ones(64)], ["k", "k"])
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.sum() == 0
    assert second.sum() == 64


def test_another_shape_for_the_same_micro_batch_is_refused(pair: Pair) -> None:
    send(pair[0], forward(0), torch.zeros(2))
    with pytest.raises(InputError, match=r"micro-batch 1 gives float32 \(3,\), but an earlier .* gave float32 \(2,\)"):
        send(pair[0], forward(1), torch.zeros(3))


@pytest.mark.parametrize("side", [8, 2000], ids=["small", "large"])
def test_a_message_that_never_comes_is_a_stall(side: int) -> None:
    pair = connect(0.2)
    pair[1].post(forward(0), "k")
    send(pair[0], forward(0), torch.zeros(side, side))
    pair[1].receive(forward(0))
    pair[1].post(forward(1), "k")
    with pytest.raises(StallError, match=r"rank 1 waited 0.2 s for F of stage 0, micro-batch 1, to arrive from rank 0"):
        pair[1].receive(forward(1))


@pytest.mark.parametrize("side", [8, 2000], ids=["small", "large"])
def test_a_neighbour_that_is_gone_is_named(side: int) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    sender, receiver = LocalTransport({1: mine}, {}, 0, 30.0), LocalTransport({}, {0: theirs}, 1, 30.0)
    receiver.post(forward(0), "k")
    send(sender, forward(0), torch.zeros(side, side))
    receiver.receive(forward(0))
    receiver.post(forward(1), "k")
    sender.finish()
    mine.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLostError, match=r"rank 1 lost rank 0 during F of stage 0, micro-batch 1"):
        receiver.receive(forward(1))
    with pytest.raises(PeerLostError, match=r"rank 0 lost rank 1 during F of stage 0, micro-batch 1"):
        send(sender, forward(1), torch.zeros(side, side))


def test_an_empty_message_needs_no_one_to_take_it() -> None:
    """As where the first stage takes no gradient: it does not wait for any, and may be gone."""
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    sender, receiver = LocalTransport({1: mine}, {}, 0, 30.0), LocalTransport({}, {0: theirs}, 1, 30.0)
    for i in range(2):
        receiver.post(forward(i), "k")
    send(sender, forward(0), [])
    assert receiver.receive(forward(0)).tensors == receiver.receive(forward(1)).tensors == []
    theirs.shutdown(socket.SHUT_RDWR)
    send(sender, forward(1), [])
    sender.finish()


@pytest.mark.parametrize("seen", [False, True], ids=["first of its shape", "known shape"])
@pytest.mark.parametrize(
    ("sent", "key"), [(forward(3), "k"), (forward(1, stage=2), "k"), (forward(1), "other")], ids=["micro-batch", "stage", "batch"]
)
def test_ranks_that_do_different_things_are_told_so(pair: Pair, sent: Parcel, key: object, seen: bool) -> None:
    """The messages are of one size: only the tag tells them apart."""
    if seen:
        for first, its_key in {(forward(0), "k"), (Parcel("F", sent.stage, 0, 0, 1), key)}:
            pair[1].post(first, its_key)
            send(pair[0], first, torch.zeros(4), its_key)
            pair[1].receive(first)
    pair[1].post(forward(1), "k")
    send(pair[0], sent, torch.zeros(4), key)
    with pytest.raises(
        InputError, match=r"rank 1 waited for F of stage 0, micro-batch 1, and rank 0 sent F of stage .* same shapes"
    ):
        pair[1].receive(forward(1))
