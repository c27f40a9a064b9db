"""What passes between stages: taken apart, described, sent as JSON and put together again."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wavetrain.errors import InputError
from wavetrain.runtime.structure import Leaf, Structure, flatten

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]

tensors = st.builds(
    lambda shape, dtype, grad: torch.zeros(shape, dtype=dtype, requires_grad=grad and (dtype.is_floating_point)),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.booleans(),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    flat, structure = flatten(value, "x")
    again = Structure.parse(structure.dump())
    assert again == structure
    assert hash(again.leaves) == hash(structure.leaves)
    assert alike(value, again.unflatten(flat))
    assert [leaf.shape for leaf in again.leaves] == [tuple(t.shape) for t in flat]
    assert [leaf.requires_grad for leaf in again.leaves] == [t.requires_grad for t in flat]


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({1, 2}, "is a set; what passes between layers must be a tensor"),
        (object(), "is a object"),
        ((torch.zeros(2), {"a": lambda: 0}), "is a function"),
        ({1: torch.zeros(2)}, "is a dict"),
        (Pair(torch.zeros(1), torch.zeros(2)), "is a Pair"),
        (torch.zeros(2, dtype=torch.complex128), "holds a tensor of torch.complex128, which cannot be sent"),
        (torch.zeros(2, 2).to_sparse(), "holds a sparse tensor"),
    ],
)
def test_what_cannot_pass_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(InputError, match="what layer 3 returns") as caught:
        flatten(value, "what layer 3 returns")
    assert problem in str(caught.value)


def test_in_words() -> None:
    _, structure = flatten((torch.zeros(4, 8), {"mask": torch.ones(4, dtype=torch.bool)}), "x")
    assert structure.describe() == "float32 (4, 8), bool (4,)"
    assert flatten((), "x")[1].describe() == "no tensor"


GOOD: dict[str, Any] = {"nesting": {"tuple": [0, {"dict": {"m": 1}}]}, "leaves": [[[2], "float32", True], [[], "bool", False]]}


@pytest.mark.parametrize(
    "change",
    [
        {"nesting": {"tuple": [0, 2]}},
        {"nesting": {"tuple": [0]}},
        {"nesting": -1},
        {"nesting": "0"},
        {"nesting": {"set": [0, 1]}},
        {"nesting": {"tuple": {"a": 0}}},
        {"nesting": {"dict": [0, 1]}},
        {"nesting": {"tuple": [0], "list": [1]}},
        {"nesting": {"value": [0, 1]}},
        {"nesting": None},
        {"leaves": 3},
        {"leaves": [[[2], "float32"]]},
        {"leaves": [[[-2], "float32", True], [[], "bool", False]]},
        {"leaves": [[[2], "float31", True], [[], "bool", False]]},
        {"leaves": [[["x"], "float32", True], [[], "bool", False]]},
        {"leaves": [[2, "float32", True], [[], "bool", False]]},
    ],
)
def test_a_message_that_is_no_structure(change: dict[str, Any]) -> None:
    assert Structure.parse(json.dumps(GOOD).encode()).leaves[0] == Leaf((2,), torch.float32, True)
    with pytest.raises(InputError, match="cannot be read"):
        Structure.parse(json.dumps(GOOD | change).encode())


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_bytes_that_are_no_structure(data: bytes) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Structure.parse(data)


def test_nested_without_end() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Structure.parse(b"[" * 100_000)


json_values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@given(
    st.recursive(
        st.integers(-1, 3),
        lambda inner: st.dictionaries(
            st.sampled_from(["tuple", "list", "dict", "value", "x"]), st.lists(inner, max_size=2) | inner
        ),
    ),
    st.lists(
        st.tuples(st.lists(st.integers(-1, 3), max_size=2), st.sampled_from(["float32", "bool", "x"]), st.booleans()), max_size=3
    ),
)
def test_what_is_read_can_be_put_together(nesting: Any, leaves: Any) -> None:
    """Whatever is read without an error is a structure in full: it takes its tensors, and gives them back."""
    try:
        structure = Structure.parse(json.dumps({"nesting": nesting, "leaves": leaves}).encode())
    except InputError:
        return
    flat = [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in structure.leaves]
    again, same = flatten(structure.unflatten(flat), "x")
    assert same.nesting == structure.nesting
    assert all(a is b for a, b in zip(again, flat, strict=True))


@given(json_values)
def test_json_of_any_kind(value: Any) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Structure.parse(json.dumps(value).encode())
