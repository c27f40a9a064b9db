"""Clusters: groups of equal nodes, what their devices can do, and what lies between them.

As a file:

    [[nodes]]                        # a group of equal nodes
    count = 3                        # default: 1
    instance = "p3.8xlarge"          # a known one, or in its place:

    [[nodes]]
    device = "T4"                    # a known one; see wavetrain plan --devices
    gpus = 4                         # devices of a node
    memory_gib = 15.8                # what one of them can hold; default: the device's
    intra_gbps = 50                  # gigabits per second, one way, between devices of a node; default: the device's
    inter_gbps = 50                  # of a node's network, one way; default: what nodes of such devices usually have
    flow_gbps = 10                   # the most that one connection between nodes gets; default: all of inter_gbps
    intra_latency = 5e-6             # seconds of a message; default
    inter_latency = 2e-5             # default
    inter_measured = [[1e6, 8e8], [1e8, 4e9]]    # bytes of a message, bytes per second that were reached; intra_measured likewise
    price = 3.91                     # dollars an hour and node

    [devices.my-card]                # devices that no table has
    half_tflops = 100                # matrix products in fp16 or bf16
    single_tflops = 50               # in fp32 or TF32
    memory_gib = 40
    memory_gbytes_per_second = 900
    link_gbps = 200

or in words: ``3 x p3.8xlarge + 1 x g4dn.12xlarge``, ``2 x 8 x A100-80`` (two nodes of eight).
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from wavetrain.devices import GB, GBPS, TERA, Device, find_device, find_instance
from wavetrain.errors import FormatError, InputError, UnknownNameError, require_keys
from wavetrain.files import parse_toml, read_text

Found = TypeVar("Found")

MAX_NODES: Final = 100_000
GIB: Final = 2.0**30
INTRA_LATENCY: Final = 1e-5
INTER_LATENCY: Final = 3e-5

_NODE_KEYS: Final = (
    *("count", "instance", "device", "gpus", "memory_gib", "intra_gbps", "inter_gbps", "flow_gbps"),
    *("intra_latency", "inter_latency", "intra_measured", "inter_measured", "price"),
)
_DEVICE_KEYS: Final = ("half_tflops", "single_tflops", "memory_gib", "memory_gbytes_per_second", "link_gbps")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries messages, one way."""

    bandwidth: float
    """Bytes per second of large messages."""
    latency: float = 0.0
    """Seconds of the smallest message."""
    measured: tuple[tuple[float, float], ...] = ()
    """(bytes, bytes per second) that were reached, by rising bytes; takes the place of the other two."""

    def rate(self, num_bytes: float) -> float:
        """Bytes per second that a message of ``num_bytes`` gets, its latency included."""
        return num_bytes / self.seconds(num_bytes) if num_bytes > 0 else self.bandwidth

    def seconds(self, num_bytes: float) -> float:
        """Of one message. Between measured sizes the rate is interpolated over the size's logarithm; beyond them it stays."""
        if not self.measured:
            return self.latency + num_bytes / self.bandwidth
        if num_bytes <= 0:
            return self.latency
        sizes = [size for size, _ in self.measured]
        i = bisect_left(sizes, num_bytes)
        if i == 0:
            least, rate = self.measured[0]
            return max(num_bytes, least) / rate  # smaller ones take as long as the smallest that was measured
        if i == len(sizes):
            return num_bytes / self.measured[-1][1]
        (low, slow), (high, fast) = self.measured[i - 1], self.measured[i]
        part = math.log(num_bytes / low) / math.log(high / low)
        return num_bytes / (slow + (fast - slow) * part)

    def limited(self, bandwidth: float) -> Link:
        """The same with at most ``bandwidth`` bytes per second."""
        if bandwidth >= self.bandwidth:
            return self
        return replace(self, bandwidth=bandwidth, measured=tuple((size, min(rate, bandwidth)) for size, rate in self.measured))


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes that are all alike."""

    count: int
    gpus: int
    """Devices of one node."""
    device: Device
    intra: Link
    """From a device to another of its node."""
    inter: Link
    """From a node to the network, shared by its devices."""
    flow_bandwidth: float = math.inf
    """The most that one connection to another node gets, in bytes per second."""
    price: float | None = None
    """Dollars an hour and node."""

    @property
    def num_devices(self) -> int:
        return self.count * self.gpus

    def describe(self) -> str:
        return f"{self.count} × {self.gpus} {self.device.name}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Groups of nodes, in the order in which ranks are counted."""

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("a cluster needs at least one node")
        if sum(g.count for g in self.groups) > MAX_NODES:
            raise InputError(f"{sum(g.count for g in self.groups)} nodes; at most {MAX_NODES} are planned for")
        for group in self.groups:
            if group.count < 1 or group.gpus < 1:
                raise InputError(f"{group.describe()}: at least one node, and one device in it")

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def price(self) -> float | None:
        """Dollars an hour; None where a group has no price."""
        prices = [None if g.price is None else g.count * g.price for g in self.groups]
        return None if None in prices else sum(p for p in prices if p is not None)

    def nodes(self) -> Iterator[NodeGroup]:
        """The group of every node, in order."""
        for group in self.groups:
            for _ in range(group.count):
                yield group

    def describe(self) -> str:
        return " + ".join(group.describe() for group in self.groups)

    def without(self, device: str) -> Cluster | None:
        """The cluster without the groups of a device; None if nothing is left."""
        left = tuple(group for group in self.groups if group.device.name != device)
        return replace(self, groups=left) if left else None


