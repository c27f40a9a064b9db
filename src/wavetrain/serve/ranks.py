"""Ranks that hold a model together while it generates: sums that are started and waited for, and one message a step.

Two groups of the same ranks: *data*, for sums, whose limit is how long a peer may be silent within a step; and *control*, for
what rank 0 says next, which may be hours away (a chat that waits for its user).

Sums run on Gloo's own threads (on GPUs: on NCCL's own stream; written, not run here) while the caller computes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import PeerLostError, RuntimeFailure, StallError
from wavetrain.models.context import Alone, Pending, ordered_sum
from wavetrain.serve import steps
from wavetrain.serve.sampling import Candidates, merge
from wavetrain.serve.steps import Step

_FOR_EVER: Final = timedelta(days=365)
_LOOK_EVERY: Final = timedelta(seconds=1)
"""How often a rank that waits looks whether the others still live: Gloo does not always hear of a peer's death."""


@dataclass
class Traffic:
    """What sums over ranks took, in seconds, by where they are in a step: hidden behind compute, and exposed."""

    taken: deque[list[tuple[float, float]]] = field(default_factory=lambda: deque(maxlen=4096))
    """Of the last steps, of every sum: seconds that it was under way, seconds that it was waited for."""

    def begin_step(self) -> None:
        self.taken.append([])

    def summary(self) -> dict[str, Any]:
        """Medians over the steps of one kind (steps with as many sums): milliseconds hidden and exposed, in all and by sum."""
        whole = [step for step in self.taken if step]
        if not whole:
            return {"sums": 0, "hidden_ms": 0.0, "exposed_ms": 0.0, "by_sum": []}
        by_sum = [
            {
                "hidden_ms": 1e3 * statistics.median(max(0.0, step[i][0] - step[i][1]) for step in whole if len(step) > i),
                "exposed_ms": 1e3 * statistics.median(step[i][1] for step in whole if len(step) > i),
            }
            for i in range(max(map(len, whole)))
        ]
        return {
            "sums": len(by_sum),
            "hidden_ms": sum(s["hidden_ms"] for s in by_sum),
            "exposed_ms": sum(s["exposed_ms"] for s in by_sum),
            "by_sum": by_sum,
        }


