"""Batches: every window once an epoch, any batch at once, replicas that share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.data import Batches, MaskedLM, Tokens
from wavetrain.data.shuffle import keys, permuted
from wavetrain.errors import InputError

SEEDS = st.integers(0, 2**63 - 1)


def row(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Tokens that say where they stand."""
    return np.arange(length, dtype=np.uint16)


@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
@settings(max_examples=80, deadline=None)
def test_a_permutation_has_everything_once(size: int, seed: int, epoch: int) -> None:
    indices = np.arange(size, dtype=np.uint64)
    places = permuted(indices, size, keys(seed, np.full(size, epoch, dtype=np.uint64)))
    assert sorted(places.tolist()) == list(range(size))


def test_permutations_look_random() -> None:
    """Over many seeds, each of 7 elements lands on each place about equally often, and pairs do not follow each other."""
    num_seeds, size = 4000, 7
    key = np.repeat(keys(0, np.arange(num_seeds, dtype=np.uint64)), size)
    places = permuted(np.tile(np.arange(size, dtype=np.uint64), num_seeds), size, key).reshape(num_seeds, size)
    for element in range(size):
        counts = np.bincount(places[:, element].astype(np.int64), minlength=size)
        assert np.abs(counts - num_seeds / size).max() < 6 * (num_seeds / size) ** 0.5
    follows = (places[:, 1] == places[:, 0] + 1).mean()
    assert abs(follows - 1 / size) < 0.04


@given(
    length=st.integers(2, 400),
    seq=st.integers(1, 40),
    rows=st.integers(1, 5),
    num_replicas=st.integers(1, 4),
    position=st.integers(0, 10**9),
    seed=SEEDS,
)
@settings(max_examples=80, deadline=None)
def test_replicas_together_are_one_replica(length: int, seq: int, rows: int, num_replicas: int, position: int, seed: int) -> None:
    seq = min(seq, length - 1)
    batch = rows * num_replicas
    whole = Batches(row(length), batch=batch, seq=seq, seed=seed)
    whole.position = position
    inputs, targets = next(whole)
    assert inputs.shape == targets.shape == (batch, seq)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    parts = [
        Batches(row(length), batch=batch, seq=seq, seed=seed, replica=r, num_replicas=num_replicas).at(position)
        for r in range(num_replicas)
    ]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


@given(length=st.integers(5, 300), seq=st.integers(1, 20), batch=st.integers(1, 9), seed=SEEDS, shuffle=st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_window_once(length: int, seq: int, batch: int, seed: int, shuffle: bool) -> None:
    seq = min(seq, length - 1)
    stream = Batches(row(length), batch=batch, seq=seq, seed=seed, shuffle=shuffle)
    starts: list[int] = []
    while len(starts) < 2 * stream.num_windows:
        assert stream.epoch == len(starts) // stream.num_windows
        starts += next(stream)[0][:, 0].tolist()
    windows = [i * seq for i in range((length - 1) // seq)]
    assert sorted(starts[: stream.num_windows]) == windows
    assert sorted(starts[stream.num_windows : 2 * stream.num_windows]) == windows
    if not shuffle:
        assert starts[: stream.num_windows] == windows


@given(position=st.integers(0, 50), seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_resumed_stream_goes_on_as_if_undisturbed(position: int, seed: int) -> None:
    stream = Batches(row(100), batch=3, seq=7, seed=seed)
    expected = [inputs for inputs, _ in itertools.islice(stream, position, position + 3)]
    assert stream.position == position + 3
    again = Batches(row(100), batch=3, seq=7, seed=seed)
    again.position = position
    assert all(torch.equal(a, b) for a, (b, _) in zip(expected, again, strict=False))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(Batches(row(1001), batch=100, seq=10, seed=seed).at(epoch)[0][:, 0].tolist())

    orders = {order(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(range(0, 1000, 10)) not in orders


def test_the_order_stays_the_same_for_ever() -> None:
    """A checkpoint of an older version names its place in this order."""
    assert Batches(row(1001), batch=6, seq=10, seed=1).at(3)[0][:, 0].tolist() == [320, 400, 190, 830, 110, 480]


def test_far_places_are_reached_at_once() -> None:
    stream = Batches(np.zeros(10**6, dtype=np.uint8), batch=4, seq=10)
    stream.position = 2**59
    assert next(stream)[0].shape == (4, 10)
    assert stream.epoch > 10**12


def test_masked_rows_do_not_depend_on_the_replica() -> None:
    objective = MaskedLM(mask_token=400, vocab=400)
    whole = Batches(row(400), batch=6, seq=20, seed=4, objective=objective).at(5)
    parts = [Batches(row(400), batch=6, seq=20, seed=4, objective=objective, replica=r, num_replicas=3).at(5) for r in range(3)]
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))
    assert (whole[0] == 400).any()


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"seq": 0}, "seq is 0"),
        ({"seq": 100}, "100 tokens.*at most 99"),
        ({"batch": 3, "num_replicas": 2}, "take batch=4"),
        ({"replica": 1}, "replica 1 of 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_streams_that_cannot_be_are_refused(given_: dict[str, int], words: str) -> None:
    arguments = {"batch": 4, "seq": 5, **given_}
    with pytest.raises(InputError, match=words):
        Batches(row(100), **arguments)  # type: ignore[arg-type]


def test_positions_that_cannot_be_are_refused() -> None:
    stream = Batches(row(100), batch=4, seq=5)
    with pytest.raises(InputError, match="position is -1"):
        stream.position = -1
    with pytest.raises(InputError, match="position is -2"):
        stream.at(-2)
    with pytest.raises(InputError, match="2\\*\\*62"):
        stream.position = 2**61


def test_tokens_beyond_the_vocabulary_are_named() -> None:
    with pytest.raises(InputError, match="token 50 of the data is 50, which is not below vocab=50"):
        Batches(Tokens(row(100), vocab=50), batch=19, seq=5, shuffle=False).at(0)
