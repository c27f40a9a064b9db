"""Estimates: the sum of their parts, no faster for more work, and as the formulas say where those are known."""

from __future__ import annotations

import numpy as np
import pytest

from wavetrain.cluster import cluster_from_text
from wavetrain.errors import FormatError, InputError, UnknownNameError
from wavetrain.plan.calibration import Calibration, calibration_from_text, shipped
from wavetrain.plan.clock import RECOMPUTES
from wavetrain.plan.estimate import PARTS, CostModel, Strategy
from wavetrain.plan.layout import Layout, even_cut
from wavetrain.plan.memory import in_flight
from wavetrain.plan.placement import layouts, num_slots
from wavetrain.profile import LayerTable, Profiles
from wavetrain.workload import load_workload

from .worlds import even, mixed, model, workload


def first(cluster_text: str, tp: int, ranks: int) -> Layout:
    groups = cluster_from_text(cluster_text).groups
    return next(layouts(groups, tp, ranks, num_slots(groups, tp) // ranks))


NODES = '[[nodes]]\ncount = 2\ndevice = "A100-80"\ngpus = 4\n'


def test_parts_add_up_and_more_work_takes_longer() -> None:
    costs = model(10)
    layout = first(NODES, 1, 4)
    cut = even_cut(12, 4)
    before = 0.0
    for micro_batch in (1, 2, 4, 8):
        found = costs.estimate(layout, cut, Strategy(micro_batch=micro_batch, num_micro_batches=(4, 4)))
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert set(found.parts) == set(PARTS)
        assert found.seconds > before
        assert found.fits
        before = found.seconds


def test_recompute_trades_time_for_memory() -> None:
    costs, layout, cut = model(10), first(NODES, 2, 2), even_cut(12, 2)
    found = [costs.estimate(layout, cut, Strategy(micro_batch=8, num_micro_batches=(4, 4), recompute=r)) for r in RECOMPUTES]
    assert found[0].seconds < found[1].seconds < found[2].seconds
    assert found[0].peak_bytes > found[1].peak_bytes > found[2].peak_bytes


def test_a_sharded_optimizer_divides_its_part() -> None:
    costs, layout, cut = model(10), first(NODES, 1, 2), even_cut(12, 2)
    whole, shared = (
        costs.estimate(layout, cut, Strategy(micro_batch=1, num_micro_batches=(2,) * 4, sharded_optimizer=s))
        for s in (False, True)
    )
    assert whole.memory[0].states / shared.memory[0].states == pytest.approx((4 + 4 + 12) / (4 + 4 + 12 / 4))


def test_waiting_for_messages_costs_more_than_hiding_them() -> None:
    layout, cut = first('[[nodes]]\ncount = 4\ndevice = "V100-16"\ngpus = 1\ninter_gbps = 25\n', 1, 4), even_cut(12, 4)
    strategy = Strategy(micro_batch=2, num_micro_batches=(16,))
    waits, hides = (model(10, overlaps=o).estimate(layout, cut, strategy).seconds for o in (False, True))
    assert hides < waits


def test_flops_are_the_published_ones() -> None:
    """72·L·s·h²·(1 + s/6h + V/12hL) a sample, forward and backward (Narayanan et al. 2021)."""
    found = load_workload("gpt3-1.3b")
    layers, s, h, v = 24, 2048, 2048, 50257
    assert 3 * found.flops == pytest.approx(72 * layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * layers)), rel=0.01)


def test_a_profile_takes_the_place_of_the_datasheet() -> None:
    load = workload(4)
    table = LayerTable(micro_batches=(1, 2), forward=np.full((2, 6), 0.5), backward=np.full((2, 6), 1.0), update=None)
    calibration = Calibration().changed("A100-80", profile_overhead=0.0)
    costs = CostModel(workload=load, calibration=calibration, profiles=Profiles(times={(load.name, "A100-80", 1): table}))
    layout = first('[[nodes]]\ndevice = "A100-80"\n', 1, 1)
    found = costs.estimate(layout, (0, 6), Strategy(micro_batch=1, num_micro_batches=(2,)))
    assert found.parts["compute"] == pytest.approx(2 * 6 * 1.5)
    assert not found.estimated
    assert costs.estimate(layout, (0, 6), Strategy(micro_batch=8, num_micro_batches=(1,))).estimated
    other = CostModel(
        workload=workload(5), calibration=calibration, profiles=Profiles(times={("small-5x512", "A100-80", 1): table})
    )
    assert other.table("A100-80", 1) is None, "a profile with another number of layers is of another cut"


