"""The weights of a rank: what it holds, under which name, and with whom it shares them.

A parameter's canonical name is its first name in the whole model, so that it is the same wherever the layer sits. A parameter may
have several *uses*: two layers that are tied, or the two routes of Chimera. Every use has a gradient of its own, and the sum over
the uses is made once a step, in the order of the model: so it does not matter which of them sit on one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wavetrain.errors import InputError
from wavetrain.schedule.schedule import Schedule


class Use(NamedTuple):
    """One place where a parameter is used; the order of uses is the order in which their gradients are added."""

    layer: int
    route: int
    rank: int
    """The pipeline rank that computes it."""


@dataclass
class Weight:
    """A parameter that this rank holds."""

    name: str
    """Canonical."""
    index: int
    """Its number among the canonical names of the whole model."""
    parameter: nn.Parameter
    """The one that the optimizer sees."""
    uses: tuple[Use, ...]
    """All of them, on all ranks, in order."""
    local: dict[Use, Tensor] = field(default_factory=dict)
    """What gathers the gradient of each use on this rank; all share the memory of ``parameter``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline ranks that hold it."""
        return tuple(sorted({use.rank for use in self.uses}))


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a model."""

    layers: dict[tuple[int, int], nn.Module]
    """By (route, layer)."""
    weights: list[Weight]
    buffers: dict[str, Tensor]
    """By canonical name."""
    num_names: int
    """Parameters of the whole model."""

    def parameters_of(self, route: int, layers: Sequence[int]) -> list[Tensor]:
        """What gathers the gradients of some layers, in the order of the model; frozen parameters left out."""
        found: list[Tensor] = []
        for layer in layers:
            for weight in self.weights:
                found.extend(
                    t for use, t in weight.local.items() if use.layer == layer and use.route == route and t.requires_grad
                )
        return found


def take_over(
    model: nn.Sequential,
    stages: Sequence[range],
    schedule: Schedule,
    rank: int,
    device: torch.device,
    seed: int,
    divide: Callable[[nn.Module], object] | None = None,
) -> Holding:
    """Keep the layers of ``rank`` on ``device`` and let the memory of all others go.

    ``model`` is used up: its layers on this rank are moved, those on other ranks lose their weights. Layers on the meta device
    are made real here, with a seed of their own each. ``divide`` is applied to every layer that is kept (tensor parallelism).
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
    layers = _each_its_own(model)
    stage_of = [s for s, run in enumerate(stages) for _ in run]
    homes = [[schedule.placements[route][stage_of[i]] for route in range(schedule.num_routes)] for i in range(len(layers))]
    canonical: dict[nn.Parameter, str] = {}
    uses: dict[nn.Parameter, list[Use]] = {}
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        for inner, parameter in layer.named_parameters():
            canonical.setdefault(parameter, f"{name}.{inner}")
            uses.setdefault(parameter, []).extend(Use(i, route, home) for route, home in enumerate(homes[i]))
    index = {p: n for n, p in enumerate(canonical)}
    shared = {p: Weight(canonical[p], index[p], p, tuple(sorted(set(u)))) for p, u in uses.items()}
    held: dict[tuple[int, int], nn.Module] = {}
    weights: dict[nn.Parameter, Weight] = {}
    buffers: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        for route, home in enumerate(homes[i]):
            if home != rank:
                continue
            if (0, i) in held or (1, i) in held:
                raise InputError(f"{schedule.name} places both copies of layer {i} on rank {rank}; use a schedule of one route")
            inner_names: dict[nn.Parameter, list[str]] = {}
            for inner, parameter in layer.named_parameters(remove_duplicate=False):
                inner_names.setdefault(parameter, []).append(inner)
            _make_real(layer, names[i], i, seed, device)
            if divide is not None:
                divide(layer)
            held[route, i] = layer
            for original, (inner, *again) in inner_names.items():
                weight = weights.setdefault(original, shared[original])
                parameter = layer.get_parameter(inner)
                if weight.local:
                    parameter = nn.Parameter(weight.parameter.detach(), weight.parameter.requires_grad)
                    _replace(layer, inner, parameter)
                else:
                    weight.parameter = parameter
                for other in again:  # used twice in one layer: autograd adds these up by itself
                    _replace(layer, other, parameter)
                weight.local[Use(i, route, rank)] = parameter
            buffers.update({f"{names[i]}.{n}": b for n, b in layer.named_buffers()})
    for i, layer in enumerate(layers):
        if rank not in homes[i]:
            layer.to_empty(device="meta")
    return Holding(held, sorted(weights.values(), key=lambda w: w.index), buffers, len(canonical))


def _each_its_own(model: nn.Sequential) -> list[nn.Module]:
    """The layers; one that is listed twice is copied, but for its weights, which are then tied."""
    seen: set[nn.Module] = set()
    layers: list[nn.Module] = []
    for layer in model:
        layers.append(copy.deepcopy(layer, {id(p): p for p in layer.parameters()}) if layer in seen else layer)
        seen.add(layer)
    return layers


def _make_real(layer: nn.Module, name: str, number: int, seed: int, device: torch.device) -> None:
    """Move ``layer`` to ``device``; from the meta device by drawing its weights."""
    if not any(t.is_meta for t in (*layer.parameters(), *layer.buffers())):
        layer.to(device)
        return
    _require_reset(layer, name)
    layer.to_empty(device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed * 1_000_003 + number)
        for module in reversed(list(layer.modules())):  # a module's own choice comes after those of its parts
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


def _require_reset(module: nn.Module, name: str) -> None:
    """Refuse a module on the meta device that no ``reset_parameters`` would fill: it would hold whatever memory held before."""
    if callable(getattr(module, "reset_parameters", None)):
        return
    own = [n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if own:
        raise InputError(
            f"{name} ({type(module).__name__}) is on the meta device and has no reset_parameters() to fill {', '.join(own)}; "
            "give it one, or make the model on the CPU"
        )
    for child_name, child in module.named_children():
        _require_reset(child, f"{name}.{child_name}")


def _replace(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, parameter)
