"""The ways to spend N gradients a round that benchmarks of OptEx compare, all on the same inner optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wavetrain.errors import DivergedError
from wavetrain.optim import OptEx
from wavetrain.optim.fork import Fork

METHODS = ("vanilla", "large batch", "line search", "coasting", "paper", "ours", "target")
"""Vanilla: one step with one minibatch. Large batch: one step with the mean of N gradients. Line search: N lengths of a step
with the last gradient, one true step from the best. Coasting: N − 1 steps without a gradient, then a true one. Paper: OptEx as
published. Target: N true steps, one after another, which no round of parallel gradients can beat but by averaging noise."""

_PAPER = ("optex", "paper", "play", "process", "history", "flat", "fork", "evaluation")


def code_of(method: str) -> tuple[str, ...]:
    """Files that a method's results depend on, for :mod:`benchmarks.kept`; all but OptEx only on how state is set aside."""
    own = {"ours": ("optim/*.py",), "paper": tuple(f"optim/{name}.py" for name in _PAPER)}
    return ("optimizers.py", *own.get(method, ("optim/fork.py",)))


@dataclass
class Problem:
    """Something to minimise."""

    parameters: list[nn.Parameter]
    loss: Callable[[int], Tensor]
    """Of minibatch i of the round under way."""
    moving: bool = False
    """Losses of different rounds cannot be compared."""


def rounds(method: str, problem: Problem, base: Optimizer, parallel: int) -> Callable[[], None]:
    """What does one round by a method."""
    if method in ("paper", "ours"):
        opt = OptEx(base, parallel=parallel, mode="paper" if method == "paper" else "auto", moving_losses=problem.moving)
        return lambda: _round(opt, problem)
    if method in ("line search", "coasting"):
        return _Tried(problem, base, parallel, coast=method == "coasting")
    if method == "large batch":

        def whole() -> None:
            base.zero_grad()
            for i in range(parallel):
                torch.autograd.backward(problem.loss(i) / parallel)
            base.step()

        return whole

    def one_by_one() -> None:
        for i in range(parallel if method == "target" else 1):
            base.zero_grad()
            torch.autograd.backward(problem.loss(i))
            base.step()

    return one_by_one


def _round(opt: OptEx, problem: Problem) -> None:
    try:
        opt.step(problem.loss)
    except DivergedError:  # said, and rolled back: no better than a loss that is no number
        with torch.no_grad():
            problem.parameters[0].fill_(math.nan)


class _Tried:
    """Line search and coasting: N points on the way of one direction, and a true step from one of them."""

    def __init__(self, problem: Problem, base: Optimizer, parallel: int, *, coast: bool) -> None:
        self.problem, self.base, self.parallel, self.coast = problem, base, parallel, coast
        self.fork, self.last = Fork(base), [torch.zeros_like(p) for p in problem.parameters]

    def __call__(self) -> None:
        parameters, base = self.problem.parameters, self.base
        if self.coast:
            for _ in range(self.parallel - 1):
                for p in parameters:
                    p.grad = torch.zeros_like(p)
                base.step()
            self._true(self.parallel - 1)
            base.step()
            return
        start = [p.detach().clone() for p in parameters]
        self.fork.save()
        rates = [group["lr"] for group in base.param_groups]
        losses = []
        for i in range(self.parallel):
            self._go(start, rates, i)
            losses.append(self._true(i))
        best = min(range(self.parallel), key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf)
        self._go(start, rates, best)
        self._true(best)
        self.last = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in parameters]
        base.step()

    def _go(self, start: list[Tensor], rates: list[float], times: int) -> None:
        """From the start, a step with the last gradient at ``times`` the rate."""
        self.fork.restore()
        with torch.no_grad():
            for p, s, g in zip(self.problem.parameters, start, self.last, strict=True):
                p.copy_(s)
                p.grad = g.clone() if times else torch.zeros_like(g)
        for group, rate in zip(self.base.param_groups, rates, strict=True):
            group["lr"] = times * rate
        self.base.step()
        for group, rate in zip(self.base.param_groups, rates, strict=True):
            group["lr"] = rate

    def _true(self, i: int) -> float:
        self.base.zero_grad()
        loss = self.problem.loss(i)
        torch.autograd.backward(loss)
        return float(loss.detach())
