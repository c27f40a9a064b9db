"""The search finds the best plan of its space, or says why there is none."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.cluster import Cluster, cluster_from_text, load_cluster
from wavetrain.errors import InputError
from wavetrain.plan.estimate import CostModel, Strategy
from wavetrain.plan.placement import layouts, num_slots
from wavetrain.plan.planner import Planned, make_plan
from wavetrain.plan.rooms import balanced
from wavetrain.plan.search import search
from wavetrain.plan.shapes import Limits
from wavetrain.plan.sources import Sources

from .worlds import even, mixed, model

PLAIN = Limits(schedules=(("1f1b", 1),), recompute=("none",), sharded_optimizer=(False,), leave_out=False)


def brute(costs: CostModel, cluster: Cluster, batch: int, *, tps: tuple[int, ...] = (1, 2)) -> float:
    """The least seconds over all shapes, layouts and cuts with equal shares of the batch."""
    best = math.inf
    layers = costs.workload.num_layers
    for tp in tps:
        if any(g.gpus % tp for g in cluster.groups):
            continue
        slots = num_slots(cluster.groups, tp)
        for ranks in (r for r in range(1, slots + 1) if slots % r == 0 and r <= layers):
            replicas = slots // ranks
            for layout in layouts(cluster.groups, tp, ranks, replicas):
                for inner in combinations(range(1, layers), ranks - 1):
                    for micro in (m for m in range(1, batch + 1) if batch % (m * replicas) == 0):
                        strategy = Strategy(micro_batch=micro, num_micro_batches=(batch // micro // replicas,) * replicas)
                        found = costs.estimate(layout, (0, *inner, layers), strategy)
                        if found.fits:
                            best = min(best, found.seconds)
    return best


@pytest.mark.parametrize("cluster", [even(2, 2), even(1, 4, "T4-16"), mixed()], ids=["even", "one node", "mixed"])
@pytest.mark.parametrize("batch", [4, 12])
def test_nothing_is_better_than_what_was_found(cluster: Cluster, batch: int) -> None:
    costs = model(3, overlaps=False)
    found = search(costs, cluster, batch, PLAIN)
    assert found.complete
    best = brute(costs, cluster, batch)
    assert found.best[0].seconds <= best * 1.02, "the cut is best for the sum of its objective, which differs a little"
    assert found.best[0].seconds >= found.bound * (1 - 1e-9)


def test_bounds_hold() -> None:
    costs = model(4)
    for cluster in (even(2, 2), mixed()):
        for name in ("1f1b", "zb-wave"):
            limits = replace(PLAIN, schedules=((name, 1),), seconds=math.inf)
            everything = search(costs, cluster, 8, limits)
            for tp in (1, 2):
                part = search(costs, cluster, 8, replace(limits, tp=(tp,)))
                assert part.best[0].seconds >= everything.best[0].seconds * (1 - 1e-9)


@given(st.integers(1, 60), st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 5)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=200)
def test_shares_are_balanced(total: int, replicas: list[tuple[float, float]]) -> None:
    pace, fill = (np.array(v) for v in zip(*replicas, strict=True))
    found = balanced(total, pace, fill)
    if total < len(replicas):
        assert found is None
        return
    assert found is not None
    assert sum(found) == total
    assert min(found) >= 1
    worst = max(n * p + f for n, (p, f) in zip(found, replicas, strict=True))
    for giver in range(len(found)):
        for taker in range(len(found)):
            if giver != taker and found[giver] > 1:
                moved = [n - (i == giver) + (i == taker) for i, n in enumerate(found)]
                assert max(n * p + f for n, (p, f) in zip(moved, replicas, strict=True)) >= worst * (1 - 1e-6)


def planned(cluster: Cluster, batch: int = 12, limits: Limits | None = None, layers: int = 10, hidden: int = 512) -> Planned:
    return make_plan(model(layers, hidden), cluster, batch, Sources(model="m", cluster="c"), limits)


def test_slow_devices_get_less() -> None:
    best = planned(mixed(), limits=Limits(leave_out=False, dp=(1,), tp=(1,))).best
    counts: dict[str, list[float]] = {name: [] for name in best.device_names}
    for k in range(best.pp):
        counts[best.devices[k][0]].append(best.rank_seconds[k])
    assert set(counts) == {"V100-16", "T4-16"}
    mean = {name: sum(v) / len(v) for name, v in counts.items()}
    assert mean["T4-16"] < 2.5 * mean["V100-16"], "an even cut would make it the ratio of the devices' speeds"


def test_replicas_of_slow_devices_get_fewer_micro_batches() -> None:
    limits = Limits(leave_out=False, pp=(1,), tp=(1,), micro_batch=(2,), schedules=(("1f1b", 1),))
    best = planned(mixed(), batch=120, limits=limits, hidden=2048).best
    by = {name: {n for n, d in zip(best.micro_batches, best.devices[0], strict=True) if d == name} for name in best.device_names}
    assert max(by["T4-16"]) < min(by["V100-16"])
    assert sum(best.micro_batches) == 60


def test_plans_fit_and_are_simulated() -> None:
    found = planned(even(2, 4))
    assert found.best.simulated
    assert max(found.best.memory_share) <= 1
    assert [p.seconds for p in found.plans] == sorted(p.seconds for p in found.plans)
    low, high = found.best.interval
    assert low < found.best.seconds < high


def test_nothing_fits_and_why() -> None:
    big = CostModel(workload=model().workload, calibration=model().calibration)
    tiny = replace(even(1, 2), groups=tuple(replace(g, device=replace(g.device, memory_bytes=1.2e9)) for g in even(1, 2).groups))
    with pytest.raises(InputError, match=r"no plan fits.*GB more|cannot be split") as raised:
        make_plan(big, tiny, 8, Sources(model="m", cluster="c"))
    assert "more" in str(raised.value)


@pytest.mark.parametrize("batch", [0, -3])
def test_an_impossible_batch_is_refused(batch: int) -> None:
    with pytest.raises(InputError, match="batch"):
        search(model(), even(), batch)


def test_limits_that_leave_nothing_are_refused() -> None:
    for limits, word in (
        (Limits(tp=(3,)), "tensor parallelism of 3"),
        (Limits(pp=(99,)), "pp 99"),
        (Limits(micro_batch=(3,)), "micro-batch of 3"),
    ):
        with pytest.raises(InputError, match=word):
            search(model(), even(), 8, limits)


def test_more_devices_never_make_it_slower() -> None:
    for words in (("1 x 6 x A100-80", "1 x 7 x A100-80"), ("1 x 2 x V100-16", "2 x 2 x V100-16")):
        few, many = (search(model(10), load_cluster(w), 13).best[0].seconds for w in words)
        assert many <= few * 1.001
    slow = cluster_from_text('[[nodes]]\ncount = 2\ndevice = "A100-80"\ngpus = 2\ninter_gbps = 0.001\n')
    assert search(model(10), slow, 16).best[0].layout.num_devices == 2, "a node is left out rather than waited for"


def test_nodes_keep_their_numbers() -> None:
    cluster = Cluster(groups=(*even(1, 1, "T4-16").groups, *even(2, 4, "A100-80").groups))
    best = planned(cluster, 16).best
    assert best.device_names == ("A100-80",)
    assert {n for row in best.nodes for n in row} <= {1, 2}


def test_a_large_cluster_is_planned_in_time() -> None:
    cluster = load_cluster("16 x 8 x V100-32 + 16 x 8 x A100-80")
    found = search(model(30, 2048), cluster, 512, Limits(seconds=3.0))
    assert found.best
    assert found.bound <= found.best[0].seconds
