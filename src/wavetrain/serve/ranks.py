"""Ranks that hold a model together while it generates: sums that are started and waited for, and one message a step.

Messages travel over :mod:`wavetrain.serve.wires` while the caller computes: a rank sends its part of a sum to all others, and
each adds them up in the same order. Of more than two ranks, that is more bytes than needed; there, large sums are left to Gloo,
whose ring runs on threads of its own. On GPUs all sums run on NCCL's own stream; written, not run here.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import PeerLostError, RuntimeFailure, StallError
from wavetrain.models.context import Alone, Pending, ordered_sum
from wavetrain.serve import steps
from wavetrain.serve.sampling import Candidates, merge
from wavetrain.serve.steps import Step
from wavetrain.serve.wires import Wires

_LOOK_EVERY: Final = timedelta(seconds=1)
"""How often a rank that waits for Gloo looks whether the others still live: Gloo does not always hear of a peer's death."""
RING_BYTES: Final = 1 << 18
"""A sum of so many bytes over more than two ranks goes around a ring: twice its bytes from each rank, however many there are."""


@dataclass
class Traffic:
    """What sums over ranks took, in seconds, by where they are in a step."""

    taken: deque[list[tuple[float, float]]] = field(default_factory=lambda: deque(maxlen=4096))
    """Of the last steps, of every sum: seconds that it was under way behind compute, and seconds that the caller spent on it."""

    def begin_step(self) -> None:
        self.taken.append([])

    def summary(self) -> dict[str, Any]:
        """Medians over steps, of prompts and of decoding alike: milliseconds hidden and exposed, in all and by sum."""
        whole = [step for step in self.taken if step]
        if not whole:
            return {"sums": 0, "hidden_ms": 0.0, "exposed_ms": 0.0, "by_sum": []}
        by_sum = [
            {
                name: 1e3 * statistics.median(step[i][at] for step in whole if len(step) > i)
                for at, name in enumerate(("hidden_ms", "exposed_ms"))
            }
            for i in range(max(map(len, whole)))
        ]
        return {
            "sums": len(by_sum),
            "hidden_ms": sum(s["hidden_ms"] for s in by_sum),
            "exposed_ms": sum(s["exposed_ms"] for s in by_sum),
            "by_sum": by_sum,
        }


class _Work(Protocol):
    """Something under way."""

    arrived: float | None
    """When it was there, by ``time.time()``, once it was waited for."""

    def wait(self) -> None: ...


class _Sum:
    """A sum under way; ``start`` begins it."""

    def __init__(self, start: Callable[[], _Work], result: Callable[[], Tensor], traffic: Traffic | None) -> None:
        self._result, self._traffic = result, traffic
        self._value: Tensor | None = None
        self._begun = time.time()
        self._work = start()
        self._away = time.time()

    def wait(self) -> Tensor:
        if self._value is None:
            begin = time.time()
            self._work.wait()
            self._value = self._result()
            if self._traffic is not None:
                arrived = begin if self._work.arrived is None else self._work.arrived
                hidden = max(0.0, min(arrived, begin) - self._away)
                self._traffic.taken[-1].append((hidden, time.time() - begin + self._away - self._begun))
        return self._value


class _Collective:
    """A collective of torch.distributed under way."""

    def __init__(self, work: Any, rank: int, watch: Callable[[], None] | None, *, timed: bool) -> None:
        self._work, self._rank, self._watch = work, rank, watch
        self.arrived: float | None = None
        if timed:
            work.get_future().add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self.arrived = time.time()

    def wait(self) -> None:
        """Wait for it; :class:`PeerLostError` if it cannot come."""
        while True:
            try:
                self._work.wait(*(() if self._watch is None else (_LOOK_EVERY,)))
            except RuntimeError as error:
                if self._watch is None or self._work.is_completed():
                    raise _gone(self._rank, error) from error
                self._watch()
            else:
                return


class Solo(Alone):
    """One rank that is all of them: :class:`Team` without others."""

    def begin_step(self) -> None: ...

    def send_step(self, step: Step | None) -> None: ...

    def gather(self, found: Candidates, num: int) -> Candidates:
        return found

    def close(self) -> None: ...


