"""Emulated compute: a stage that only waits, and hands on messages of the real size.

Waiting is by the clock: an action ends when its time is over, however late the operating system is to wake the process; what
comes late shows as overhead of the run and is not charged to the schedule twice.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wavetrain.runtime.stage import Result
from wavetrain.runtime.structure import Leaf, Structure
from wavetrain.schedule.actions import Kind

_PR_SET_TIMERSLACK = 29


class Waiter:
    """Waits precisely. Linux wakes a sleeping process up to 50 µs late to save power; here it is asked not to."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def wait(self, seconds: float) -> None:
        """Return ``seconds`` from now."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(left)


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


def message_tensor(num_bytes: float) -> Tensor:
    """A float32 tensor of about ``num_bytes`` bytes."""
    return torch.zeros(max(1, round(num_bytes / 4)))
