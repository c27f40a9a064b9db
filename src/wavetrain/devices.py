"""Tables of devices and of cloud instances: what a datasheet says.

Numbers are those of dense arithmetic without sparsity. Where a card exists with two sizes of memory, its name says which; the
memory given is what its driver reports. Prices
are list prices of on-demand use in dollars an hour and node; they change, and a cluster file may give its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from wavetrain.errors import UnknownNameError

GB: Final = 1e9
TERA: Final = 1e12
GBPS: Final = 1e9 / 8
"""Bytes per second in a gigabit per second."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one core."""

    name: str
    half_flops: float
    """Floating-point operations per second of matrix products in fp16 or bf16."""
    single_flops: float
    """The same in fp32, or TF32 where the device has it."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second, one way, from a device to the others of its node."""
    network_bandwidth: float = 1.25 * GB
    """Bytes per second that a node usually has to other nodes, one way, for every such device in it."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether its matrix units take bf16; those before NVIDIA's Ampere take fp16 only."""
        return self.name not in _WITHOUT_BFLOAT16

    def flops(self, element_bytes: int) -> float:
        """Operations per second of matrix products with elements of 2 or 4 bytes."""
        return self.half_flops if element_bytes <= 2 else self.single_flops


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine that can be rented."""

    name: str
    device: str
    gpus: int
    network_gbps: float
    price: float
    """Dollars an hour."""
    flow_gbps: float | None = None
    """The most that one connection to another node gets, where it is less than the network's."""


def _device(name: str, half: float, single: float, memory: float, bandwidth: float, link: float, network: float) -> Device:
    """TFLOPS in fp16 and fp32, GB, GB/s of memory, GB/s of the link one way, Gbit/s of network a device usually has."""
    return Device(
        name=name,
        half_flops=half * TERA,
        single_flops=single * TERA,
        memory_bytes=memory * GB,
        memory_bandwidth=bandwidth * GB,
        link_bandwidth=link * GB,
        network_bandwidth=network * GBPS,
    )


_WITHOUT_BFLOAT16: Final = ("T4-16", "P100-16", "V100-16", "V100-32", "RTX-2080", "Titan-RTX")
_PCIE3, _PCIE4, _PCIE5 = 12.0, 24.0, 48.0  # GB/s that a x16 slot gives in practice
DEVICES: Final[dict[str, Device]] = {
    device.name: device
    for device in (
        _device("T4-16", 65, 8.1, 15.8, 320, _PCIE3, 12.5),
        _device("P100-16", 21.2, 10.6, 17, 732, _PCIE3, 10),
        _device("V100-16", 125, 15.7, 16.9, 900, 150, 2.5),
        _device("V100-32", 125, 15.7, 34, 900, 150, 12.5),
        _device("RTX-2080", 43, 11, 11, 616, _PCIE3, 3),
        _device("Titan-RTX", 130, 16.3, 24, 672, _PCIE3, 3),
        _device("RTX-3090", 71, 35.6, 24, 936, _PCIE4, 3),
        _device("RTX-4090", 165, 82.6, 24, 1008, _PCIE4, 3),
        _device("A10G-24", 70, 35, 24.1, 600, _PCIE4, 10),
        _device("A40-48", 150, 75, 48, 696, _PCIE4, 25),
        _device("A6000-48", 155, 77, 48, 768, _PCIE4, 25),
        _device("L4-24", 121, 60, 24.1, 300, _PCIE4, 10),
        _device("L40S-48", 362, 183, 48, 864, _PCIE4, 50),
        _device("A100-40", 312, 156, 42.4, 1555, 300, 200),
        _device("A100-80", 312, 156, 85, 2039, 300, 200),
        _device("H100-80", 990, 495, 85, 3350, 450, 400),
        _device("H200-141", 990, 495, 150, 4800, 450, 400),
        _device("GH-96", 990, 495, 102, 4000, 450, 200),
        _device("B200-192", 2250, 1125, 192, 8000, 900, 400),
        _device("MI250X-128", 383, 96, 128, 3277, 250, 100),
        _device("MI300X-192", 1307, 654, 192, 5300, 448, 400),
        _device("TPU-v4-32", 275, 137, 32, 1228, 150, 100),
        _device("CPU-core", 0.05, 0.05, 4, 8, 4, 5),
    )
}
"""By name."""

_ALIASES: Final = {
    "t4": "T4-16",
    "v100": "V100-16",
    "a100": "A100-40",
    "h100": "H100-80",
    "h200": "H200-141",
    "gh200": "GH-96",
    "b200": "B200-192",
    "mi300x": "MI300X-192",
    "mi250x": "MI250X-128",
    "a10g": "A10G-24",
    "l4": "L4-24",
    "l40s": "L40S-48",
    "a40": "A40-48",
    "a6000": "A6000-48",
    "p100": "P100-16",
    "cpu": "CPU-core",
}
"""Short names; of two sizes of memory the smaller."""


