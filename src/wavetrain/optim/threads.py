"""Threads: the minibatches of a round evaluated at the same time on one device, each thread with a copy of the model.

Several minibatches side by side keep the cores busier than one after another, each on all cores: measured on two cores, 1.1 to
1.4 times as fast for networks from which a thread has more to do than Python has (benchmarks/optex_threads.py). ``torch.vmap``
over the copies, measured beside it, is no faster than one after another on a CPU.

Random numbers are drawn from one generator for all threads, and buffers that a forward pass writes to (the running statistics of
BatchNorm) would be those of a copy: a closure that does either is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.optim.evaluation import evaluate
from wavetrain.optim.flat import Flat
from wavetrain.optim.team import Shared

_INSTEAD: Final = "give OptEx no model, or threads=1, and its minibatches are evaluated one after another"


@dataclass(frozen=True)
class _Copy:
    """A model of a thread's own."""

    model: nn.Module
    flat: Flat
    """Of its trained parameters, in the order of the original's."""


class Threads:
    """Evaluates minibatches at the same time.

    Args:
        model: that the closure computes the loss of.
        flat: of its trained parameters; all that the optimizer trains must be the model's.
        count: of threads.

    Raises:
        InputError: the optimizer trains what is not the model's.
    """

    def __init__(self, model: nn.Module, flat: Flat, count: int) -> None:
        self.model, self.count = model, count
        own = {id(p): i for i, p in enumerate(model.parameters())}
        if any(id(p) not in own for p in flat.parameters):
            raise InputError("the optimizer trains parameters that are not the model's: give OptEx the model that holds them all")
        places = [own[id(p)] for p in flat.parameters]
        self._free: SimpleQueue[_Copy] = SimpleQueue()
        self._copies: list[_Copy] = []
        for _ in range(count):
            twin = copy.deepcopy(model)
            every = list(twin.parameters())
            self._copies.append(_Copy(twin, Flat([{"params": [every[i] for i in places]}])))
            self._free.put(self._copies[-1])
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="optex")

    def held_bytes(self) -> int:
        """Of the copies."""
        return sum(t.numel() * t.element_size() for one in self._copies for t in (*one.model.parameters(), *one.model.buffers()))

    def evaluate(self, closure: Callable[..., Any], points: Sequence[Tensor], scale: float | None) -> list[Shared]:
        """Minibatch i at ``points[i]`` (d,), for all i; the same whatever the number of threads.

        Raises:
            InputError: the closure draws random numbers, or writes to buffers.
        """
        self._follow()
        threads, state = torch.get_num_threads(), torch.get_rng_state()
        each = max(1, threads // self.count)
        try:
            found = list(self._pool.map(lambda i: self._one(closure, i, points[i], scale, each), range(len(points))))
        finally:
            torch.set_num_threads(threads)  # of MKL, a thread that sets its own number sets that of all
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            raise InputError(
                f"the closure draws random numbers (dropout?), and threads draw from one generator, in any order; {_INSTEAD}"
            )
        return found

    def _one(self, closure: Callable[..., Any], index: int, point: Tensor, scale: float | None, threads: int) -> Shared:
        """One minibatch on a copy that is free; what goes wrong is kept."""
        torch.set_num_threads(threads)
        own = self._free.get()
        gradient = torch.empty_like(point)
        try:
            own.flat.write(point)
            before = [b._version for b in own.model.buffers()]
            done = evaluate(lambda i: closure(i, own.model), index, None, own.flat, gradient, scale)
            written = before != [b._version for b in own.model.buffers()]
        except Exception as error:
            return Shared(gradient, 0.0, (False,) * len(own.flat.parameters), error)
        finally:
            own.flat.forget_gradients()
            self._free.put(own)
        if written:
            told = f"the model's forward pass writes to its buffers (BatchNorm?), and a copy's would be lost; {_INSTEAD}"
            return Shared(gradient, 0.0, done.has, InputError(told))
        return Shared(gradient, done.loss, done.has)

    @torch.no_grad()
    def _follow(self) -> None:
        """Copies are as the model is in all that is not trained: modes, buffers, frozen parameters."""
        for one in self._copies:
            for module, twin in zip(self.model.modules(), one.model.modules(), strict=True):
                twin.training = module.training
            trained = {id(p) for p in one.flat.parameters}
            mine, theirs = ([*model.parameters(), *model.buffers()] for model in (self.model, one.model))
            for own, copied in zip(mine, theirs, strict=True):
                if id(copied) not in trained:
                    copied.copy_(own)