class _Sum:
    """A sum under way."""

    def __init__(self, work: Any, result: Callable[[], Tensor], team: Team, traffic: Traffic | None) -> None:
        self._work, self._result, self._team, self._traffic = work, result, team, traffic
        self._value: Tensor | None = None
        self._begun = time.perf_counter()
        self._ended: list[float] = []
        if traffic is not None:
            work.get_future().add_done_callback(lambda _: self._ended.append(time.perf_counter()))

    def wait(self) -> Tensor:
        if self._value is None:
            begin = time.perf_counter()
            self._team.wait(self._work)
            if self._traffic is not None:
                now = time.perf_counter()
                ended = min(self._ended[0], now) if self._ended else now
                self._traffic.taken[-1].append((ended - self._begun, max(0.0, min(now, ended) - begin)))
            self._value = self._result()
        return self._value


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
        timeout_seconds: how long a sum may take.
        local: whether all ranks are on this machine.
        device: of the model.
        watch: called now and then while a sum is waited for; raises if a rank is gone.
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
        self._watch = watch
        self.traffic: Traffic | None = None
        self._parts, self._max_rows, self._deterministic = tuple(parts), max_rows, deterministic
        limit = timedelta(seconds=timeout_seconds)
        try:
            self._control = _gloo(store, "control", rank, size, limit, local)
            self._control._set_default_timeout(_FOR_EVER)  # but not to be met in the first place
            if device is not None and device.type == "cuda":  # not run here
                self._data: Any = _nccl(store, rank, size, limit)
            else:
                self._data = _gloo(store, "data", rank, size, limit, local)
        except (RuntimeError, ValueError) as error:
            raise RuntimeFailure(f"rank {rank} could not meet the other {size - 1}: {_first_line(error)}") from error

    def begin_step(self) -> None:
        """A new step begins; only for what is counted."""
        if self.traffic is not None:
            self.traffic.begin_step()

    def start_sum(self, parts: Tensor, *, scratch: bool = False) -> Pending:
        """Begin to add up (parts here, …) over all ranks; ``scratch``: ``parts`` may be overwritten."""
        if self._deterministic:
            return self._start_ordered(parts)
        own = ordered_sum(parts)
        if len(parts) == 1 and not scratch:
            own = own.clone()
        own = own.contiguous()
        return _Sum(self._start(lambda: self._data.allreduce([own])), lambda: own, self, self.traffic)

    def _start_ordered(self, parts: Tensor) -> Pending:
        most = max(self._parts) if len(parts) == self._parts[self.rank] else 1
        own = parts.new_zeros(most, *parts.shape[1:])
        own[: len(parts)] = parts
        found = [torch.empty_like(own) for _ in range(self.size)]
        held = self._parts if len(parts) == self._parts[self.rank] else (1,) * self.size

        def add() -> Tensor:
            return ordered_sum(torch.cat([part[:count] for part, count in zip(found, held, strict=True)]))

        return _Sum(self._start(lambda: self._data.allgather([found], [own])), add, self, self.traffic)

    def gather(self, found: Candidates, num: int) -> Candidates:
        """The likeliest tokens over all ranks; on rank 0, elsewhere what this rank found."""
        if self._deterministic:
            return found  # every rank has seen all tokens
        width = found.values.shape[-1]
        most = num or width
        if num == 0:  # the last rank may have fewer tokens than the first
            sizes = torch.tensor([width])
            self._wait_for(self._control.allreduce, [sizes], _max_options())
            most = int(sizes)
        rows = len(found.values)
        sent = torch.full((rows, 2 * most + 1), -torch.inf, dtype=torch.float64)
        sent[:, :width] = found.values
        sent[:, most : most + width] = found.tokens
        sent[:, -1] = found.total
        options = dist.GatherOptions()
        options.rootRank = 0
        every = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait_for(self._control.gather, [every] if self.rank == 0 else [], [sent], options)
        if self.rank != 0:
            return found
        parts = [
            Candidates(got[:, :most].float(), got[:, most : 2 * most].clamp(min=0).long(), got[:, -1].float()) for got in every
        ]
        return merge(parts, num)

    def slowest(self, seconds: float) -> float:
        """The longest of what all ranks say they took."""
        longest = torch.tensor([seconds], dtype=torch.float64)
        self._wait_for(self._control.allreduce, [longest], _max_options())
        return float(longest)

    def send_step(self, step: Step | None) -> None:
        """Rank 0: tell the others what comes next; None: nothing more."""
        message, following = steps.encode(step, self._max_rows)
        self._broadcast(message)
        if following is not None:
            self._broadcast(following)

    def receive_step(self) -> Step | None:
        """The other ranks: what comes next."""
        message = torch.empty(steps.message_size(self._max_rows), dtype=torch.int64)
        self._broadcast(message)
        count = steps.tokens_that_follow(message)
        following = None
        if count:
            following = torch.empty(count, dtype=torch.int64)
            self._broadcast(following)
        return steps.decode(message, following)

    def wait(self, work: Any) -> None:
        """Wait for something under way; :class:`PeerLostError` if it cannot come."""
        while True:
            try:
                work.wait(*(() if self._watch is None else (_LOOK_EVERY,)))
            except RuntimeError as error:
                if self._watch is None or work.is_completed():
                    raise PeerLostError(f"a peer of rank {self.rank} is gone: {_first_line(error)}", rank=-1) from error
                self._watch()
            else:
                return

    def close(self) -> None:
        """Let the connections go."""
        for group in (self._data, self._control):
            group.shutdown()

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._wait_for(self._control.broadcast, [tensor], options)

    def _wait_for(self, collective: Callable[..., Any], *args: Any) -> None:
        self.wait(self._start(lambda: collective(*args)))

    def _start(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            raise PeerLostError(f"a peer of rank {self.rank} is gone: {_first_line(error)}", rank=-1) from error


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


def _gloo(store: Store, name: str, rank: int, size: int, limit: timedelta, local: bool) -> Any:
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
    return group(PrefixStore(name, store), rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    """Written, not run here: NCCL runs its sums on a stream of its own; ``wait`` lets the current stream wait, not the caller."""
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = limit
    return group(PrefixStore("data", store), rank, size, options)


def _max_options() -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
