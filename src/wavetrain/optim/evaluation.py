"""Evaluation: the true loss and gradient of one minibatch at the point where the parameters are.

Random numbers of a minibatch (dropout, sampling) depend on the round and its index alone, so that a round gives the same whether
its minibatches are evaluated one after another or by ranks. Buffers of modules (running statistics of BatchNorm) take part in
every evaluation, in the order of the minibatches, and are never rolled back; with ranks, each keeps its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavetrain.errors import InputError
from wavetrain.optim.flat import Flat

Closure = Callable[..., Any]


@dataclass(frozen=True)
class Evaluated:
    """One minibatch."""

    loss: float
    has: tuple[bool, ...]
    """Which parameters got a gradient."""


def takes_index(closure: Closure) -> bool:
    """Whether a closure takes the index of a minibatch (or nothing).

    Raises:
        InputError: it is no function, or takes more.
    """
    if not callable(closure):
        raise InputError(
            f"step() takes a function that returns the loss of a minibatch, such as lambda i: loss_fn(model(x[i]), y[i]); "
            f"got {type(closure).__name__}"
        )
    try:
        parameters = list(inspect.signature(closure).parameters.values())
    except (TypeError, ValueError):
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    if len(needed) > 1:
        raise InputError(
            f"the closure needs {len(needed)} arguments ({', '.join(p.name for p in needed)}); OptEx calls it with the index "
            "of a minibatch, 0 to N − 1, or with nothing"
        )
    return len(needed) == 1 or any(p.kind == p.VAR_POSITIONAL for p in parameters)


def evaluate(closure: Closure, index: int | None, seed: int, flat: Flat, out: Tensor, scale: float) -> Evaluated:
    """Run ``closure``, and its backward pass if it did not; the gradient goes into ``out`` (d,), divided by ``scale``.

    Raises:
        InputError: it returns no loss, gives no gradient, or changes the parameters.
    """
    flat.forget_gradients()
    before = flat.versions()
    devices = [flat.device] if flat.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(seed)
        loss = closure() if index is None else closure(index)
        if isinstance(loss, int | float):
            loss = torch.tensor(float(loss))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the closure must return the loss of its minibatch, one number; it returned {given}")
        if loss.requires_grad and all(p.grad is None for p in flat.parameters):
            torch.autograd.backward(loss * scale if scale != 1 else loss)
    if flat.versions() != before:
        raise InputError(
            "the closure changed the parameters: it must only compute the loss (and its gradient); OptEx does the steps"
        )
    has = flat.read_gradients(out)
    if not any(has):
        raise InputError(
            "no parameter of the optimizer got a gradient: the closure's loss does not depend on them, or was computed "
            "under torch.no_grad()"
        )
    if scale != 1:
        out.div_(scale)
    return Evaluated(float(loss.detach()), has)


def is_finite(loss: float, gradient: Tensor) -> bool:
    """Whether both are numbers."""
    return math.isfinite(loss) and bool(torch.isfinite(gradient.sum()))
