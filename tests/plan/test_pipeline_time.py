"""The time of a pipeline without a schedule is what the simulator finds with one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.errors import UnknownNameError
from wavetrain.plan.pipeline_time import SCHEDULES, SCHEDULES_WITH_WAVES, fill_share, passes, pipeline_seconds, placement_of
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.simulator import simulate


def simulated(forward: list[float], backward: list[float], delay: list[float], count: int, name: str = "1f1b") -> float:
    ranks = len(forward)
    latency = [[0.0] * ranks for _ in range(ranks)]
    for k, seconds in enumerate(delay):
        latency[k][k + 1] = latency[k + 1][k] = seconds
    costs = Costs(
        forward=tuple(forward),
        backward_input=tuple(b / 2 for b in backward),
        backward_weight=tuple(b / 2 for b in backward),
        activation_bytes=(1.0,) * ranks,
        message_bytes=(0.0,) * ranks,
        speed=(1.0,) * ranks,
        latency=tuple(tuple(row) for row in latency),
        bandwidth=((math.inf,) * ranks,) * ranks,
        memory_cap=(math.inf,) * ranks,
    )
    return simulate(build(name, num_ranks=ranks, num_micro_batches=count), costs).makespan


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], int]:
    ranks = draw(st.integers(1, 6))
    number = st.floats(0.1, 4.0)
    rows = [draw(st.lists(number, min_size=ranks, max_size=ranks)) for _ in range(2)]
    delay = draw(st.lists(st.sampled_from([0.0, 0.05, 1.0]), min_size=ranks - 1, max_size=ranks - 1))
    return rows[0], rows[1], delay, draw(st.integers(1, 5 * ranks))


@given(pipelines())
@settings(deadline=None, max_examples=200)
def test_one_forward_one_backward_is_exact(pipeline: tuple[list[float], list[float], list[float], int]) -> None:
    forward, backward, delay, count = pipeline
    found = pipeline_seconds(np.array(forward), np.array(backward), count, "1f1b", 1, np.array(delay))
    assert found == pytest.approx(simulated(forward, backward, delay, count))


def test_many_micro_batches_go_at_the_pace_of_the_slowest() -> None:
    forward, backward = np.array([1.0, 1.5, 0.5, 1.0]), np.array([2.0, 2.5, 1.5, 2.0])
    found = pipeline_seconds(forward, backward, 200)
    assert found == pytest.approx(simulated(forward.tolist(), backward.tolist(), [0.0] * 3, 200), rel=2e-3)


@pytest.mark.parametrize("name", [*SCHEDULES, *SCHEDULES_WITH_WAVES])
def test_no_family_is_faster_than_its_work(name: str) -> None:
    forward = np.ones(4)
    waves = 2
    found = pipeline_seconds(forward, 2 * forward, 8, name, waves)
    assert 24.0 <= found <= 33.0
    assert fill_share(name, waves) <= 1
    assert len(placement_of(name, 4, waves)) == 4 * passes(name, waves)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="zb-wave"):
        fill_share("zb-wav", 1)
