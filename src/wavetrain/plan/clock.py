"""The clock: seconds of every layer on a device, forward and backward, with tensor parallelism and recompute.

From a datasheet and calibrated constants:

    F = max( launch,  flops / (tp · reached peak)  +  bytes moved / reached bandwidth  +  all-reduces )
    B = max( launch,  2 · flops … +  backward_moved · bytes …  +  all-reduces )  +  what is recomputed

where the peak that is reached falls for narrow models, peak · compute / (1 + half_width · √tp / width), and an all-reduce over
the tp
devices of a slot takes  2(tp − 1)/tp · (latency + bytes / bandwidth).

From a profile where there is one:

    with a backward pass      its layers alone, less what measuring costs, plus all-reduces (it was measured without them)
    forward, one size         what is left of the measured time after the device's own is launching; then as above, the device's
                              own scaled down where it is more than was measured; all-reduces are part of what was measured
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster import Link, NodeGroup
from wavetrain.plan.calibration import Constants
from wavetrain.profile import LayerTable
from wavetrain.workload import Workload

Floats = NDArray[np.float64]
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: Final[tuple[Recompute, ...]] = ("none", "selective", "full")
"""What is computed again in the backward pass instead of being kept: nothing, attention's scores, everything but the input."""

SHARPNESS: Final = 3.0
"""Of the change from waiting for launches to waiting for the device."""


class Arrays(NamedTuple):
    """The numbers of a workload's layers as arrays, (num_layers,); see :class:`wavetrain.workload.Layer`."""

    element_bytes: int
    flops: Floats
    attention_flops: Floats
    width: Floats
    moved_split: Floats
    moved_whole: Floats
    moved_scores: Floats
    moved_logits: Floats
    parameters_split: Floats
    parameters_whole: Floats
    activation_split: Floats
    activation_whole: Floats
    score_bytes: Floats
    working_split: Floats
    output_bytes: Floats
    reductions: Floats
    kernels: Floats


def arrays(workload: Workload) -> Arrays:
    """The layers of a workload as arrays."""
    columns = (np.array([getattr(layer, name) for layer in workload.layers], dtype=np.float64) for name in Arrays._fields[1:])
    return Arrays(workload.element_bytes, *columns)


class LayerSeconds(NamedTuple):
    """Of every layer for one micro-batch, (num_layers,)."""

    forward: Floats
    backward: Floats
    tensor: Floats
    """Of both, all-reduces of tensor parallelism."""
    estimated: bool = False
    """Whether a profile was used beyond the sizes that it measured."""

    @property
    def both(self) -> Floats:
        found: Floats = self.forward + self.backward
        return found


def layer_seconds(
    a: Arrays,
    group: NodeGroup,
    constants: Constants,
    *,
    tp: int,
    micro_batch: float,
    recompute: Recompute = "none",
    table: LayerTable | None = None,
) -> LayerSeconds:
    """Seconds of every layer for one micro-batch.

    Args:
        a: the model.
        group: the nodes whose devices compute.
        constants: of the device.
        tp: devices that share the layers; beyond the devices of a node, the network carries the all-reduces.
        micro_batch: samples.
        recompute: what is computed again in the backward pass.
        table: what was measured of this model on this device with this tp.
    """
    if table is None:
        return _estimated(a, group, constants, tp, micro_batch, recompute)
    measured = table.at(micro_batch)
    if measured.backward is not None:
        overhead = constants.profile_overhead
        reduce = a.reductions * _all_reduce(group, constants, tp, micro_batch * a.output_bytes) if tp > 1 else 0.0 * a.flops
        forward = np.maximum(measured.forward - overhead, 0.2 * measured.forward)
        backward = np.maximum(measured.backward - overhead, 0.2 * measured.backward)
        again = (forward + reduce) * _again(a, recompute)
        return LayerSeconds(forward + reduce, backward + reduce + again, 2 * reduce, measured.outside)
    base = table.at(table.micro_batches[0])
    small = _device_seconds(a, group, constants, tp, table.micro_batches[0])
    large = _device_seconds(a, group, constants, tp, micro_batch)
    scale = np.where(small.forward > 0, np.minimum(1.0, base.forward / np.maximum(small.forward, 1e-12)), 1.0)
    grown = micro_batch / table.micro_batches[0]
    unknown = small.forward <= 0  # layers that the workload says nothing of: in proportion
    launch = np.maximum(base.forward**SHARPNESS - (small.forward * scale) ** SHARPNESS, 0.0) ** (1 / SHARPNESS)
    proportional = measured.forward * (1.0 if grown <= 1 else 0.5 + 0.5 * grown)
    forward = np.where(unknown, proportional, _slower(launch, large.forward * scale))
    floor = launch * constants.launch_backward / max(constants.launch_forward, 1e-12)
    backward = np.where(unknown, 2 * forward, _slower(floor, large.backward * scale))
    return LayerSeconds(forward, backward + forward * _again(a, recompute), large.tensor * scale, False)


