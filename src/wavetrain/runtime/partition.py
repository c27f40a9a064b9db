"""The cut: which layers make which stage, and which of them this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch import nn

from wavetrain.errors import InputError
from wavetrain.models.costs import layer_cost
from wavetrain.schedule.balance import even_ranks
from wavetrain.schedule.costs import Costs, cut_points
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate


def cut_layers(layers: Sequence[nn.Module], schedule: Schedule, counts: Sequence[int] | None = None) -> list[range]:
    """The layers of every stage.

    Args:
        layers: in the order of the forward pass.
        schedule: says how many stages there are.
        counts: layers of every stage; without it the cut is made by the layers' estimated costs: the dearest stage as cheap as
            can be (for the share that the schedule gives it), or the ranks as even as can be, whichever the simulator finds
            faster.
    """
    num_stages = schedule.num_stages
    if counts is not None:
        if len(counts) != num_stages or min(counts) < 1 or sum(counts) != len(layers):
            raise InputError(
                f"cut={list(counts)} names {sum(counts)} layers in {len(counts)} stages, but the model has {len(layers)} layers "
                f"and {schedule.name} on {schedule.num_ranks} ranks has {num_stages} stages, each with at least one layer"
            )
        return [range(a, b) for a, b in pairwise([0, *accumulate(counts)])]
    if not layers:
        raise InputError("the model has no layers")
    if len(layers) < num_stages:
        most = len(layers) // schedule.num_ranks
        advice = f"at most {most} stages a rank fit" if most else f"at most {len(layers)} ranks fit"
        raise InputError(
            f"the model has {len(layers)} layers, but {schedule.name} on {schedule.num_ranks} ranks has {num_stages} stages; "
            f"use fewer waves or stages per rank ({advice}), or a model of more layers"
        )
    times = tuple(layer_cost(layer) for layer in layers)
    even = list(cut_points(times, schedule.shares or (1.0,) * num_stages))
    candidates = (even, even_ranks(even, [times] * schedule.num_ranks, schedule.placements, schedule.shares))

    def seconds(points: list[int]) -> float:
        stages = [sum(times[a:b]) for a, b in pairwise(points)]
        return simulate(schedule, _stage_costs(stages, schedule.num_ranks)).makespan

    points = min(candidates, key=seconds)
    return [range(a, b) for a, b in pairwise(points)]


def layer_costs(layers: Sequence[nn.Module], num_ranks: int) -> Costs:
    """Every layer as a stage of its own, by its estimated cost."""
    return _stage_costs([layer_cost(layer) for layer in layers], num_ranks)


def _stage_costs(seconds: Sequence[float], num_ranks: int) -> Costs:
    """Costs of stages by what F takes; I and W are taken to cost the same."""
    ones = (1.0,) * len(seconds)
    return replace(
        Costs.uniform(num_ranks),
        forward=tuple(seconds),
        backward_input=tuple(seconds),
        backward_weight=tuple(seconds),
        activation_bytes=ones,
        message_bytes=(0.0,) * len(seconds),
        divisible=False,
    )
