"""Micro-batches: a batch split, described and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.errors import InputError
from wavetrain.runtime.micro_batches import count_targets, shape_key, split_batch


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 3))
def test_a_batch_is_split_as_evenly_as_can_be(size: int, number: int, width: int) -> None:
    batch = {"x": torch.arange(size * width).reshape(size, width), "mask": (torch.arange(size), None, "name")}
    if size < number:
        with pytest.raises(InputError, match=f"hold {size} samples, which cannot be split into {number} micro-batches"):
            split_batch(batch, number, "inputs")
        return
    parts = split_batch(batch, number, "inputs")
    sizes = [len(part["x"]) for part in parts]
    assert len(parts) == number
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])  # type: ignore[arg-type]
    assert torch.equal(torch.cat([part["mask"][0] for part in parts]), torch.arange(size))
    assert all(part["mask"][1:] == (None, "name") for part in parts)


def test_a_list_is_taken_as_it_is() -> None:
    parts = [torch.zeros(2, 3), torch.zeros(1, 9)]
    assert split_batch(parts, 2, "inputs") is parts
    with pytest.raises(InputError, match="targets are a list of 2 micro-batches, but the schedule has 3"):
        split_batch(parts, 3, "targets")


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (
            (torch.zeros(4, 2), torch.zeros(3)),
            r"one size along their first dim, to be split; they are float32 \(4, 2\), float32 \(3,\)",
        ),
        ((torch.zeros(4, 2), torch.tensor(1.0)), "one size along their first dim"),
        (torch.tensor(1.0), "cannot be split|one size"),
        ((), "they are no tensor"),
        (None, "they are no tensor"),
        ({4, 5}, "is a set|are a set"),
    ],
)
def test_what_cannot_be_split(batch: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        split_batch(batch, 2, "inputs")


def test_shapes_have_keys() -> None:
    x = torch.zeros(2, 3)
    same = [x, torch.ones(2, 3)]
    other: list[Any] = [torch.zeros(3, 2), x.long(), (x,), [x], {"x": x}, {"y": x}, (x, None), (x, 1), (x, 2), (x, x)]
    assert len({shape_key(value) for value in same}) == 1
    assert len({shape_key(value) for value in [x, *other]}) == len(other) + 1


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (torch.tensor([[1, -100, 3], [-100, -100, 0]]), 3),
        (torch.tensor([1, -100], dtype=torch.int32), 1),
        (torch.full((2, 2), -100), 0),
        (torch.zeros(2, 5), 10),
        ({"labels": torch.tensor([5, -100]), "weights": torch.zeros(9)}, 1),
        (None, 1),
        ((), 1),
    ],
)
def test_what_a_micro_batch_counts(targets: Any, count: float) -> None:
    assert count_targets(targets) == count
