"""Memory: what a device holds at the peak, part by part.

    weights, gradients, optimizer    bytes a parameter: with mixed-precision Adam 16 (2 + 2 + 12), or 20 where gradients are
                                     reduced in fp32 (4 more for their copy); 16 in fp32 (4 + 4 + 8); a sharded optimizer divides
                                     its own part by the number of replicas
    activations                      of every micro-batch that is in flight, as the schedule holds them
    working set                      what one layer takes while it is computed (or recomputed)
    base                             what the driver, the libraries and the communication hold before anything is loaded

Activations of a transformer block are those of Korthikanti et al. (2022); see :mod:`wavetrain.workload`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.plan.calibration import Constants
from wavetrain.plan.clock import Arrays, Recompute
from wavetrain.profile import LayerMemory

Floats = NDArray[np.float64]


class StageMemory(NamedTuple):
    """Bytes of every layer on one device of a slot, (num_layers,)."""

    states: Floats
    """Weights, gradients and optimizer."""
    activation: Floats
    """Kept of one micro-batch."""
    working: Floats
    """Needed while the layer is computed, beside what is kept."""


class Held(NamedTuple):
    """Bytes of one device at its peak."""

    states: float
    activations: float
    working: float
    base: float

    @property
    def total(self) -> float:
        return sum(self)


def layer_memory(
    a: Arrays,
    *,
    tp: int,
    micro_batch: float,
    num_replicas: int = 1,
    recompute: Recompute = "none",
    sharded_optimizer: bool = False,
    gradient_bytes: int = 4,
    table: LayerMemory | None = None,
) -> StageMemory:
    """Bytes of every layer on one device.

    Args:
        a: the model.
        tp: devices that share the layers.
        micro_batch: samples.
        num_replicas: over which a sharded optimizer is divided.
        recompute: what is not kept.
        sharded_optimizer: whether every replica holds its part of the optimizer only.
        gradient_bytes: of one gradient between replicas.
        table: what was measured of this model with this tp.
    """
    element = a.element_bytes
    parameters = a.parameters_split / tp + a.parameters_whole if table is None else table.parameters / element
    optimizer = 12.0 if element <= 2 else 8.0
    if sharded_optimizer:
        optimizer /= num_replicas
    copy = gradient_bytes if gradient_bytes > element else 0
    states = parameters * (2 * element + copy + optimizer)
    kept = micro_batch * (a.activation_split / tp + a.activation_whole) if table is None else micro_batch * table.activation
    working = micro_batch * a.working_split / tp
    if recompute == "none":
        return StageMemory(states, kept, working)
    if recompute == "selective":
        scores = micro_batch * a.score_bytes / tp
        return StageMemory(states, np.maximum(kept - scores, 0.0), scores + working)
    inputs = micro_batch * np.concatenate((a.output_bytes[:1], a.output_bytes[:-1]))
    return StageMemory(states, np.minimum(inputs, kept), kept + working)


def held(layers: StageMemory, constants: Constants, first: int, last: int, in_flight: float) -> Held:
    """The peak of a device that holds layers ``first`` … ``last − 1`` with ``in_flight`` micro-batches of them."""
    part = slice(first, last)
    return Held(
        float(layers.states[part].sum()) * constants.memory_extra,
        float(layers.activation[part].sum()) * in_flight * constants.memory_extra,
        float(layers.working[part].max()) * constants.memory_extra,
        constants.memory_base,
    )


def in_flight(schedule: str, num_ranks: int, num_micro_batches: int, waves: int = 1) -> Floats:
    """Micro-batches of a rank's whole share that each rank holds at the peak, (num_ranks,), by the family of the schedule.

    What the families promise; of a plan that is to be run, :func:`wavetrain.prove` says it exactly.
    """
    ranks = np.arange(num_ranks, dtype=np.float64)
    most: Floats = np.full(num_ranks, float(num_micro_batches))
    if schedule == "1f1b":
        most = np.minimum(num_ranks - ranks, most)
    elif schedule == "interleaved":
        most = np.minimum(num_ranks - ranks + (num_ranks - 1) / waves, most)
    elif schedule != "gpipe" and not (schedule == "hanayo" and num_micro_batches > num_ranks):
        most = np.minimum(float(num_ranks), most)
    return most