def load_cluster(source: str | os.PathLike[str]) -> Cluster:
    """A cluster from a TOML file, from words (``3 x p3.8xlarge + 1 x g4dn.12xlarge``), or ``detect`` for this machine.

    Raises:
        FormatError: the file cannot be read, or a value in it is not what its key asks for.
        UnknownNameError: an instance, device or key that is not known.
        InputError: words that say nothing.
    """
    name = os.fspath(source)
    if name == "detect":
        return detect()
    if name.endswith(".toml") or os.sep in name:
        return cluster_from_text(read_text(name), name)
    return _from_words(name)


def cluster_from_text(text: str, path: object = "<cluster>") -> Cluster:
    """The cluster in the text of a TOML file; ``path`` is what errors name."""
    data = parse_toml(text, path)
    return _Reader(path, text, data).cluster()


def describe_link(link: Link) -> str:
    """In words, as reports name it."""
    return f"{link.bandwidth / GBPS:.3g} Gbit/s"


def detect() -> Cluster:
    """The machine this runs on: its GPUs if ``nvidia-smi`` finds any, else its CPU cores."""
    found = _gpus()
    memory = _memory_bytes()
    if not found:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        core = replace(find_device("CPU-core"), memory_bytes=memory / cores)
        return Cluster(groups=(_group(core, 1, cores, {}),))
    groups: dict[tuple[str, float], int] = {}
    for name, size in found:
        groups[name, size] = groups.get((name, size), 0) + 1
    return Cluster(
        groups=tuple(_group(replace(find_device(name), memory_bytes=size), 1, n, {}) for (name, size), n in groups.items())
    )


