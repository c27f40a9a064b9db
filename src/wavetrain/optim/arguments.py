"""What an OptEx is made with, checked: a word that says what to give instead, before anything has happened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.optim.kernels import KERNELS

HISTORY: Final = {"auto": 32, "paper": 50}
"""Pairs that are kept, by mode."""
SELECT: Final = ("last", "loss", "gradient")


def check_wrapped(base: object, wrapper: type[Optimizer]) -> None:
    """Whether an optimizer can be wrapped."""
    if not isinstance(base, Optimizer):
        raise InputError(
            f"OptEx wraps a torch optimizer, such as torch.optim.AdamW(model.parameters()); got {type(base).__name__}"
        )
    if isinstance(base, LBFGS | wrapper):
        raise InputError(f"OptEx cannot wrap {type(base).__name__}: it needs an optimizer whose step takes one gradient")


def check_choices(mode: str, kernel: str, select: str) -> None:
    """Names of which only some are known."""
    for what, name, known in (("mode", mode, HISTORY), ("kernel", kernel, KERNELS), ("select", select, SELECT)):
        if name not in known:
            raise UnknownNameError(what, name, known)


def check_flags(**flags: object) -> None:
    """What is True or False."""
    for what, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{what} is {flag!r}; expected True or False")


def check_who(parallel: object, process_group: object, shard_group: object, model: object, *, shard_history: bool) -> None:
    """Who evaluates minibatches, and who holds parameters."""
    if process_group is None and parallel is None:
        raise InputError(
            "give parallel=N, the minibatches of a round, or process_group=dist.group.WORLD after dist.init_process_group()"
        )
    for what, group in (("process_group", process_group), ("shard_group", shard_group)):
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InputError(f"{what} is {group!r}; expected a group of torch.distributed")
    if shard_history and (process_group is None or shard_group is not None):
        raise InputError(
            "shard_history shares what is kept over the ranks of process_group: give that, and no shard_group, whose ranks "
            "hold parts of the model anyway"
        )
    if model is not None and (not isinstance(model, nn.Module) or process_group is not None or shard_group is not None):
        raise InputError(
            f"model is {type(model).__name__}; expected a torch module, and no group of ranks: they evaluate at the same "
            "time anyway"
        )


def check_kinds(model: object, threads: object, grad_scaler: object, history_dtype: object, held_elsewhere: object) -> None:
    """All else that is of one kind only."""
    if threads is not None and model is None:
        raise InputError("threads evaluate with copies of the model: give model= as well, and a closure of (i, model)")
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise InputError(f"grad_scaler is {grad_scaler!r}; expected a torch.amp.GradScaler")
    if history_dtype not in (None, torch.float64, torch.float32, torch.bfloat16):
        raise InputError(f"history_dtype is {history_dtype!r}; expected torch.bfloat16 or wider, that any gradient fits in")
    if not isinstance(held_elsewhere, Iterable):
        raise InputError(f"held_elsewhere is {held_elsewhere!r}; expected parameters")


def whole_number(name: str, value: object, least: int) -> int:
    """A number, if it is whole and no less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}; expected a whole number, {least} or more")
    return value


def positive(name: str, value: object) -> float:
    """A number, if it is above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{name} is {value!r}; expected a number above 0")
    return float(value)
