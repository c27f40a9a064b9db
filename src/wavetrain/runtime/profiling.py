"""Profiling: what the layers of a model take on this machine, one device at a time, and what a message between processes takes.

The layers run as a stage runs them, all forward and then all backward, with a clock between any two; several passes, for
several micro-batches. What a layer keeps for its backward pass is counted as autograd saves it (parameters and shared storage
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

    The layers run as a stage runs them, one after another, all forward and then all backward, and gradients add up: a layer
    that is run again and again alone finds its weights in the cache and makes its gradients anew.

    Args:
        layers: in the order of the forward pass, each taking what the one before it gives: one tensor.
        inputs: of the first layer, (micro_batch, …).
        repeats: passes over all layers; the middle half of them counts, by its mean. One more goes before.
        threads: of torch, on the CPU.
        progress: is told how far it is.

    Raises:
        InputError: a layer does not give one tensor.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kept, sizes = _measure_bytes(layers, inputs)
        passes = []
        for run in range(repeats):
            if progress is not None:
                progress(f"{len(layers)} layers, micro-batch {inputs.shape[0]}, pass {run + 1} of {repeats}")
            passes.append(_measure_pass(layers, inputs))
    finally:
        torch.set_num_threads(before)
        for layer in layers:
            layer.zero_grad(set_to_none=True)
    passes.sort(key=lambda one: sum(forward + backward for forward, backward in one))
    counted = passes[len(passes) // 4 : len(passes) - len(passes) // 4]
    return [
        MeasuredLayer(
            forward_seconds=statistics.fmean(one[i][0] for one in counted),
            backward_seconds=statistics.fmean(one[i][1] for one in counted),
            parameter_bytes=float(sum(p.numel() * p.element_size() for p in layer.parameters())),
            output_bytes=sizes[i],
            activation_bytes=kept[i],
        )
        for i, layer in enumerate(layers)
    ]


def _given(value: Tensor) -> Tensor:
    given = value.detach()
    return given.requires_grad_() if given.is_floating_point() else given


def _measure_bytes(layers: Sequence[nn.Module], inputs: Tensor) -> tuple[list[float], list[float]]:
    """Bytes that every layer keeps for its backward pass, and of its output; runs every layer once, forward and backward."""
    kept, sizes = [], []
    value = inputs
    for i, layer in enumerate(layers):
        saved: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

        def note(tensor: Tensor, saved: dict[int, int] = saved, own: set[int] = own) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = layer(_given(value))
        if not isinstance(output, Tensor):
            raise InputError(f"layer {i} gives {type(output).__name__}; only layers that give one tensor can be profiled")
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        kept.append(float(sum(saved.values())))
        sizes.append(float(output.numel() * output.element_size()))
        value = output.detach()
    return kept, sizes


def _measure_pass(layers: Sequence[nn.Module], inputs: Tensor) -> list[tuple[float, float]]:
    """Seconds of every layer, forward and backward, of one pass over all of them."""
    given, outputs, forward = [], [], []
    value = inputs
    for layer in layers:
        given.append(_given(value))
        _wait(value)
        begin = time.perf_counter()
        value = layer(given[-1])
        _wait(value)
        forward.append(time.perf_counter() - begin)
        outputs.append(value)
    backward = [0.0] * len(layers)
    gradient: Tensor | None = torch.ones_like(value)
    for i in reversed(range(len(layers))):
        if outputs[i].requires_grad:
            begin = time.perf_counter()
            torch.autograd.backward(outputs[i], gradient)
            _wait(outputs[i])
            backward[i] = time.perf_counter() - begin
        gradient = given[i].grad
        given.pop()
        outputs.pop()
    return list(zip(forward, backward, strict=True))


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
