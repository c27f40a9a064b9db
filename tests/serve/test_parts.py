"""The pieces of generation: messages, drawing, text as it comes."""

from __future__ import annotations

import codecs
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.errors import InputError, RankFailedError
from wavetrain.serve import steps
from wavetrain.serve.ranks import _Collective
from wavetrain.serve.sampling import Candidates, SamplingParams, candidates, draw, merge
from wavetrain.serve.sequences import Text
from wavetrain.serve.steps import Row, Step
from wavetrain.serve.tokenizers import Bytes

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")  # which stands for what is no character
ROWS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2000), st.integers(1, 40)), min_size=1, max_size=8)


@settings(deadline=None)
@given(ROWS, st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8), st.integers(0, 256))
def test_a_step_is_told_whole(rows: list[tuple[int, int, int]], moves: list[tuple[int, int]], wanted: int) -> None:
    tokens = tuple(range(sum(count for *_, count in rows)))
    step = Step(tuple(Row(*row) for row in rows), tokens, tuple(moves), wanted)
    message, following = steps.encode(step, 8)
    assert len(message) == steps.message_size(8)
    assert steps.tokens_that_follow(message) == (0 if following is None else len(tokens))
    assert steps.decode(message, following) == step
    assert steps.decode(*steps.encode(None, 8)) is None


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 8))
def test_a_step_of_decoding_is_one_message(num_rows: int, num_moves: int) -> None:
    step = Step(tuple(Row(i, 5, 1) for i in range(num_rows)), tuple(range(num_rows)), ((7, 0),) * num_moves)
    assert step.decodes
    assert steps.encode(step, 8)[1] is None


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(2, 40), st.integers(1, 4), st.integers(0, 12))
def test_the_likeliest_of_all_ranks_are_those_of_the_whole(seed: int, vocab: int, num_ranks: int, wanted: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    each = -(-vocab // num_ranks)
    parts = [candidates(logits[:, i : i + each], wanted, i) for i in range(0, vocab, each)]
    found, whole = merge(parts, wanted), candidates(logits, wanted, 0)
    assert torch.equal(found.tokens, whole.tokens)
    assert torch.equal(found.values, whole.values)
    torch.testing.assert_close(found.total, logits.logsumexp(-1))


def drawn(params: SamplingParams, num: int = 4000) -> torch.Tensor:
    """How often each of five tokens is drawn."""
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    found = candidates(logits, params.num_candidates, 0)
    generator = torch.Generator().manual_seed(0)
    columns = [draw(found, 0, params, generator) for _ in range(num)]
    return torch.bincount(found.tokens[0][columns], minlength=5) / num


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25, 0.04, 0.0225, 0.01, 0.0025]),
        ({"top_k": 2}, [0.5, 0.2, 0, 0, 0]),
        ({"top_p": 0.6}, [0.5, 0.2, 0, 0, 0]),
        ({"top_p": 0.5}, [0.5, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [0.5, 0.2, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(params: dict[str, Any], expected: list[float]) -> None:
    chances = torch.tensor(expected)
    torch.testing.assert_close(drawn(SamplingParams(**params)), chances / chances.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"logprobs": 21}, "0 to 20"),
        ({"stop": ("",)}, "empty"),
        ({"stop": 5}, "stop is 5"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": ["a"]}, "token numbers"),
    ],
)
def test_parameters_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SamplingParams(**given)


@settings(deadline=None)
@given(st.text(LETTERS, max_size=30), st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3))
def test_text_comes_piece_by_piece_and_ends_at_a_stop(text: str, stops: list[str]) -> None:
    found, shown = Text(Bytes(), tuple(stops)), ""
    for token in Bytes().encode(text):
        found.push(token)
        safe = found.safe()
        assert safe.startswith(shown), "what was shown does not change"
        shown = safe
        if found.stopped:
            break
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert found.stopped == bool(ends)
    if not ends:
        assert found.whole() == text
    else:
        assert not any(stop in found.whole() for stop in stops)
        assert text.startswith(found.whole())
    assert found.whole().startswith(shown)


def test_bytes_that_are_no_text() -> None:
    found = Text(Bytes(), ())
    for token in [0xE2, 0x82, 65, 0xFF, 66]:
        found.push(token)
    assert found.whole() == codecs.decode(bytes([0xE2, 0x82, 65, 0xFF, 66]), "utf-8", "replace")


@settings(deadline=None)
@given(st.binary(max_size=12))
def test_any_bytes_come_as_their_text(raw: bytes) -> None:
    found = Text(Bytes(), ())
    for token in raw:
        found.push(token)
    assert found.whole() == raw.decode("utf-8", errors="replace")


def test_a_stop_after_bytes_that_are_no_text() -> None:
    found = Text(Bytes(), ("☃",))
    for token in [255, 255, 255, *"☃".encode()]:
        found.push(token)
    assert found.stopped


def test_temperatures_that_are_hardly_any() -> None:
    assert drawn(SamplingParams(temperature=1e-40), 20)[0] == 1


def test_a_draw_sees_as_many_as_it_needs() -> None:
    assert SamplingParams(temperature=0).num_candidates == 1
    assert SamplingParams(temperature=0, logprobs=5).num_candidates == 5
    assert SamplingParams(top_k=40).num_candidates == 40
    assert SamplingParams(top_k=1000).num_candidates == 0
    assert SamplingParams().num_candidates == 0
    assert Candidates(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1)).values.shape == (1, 1)


def test_who_waits_looks_whether_the_others_live() -> None:
    """Gloo does not always hear of a peer's death: then a sum would be waited for until its limit."""

    class Never:
        def wait(self, timeout: timedelta) -> None:
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    looked = iter((None, None, RankFailedError("rank 1 was killed", rank=1, cause="signal 9")))

    def watch() -> None:
        if (error := next(looked)) is not None:
            raise error

    with pytest.raises(RankFailedError, match="rank 1 was killed"):
        _Collective(Never(), 0, watch, timed=False).wait()