class Team:
    """Several ranks.

    Args:
        store: where they meet.
        rank: this one.
        size: how many.
        parts: sub-layers (or 1) that each of them holds.
        max_rows: rows of a step at most.
        deterministic: add up in the order of the parts on every rank: the same bits however many ranks share the model. Each rank
            then receives all parts instead of a sum.
        timeout_seconds: how long the others may be silent within a step.
        local: whether all ranks are on this machine.
        device: of the model.
        watch: called now and then by a rank that waits; raises if another is gone.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        parts: Sequence[int],
        max_rows: int,
        deterministic: bool = False,
        timeout_seconds: float = 600.0,
        local: bool = True,
        device: torch.device | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._others = [other for other in range(size) if other != rank]
        self._watch = watch
        self._traffic: Traffic | None = None
        self._parts, self._max_rows, self._deterministic = tuple(parts), max_rows, deterministic
        self._wires = Wires(store, rank=rank, size=size, local=local, timeout_seconds=timeout_seconds, watch=watch)
        self._on_gpu = device is not None and device.type == "cuda"
        self._ring: Any = None
        limit = timedelta(seconds=timeout_seconds)
        try:
            if self._on_gpu:  # not run here
                self._ring = _nccl(store, rank, size, limit)
            elif size > 2:
                self._ring = _gloo(store, rank, size, limit, local)
        except (RuntimeError, ValueError) as error:
            self._wires.close()
            raise RuntimeFailure(f"rank {rank} could not meet the other {size - 1}: {_first_line(error)}") from error

    def count_traffic(self, *, on: bool = True) -> None:
        """From now on, measure how long sums take, or no longer: see :attr:`traffic`."""
        self._traffic = Traffic() if on else None
        self._wires.stamp(on=on)

    @property
    def traffic(self) -> Traffic | None:
        """What sums took, if that is counted."""
        return self._traffic

    def begin_step(self) -> None:
        """A new step begins; only for what is counted."""
        if self._traffic is not None:
            self._traffic.begin_step()

    def start_sum(self, parts: Tensor, *, scratch: bool = False) -> Pending:
        """Begin to add up (parts here, …) over all ranks; ``scratch``: ``parts`` may be overwritten."""
        if self._deterministic:
            return self._start_ordered(parts)
        own = ordered_sum(parts).contiguous()
        if self._ring is None or not (self._on_gpu or own.nbytes >= RING_BYTES):
            return self._start_exchange(own, {other: torch.empty_like(own) for other in self._others}, self._added)
        if own.data_ptr() == parts.data_ptr() and not scratch:
            own = own.clone()

        def start() -> _Collective:
            try:
                return _Collective(self._ring.allreduce([own]), self.rank, self._watch, timed=self._traffic is not None)
            except RuntimeError as error:
                raise _gone(self.rank, error) from error

        return _Sum(start, lambda: own, self._traffic)

    def _added(self, every: list[Tensor]) -> Tensor:
        """The sum of one tensor a rank, in memory that a message came in."""
        total = torch.add(every[0], every[1], out=every[self._others[0]])
        for part in every[2:]:
            total += part
        return total

    def _start_ordered(self, parts: Tensor) -> Pending:
        """All parts of all ranks to every rank, which adds them up as one rank alone would."""
        whole = len(parts) == self._parts[self.rank]  # or one sum of them, as of the head
        found = {other: parts.new_empty(self._parts[other] if whole else 1, *parts.shape[1:]) for other in self._others}
        return self._start_exchange(parts.contiguous(), found, lambda every: ordered_sum(torch.cat(every)))

    def _start_exchange(self, own: Tensor, found: dict[int, Tensor], add: Callable[[list[Tensor]], Tensor]) -> Pending:
        """Send ``own`` to all others, and what they send into ``found``; then add up, in the order of ranks on each."""
        return _Sum(
            lambda: self._wires.start(dict.fromkeys(self._others, own), found),
            lambda: add([own if rank == self.rank else found[rank] for rank in range(self.size)]),
            self._traffic,
        )

    def gather(self, found: Candidates, num: int) -> Candidates:
        """The likeliest tokens over all ranks; on rank 0, elsewhere what this rank found."""
        if self._deterministic:
            return found  # every rank has seen all tokens
        width = found.values.shape[-1]
        most = num or int(self._largest(width))  # the last rank may have fewer tokens than the first
        rows = len(found.values)
        sent = torch.full((rows, 2 * most + 1), -torch.inf, dtype=torch.float64)
        sent[:, :width] = found.values
        sent[:, most : most + width] = found.tokens
        sent[:, -1] = found.total
        if self.rank != 0:
            self._wires.start({0: sent}, {}).wait()
            return found
        every = {other: torch.empty_like(sent) for other in self._others}
        self._wires.start({}, every).wait()
        parts = [
            Candidates(got[:, :most].float(), got[:, most : 2 * most].clamp(min=0).long(), got[:, -1].float())
            for got in (sent, *every.values())
        ]
        return merge(parts, num)

    def slowest(self, seconds: float) -> float:
        """The longest of what all ranks say they took."""
        return self._largest(seconds)

    def _largest(self, number: float) -> float:
        own = torch.tensor([number], dtype=torch.float64)
        every = {other: torch.empty_like(own) for other in self._others}
        self._wires.start(dict.fromkeys(self._others, own), every).wait()
        return max(number, *map(float, every.values()))

    def send_step(self, step: Step | None) -> None:
        """Rank 0: tell the others what comes next; None: nothing more."""
        for message in steps.encode(step, self._max_rows):
            if message is not None:
                self._wires.start(dict.fromkeys(self._others, message), {}).wait()

    def receive_step(self) -> Step | None:
        """The other ranks: what comes next, which may be hours away (a chat that waits for its user)."""
        message = torch.empty(steps.message_size(self._max_rows), dtype=torch.int64)
        self._wires.start({}, {0: message}).wait(for_ever=True)
        count = steps.tokens_that_follow(message)
        following = None
        if count:
            following = torch.empty(count, dtype=torch.int64)
            self._wires.start({}, {0: following}).wait()
        return steps.decode(message, following)

    def close(self) -> None:
        """Let the connections go."""
        self._wires.close()
        if self._ring is not None:
            self._ring.shutdown()


def meet(store: Store, rank: int, size: int, timeout_seconds: float, watch: Callable[[], None] | None) -> Store:
    """Wait until every rank has come to this point; a part of the store that no other meeting uses.

    Args:
        store: that all ranks have.
        rank: this one.
        size: how many.
        timeout_seconds: how long the others may take.
        watch: called again and again meanwhile; raises if a rank is gone.
    """
    number = store.add(f"wavetrain/meeting/{rank}", 1)  # of this rank; all make the same ones
    own: Store = PrefixStore(f"wavetrain/{number}", store)
    own.set(f"here/{rank}", "1")
    until = time.monotonic() + timeout_seconds
    while not own.check([f"here/{other}" for other in range(size)]):
        if watch is not None:
            watch()
        if time.monotonic() > until:
            raise StallError(f"rank {rank}: not all of {size} ranks were ready within {timeout_seconds:g} s")
        time.sleep(0.02)
    return own


def _gloo(store: Store, rank: int, size: int, limit: timedelta, local: bool) -> Any:
    """A group of its own, so that none of the caller's is touched. The class is torch's, its constructor undocumented."""
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if local:
        device = group.create_device(hostname="127.0.0.1")
    elif interface:
        device = group.create_device(interface=interface.split(",")[0])
    else:
        device = group.create_default_device()
    options._devices = [device]
    options._timeout = limit
    options._threads = 2
    return group(PrefixStore("ring", store), rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    """Written, not run here: NCCL runs its sums on a stream of its own; ``wait`` lets the current stream wait, not the caller."""
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = limit
    return group(PrefixStore("ring", store), rank, size, options)


def _gone(rank: int, error: Exception) -> PeerLostError:
    return PeerLostError(f"a peer of rank {rank} is gone: {_first_line(error)}", rank=-1)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
