"""Files to tokens, the embedded corpus, text and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wavetrain.data
from wavetrain.data import Batches, TextData, TokenData, Tokens, decode, encode, open_data, stdlib_corpus
from wavetrain.errors import FormatError, InputError


def everything(tokens: Tokens) -> list[int]:
    return [int(token) for token in tokens.window(0, len(tokens))]


@given(st.text())
def test_text_comes_back(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == torch.int64
    assert decode(tokens) == decode(tokens.tolist()) == decode(tokens.numpy()) == text


def test_broken_text_is_shown_as_such() -> None:
    assert decode([104, 105, 255]) == "hi\ufffd"
    with pytest.raises(InputError, match="token 256"):
        decode([256])
    with pytest.raises(InputError, match="flat"):
        decode(torch.zeros(2, 2, dtype=torch.int64))


def test_the_corpus_is_python_and_always_the_same() -> None:
    corpus = stdlib_corpus()
    assert len(corpus) > 1_000_000
    assert corpus == stdlib_corpus()
    assert stdlib_corpus(1000) == corpus[:1000]
    assert b"class OrderedDict" in corpus or b"class Fraction" in corpus
    with pytest.raises(InputError, match="max_bytes is 0"):
        stdlib_corpus(0)


def test_without_files_there_is_the_corpus() -> None:
    data = open_data()
    assert data.vocab == 256
    assert bytes(everything(data.span(0, 100))) == stdlib_corpus(100)


@given(st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=6), st.data())
def test_parts_read_as_one_row(parts: list[list[int]], draw: st.DataObject) -> None:
    tokens = Tokens([np.array(part, dtype=np.uint8) for part in parts])
    flat = [value for part in parts for value in part]
    assert len(tokens) == len(flat)
    start = draw.draw(st.integers(0, len(flat)))
    stop = draw.draw(st.integers(start, len(flat)))
    assert tokens.window(start, stop - start).tolist() == flat[start:stop]
    assert everything(tokens.span(start, stop)) == flat[start:stop]


def test_the_tail_is_held_out() -> None:
    train, validation = Tokens([np.arange(60), np.arange(60, 100)]).split(0.25)
    assert everything(train) == list(range(75))
    assert everything(validation) == list(range(75, 100))
    assert [len(part) for part in Tokens(b"abc").split(0)] == [3, 0]
    with pytest.raises(InputError, match=r"fraction of 1\.0"):
        train.split(1.0)
    with pytest.raises(InputError, match="0 tokens"):
        Batches(Tokens(b"abc").split(0)[1], batch=1, seq=1)


def test_text_files_are_bytes_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zwei ü")
    (tmp_path / "a.txt").write_text("one ")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.txt").write_text("!")
    assert decode(TextData(tmp_path / "b.txt").window(0, 7)) == "zwei ü"
    assert decode(everything(TextData([tmp_path / "b.txt", str(tmp_path / "a.txt")]))) == "zwei üone "
    assert decode(everything(TextData(tmp_path))) == "one zwei ü!"
    assert decode(everything(open_data(tmp_path))) == "one zwei ü!"
    assert TextData(tmp_path).vocab == 256


def test_a_letter_may_stand_where_the_look_at_a_file_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" + "ü" * 50_000)
    assert len(TextData(tmp_path / "a.txt")) == 100_001


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_token_files_are_read_as_written(dtype: str, tmp_path: Path) -> None:
    numbers = np.array([3, 1, 200, 0], dtype=dtype)
    numbers.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", numbers[::-1].astype(np.int64))
    assert everything(TokenData(tmp_path / "a.bin", dtype=dtype)) == [3, 1, 200, 0]
    assert everything(TokenData(tmp_path, dtype=dtype)) == [3, 1, 200, 0, 0, 200, 1, 3]
    assert everything(open_data([tmp_path / "a.bin", tmp_path / "b.npy"], dtype=dtype, vocab=201)) == [3, 1, 200, 0, 0, 200, 1, 3]
    with pytest.raises(InputError, match="token 2 of the data is 200"):
        everything(open_data(tmp_path, dtype=dtype, vocab=200))


def test_negative_numbers_are_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, -1]))
    with pytest.raises(InputError, match="token 1 of the data is -1, which is negative"):
        everything(TokenData(tmp_path / "a.npy"))


def test_files_that_cannot_be_data_are_refused(tmp_path: Path) -> None:
    def refused(words: str, make: Any, *args: Any, **more: Any) -> None:
        with pytest.raises(InputError, match=words):
            make(*args, **more)

    (tmp_path / "empty.txt").touch()
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "latin.txt").write_bytes("line\nschön".encode("latin-1"))
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / "broken.npy").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empties").mkdir()
    (tmp_path / "empties" / "a.txt").touch()
    np.save(tmp_path / "flat.npy", np.zeros((2, 2), dtype=np.uint16))
    np.save(tmp_path / "float.npy", np.zeros(2))
    np.save(tmp_path / "none.npy", np.zeros(0, dtype=np.uint16))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    os.mkfifo(tmp_path / "pipe.txt")

    refused("there is no file", TextData, tmp_path / "nothing.txt")
    refused("is empty", TextData, tmp_path / "empty.txt")
    refused("no data files", TextData, [])
    refused("not a regular file", TextData, tmp_path / "pipe.txt")
    refused(r"holds no \*\.txt file", TextData, tmp_path / "folder")
    refused("all data files are empty", TextData, tmp_path / "empties")
    refused(r"latin\.txt:2: not UTF-8", TextData, tmp_path / "latin.txt")
    refused("zero bytes", TextData, tmp_path / "zero.txt")
    refused("3 bytes.*uint16", TokenData, tmp_path / "odd.bin")
    refused("unknown dtype of tokens 'uint18'; did you mean .*'uint16'", TokenData, tmp_path / "odd.bin", dtype="uint18")
    refused("not a readable", TokenData, tmp_path / "broken.npy")
    refused("not a readable", TokenData, tmp_path / "objects.npy")
    refused(r"shape \(2, 2\)", TokenData, tmp_path / "flat.npy")
    refused("float64", TokenData, tmp_path / "float.npy")
    refused("no tokens", TokenData, tmp_path / "none.npy")
    refused("mixes text and token files", open_data, [tmp_path / "latin.txt", tmp_path / "odd.bin"])
    refused("flat row", Tokens, np.zeros(3))
    refused("asked for", Tokens(b"abc").window, 2, 2)


def test_a_bad_file_is_carried_by_the_error(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(FormatError) as caught:
        TokenData(tmp_path / "odd.bin")
    assert caught.value.path == str(tmp_path / "odd.bin")


def test_public_names_are_there() -> None:
    for name in wavetrain.data.__all__:
        assert getattr(wavetrain.data, name) is not None
    with pytest.raises(AttributeError):
        wavetrain.data.nothing  # noqa: B018
