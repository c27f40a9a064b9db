"""Threads: the minibatches of a round evaluated at the same time on one device, each thread with a twin of the model.

Several minibatches side by side keep the cores busier than one after another, each on all cores: measured on two cores
(benchmarks/optex_threads.py), 1.1 to 1.2 times as fast where a minibatch takes more than some ten milliseconds, and slower where
it takes less. ``torch.vmap`` over copies, measured beside it, is faster for small networks of dense layers alone, and slower with
attention, which it has no rule for.

A twin has trained parameters and buffers of its own, made anew every round; all else (frozen parameters, attributes, hooks) is
the model's own. What cannot be had this way is refused: random numbers, which all threads would draw from one generator, buffers
that a forward pass writes to (the running statistics of BatchNorm), which would be lost, and losses that lead past the twin to
the model itself.
"""

from __future__ import annotations

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


def check_model(model: nn.Module, flat: Flat) -> None:
    """Refuse a model that does not hold all of the trained parameters."""
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for p in flat.parameters):
        raise InputError("the optimizer trains parameters that are not the model's: give OptEx the model that holds them all")


class Threads:
    """Evaluates minibatches at the same time.

    Args:
        model: that the closure computes the loss of.
        flat: of its trained parameters; all that the optimizer trains must be the model's.
        count: of threads.

    Raises:
        InputError: the optimizer trains what is not the model's, or the model is a compiled one.
    """

    def __init__(self, model: nn.Module, flat: Flat, count: int) -> None:
        check_model(model, flat)
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
            raise InputError(
                f"threads evaluate twins of the model, which torch.compile would compile again and again; {_INSTEAD}"
            )
        self._model, self._flat, self.count = model, flat, count
        self._values = [[torch.empty_like(p) for p in flat.parameters] for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="optex")

    def held_bytes(self) -> int:
        """Of the twins' parameters."""
        return sum(t.numel() * t.element_size() for values in self._values for t in values)

    def evaluate(self, closure: Callable[..., Any], points: Sequence[Tensor], scale: float | None) -> list[Shared]:
        """Minibatch i at ``points[i]`` (d,), for all i; to the bit the same as one after another with as many cores for each.

        Raises:
            InputError: the closure draws random numbers, or its loss depends on the model itself.
        """
        free: SimpleQueue[_Twin] = SimpleQueue()
        for values in self._values:
            free.put(_twin(self._model, self._flat, values))
        self._flat.forget_gradients()
        threads, state = torch.get_num_threads(), _random_state(self._flat.device)
        each = max(1, threads // self.count)

        def one(index: int) -> Shared:
            torch.set_num_threads(each)
            twin = free.get()
            try:
                return twin.evaluate(closure, index, points[index], scale)
            finally:
                free.put(twin)

        try:
            found = list(self._pool.map(one, range(len(points))))
        finally:
            torch.set_num_threads(threads)  # of MKL, a thread that sets its own number sets that of all
        if any(p.grad is not None for p in self._flat.parameters):
            self._flat.forget_gradients()
            raise InputError(
                "the loss depends on the model itself, past the one that the closure is given: take lambda i, model: … and use "
                f"its model everywhere; or {_INSTEAD}"
            )
        if not torch.equal(state, _random_state(self._flat.device)):
            raise InputError(
                f"random numbers were drawn (dropout?), and threads draw from one generator, in any order; {_INSTEAD}"
            )
        return found


@dataclass(frozen=True)
class _Twin:
    """A model that one thread may use."""

    model: nn.Module
    flat: Flat
    """Of its trained parameters, in the order of the original's."""

    def evaluate(self, closure: Callable[..., Any], index: int, point: Tensor, scale: float | None) -> Shared:
        """One minibatch; what goes wrong is kept."""
        gradient = torch.empty_like(point)
        none = (False,) * len(self.flat.parameters)
        try:
            self.flat.write(point)
            before = self._buffers()
            done = evaluate(lambda i: closure(i, self.model), index, None, self.flat, gradient, scale)
            written = before != self._buffers()
        except Exception as error:
            return Shared(gradient, 0.0, none, error)
        finally:
            self.flat.forget_gradients()
        if written:
            told = f"the model's forward pass writes to its buffers (BatchNorm?), and a twin's are lost; {_INSTEAD}"
            return Shared(gradient, 0.0, none, InputError(told))
        return Shared(gradient, done.loss, done.has, finite=done.finite)

    def _buffers(self) -> list[tuple[int, int]]:
        """Changes when one is written to, or replaced."""
        return [(id(b), b._version) for b in self.model.buffers()]


@torch.no_grad()
def _twin(model: nn.Module, flat: Flat, values: Sequence[Tensor]) -> _Twin:
    """The model as it is now, with parameters that lie in ``values``, by torch's own way to make replicas."""
    own = {id(p): _like(p, nn.Parameter(value)) for p, value in zip(flat.parameters, values, strict=True)}
    modules = {id(module): module._replicate_for_data_parallel() for module in model.modules()}  # type: ignore[no-untyped-call]
    for module in model.modules():
        twin = modules[id(module)]
        del twin._is_replica
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else modules[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
                continue
            if id(parameter) not in own:  # what is not trained gets no gradient, that threads would add up in one place
                own[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
            setattr(twin, name, own[id(parameter)])
        for name, buffer in module._buffers.items():
            twin._buffers[name] = None if buffer is None else buffer.clone()
    return _Twin(modules[id(model)], Flat([{"params": [own[id(p)] for p in flat.parameters]}]))


def _like(original: Any, parameter: Any) -> nn.Parameter:
    """With the original's hooks."""
    for hook in (original._backward_hooks or {}).values():
        parameter.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        parameter.register_post_accumulate_grad_hook(hook)
    found: nn.Parameter = parameter
    return found


def _random_state(device: torch.device) -> Tensor:
    """Changes when random numbers are drawn."""
    if device.type == "cuda":  # not run here
        return torch.cat((torch.get_rng_state(), torch.cuda.get_rng_state(device)))
    return torch.get_rng_state()
