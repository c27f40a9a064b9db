"""The cut: which layers make which stage, and which of them this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from wavetrain.errors import InputError
from wavetrain.models.costs import layer_cost
from wavetrain.schedule.costs import cut_points
from wavetrain.schedule.schedule import Schedule


def cut_layers(layers: Sequence[nn.Module], schedule: Schedule, counts: Sequence[int] | None = None) -> list[range]:
    """The layers of every stage.

    Args:
        layers: in the order of the forward pass.
        schedule: says how many stages there are.
        counts: layers of every stage; without it the dearest stage is made as cheap as can be, by the layers' estimated costs.
    """
    num_stages = schedule.num_stages
    if counts is not None:
        if len(counts) != num_stages or min(counts) < 1 or sum(counts) != len(layers):
            raise InputError(
                f"cut={list(counts)} names {sum(counts)} layers in {len(counts)} stages, but the model has {len(layers)} layers "
                f"and {schedule.name} on {schedule.num_ranks} ranks has {num_stages} stages, each with at least one layer"
            )
        return [range(a, b) for a, b in pairwise([0, *accumulate(counts)])]
    if len(layers) < num_stages:
        most = len(layers) // schedule.num_ranks
        advice = f"at most {most} stages a rank fit" if most else f"at most {len(layers)} ranks fit"
        raise InputError(
            f"the model has {len(layers)} layers, but {schedule.name} on {schedule.num_ranks} ranks has {num_stages} stages; "
            f"use fewer waves or stages per rank ({advice}), or a model of more layers"
        )
    costs = tuple(layer_cost(layer) for layer in layers)
    return [range(a, b) for a, b in pairwise(cut_points(costs, (1.0,) * num_stages))]
