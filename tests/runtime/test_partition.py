"""Layers into stages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from wavetrain.errors import InputError
from wavetrain.runtime.partition import cut_layers
from wavetrain.schedule.families import build


@given(st.lists(st.integers(1, 64), min_size=8, max_size=24), st.sampled_from([(2, 1), (2, 2), (4, 1), (1, 4)]))
def test_every_layer_is_in_one_stage_and_no_stage_is_empty(widths: list[int], shape: tuple[int, int]) -> None:
    layers = [nn.Linear(a, b) for a, b in pairwise([8, *widths])]
    schedule = build("hanayo", num_ranks=shape[0], waves=shape[1], num_micro_batches=4)
    stages = cut_layers(layers, schedule)
    assert [i for stage in stages for i in stage] == list(range(len(layers)))
    assert all(stages)
    assert len(stages) == schedule.num_stages


def test_what_does_not_fit_says_what_would() -> None:
    schedule = build("hanayo", num_ranks=2, waves=2, num_micro_batches=2)
    with pytest.raises(InputError, match=r"4 layers, but hanayo on 2 ranks has 8 stages.*at most 2 stages a rank fit"):
        cut_layers([nn.Identity()] * 4, schedule)
    with pytest.raises(InputError, match=r"1 layers, but .*at most 1 ranks fit"):
        cut_layers([nn.Identity()], schedule)
    with pytest.raises(InputError, match="the model has no layers"):
        cut_layers([], schedule)
    with pytest.raises(InputError, match=r"cut=\[1, 1\] names 2 layers in 2 stages, but the model has 8 layers"):
        cut_layers([nn.Identity()] * 8, schedule, (1, 1))
