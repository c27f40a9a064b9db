"""Wires: messages between ranks that travel while their sender does something else; here every rank is a thread."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import PeerLostError, RankFailedError, RuntimeFailure, StallError
from wavetrain.serve.ranks import RING_BYTES, Team
from wavetrain.serve.wires import Wires

pytestmark = pytest.mark.timeout(120)


def together(size: int, act: Callable[[int], Any]) -> list[Any]:
    """What every rank's thread returns."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(act, rank) for rank in range(size)]]


@contextmanager
def met(size: int, **options: Any) -> Iterator[list[Wires]]:
    store = HashStore()
    wires = together(size, lambda rank: Wires(store, rank=rank, size=size, **{"local": True, "timeout_seconds": 30, **options}))
    yield wires
    for one in wires:
        one.close()


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count) * (rank + 1)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.sampled_from((0, 1, 7, 1000, 300_000, 2_000_000)), st.booleans()), min_size=1, max_size=6),
)
def test_messages_come_whole_and_in_order_however_large(size: int, messages: list[tuple[int, bool]]) -> None:
    """Larger than what the kernel holds, both ways at once, several under way, waited for at once or later."""
    with met(size) as wires:

        def act(rank: int) -> bool:
            others, late, good = [o for o in range(size) if o != rank], [], True
            for count, wait in messages:
                found = {other: torch.empty(count, dtype=torch.int64) for other in others}
                transfer = wires[rank].start({other: numbers(rank, count) for other in others}, found)
                late.append((transfer, found, count))
                if wait:
                    transfer.wait()
            for transfer, found, count in late:
                transfer.wait()
                good &= all(torch.equal(got, numbers(other, count)) for other, got in found.items())
            return good

        assert together(size, act) == [True] * size


def test_a_message_is_on_its_way_while_its_sender_does_something_else() -> None:
    with met(2) as (one, two):
        one.stamp()
        found = torch.empty(100)
        transfer = one.start({}, {1: found})
        two.start({0: torch.ones(100)}, {})  # and is not waited for
        time.sleep(0.3)
        begin = time.time()
        transfer.wait()
        assert torch.equal(found, torch.ones(100))
        assert transfer.arrived is None or transfer.arrived < begin, "it has been there all the while"


def test_a_rank_that_ends_is_named() -> None:
    with met(3) as (one, two, three):
        transfer = one.start({}, {2: torch.empty(4)})
        three.close()
        with pytest.raises(PeerLostError, match="rank 2 is gone") as caught:
            transfer.wait()
        assert caught.value.rank == 2
        two.close()


def test_a_rank_that_says_nothing() -> None:
    with met(2, timeout_seconds=1.5) as (one, _), pytest.raises(StallError, match=r"rank 1 has not answered within 1\.5 s"):
        one.start({}, {1: torch.empty(4)}).wait()


def test_who_waits_looks_whether_the_others_live() -> None:
    def watch() -> None:
        raise RankFailedError("rank 1 was killed", rank=1, cause="signal 9")

    with met(2) as (one, _):
        one.watch = watch
        with pytest.raises(RankFailedError, match="rank 1 was killed"):
            one.start({}, {1: torch.empty(4)}).wait(for_ever=True)


def test_ranks_that_are_out_of_step() -> None:
    with met(2) as (one, two):
        two.start({0: torch.ones(3)}, {}).wait()
        with pytest.raises(RuntimeFailure, match="out of step: rank 1 sent 12 bytes where 16 were expected"):
            one.start({}, {1: torch.empty(4)}).wait()


def test_strangers_are_turned_away_and_hold_up_nobody() -> None:
    """Some say nothing at all; the right word may come in pieces."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as silent:
        made = pool.submit(lambda: Wires(store, rank=0, size=2, local=True, timeout_seconds=30))
        word, port, host = store.get("wires/0").decode().split()
        assert host == "127.0.0.1", "nothing listens beyond this machine"
        for _ in range(20):
            silent.enter_context(socket.create_connection((host, int(port))))
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n" + bytes(16), bytes(16) + (1).to_bytes(8, "little")):
            with socket.create_connection((host, int(port))) as stranger, contextlib.suppress(OSError):  # turned away meanwhile
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(10)
                assert stranger.recv(1) == b""
        with socket.create_connection((host, int(port))) as rank_1:
            hello = bytes.fromhex(word) + (1).to_bytes(8, "little")
            rank_1.sendall(hello[:5])
            time.sleep(0.3)
            assert not made.done()
            rank_1.sendall(hello[5:])
            one = made.result(10)
            found = torch.empty(1, dtype=torch.int64)
            rank_1.sendall((8).to_bytes(8, "little") + (7).to_bytes(8, "little"))
            one.start({}, {1: found}).wait()
            assert found == 7
            one.close()


def test_strangers_do_not_make_a_rank_wait_longer() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as silent:
        made = pool.submit(lambda: Wires(store, rank=0, size=2, local=True, timeout_seconds=1))
        _, port, host = store.get("wires/0").decode().split()
        for _ in range(8):
            silent.enter_context(socket.create_connection((host, int(port))))
        with pytest.raises(RuntimeFailure, match="rank 1 did not connect within 1 s"):
            made.result(20)


def test_a_rank_that_never_comes() -> None:
    with pytest.raises(RuntimeFailure, match=r"rank 0 at 127\.0\.0\.1 could not meet the other 1: rank 1 did not connect"):
        Wires(HashStore(), rank=0, size=2, local=True, timeout_seconds=0.5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [5, RING_BYTES // 2])
def test_sums_are_the_same_bits_on_all_ranks(size: int, count: int) -> None:
    """Small ones and large ones; what was given stays as it is."""
    store = HashStore()
    parts = [torch.randn(1, count, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    kept = [part.clone() for part in parts]

    def act(rank: int) -> list[torch.Tensor]:
        team = Team(store, rank=rank, size=size, parts=(1,) * size, max_rows=1)
        found = [team.start_sum(parts[rank]).wait() for _ in range(2)]
        assert team.slowest(float(rank)) == size - 1
        team.close()
        return found

    found = together(size, act)
    for first, second in found:
        assert torch.equal(first, second)
        assert torch.equal(first, found[0][0])
        torch.testing.assert_close(first, torch.cat(parts).sum(0))
    assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))
