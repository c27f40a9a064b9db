"""Clusters from files, from words, and from this machine."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wavetrain.cluster import GIB, Cluster, Link, cluster_from_text, load_cluster
from wavetrain.devices import DEVICES, GBPS, INSTANCES, find_device, find_instance
from wavetrain.errors import FormatError, InputError, UnknownNameError

FULL = """
[[nodes]]
count = 3
instance = "p3.8xlarge"

[[nodes]]
device = "mine"
gpus = 4
memory_gib = 30
intra_gbps = 64
inter_gbps = 25
flow_gbps = 10
intra_latency = 1e-6
inter_latency = 0
inter_measured = [[1e3, 1e6], [1e6, 1e9]]
price = 2.5

[devices.mine]
half_tflops = 100
single_tflops = 50
memory_gib = 40
memory_gbytes_per_second = 900
link_gbps = 200
"""


def test_a_full_file() -> None:
    cluster = cluster_from_text(FULL)
    v100, mine = cluster.groups
    assert (cluster.num_devices, cluster.num_nodes) == (16, 4)
    assert (v100.device.name, v100.gpus, v100.inter.bandwidth) == ("V100-16", 4, 10 * GBPS)
    assert mine.device.half_flops == 100e12
    assert mine.device.memory_bytes == 30 * GIB
    assert mine.intra == Link(bandwidth=64 * GBPS, latency=1e-6)
    assert mine.flow_bandwidth == 10 * GBPS
    assert cluster.price == pytest.approx(3 * 12.24 + 2.5)
    assert [group.device.name for group in cluster.nodes()] == ["V100-16"] * 3 + ["mine"]
    assert cluster.describe() == "3 × 4 V100-16 + 1 × 4 mine"
    left = cluster.without("V100-16")
    assert left is not None
    assert left.groups == (mine,)
    assert left.without("mine") is None


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("3 x p3.8xlarge + 1 x g4dn.12xlarge", {"V100-16": 12, "T4-16": 4}),
        ("p4d.24xlarge", {"A100-40": 8}),
        ("2x p4de.24xlarge", {"A100-80": 16}),
        ("2 x 8 x a100", {"A100-40": 16}),
        ("1 × 2 × H100-80 + 1 × 3 × T4", {"H100-80": 2, "T4-16": 3}),
    ],
)
def test_words(words: str, devices: dict[str, int]) -> None:
    assert {group.device.name: group.num_devices for group in load_cluster(words).groups} == devices


@pytest.mark.parametrize("words", ["", "3 x", "0 x p3.8xlarge", "2 x 3 x 4 x T4", "-1 x p3.8xlarge", "+"])
def test_words_that_say_nothing(words: str) -> None:
    with pytest.raises(InputError):
        load_cluster(words)


def test_names_that_are_nearly_right() -> None:
    with pytest.raises(UnknownNameError, match=r"p3.8xlarge"):
        load_cluster("2 x p3.8xlrge")
    with pytest.raises(UnknownNameError, match="H100-80"):
        load_cluster("2 x 8 x H100-8")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("t4", "T4-16"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("A100-SXM4-40GB", "A100-40"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA H100 80GB HBM3", "H100-80"),
        ("gh-96", "GH-96"),
    ],
)
def test_devices_by_other_names(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_tables_make_sense() -> None:
    for instance in INSTANCES.values():
        assert instance.device in DEVICES
        assert find_instance(instance.name.upper()) is instance
    for device in DEVICES.values():
        assert device.half_flops >= device.single_flops > 0
        assert device.flops(2) == device.half_flops
        assert device.flops(4) == device.single_flops


def test_this_machine() -> None:
    cluster = load_cluster("detect")
    assert cluster.num_nodes == 1
    assert cluster.num_devices >= 1
    assert all(group.device.memory_bytes > 2**26 for group in cluster.groups)


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (("count = 3", "count = 0"), 3, "count is 0; expected a whole number"),
        (("count = 3", "count = -2"), 3, "count is -2"),
        (("count = 3", "count = 2.5"), 3, "count is 2.5"),
        (('"p3.8xlarge"', '"p3.8xlage"'), 4, "unknown instance 'p3.8xlage'; did you mean 'p3.8xlarge'"),
        (('"p3.8xlarge"', "3"), 4, "instance is 3, not a name"),
        (('instance = "p3.8xlarge"', 'instance = "p3.8xlarge"\ndevice = "T4"'), 4, "give an instance, or a device"),
        (('instance = "p3.8xlarge"', ""), 2, "no 'device' and no 'instance'"),
        (('device = "mine"', 'device = "min"'), 7, "unknown device 'min'"),
        (("gpus = 4", "gpus = true"), 8, "gpus is True"),
        (("memory_gib = 30", "memory_gib = -1"), 9, "memory_gib is -1; expected a number above 0"),
        (("intra_gbps = 64", "intra_gbps = nan"), 10, "intra_gbps is nan"),
        (("inter_latency = 0", "inter_latency = -1"), 14, "inter_latency is -1; expected a number, 0 or more"),
        (("[[1e3, 1e6], [1e6, 1e9]]", "[[1e6, 1e6], [1e3, 1e9]]"), 15, "sizes must rise"),
        (("[[1e3, 1e6], [1e6, 1e9]]", "[[1e6]]"), 15, r"expected \[bytes, bytes per second\]"),
        (("price = 2.5", 'price = "2"'), 16, "price is '2'"),
        (("half_tflops = 100", "half_tflops = 0"), None, "half_tflops is 0; expected a number above 0"),
        (("half_tflops = 100", ""), 18, "no 'half_tflops'"),
        (("[[nodes]]\ncount = 3", "[[nodes]\ncount = 3"), 2, "not TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(change: tuple[str, str], line: int | None, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        cluster_from_text(FULL.replace(*change), "cluster.toml")
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "near"), [(FULL.replace("count", "cuont"), "count"), (FULL.replace("half_tflops", "half_flops"), "half_tflops")]
)
def test_unknown_keys(text: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        cluster_from_text(text)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none.toml: No such file"):
        load_cluster(tmp_path / "none.toml")


@given(st.text(max_size=200))
@example('nodes = 3\ndevices = "x"')
@example("[[nodes]]\ndevice = 'T4'\nintra_measured = []")
@settings(deadline=None)
def test_any_text_is_a_cluster_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert isinstance(cluster_from_text(text), Cluster)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e3, 1e12)), min_size=1, max_size=5, unique_by=lambda t: t[0]))
def test_measured_links_are_met_where_they_were_measured(rows: list[tuple[float, float]]) -> None:
    rows.sort()
    link = Link(bandwidth=max(r for _, r in rows), measured=tuple(rows))
    for size, rate in rows:
        assert link.seconds(size) == pytest.approx(size / rate, rel=1e-6)
    assert link.seconds(2 * rows[-1][0]) == pytest.approx(2 * rows[-1][0] / rows[-1][1])
    assert link.seconds(rows[0][0] / 2) == pytest.approx(rows[0][0] / rows[0][1])


def test_links_without_measurements() -> None:
    link = Link(bandwidth=1e9, latency=1e-5)
    assert link.seconds(1e6) == pytest.approx(1.01e-3)
    assert link.rate(1e6) == pytest.approx(1e6 / 1.01e-3)
    assert link.limited(1e8).seconds(1e6) == pytest.approx(1e-2 + 1e-5)
    assert link.limited(math.inf) is link