def _gpus() -> list[tuple[str, float]]:
    """(name, bytes) of the GPUs of this machine."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in text.splitlines() if "," in line]
    return [(name.strip(), float(size) * 2**20) for name, _, size in rows]


def _memory_bytes() -> float:
    try:
        found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return float(found[1]) * 1024 if found else 4 * GB


def _from_words(text: str) -> Cluster:
    groups = []
    for part in text.split("+"):
        words = [word for word in re.split(r"\s*[x×*]\s+|\s+[x×*]\s*", part.strip()) if word]
        counts = [int(w) for w in words[:-1] if w.isdigit()]
        if not words or len(counts) != len(words) - 1 or len(counts) > 2 or (counts and min(counts) < 1):
            raise InputError(
                f"{text!r} is no cluster; write '3 x p3.8xlarge + 1 x g4dn.12xlarge', '2 x 8 x A100-80' (nodes x devices x "
                "device), the name of a .toml file, or detect"
            )
        if len(counts) == 2:
            groups.append(_group(find_device(words[-1]), counts[0], counts[1], {}))
        else:
            groups.append(_of_instance(words[-1], counts[0] if counts else 1))
    return Cluster(groups=tuple(groups))


def _of_instance(name: str, count: int, given: Mapping[str, Any] | None = None) -> NodeGroup:
    instance = find_instance(name)
    known: dict[str, Any] = {"inter_gbps": instance.network_gbps, "price": instance.price}
    if instance.flow_gbps is not None:
        known["flow_gbps"] = instance.flow_gbps
    return _group(find_device(instance.device), count, instance.gpus, known | dict(given or {}))


def _group(device: Device, count: int, gpus: int, given: Mapping[str, Any]) -> NodeGroup:
    if "memory_gib" in given:
        device = replace(device, memory_bytes=given["memory_gib"] * GIB)
    intra = given["intra_gbps"] * GBPS if "intra_gbps" in given else device.link_bandwidth
    return NodeGroup(
        count=count,
        gpus=gpus,
        device=device,
        intra=_link(intra, given.get("intra_latency", INTRA_LATENCY), given.get("intra_measured", ())),
        inter=_link(
            given["inter_gbps"] * GBPS if "inter_gbps" in given else gpus * device.network_bandwidth,
            given.get("inter_latency", INTER_LATENCY),
            given.get("inter_measured", ()),
        ),
        flow_bandwidth=given["flow_gbps"] * GBPS if "flow_gbps" in given else math.inf,
        price=given.get("price"),
    )


def _link(bandwidth: float, latency: float, measured: tuple[tuple[float, float], ...]) -> Link:
    return Link(bandwidth=max(rate for _, rate in measured) if measured else bandwidth, latency=latency, measured=measured)


class _Reader:
    """One file: its data, and its text to find lines in."""

    def __init__(self, path: object, text: str, data: Mapping[str, Any]) -> None:
        self.path, self.text, self.data = path, text, data

    def cluster(self) -> Cluster:
        require_keys(self.path, self.data, ("nodes", "devices"))
        devices = self._devices()
        tables = self.data.get("nodes")
        if not isinstance(tables, list) or not tables:
            raise FormatError(self.path, None, "no [[nodes]]: give at least one group of nodes")
        groups = []
        for i, table in enumerate(tables):
            if not isinstance(table, dict):
                raise FormatError(self.path, None, f"nodes[{i}] is {table!r}, not a [[nodes]] table")
            require_keys(f"{self.path}, nodes[{i}]", table, _NODE_KEYS)
            groups.append(self._group(i, table, devices))
        try:
            return Cluster(groups=tuple(groups))
        except InputError as error:
            raise FormatError(self.path, None, str(error)) from None

    def _group(self, i: int, table: dict[str, Any], devices: Mapping[str, Device]) -> NodeGroup:
        given: dict[str, Any] = {}
        for key in ("memory_gib", "intra_gbps", "inter_gbps", "flow_gbps"):
            if key in table:
                given[key] = self._number(i, key, table[key])
        for key in ("intra_latency", "inter_latency", "price"):
            if key in table:
                given[key] = self._number(i, key, table[key], least=0.0)
        for key in ("intra_measured", "inter_measured"):
            if key in table:
                given[key] = self._measured(i, key, table[key])
        count = self._count(i, "count", table.get("count", 1))
        if "instance" in table:
            if "device" in table or "gpus" in table:
                raise self._error(i, "instance", "give an instance, or a device and gpus, not both")
            return self._named(i, "instance", table, lambda name: _of_instance(name, count, given))
        if "device" not in table:
            raise self._error(i, None, "no 'device' and no 'instance': say what the nodes have")
        device = self._named(i, "device", table, lambda name: devices[name] if name in devices else find_device(name))
        return _group(device, count, self._count(i, "gpus", table.get("gpus", 1)), given)

    def _devices(self) -> dict[str, Device]:
        tables = self.data.get("devices", {})
        if not isinstance(tables, dict):
            raise FormatError(self.path, None, "devices is no table; write [devices.NAME] above the numbers of a device")
        found = {}
        for name, table in tables.items():
            where = f"[devices.{name}]"
            if not isinstance(table, dict):
                raise FormatError(self.path, None, f"{where} is {table!r}, not a table")
            require_keys(f"{self.path}, {where}", table, _DEVICE_KEYS)
            for key in _DEVICE_KEYS:
                if key not in table:
                    raise FormatError(self.path, self._line(rf"\[devices\.[\"']?{re.escape(name)}"), f"{where}: no {key!r}")
            half, single, memory, bandwidth, link = (self._positive(where, key, table[key]) for key in _DEVICE_KEYS)
            found[name] = Device(
                name=name,
                half_flops=half * TERA,
                single_flops=single * TERA,
                memory_bytes=memory * GIB,
                memory_bandwidth=bandwidth * GB,
                link_bandwidth=link * GBPS,
            )
        return found

    def _named(self, i: int, key: str, table: dict[str, Any], find: Callable[[str], Found]) -> Found:
        name = table[key]
        if not isinstance(name, str):
            raise self._error(i, key, f"{key} is {name!r}, not a name")
        try:
            return find(name)
        except UnknownNameError as error:
            raise self._error(i, key, str(error)) from None

    def _count(self, i: int, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
            raise self._error(i, key, f"{key} is {value!r}; expected a whole number, 1 to {MAX_NODES}")
        return value

    def _measured(self, i: int, key: str, value: object) -> tuple[tuple[float, float], ...]:
        rows: list[tuple[float, float]] = []
        if not isinstance(value, list) or not value:
            raise self._error(i, key, f"{key} is {value!r}; expected a list of [bytes, bytes per second]")
        for row in value:
            if not isinstance(row, list) or len(row) != 2:
                raise self._error(i, key, f"{key} holds {row!r}; expected [bytes, bytes per second]")
            size, rate = (self._number(i, key, v) for v in row)
            if rows and size <= rows[-1][0]:
                raise self._error(i, key, f"{key}: sizes must rise, but {size:g} follows {rows[-1][0]:g}")
            rows.append((size, rate))
        return tuple(rows)

    def _number(self, i: int, key: str, value: object, least: float | None = None) -> float:
        wrong = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        if wrong or not isinstance(value, int | float) or value > 1e15 or (value < least if least is not None else value <= 0):
            raise self._error(i, key, f"{key} is {value!r}; expected a number{' above 0' if least is None else ', 0 or more'}")
        return float(value)

    def _positive(self, where: str, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise FormatError(self.path, None, f"{where}: {key} is {value!r}; expected a number above 0")
        return float(value)

    def _error(self, i: int, key: str | None, problem: str) -> FormatError:
        """An error that names the line of ``key`` in the i-th table."""
        starts = [m.start() for m in re.finditer(r"^[ \t]*\[\[[ \t]*nodes[ \t]*\]\]", self.text, re.MULTILINE)]
        line = None
        if i < len(starts):
            line = self.text.count("\n", 0, starts[i]) + 1
            part = self.text[starts[i] : starts[i + 1] if i + 1 < len(starts) else None]
            if key and (found := re.search(rf"^[ \t]*{key}[ \t]*=", part, re.MULTILINE)):
                line += part.count("\n", 0, found.start())
        return FormatError(self.path, line, f"nodes[{i}]: {problem}")

    def _line(self, pattern: str) -> int | None:
        found = re.search(pattern, self.text)
        return self.text.count("\n", 0, found.start()) + 1 if found else None
