"""A product of a few rows, or of odd widths, is the product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.models.linear import Linear, product
from wavetrain.models.stacked import StackedLinear


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 64) | st.sampled_from([65, 100]),
    st.sampled_from([1, 40]),
    st.sampled_from([1, 7, 65, 6_600, 6_603, 16_390]),
    st.booleans(),
    st.integers(1, 2),
)
def test_a_product_is_a_product(rows: int, inputs: int, outputs: int, biased: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        bias = torch.randn(outputs) if biased else None
        expected = torch.nn.functional.linear(x, weight, bias)
        with torch.no_grad():
            torch.testing.assert_close(product(x, weight, bias), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(product(x[None].mT.mT, weight, bias), expected[None], rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 3, 8)])
def test_any_leading_dims(shape: tuple[int, ...]) -> None:
    layer = Linear(8, 128)
    x = torch.randn(shape)
    with torch.no_grad():
        assert layer(x).shape == (*shape[:-1], 128)
    assert layer(x).requires_grad


@pytest.mark.parametrize("rows", [4, 100])
def test_within_autocast_it_is_what_linear_is(rows: int) -> None:
    weight, x = torch.randn(6_603, 40), torch.randn(rows, 40).half()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(product(x, weight), torch.nn.functional.linear(x, weight))
        stacked = StackedLinear(2, 40, 6_603)
        assert stacked(x.expand(2, rows, 40)).shape == (2, rows, 6_603)
