"""Models that are known by their profile alone."""

from __future__ import annotations

import os

from wavetrain.profile import Profiles
from wavetrain.workload import PRESET_NAMES, Layer, Workload


def measured_workload(profiles: Profiles, name: str) -> Workload | None:
    """A model that was profiled under ``name``, layer by layer; None if there is none, or if the name is one of wavetrain's own.

    It is of 4-byte numbers, and its layers cannot be shared by several devices (tp 1).
    """
    memory = profiles.memory.get((name, 1))
    if memory is None or name in PRESET_NAMES or os.path.exists(name):
        return None
    layers = tuple(
        Layer(
            name=f"layer {i}",
            parameters_whole=float(memory.parameters[i]) / 4,
            activation_whole=float(memory.activation[i]),
            output_bytes=float(memory.output[i]),
        )
        for i in range(len(memory.parameters))
    )
    return Workload(name=name, layers=layers, element_bytes=4, tensor_limit=1)
