"""The cut is the best of all cuts."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.errors import InputError
from wavetrain.plan.cut import best_cut


def value(
    points: tuple[int, ...], seconds: list[np.ndarray], messages: list[np.ndarray], num_micro_batches: int
) -> tuple[float, float]:
    stages = [float(s[a:b].sum()) for s, (a, b) in zip(seconds, pairwise(points), strict=True)]
    sent = sum(float(m[p - 1]) for m, p in zip(messages, points[1:-1], strict=True))
    return (num_micro_batches - 1) * max(stages) + sum(stages) + sent, max(stages)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[np.ndarray], list[np.ndarray], int, list[np.ndarray] | None]:
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, num_layers))
    number = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5, 4.0]) | st.floats(0, 10)

    def row() -> np.ndarray:
        return np.array(draw(st.lists(number, min_size=num_layers, max_size=num_layers)))

    alike = draw(st.booleans())
    first = row()
    seconds = [first if alike else row() for _ in range(num_stages)]
    messages = [row() for _ in range(num_stages - 1)]
    allowed = None
    if draw(st.booleans()):
        longest = draw(st.lists(st.integers(1, num_layers), min_size=num_stages, max_size=num_stages))
        span = np.arange(num_layers + 1)[None, :] - np.arange(num_layers + 1)[:, None]
        allowed = [span <= most for most in longest]
    return seconds, messages, draw(st.integers(1, 20)), allowed


@given(problems())
@settings(deadline=None, max_examples=400)
def test_no_cut_is_better(problem: tuple[list[np.ndarray], list[np.ndarray], int, list[np.ndarray] | None]) -> None:
    seconds, messages, num_micro_batches, allowed = problem
    num_layers, num_stages = len(seconds[0]), len(seconds)
    best = None
    for inner in combinations(range(1, num_layers), num_stages - 1):
        points = (0, *inner, num_layers)
        if allowed is not None and not all(ok[a, b] for ok, (a, b) in zip(allowed, pairwise(points), strict=True)):
            continue
        found, _ = value(points, seconds, messages, num_micro_batches)
        best = found if best is None else min(best, found)
    cut = best_cut(seconds, messages, num_micro_batches, allowed)
    if best is None:
        assert cut is None
        return
    assert cut is not None
    assert cut.value == pytest.approx(best, rel=1e-9, abs=1e-9)
    total, slowest = value(cut.points, seconds, messages, num_micro_batches)
    assert cut.value == pytest.approx(total)
    assert cut.slowest == pytest.approx(slowest)
    assert list(cut.points) == sorted(set(cut.points))


def test_a_slow_device_gets_fewer_layers() -> None:
    fast, slow = np.ones(12), 3 * np.ones(12)
    cut = best_cut([fast, slow, fast], [np.zeros(12)] * 2, 32)
    assert cut is not None
    assert cut.points == (0, 5, 6, 12)


def test_more_stages_than_layers() -> None:
    with pytest.raises(InputError, match="2 layers cannot be cut into 3 stages"):
        best_cut([np.ones(2)] * 3, [np.zeros(2)] * 2, 4)


def test_large_models_are_cut_in_no_time() -> None:
    random = np.random.default_rng(0)
    seconds = [random.uniform(1, 2) * random.uniform(0.9, 1.1, 128) for _ in range(64)]
    messages = [random.uniform(0, 0.1, 128) for _ in range(63)]
    start = time.perf_counter()
    assert best_cut(seconds, messages, 64) is not None
    assert time.perf_counter() - start < 20
