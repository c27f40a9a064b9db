"""Evaluation: the true loss and gradient of one minibatch at the point where the parameters are.

Random numbers of a minibatch (dropout, sampling) depend on the round and its index alone, so that a round gives the same whether
its minibatches are evaluated one after another or by ranks. Buffers of modules (running statistics of BatchNorm) take part in
every evaluation, point by point, and are never rolled back; with ranks, each keeps its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.optim.flat import Flat

Closure = Callable[..., Any]


@dataclass(frozen=True)
class Evaluated:
    """One minibatch."""

    loss: float
    has: tuple[bool, ...]
    """Which parameters got a gradient."""
    finite: bool
    """Whether loss and gradient are numbers."""


def with_index(closure: Closure, model: nn.Module | None = None) -> Callable[..., Any]:
    """A closure as a function of the index of a minibatch, whether it takes one or not; with a ``model``, of that as well.

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
        return closure
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if model is not None:
        if len(needed) != 2 or any(p.kind is p.KEYWORD_ONLY for p in needed):
            raise InputError(
                "OptEx was given a model, and calls the closure with the index of a minibatch and a model to evaluate it with: "
                f"lambda i, model: loss_fn(model(x[i]), y[i]); this one takes {len(needed)}"
            )
        return closure
    if len(needed) > 1:
        raise InputError(
            f"the closure needs {len(needed)} arguments ({', '.join(p.name for p in needed)}); OptEx calls it with the index "
            "of a minibatch, 0 to N − 1, or with nothing"
        )
    named = needed or [p for p in parameters if p.name in ("i", "index")]
    if named and named[0].kind is named[0].KEYWORD_ONLY:
        name = named[0].name
        return lambda i: closure(**{name: i})
    if named or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return closure
    return lambda i: closure()


def evaluate(
    closure: Callable[[int], Any], index: int, seed: int | None, flat: Flat, out: Tensor, scale: float | None
) -> Evaluated:
    """Run ``closure``, and its backward pass if it did not; the gradient goes into ``out`` (d,).

    With ``scale``, the loss is multiplied by it before the backward pass, and the gradient divided by it after. Without ``seed``,
    no random numbers are prepared for.

    Raises:
        InputError: it returns no loss, gives no gradient, or changes the parameters.
    """
    flat.forget_gradients()
    torch.clear_autocast_cache()  # of weights at another point
    before = flat.versions()
    devices = [flat.device] if flat.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=seed is not None), torch.enable_grad():
        if seed is not None:
            torch.manual_seed(seed)
        loss = closure(index)
        if isinstance(loss, int | float):
            loss = torch.tensor(float(loss))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the closure must return the loss of its minibatch, one number; it returned {given}")
        done = any(p.grad is not None for p in flat.parameters)
        if done and scale is not None:
            raise InputError("with grad_scaler, OptEx scales the loss: the closure must return it without loss.backward()")
        if loss.requires_grad and not done:
            torch.autograd.backward(loss if scale is None else loss * scale)
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
    if scale is not None:
        out.div_(scale)
    found = float(loss.detach())
    return Evaluated(found, has, math.isfinite(found) and is_finite(out))


def is_finite(gradient: Tensor) -> bool:
    """Whether all are numbers. If their sum is one they are, and it is much quicker; if it is none, it may be too large."""
    return math.isfinite(float(gradient.sum())) or bool(torch.isfinite(gradient).all())
