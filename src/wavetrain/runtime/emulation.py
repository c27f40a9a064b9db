"""Emulated compute: a stage that only waits, and hands on messages of the real size.

An action begins when the rank gets to it and ends the given seconds later, or a little after where the operating system is late
to wake the process: what a rank does between two actions, and what it loses to the operating system, is part of what is
measured.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from wavetrain.runtime.program import Parcel
from wavetrain.runtime.stage import Result
from wavetrain.runtime.structure import Leaf, Structure
from wavetrain.runtime.transport import Arrived, Transport
from wavetrain.schedule.actions import Kind
from wavetrain.schedule.costs import Costs

_PR_SET_TIMERSLACK = 29


SPIN_SECONDS = 7e-5
"""The end of a wait is spent looking at the clock: to be woken takes about that long."""


class Waiter:
    """Waits precisely. Linux wakes a sleeping process some 50 µs late to save power; here it is asked not to."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def wait(self, seconds: float) -> None:
        """Return ``seconds`` from now."""
        self.wait_until(time.monotonic() + seconds)

    def wait_until(self, end: float) -> None:
        """Return at ``end`` of the monotonic clock."""
        clock = time.monotonic
        asleep = end - clock() - SPIN_SECONDS
        if asleep > 0:
            time.sleep(asleep)
        while clock() < end:
            pass


class EmulatedStage:
    """A worker that waits.

    Args:
        seconds: of every kind of action.
        message: what it gives to its neighbours, both ways: one tensor.
    """

    def __init__(self, waiter: Waiter, seconds: Mapping[Kind, float], message: Tensor, *, first: bool, last: bool) -> None:
        self._waiter, self._seconds, self._first, self._last = waiter, seconds, first, last
        message = message.detach()
        self._result: Result = ([message], Structure(0, (Leaf(tuple(message.shape), message.dtype, True),)))

    def forward(self, micro_batch: int, received: Sequence[Tensor], structure: Structure | None) -> Result | None:
        self._waiter.wait(self._seconds["F"])
        return None if self._last else self._result

    def backward(self, micro_batch: int, flows: Sequence[Tensor]) -> Result | None:
        self._waiter.wait(self._seconds["B"])
        return None if self._first else self._result

    def backward_input(self, micro_batch: int, flows: Sequence[Tensor]) -> Result | None:
        self._waiter.wait(self._seconds["I"])
        return None if self._first else self._result

    def backward_weight(self, micro_batch: int) -> None:
        self._waiter.wait(self._seconds["W"])


class EmulatedLinks:
    """A transport whose messages arrive no earlier than the links of some costs would let them.

    The sender knows when its link is free and writes the moment of arrival into the message; the receiver waits for it.
    Messages must be those of :func:`message_tensor`. All ranks share one monotonic clock: they run on one machine.
    """

    def __init__(self, inner: Transport, waiter: Waiter, costs: Costs) -> None:
        self._inner, self._waiter, self._costs = inner, waiter, costs
        self._free: dict[int, float] = defaultdict(float)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        self._inner.post(parcel, key)

    def receive(self, parcel: Parcel) -> Arrived:
        arrived = self._inner.receive(parcel)
        self._waiter.wait_until(float(arrived.tensors[0][0]))
        return arrived

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        stage = parcel.stage if parcel.kind == "F" else parcel.stage - 1
        target, rank = parcel.target, parcel.source
        begin = max(time.monotonic(), self._free[target])
        self._free[target] = begin + self._costs.message_bytes[stage] / self._costs.bandwidth[rank][target]
        stamped = tensors[0].clone()
        stamped[0] = self._free[target] + self._costs.latency[rank][target]
        self._inner.send(parcel, key, [stamped], structure)

    def flush(self) -> None:
        self._inner.flush()

    def arrived(self, target: int, count: int) -> None:
        self._inner.arrived(target, count)

    def release(self, message: Arrived) -> None:
        self._inner.release(message)

    def finish(self) -> None:
        self._inner.finish()


def message_tensor(num_bytes: float) -> Tensor:
    """A tensor of about ``num_bytes`` bytes, (num_bytes / 8,) float64."""
    return torch.zeros(max(1, round(num_bytes / 8)), dtype=torch.float64)
