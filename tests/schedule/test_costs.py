from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.placement import loop, straight, wave


def per_stage(*times: float, speed: tuple[float, ...] = (1.0, 1.0)) -> Costs:
    return replace(
        Costs.uniform(len(speed)),
        forward=times,
        backward_input=times,
        backward_weight=times,
        activation_bytes=times,
        message_bytes=tuple(float(i) for i in range(len(times))),
        speed=speed,
        divisible=False,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward": ()}, "at least one stage"),
        ({"speed": ()}, "at least one rank"),
        ({"forward": (1.0, -1.0)}, r"forward\[1\] is -1.0; it must be 0 or more"),
        ({"forward": (1.0, math.nan)}, r"forward\[1\] is nan; give a finite"),
        ({"backward_weight": (1.0, math.inf)}, "give a finite number"),
        ({"backward_input": (1.0,)}, "backward_input has 1 entries, but there are 2 stages"),
        ({"speed": (1.0, 0.0)}, "above 0"),
        ({"memory_cap": (1.0,)}, "memory_cap has 1 entries, but there are 2 ranks"),
        ({"memory_cap": (0.0, 1.0)}, "above 0"),
        ({"latency": ((0.0, 0.0),)}, "latency has 1 entries"),
        ({"latency": ((0.0,), (0.0, 0.0))}, "a row of latency has 1 entries"),
        ({"bandwidth": ((1.0, 0.0), (1.0, 1.0))}, "above 0"),
        ({"input_release": 1.5}, "cannot free more than all"),
        ({"input_release": -0.5}, "0 or more"),
        ({"activation_bytes": (True, 1.0)}, "not a number"),
        ({"message_bytes": ("1", 1.0)}, "not a number"),
        ({"forward": (0, 0), "backward_input": (0, 0), "backward_weight": (0, 0)}, "all stage times are zero"),
    ],
)
def test_bad_costs_are_input_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(Costs.uniform(2), **change)


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_uniform_needs_a_rank(num_ranks: int) -> None:
    with pytest.raises(InputError, match=f"{num_ranks} ranks: a pipeline needs at least 1"):
        Costs.uniform(num_ranks)


def test_a_cap_in_shares_is_of_an_even_share() -> None:
    assert per_stage(1.0, 2.0, 3.0, 6.0).with_cap(2).memory_cap == (12.0, 12.0)
    assert Costs.uniform(4).with_cap(3) == Costs.uniform(4, memory_cap=3)


def test_seconds_follow_the_rank_and_b_is_i_and_w() -> None:
    costs = replace(per_stage(1.0, 2.0, speed=(1.0, 4.0)), backward_weight=(3.0, 5.0))
    assert [costs.seconds(kind, 1, 1) for kind in "FIWB"] == [0.5, 0.5, 1.25, 1.75]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("waves", [1, 3])
def test_a_rank_share_is_divided_evenly(num_ranks: int, waves: int) -> None:
    cut = Costs.uniform(num_ranks, forward=6.0).cut([wave(num_ranks, waves)])
    assert cut.forward == pytest.approx((6.0 / (2 * waves),) * (2 * waves * num_ranks))
    assert sum(cut.activation_bytes) == pytest.approx(num_ranks)


@given(st.integers(1, 6), st.integers(1, 20))
def test_a_rank_share_is_divided_into_any_number_of_stages(num_ranks: int, num_stages: int) -> None:
    placement = tuple(s % num_ranks for s in range(num_stages))
    cut = Costs.uniform(num_ranks, forward=2.0).cut([placement])
    assert cut.num_stages == num_stages
    assert sum(cut.forward) == pytest.approx(2.0 * num_ranks)
    assert sum(cut.activation_bytes) == pytest.approx(num_ranks)


def test_more_stages_than_the_costs_name_is_an_error() -> None:
    with pytest.raises(InputError, match="the schedule has 4 stages, but the costs only name 2"):
        per_stage(1.0, 1.0).cut([loop(2, 2)])


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=7),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=2),
)
def test_joined_stages_are_the_best_of_all_cuts(times: list[float], speeds: list[float]) -> None:
    costs = per_stage(1.0, *times[1:], speed=(speeds[0], speeds[1]))
    cut = costs.cut([straight(2)])
    slowest = max(3 * t / v for t, v in zip(cut.forward, speeds, strict=True))
    best = min(
        max(3 * sum(run) / v for run, v in zip((costs.forward[:at], costs.forward[at:]), speeds, strict=True))
        for at in range(1, costs.num_stages)
    )
    assert slowest == pytest.approx(best)
    assert sum(cut.forward) == pytest.approx(sum(costs.forward))
    at = next(a for a in itertools.count(1) if cut.message_bytes[0] == costs.message_bytes[a - 1])
    assert cut.forward[0] == pytest.approx(sum(costs.forward[:at]))


def test_many_ranks_are_checked_in_no_time() -> None:
    """A matrix of pairs is one row many times over; it must not be read a billion times."""
    assert Costs.uniform(20_000).num_ranks == 20_000
