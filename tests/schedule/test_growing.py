"""Stages of unequal size that a schedule asks for, and what an action costs beside its work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wavetrain.errors import FormatError, InputError
from wavetrain.runtime.partition import cut_layers
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.json_format import dump_json, parse_json
from wavetrain.schedule.placement import straight, wave
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate


def growing(num_ranks: int = 4, num_micro_batches: int = 8, waves: int = 2, growth: float = 2.0) -> Schedule:
    return build("zb-wave", num_ranks=num_ranks, num_micro_batches=num_micro_batches, waves=waves, growth=growth)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 2), st.sampled_from([1.0, 1.5, 2.0, 3.0]))
def test_all_work_is_done_in_stages_of_the_shares(ranks: int, micro_batches: int, waves: int, growth: float) -> None:
    schedule = growing(ranks, micro_batches, waves, growth)
    cut = schedule.cut(Costs.uniform(ranks))
    assert prove(schedule).proven
    assert sum(cut.forward) == pytest.approx(ranks)
    assert sum(cut.activation_bytes) == pytest.approx(ranks)
    for before, after in pairwise(cut.forward[::ranks]):
        assert after == pytest.approx(growth * before)
    timeline = simulate(schedule)
    assert timeline.ideal == pytest.approx(3 * micro_batches)
    assert max(timeline.peak_activations) <= ranks * (1.5 if growth > 1 else 1) * (1 + 1e-9)
    assert parse_json(dump_json(schedule)) == schedule


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_growing_waves_are_shorter_where_micro_batches_are_many(num_ranks: int, num_micro_batches: int) -> None:
    even = simulate(growing(num_ranks, num_micro_batches, growth=1.0))
    grown = simulate(growing(num_ranks, num_micro_batches, growth=2.0))
    assert grown.bubble < 0.45 * even.bubble


def test_auto_grows_where_that_is_shorter() -> None:
    costs = Costs.uniform(4, hop_latency=0.01, overhead=0.01)
    found = build("auto", num_ranks=4, num_micro_batches=8, costs=costs, iterations=0)
    best = min(
        simulate(build("zb-wave", num_ranks=4, num_micro_batches=8, waves=w, costs=costs), costs).makespan for w in (1, 2, 3, 4)
    )
    assert found.shares is not None
    assert simulate(found, costs).makespan < best


@given(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=2, max_size=2))
def test_joined_stages_follow_the_shares(shares: list[float]) -> None:
    costs = replace(Costs.uniform(2).cut([straight(20)]), speed=(1.0, 1.0), divisible=False)
    first, second = costs.cut([straight(2)], shares).forward
    assert first / second == pytest.approx(shares[0] / shares[1], rel=0.25)


def test_costs_of_as_many_stages_are_what_they_are() -> None:
    costs = Costs.uniform(2).cut([wave(2, 1)])
    assert costs.cut([wave(2, 1)], (1.0, 2.0, 3.0, 4.0)) == costs


def test_layers_are_cut_by_the_shares() -> None:
    layers = [nn.Linear(8, 8) for _ in range(30)]
    counts = [len(stage) for stage in cut_layers(layers, growing(2, 4))]
    assert counts == [1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize(("growth", "waves"), [(0.5, 2), (17.0, 2), (float("nan"), 2), (16.0, 40)])
def test_a_growth_that_makes_no_sense_is_refused(growth: float, waves: int) -> None:
    with pytest.raises(InputError, match="grow"):
        growing(growth=growth, waves=waves)


@pytest.mark.parametrize("name", ["hanayo", "1f1b", "auto"])
def test_only_zb_wave_takes_a_growth(name: str) -> None:
    with pytest.raises(InputError, match=r"only zb-wave|or name zb-wave"):
        build(name, num_ranks=2, num_micro_batches=4, growth=2.0)


@pytest.mark.parametrize("shares", ["[1]", "[1, 0]", "[1, true]", "[1, 1e300]", '"1"', "[1, NaN]"])
def test_shares_in_a_file_are_checked(shares: str) -> None:
    text = dump_json(build("gpipe", num_ranks=2, num_micro_batches=2)).replace('"routes"', f'"shares": {shares}, "routes"')
    with pytest.raises(FormatError, match="shares"):
        parse_json(text)


@given(st.sampled_from(["gpipe", "1f1b", "zb-h1", "hanayo", "zb-wave"]), st.integers(1, 5), st.floats(0, 0.5))
@settings(deadline=None, max_examples=30)
def test_every_action_has_the_overhead_once(name: str, num_micro_batches: int, overhead: float) -> None:
    schedule = build(name, num_ranks=1, num_micro_batches=num_micro_batches)
    makespan = simulate(schedule, Costs.uniform(1, overhead=overhead)).makespan
    assert makespan == pytest.approx(3 * num_micro_batches + overhead * schedule.num_actions)


def test_overhead_does_not_depend_on_a_rank_s_speed() -> None:
    costs = replace(Costs.uniform(2, overhead=0.25), speed=(1.0, 4.0), divisible=False)
    assert [costs.seconds(kind, 1, 1) for kind in "FB"] == [0.5, 0.75]
