"""Four clusters and two models on paper: what a layer takes, what a link takes, what a device can hold.

The clusters stand for those of Hanayo's experiments (SC'23, section 5): nodes of eight with full NVLink, the same with NVLink
only between pairs, cloud nodes of V100s, and A100s over InfiniBand. Nothing here was measured on them; every number is what its
source documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from wavetrain.schedule.costs import Costs

WEIGHT_BYTES = 16
"""A parameter with mixed-precision Adam: weight and gradient in fp16, fp32 copy, two moments (ZeRO, Rajbhandari et al. 2020)."""
GRADIENT_BYTES = 2
"""A gradient on a link, fp16."""
USABLE_MEMORY = 0.94
"""The rest is the CUDA context and the allocator's loss."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    tflops: float
    """Dense fp16, as NVIDIA's data sheet gives it."""
    efficiency: float
    """The share of it that a transformer layer reaches."""
    memory_gb: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two devices."""

    latency_seconds: float
    bytes_per_second: float


# Megatron-LM reached 44 % of an A100's peak on its smaller models (Narayanan et al. 2021, table 1) and 39 of a V100's 125 TFLOPS
# (Shoeybi et al. 2019, section 5): rounded.
A100_80 = Device(name="A100 80 GB", tflops=312, efficiency=0.44, memory_gb=80)
A100_40 = Device(name="A100 40 GB", tflops=312, efficiency=0.44, memory_gb=40)
V100_32 = Device(name="V100 32 GB", tflops=125, efficiency=0.31, memory_gb=32)

# Latency: NCCL's own model (src/graph/tuning.cc, ring, simple protocol): 8.4 µs and 3.4 (NVLink), 5.7 (PCIe), 14 µs (network) on
# top. Bandwidth: one direction as documented, of which REACHED is taken: 80 %.
REACHED = 0.8
NVLINK3 = Link(latency_seconds=11.8e-6, bytes_per_second=REACHED * 300e9)  # A100: 600 GB/s both ways; the bridge of a pair, too
PCIE4 = Link(latency_seconds=14.1e-6, bytes_per_second=REACHED * 32e9)  # x16
PCIE3 = Link(latency_seconds=14.1e-6, bytes_per_second=REACHED * 16e9)  # x16
INFINIBAND = Link(latency_seconds=22.4e-6, bytes_per_second=REACHED * 25e9)  # HDR, 200 Gbit/s
# A TCP flow between cloud nodes is capped near 10 Gbit/s, whatever the adapter's speed; 50 µs is a round trip halved.
ETHERNET = Link(latency_seconds=50e-6, bytes_per_second=REACHED * 1.25e9)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; pipeline ranks fill node after node."""

    name: str
    device: Device
    devices_per_node: int
    inside: Callable[[int, int], Link]
    """The link between two places in a node."""
    between: Link
    """The link between nodes; every pair of devices is given its own."""

    def link(self, source: int, target: int) -> Link:
        """From one pipeline rank to another."""
        (a, i), (b, j) = divmod(source, self.devices_per_node), divmod(target, self.devices_per_node)
        return self.inside(i, j) if a == b else self.between


CLUSTERS = (
    Cluster(name="full NVLink", device=A100_80, devices_per_node=8, inside=lambda i, j: NVLINK3, between=INFINIBAND),
    Cluster(
        name="partial NVLink",
        device=A100_80,
        devices_per_node=8,
        inside=lambda i, j: NVLINK3 if i // 2 == j // 2 else PCIE4,
        between=INFINIBAND,
    ),
    Cluster(name="cloud V100", device=V100_32, devices_per_node=8, inside=lambda i, j: PCIE3, between=ETHERNET),
    # three PCIe cards a node, as on TACC's Lonestar6
    Cluster(name="A100 InfiniBand", device=A100_40, devices_per_node=3, inside=lambda i, j: PCIE4, between=INFINIBAND),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Transformer layers; embedding and head are left out, so that layers are alike, as in the paper's count of them."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int
    """Tokens."""

    @property
    def layer_parameters(self) -> int:
        return 12 * self.hidden**2

    def layer_flops(self, micro_batch: int) -> tuple[float, float, float]:
        """FLOPs of F, I and W of a layer. 24sbh² in matrices of weights, 4bs²h in attention (Narayanan et al. 2021, appendix).

        The gradients of attention's two products with respect to both factors are part of I: there are no weights in them.
        """
        weights = 24.0 * micro_batch * self.sequence * self.hidden**2
        attention = 4.0 * micro_batch * self.sequence**2 * self.hidden
        return weights + attention, weights + 2 * attention, weights

    def activation_bytes(self, micro_batch: int) -> float:
        """Bytes that a layer keeps in fp16 without recomputation: sbh(34 + 5as/h) (Korthikanti et al. 2022)."""
        per_token = 34 * self.hidden + 5 * self.num_heads * self.sequence
        return float(self.sequence * micro_batch * per_token)

    def message_bytes(self, micro_batch: int) -> float:
        """Activations between two layers, fp16."""
        return 2.0 * self.sequence * micro_batch * self.hidden


MODELS = (
    Model(name="GPT-like", num_layers=128, hidden=1024, num_heads=16, sequence=1024),
    Model(name="BERT-like", num_layers=64, hidden=2560, num_heads=64, sequence=512),
)


def pipeline_costs(cluster: Cluster, model: Model, *, num_ranks: int, micro_batch: int, weight_copies: int = 1) -> Costs:
    """Costs with one stage a layer.

    Args:
        cluster: devices and links.
        model: layers.
        num_ranks: P.
        micro_batch: sequences.
        weight_copies: how often a rank's share of the weights is held: 2 in Chimera.
    """
    rate = 1e12 * cluster.device.tflops * cluster.device.efficiency
    forward, backward_input, backward_weight = (flops / rate for flops in model.layer_flops(micro_batch))
    weights = weight_copies * WEIGHT_BYTES * model.layer_parameters * model.num_layers / num_ranks
    room = USABLE_MEMORY * 1e9 * cluster.device.memory_gb - weights
    layers, ranks = range(model.num_layers), range(num_ranks)
    return Costs(
        forward=(forward,) * len(layers),
        backward_input=(backward_input,) * len(layers),
        backward_weight=(backward_weight,) * len(layers),
        activation_bytes=(model.activation_bytes(micro_batch),) * len(layers),
        message_bytes=(model.message_bytes(micro_batch),) * len(layers),
        speed=(1.0,) * len(ranks),
        latency=tuple(tuple(0.0 if a == b else cluster.link(a, b).latency_seconds for b in ranks) for a in ranks),
        bandwidth=tuple(tuple(math.inf if a == b else cluster.link(a, b).bytes_per_second for b in ranks) for a in ranks),
        memory_cap=(max(room, 1.0),) * len(ranks),
    )


def scaled(costs: Costs, factor: float) -> Costs:
    """The same, ``factor`` times slower (faster below 1): bubbles stay as they are."""

    def longer(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * v for v in values)

    return replace(
        costs,
        forward=longer(costs.forward),
        backward_input=longer(costs.backward_input),
        backward_weight=longer(costs.backward_weight),
        latency=tuple(longer(row) for row in costs.latency),
        bandwidth=tuple(tuple(b / factor for b in row) for row in costs.bandwidth),
    )