def test_the_slowest_replica_sets_the_pace() -> None:
    groups = mixed().groups
    costs = model()
    by_columns = [lay for lay in layouts(groups, 1, 2, 3) if len(set(lay.group[0].tolist())) == 2]
    layout = by_columns[0]
    found = costs.estimate(layout, even_cut(8, 2), Strategy(micro_batch=1, num_micro_batches=(4, 4, 4)))
    slow = [r for r in range(3) if "T4-16" in {groups[g].device.name for g in layout.group[:, r]}]
    assert found.slowest[1] in slow


def test_what_does_not_match_is_refused() -> None:
    costs, layout = model(), first(NODES, 1, 2)
    with pytest.raises(InputError, match="cut"):
        costs.estimate(layout, (0, 8), Strategy(micro_batch=1, num_micro_batches=(1,) * 4))
    with pytest.raises(InputError, match="replicas"):
        costs.estimate(layout, (0, 4, 8), Strategy(micro_batch=1, num_micro_batches=(1,)))
    with pytest.raises(InputError, match="cut"):
        even_cut(3, 5)


@pytest.mark.parametrize("layers", [3, 8, 26])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_even_cut_is_even(layers: int, ranks: int) -> None:
    points = even_cut(layers, ranks)
    counts = np.diff(points)
    assert points[0] == 0
    assert points[-1] == layers
    assert counts.min() >= 1
    inner = counts.copy()
    if layers - 2 >= ranks:
        inner[0] -= 1
        inner[-1] -= 1
        assert inner.max() - inner.min() <= 1


def test_what_is_in_flight_is_what_families_promise() -> None:
    assert in_flight("1f1b", 4, 8).tolist() == [4, 3, 2, 1]
    assert in_flight("gpipe", 4, 8).tolist() == [8] * 4
    assert in_flight("zb-wave", 4, 2).tolist() == [2] * 4
    assert in_flight("hanayo", 4, 8).tolist() == [8] * 4


def test_calibrations_are_written_and_read() -> None:
    made = shipped()
    again = calibration_from_text(made.text())
    assert again.devices.keys() == made.devices.keys()
    assert again.of("A100-80").compute == pytest.approx(made.of("A100-80").compute, rel=1e-5)
    assert made.of("A100-40") is made.of("A100-80"), "the same card with less memory"
    assert made.known("T4-16")
    assert not made.known("B200-192")
    assert made.of("B200-192") is made.default


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[default]\ncompute = -1\n", "compute"),
        ("[default]\ncompute = 0\n", "above 0"),
        ("[default]\ncompute = 'x'\n", "compute"),
        ("[default\n", "not TOML"),
        ("devices = 3\n", "table"),
        ("[devices]\nT4 = 1\n", "table"),
    ],
)
def test_a_wrong_calibration_is_refused(text: str, word: str) -> None:
    with pytest.raises(FormatError, match=word):
        calibration_from_text(text)
    with pytest.raises(UnknownNameError, match="compute"):
        calibration_from_text("[default]\ncompue = 1\n")


def test_all_slots_of_a_cluster_are_laid_out() -> None:
    groups = (*mixed().groups, *even(1, 1, "A100-80").groups, *even(1, 1, "H100-80").groups)
    seen = set()
    for layout in layouts(groups, 1, 4, 2):
        assert np.bincount(layout.group.ravel(), minlength=4).tolist() == [4, 2, 1, 1]
        assert np.bincount(layout.node.ravel(), minlength=4).tolist() == [4, 2, 1, 1]
        seen.add(layout.group.tobytes())
    assert len(seen) > 20, "by rows and by columns, in every order of four types"
