"""What is hidden from a masked-language model, and what it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.data import Batches, MaskedLM, collate_masked, mask_tokens, stdlib_corpus
from wavetrain.data.masking import IGNORED
from wavetrain.errors import InputError
from wavetrain.models import BERT

MASK, VOCAB = 50, 50


def test_shares_are_those_of_bert() -> None:
    tokens = torch.randint(0, VOCAB, (200, 200), generator=torch.Generator().manual_seed(0))
    inputs, targets = mask_tokens(tokens, mask_token=MASK, vocab=VOCAB, seed=1)
    asked = targets != IGNORED
    assert float(asked.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert torch.equal(targets[asked], tokens[asked])
    assert torch.equal(inputs[~asked], tokens[~asked])
    hidden = inputs[asked]
    assert float((hidden == MASK).float().mean()) == pytest.approx(0.8, abs=0.02)
    kept = 0.1 + 0.1 / VOCAB
    assert float((hidden == tokens[asked]).float().mean()) == pytest.approx(kept, abs=0.02)
    drawn = hidden[(hidden != MASK) & (hidden != tokens[asked])]
    assert set(drawn.tolist()) == set(range(VOCAB))


@given(num_rows=st.integers(1, 5), seq=st.integers(1, 30), rate=st.floats(1e-3, 1.0), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_every_row_is_asked_for_something(num_rows: int, seq: int, rate: float, seed: int) -> None:
    tokens = torch.arange(num_rows * seq).view(num_rows, seq) % VOCAB
    inputs, targets = mask_tokens(tokens, mask_token=MASK, vocab=VOCAB, seed=seed, rate=rate)
    assert (targets != IGNORED).any(1).all()
    again = mask_tokens(tokens, mask_token=MASK, vocab=VOCAB, seed=seed, rate=rate)
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])


def test_seeds_and_rows_choose_differently() -> None:
    tokens = torch.zeros(2, 100, dtype=torch.int64)
    first, second = (mask_tokens(tokens, mask_token=MASK, vocab=VOCAB, seed=seed)[1] for seed in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_unequal_sequences_are_padded_and_padding_is_never_asked_for() -> None:
    sequences: list[Any] = [[1, 2, 3], [4], torch.tensor([5, 6, 7, 8, 9])]
    (inputs, real), targets = collate_masked(sequences, pad_token=51, mask_token=MASK, vocab=VOCAB, seed=0, rate=0.5)
    assert inputs.shape == real.shape == targets.shape == (3, 5)
    assert real.sum(1).tolist() == [3, 1, 5]
    assert (inputs[~real] == 51).all()
    assert (targets[~real] == IGNORED).all()
    assert (targets != IGNORED).any(1).all()
    logits = BERT(num_layers=1, hidden=8, num_heads=2, vocab=52)((inputs, real))
    assert torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).isfinite()


def test_masked_batches_of_bytes() -> None:
    batches = Batches(stdlib_corpus(10_000), batch=4, seq=64, objective=MaskedLM(mask_token=256, vocab=256))
    inputs, targets = next(batches)
    assert inputs.shape == targets.shape == (4, 64)
    assert (inputs == 256).any()
    assert not torch.equal(inputs, next(batches)[0])


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"rate": 1.5}, {"mask_token": -1}, {"vocab": 0}])
def test_masking_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"mask_token": MASK, "vocab": VOCAB, "seed": 0, **bad}
    with pytest.raises(InputError, match=next(iter(bad))):
        mask_tokens(torch.zeros(1, 4, dtype=torch.int64), **arguments)


def test_sequences_that_cannot_be_are_refused() -> None:
    cases: list[list[Any]] = [[], [[]], [[1], torch.zeros(2, 2)]]
    for bad in cases:
        with pytest.raises(InputError, match="flat row"):
            collate_masked(bad, pad_token=51, mask_token=MASK, vocab=VOCAB, seed=0)
    with pytest.raises(InputError, match=r"\(batch, seq\)"):
        mask_tokens(torch.zeros(4, dtype=torch.int64), mask_token=MASK, vocab=VOCAB, seed=0)
