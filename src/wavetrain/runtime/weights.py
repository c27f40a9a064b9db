"""The weights of a rank: what it holds, under which name, and with whom it shares them.

A parameter's canonical name is its first name in the whole model, so that it is the same wherever the layer sits. A parameter may
have several *uses*: two layers that are tied, or the two routes of Chimera. Every use has a gradient of its own, and the sum over
the uses is made once a step, in the order of the model: so it does not matter which of them sit on one rank.
"""

from __future__ import annotations

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
    names = list(dict(model.named_children()))
    layers = list(model.children())
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
            real = _made_real(layer, i, seed, device)
            if divide is not None:
                divide(layer)
            held[route, i] = layer
            for (inner, _), original in zip(list(layer.named_parameters()), real, strict=True):
                weight = weights.setdefault(original, shared[original])
                use = Use(i, route, rank)
                if use in weight.local:
                    continue  # used twice in one layer: autograd adds these up by itself
                parameter = layer.get_parameter(inner)
                if weight.local:
                    parameter = _replace(layer, inner, nn.Parameter(weight.parameter.detach(), weight.parameter.requires_grad))
                else:
                    weight.parameter = parameter
                weight.local[use] = parameter
            buffers.update({f"{names[i]}.{n}": b for n, b in layer.named_buffers()})
    for i, layer in enumerate(layers):
        if rank not in homes[i]:
            layer.to_empty(device="meta")
    return Holding(held, sorted(weights.values(), key=lambda w: w.index), buffers, len(canonical))


def _made_real(layer: nn.Module, number: int, seed: int, device: torch.device) -> list[nn.Parameter]:
    """Move ``layer`` to ``device``; its parameters as they were before."""
    originals = list(layer.parameters())
    if any(p.is_meta for p in originals):
        layer.to_empty(device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed * 1_000_003 + number)
            for module in reversed(list(layer.modules())):  # a module's own choice comes after those of its parts
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
    else:
        layer.to(device)
    return originals


def _replace(layer: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, parameter)
    return parameter