def _instance(name: str, gpus: int, device: str, gbps: float, price: float, flow: float | None = None) -> Instance:
    return Instance(name=name, device=device, gpus=gpus, network_gbps=gbps, price=price, flow_gbps=flow)


INSTANCES: Final[dict[str, Instance]] = {
    instance.name: instance
    for instance in (
        _instance("p3.2xlarge", 1, "V100-16", 10, 3.06),
        _instance("p3.8xlarge", 4, "V100-16", 10, 12.24),
        _instance("p3.16xlarge", 8, "V100-16", 25, 24.48, 10),
        _instance("p3dn.24xlarge", 8, "V100-32", 100, 31.21, 10),
        _instance("g4dn.xlarge", 1, "T4-16", 25, 0.53, 10),
        _instance("g4dn.12xlarge", 4, "T4-16", 50, 3.91, 10),
        _instance("g4dn.metal", 8, "T4-16", 100, 7.82, 10),
        _instance("g5.xlarge", 1, "A10G-24", 10, 1.01),
        _instance("g5.12xlarge", 4, "A10G-24", 40, 5.67, 10),
        _instance("g5.48xlarge", 8, "A10G-24", 100, 16.29, 10),
        _instance("g6.12xlarge", 4, "L4-24", 40, 4.60, 10),
        _instance("g6.48xlarge", 8, "L4-24", 100, 13.35, 10),
        _instance("g6e.12xlarge", 4, "L40S-48", 100, 10.49),
        _instance("g6e.48xlarge", 8, "L40S-48", 400, 30.13),
        _instance("p4d.24xlarge", 8, "A100-40", 400, 21.96),
        _instance("p4de.24xlarge", 8, "A100-80", 400, 27.45),
        _instance("p5.48xlarge", 8, "H100-80", 3200, 55.04),
        _instance("p5e.48xlarge", 8, "H200-141", 3200, 63.30),
        _instance("p6-b200.48xlarge", 8, "B200-192", 3200, 113.93),
        _instance("a2-highgpu-4g", 4, "A100-40", 50, 14.69),
        _instance("a2-highgpu-8g", 8, "A100-40", 100, 29.39),
        _instance("a2-ultragpu-8g", 8, "A100-80", 100, 40.55),
        _instance("a3-highgpu-8g", 8, "H100-80", 1000, 88.49),
        _instance("g2-standard-48", 4, "L4-24", 50, 4.00),
        _instance("NC24rs_v3", 4, "V100-16", 100, 13.46),
        _instance("ND96asr_v4", 8, "A100-40", 1600, 27.20),
        _instance("ND96amsr_A100_v4", 8, "A100-80", 1600, 32.77),
        _instance("ND96isr_H100_v5", 8, "H100-80", 3200, 98.32),
        _instance("ND96isr_MI300X_v5", 8, "MI300X-192", 3200, 48.00),
    )
}
"""By name: Amazon's, Google's (a2 …), Microsoft's (N…)."""


def find_device(name: str, *, largest: bool = False) -> Device:
    """A device by its name or a short form of it (``a100``, ``A100-SXM4-80GB``, ``NVIDIA T4``).

    Where the name leaves the size of memory open, it is the card with the least, or with ``largest`` the most.

    Raises:
        UnknownNameError: with the nearest names.
    """
    if name in DEVICES:
        return DEVICES[name]
    plain = re.sub(r"^(nvidia|amd|tesla|geforce)[ _-]+", "", name.strip().lower())
    plain = re.sub(r"^(tesla|geforce)[ _-]+", "", plain)
    for known in DEVICES:
        if known.lower() == plain:
            return DEVICES[known]
    size = re.search(r"(\d+) ?gi?b", plain)
    family = re.split(r"[ _-]", plain)[0]
    if size and (sized := f"{family}-{size[1]}".lower()) in (lower := {k.lower(): k for k in DEVICES}):
        return DEVICES[lower[sized]]
    if plain in _ALIASES or (family in _ALIASES and size):
        found = DEVICES[_ALIASES[plain if plain in _ALIASES else family]]
        alike = [d for d in DEVICES.values() if largest and d.name.rpartition("-")[0] == found.name.rpartition("-")[0] != ""]
        return max((found, *alike), key=lambda d: d.memory_bytes)
    raise UnknownNameError("device", name, (*DEVICES, *_ALIASES))


def find_instance(name: str) -> Instance:
    """An instance by its name.

    Raises:
        UnknownNameError: with the nearest names.
    """
    found = {known.lower(): instance for known, instance in INSTANCES.items()}.get(name.strip().lower())
    if found is None:
        raise UnknownNameError("instance", name, INSTANCES)
    return found
