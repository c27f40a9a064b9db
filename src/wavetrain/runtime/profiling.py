"""Profiling: what the layers of a model take on this machine, one device at a time, and what a message between processes takes.

Every layer is run alone, forward and backward, on what the layer before it gives, for several micro-batches; the median of
several runs counts. What a layer keeps for its backward pass is counted as autograd saves it (parameters and shared storage
once).
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.runtime.launch import launch

LINK_BYTES = 16 * 2**20
LINK_REPEATS = 8


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """Of one layer and micro-batch."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    output_bytes: float
    """Of the whole micro-batch."""
    activation_bytes: float
    """Likewise."""


def measure_layers(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    *,
    repeats: int = 5,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
) -> list[MeasuredLayer]:
    """What every layer takes for one micro-batch.

    Args:
        layers: in the order of the forward pass, each taking what the one before it gives: one tensor.
        inputs: of the first layer, (micro_batch, …).
        repeats: runs of every layer, of which the median counts; one more goes before.
        threads: of torch, on the CPU.
        progress: is told which layer is measured.

    Raises:
        InputError: a layer does not give one tensor.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = []
        value = inputs
        for i, layer in enumerate(layers):
            if progress is not None:
                progress(f"layer {i + 1} of {len(layers)}, micro-batch {inputs.shape[0]}")
            one, value = _measure(i, layer, value, repeats)
            found.append(one)
        return found
    finally:
        torch.set_num_threads(before)


def _measure(index: int, layer: nn.Module, value: Tensor, repeats: int) -> tuple[MeasuredLayer, Tensor]:
    forward, backward = [], []
    output = value
    kept = 0.0
    for run in range(repeats + 1):
        given = value.detach()
        if given.is_floating_point():
            given.requires_grad_()
        saved: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

        def note(tensor: Tensor, saved: dict[int, int] = saved, own: set[int] = own) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        _wait(value)
        begin = time.perf_counter()
        if run == 0:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = layer(given)
        else:
            output = layer(given)
        if not isinstance(output, Tensor):
            raise InputError(f"layer {index} gives {type(output).__name__}; only layers that give one tensor can be profiled")
        _wait(output)
        middle = time.perf_counter()
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        _wait(output)
        if run == 0:
            kept = float(sum(saved.values()))
        else:
            forward.append(middle - begin)
            backward.append(time.perf_counter() - middle)
        layer.zero_grad(set_to_none=True)
    return MeasuredLayer(
        forward_seconds=statistics.median(forward),
        backward_seconds=statistics.median(backward),
        parameter_bytes=float(sum(p.numel() * p.element_size() for p in layer.parameters())),
        output_bytes=float(output.numel() * output.element_size()),
        activation_bytes=kept,
    ), output.detach()


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:  # not run here
        torch.cuda.synchronize(tensor.device)


def measure_link() -> float:
    """Bytes per second of messages between two processes of this machine."""
    found = launch(_link_rank, ranks=2)
    return float(found)


def _link_rank() -> float:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    buffer = torch.zeros(LINK_BYTES, dtype=torch.uint8)
    rates = []
    for _ in range(LINK_REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        else:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        rates.append(2 * LINK_BYTES / (time.perf_counter() - begin))
    return statistics.median(rates)


def layers_from(name: str) -> tuple[list[nn.Module], Tensor]:
    """Layers and inputs of one sample from ``module:function``, a function of the user's that returns both.

    Raises:
        InputError: there is no such module or function, or it returns something else.
    """
    module_name, colon, function = name.partition(":")
    if not colon or not module_name or not function:
        raise InputError(f"--layers-from is {name!r}; expected module:function, such as my_model:build")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"--layers-from {name}: {error}") from None
    finally:
        sys.path.pop(0)
    build: Any = getattr(module, function, None)
    if not callable(build):
        raise InputError(f"--layers-from {name}: {module_name} has no function {function!r}")
    try:
        made = build()
    except Exception as error:  # the user's own code: say where it came from
        raise InputError(f"--layers-from {name}: {function} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Tensor):
        raise InputError(f"--layers-from {name}: expected (layers, inputs of one sample), the inputs a tensor (1, …)")
    layers = list(made[0])
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise InputError(f"--layers-from {name}: the first is no nn.Sequential or list of layers")
    return layers, made[1]