def _estimated(
    a: Arrays, group: NodeGroup, constants: Constants, tp: int, micro_batch: float, recompute: Recompute
) -> LayerSeconds:
    found = _device_seconds(a, group, constants, tp, micro_batch)
    launch = constants.launch_tensor if tp > 1 else 0.0
    forward = _slower(a.kernels * (constants.launch_forward + launch), found.forward)
    backward = _slower(a.kernels * (constants.launch_backward + launch), found.backward)
    if recompute == "full":
        backward = backward + forward
    elif recompute == "selective":
        rates = _rates(a, group, constants, tp)
        again = micro_batch * (a.attention_flops / tp / rates[0] + constants.scores * a.moved_scores / tp / rates[1])
        backward = backward + again
    return LayerSeconds(forward, backward, found.tensor)


def _slower(launch: Floats, device: Floats) -> Floats:
    """Whichever takes longer, the host to launch or the device to run; where they are close, a little more than either."""
    found: Floats = (launch**SHARPNESS + device**SHARPNESS) ** (1 / SHARPNESS)
    return found


def _again(a: Arrays, recompute: Recompute) -> Floats | float:
    """The part of the forward pass that is done again."""
    if recompute == "none":
        return 0.0
    if recompute == "full":
        return 1.0
    part: Floats = np.divide(a.attention_flops, a.flops, out=np.zeros_like(a.flops), where=a.flops > 0)
    return part


def _rates(a: Arrays, group: NodeGroup, constants: Constants, tp: int) -> tuple[Floats, float]:
    """Operations per second of every layer's products, and bytes per second of the rest.

    Matrices of a shared layer are narrower in one of their two dimensions: their width counts as divided by √tp.
    """
    device = group.device
    reached = constants.compute / (1 + constants.half_width * math.sqrt(tp) / np.maximum(a.width, 1.0))
    peak: Floats = device.flops(a.element_bytes) * reached
    return peak, device.memory_bandwidth * constants.memory


def _device_seconds(a: Arrays, group: NodeGroup, constants: Constants, tp: int, micro_batch: float) -> LayerSeconds:
    """What the device takes, however quickly it is told to."""
    peak, bandwidth = _rates(a, group, constants, tp)
    products = micro_batch * a.flops / (tp * peak)
    moved = micro_batch * ((a.moved_split + constants.scores * a.moved_scores) / tp + a.moved_whole) / bandwidth
    logits = constants.head * micro_batch * a.moved_logits / (tp * bandwidth)
    forward = products + moved + logits
    backward = 2 * products + constants.backward_moved * moved + logits
    if tp == 1:
        return LayerSeconds(forward, backward, np.zeros_like(forward))
    reduce = a.reductions * _all_reduce(group, constants, tp, micro_batch * a.output_bytes)
    return LayerSeconds(forward + reduce, backward + reduce, 2 * reduce)


def _all_reduce(group: NodeGroup, constants: Constants, tp: int, num_bytes: Floats) -> Floats:
    """Seconds of all-reduces of ``num_bytes`` over the devices of a slot."""
    inside = min(tp, group.gpus)
    rate = reached(group.intra, constants.reduce, num_bytes)
    seconds: Floats = 2 * (inside - 1) / inside * (constants.reduce_latency + num_bytes / rate)
    if tp > group.gpus:
        rate = reached(group.inter, constants.network, num_bytes)
        seconds = np.maximum(seconds, 2 * (tp - 1) / tp * (constants.reduce_latency + num_bytes / rate))
    return seconds


def reached(link: Link, share: float, num_bytes: Floats) -> Floats:
    """Bytes per second that messages of ``num_bytes`` get: what was measured of the link, or a share of what it should carry."""
    if not link.measured:
        return np.full(num_bytes.shape, share * link.bandwidth)
    return np.array([link.rate(n) if n > 0 else link.bandwidth for n in num_bytes.ravel()]).reshape(num_bytes.shape)
