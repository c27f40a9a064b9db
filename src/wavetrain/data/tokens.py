"""Tokens from files: one long row of numbers, read through memory maps, so that its size is not a matter of memory."""

from __future__ import annotations

import codecs
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wavetrain.data.corpus import stdlib_corpus
from wavetrain.errors import FormatError, InputError, UnknownNameError

IntArray = NDArray[Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

TOKEN_DTYPES: Final = ("uint8", "uint16", "uint32")
"""How the numbers in a .bin file may be stored, little-endian."""
_TOKEN_SUFFIXES: Final = (".bin", ".npy")
_BYTES_LOOKED_AT: Final = 1 << 16


class Tokens:
    """A row of tokens in one or several parts, which may be memory maps.

    Args:
        parts: arrays of whole numbers, (length,) each, in order; or one of them; or bytes.
        vocab: tokens are below it, which is checked when they are read; None: not known.
    """

    def __init__(self, parts: Iterable[IntArray] | IntArray | bytes, *, vocab: int | None = None) -> None:
        if isinstance(parts, (bytes, bytearray, memoryview)):
            parts = np.frombuffer(parts, dtype=np.uint8)
        arrays = [parts] if isinstance(parts, np.ndarray) else list(parts)
        for array in arrays:
            if array.ndim != 1 or array.dtype.kind not in "ui":
                raise InputError(
                    f"tokens are a flat row of whole numbers, but an array of shape {array.shape}, {array.dtype} was given"
                )
        self._parts = [array for array in arrays if len(array)]
        self._ends = list(accumulate(len(array) for array in self._parts))
        self.vocab = vocab

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """The tokens start … start + length, (length,) int64."""
        if start < 0 or length < 0 or start + length > len(self):
            raise InputError(f"tokens {start} to {start + length} were asked for, but there are {len(self)}")
        row = np.empty(length, dtype=np.int64)
        part = bisect_right(self._ends, start)
        done = 0
        while done < length:
            begin = self._ends[part] - len(self._parts[part])
            piece = self._parts[part][start + done - begin : start + length - begin]
            row[done : done + len(piece)] = piece
            done += len(piece)
            part += 1
        self._check(row, start)
        return row

    def _check(self, row: NDArray[np.int64], start: int) -> None:
        limit = np.iinfo(np.int64).max if self.vocab is None else self.vocab
        if len(row) and (row.min() < 0 or row.max() >= limit):
            where = int(np.argmax((row < 0) | (row >= limit)))
            rule = "is negative" if row[where] < 0 else f"is not below vocab={self.vocab}"
            raise InputError(
                f"token {start + where} of the data is {row[where]}, which {rule}; "
                "give the vocab of its tokenizer, and the dtype that the file was written with"
            )

    def span(self, start: int, stop: int) -> Tokens:
        """The tokens start … stop as tokens of their own; nothing is copied."""
        begins = [0, *self._ends]
        cut = [array[max(0, start - b) : max(0, stop - b)] for array, b in zip(self._parts, begins, strict=False)]
        return Tokens(cut, vocab=self.vocab)

    def split(self, fraction: float) -> tuple[Tokens, Tokens]:
        """Hold out the tail: (for training, for validation), the latter ``fraction`` of the whole, 0 to below 1."""
        if not 0 <= fraction < 1:
            raise InputError(f"a fraction of {fraction} was to be held out for validation; give one from 0 to below 1, e.g. 0.05")
        point = len(self) - int(len(self) * fraction)
        return self.span(0, point), self.span(point, len(self))


class TextData(Tokens):
    """Text files as bytes: token n is byte n, so the vocabulary is 256.

    Args:
        paths: a file, a directory, or several of them; they follow each other in the order given, those of a directory in
            the order of their names.
        pattern: the files of a directory that are taken, at any depth.
    """

    def __init__(self, paths: Paths, *, pattern: str = "*.txt") -> None:
        super().__init__([_text(file) for file in _files(paths, (pattern,))], vocab=256)


class TokenData(Tokens):
    """Files of token numbers: ``.npy`` (one dim), or ``.bin``, bare little-endian numbers.

    Args:
        paths: a file, a directory, or several of them, in order; of a directory, its .bin and .npy files.
        dtype: of the numbers in .bin files, one of :data:`TOKEN_DTYPES`; .npy files know theirs.
        vocab: tokens must be below it; None: not checked.
    """

    def __init__(self, paths: Paths, *, dtype: str = "uint16", vocab: int | None = None) -> None:
        if dtype not in TOKEN_DTYPES:
            raise UnknownNameError("dtype of tokens", dtype, TOKEN_DTYPES)
        files = _files(paths, [f"*{suffix}" for suffix in _TOKEN_SUFFIXES])
        super().__init__([_npy(file) if file.suffix == ".npy" else _bin(file, dtype) for file in files], vocab=vocab)


def open_data(paths: Paths | None = None, *, dtype: str = "uint16", vocab: int | None = None) -> Tokens:
    """The data that ``--data`` names.

    Args:
        paths: text files, or .bin and .npy token files, or directories of one kind; None: the embedded corpus.
        dtype: of .bin files.
        vocab: of token files.
    """
    if paths is None:
        return Tokens(stdlib_corpus(), vocab=256)
    listed = [Path(path) for path in _listed(paths)]
    kinds = {_holds_tokens(path) for path in listed}
    if len(kinds) > 1:
        raise InputError("the data mixes text and token files (.bin, .npy); give one kind")
    if kinds == {True}:
        return TokenData(listed, dtype=dtype, vocab=vocab)
    return TextData(listed)


def _holds_tokens(path: Path) -> bool:
    if path.is_dir():
        return any(f.suffix in _TOKEN_SUFFIXES for f in path.rglob("*"))
    return path.suffix in _TOKEN_SUFFIXES


def _listed(paths: Paths) -> list[str | os.PathLike[str]]:
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not listed:
        raise InputError("no data files were given")
    return listed


def _files(paths: Paths, patterns: Sequence[str]) -> list[Path]:
    """Existing, non-empty files; directories become the files in them that match."""
    files: list[Path] = []
    for path in map(Path, _listed(paths)):
        if path.is_dir():
            found = sorted({file for pattern in patterns for file in path.rglob(pattern) if file.is_file()})
            if not found:
                raise InputError(f"the directory {path} holds no {' or '.join(patterns)} file; name the files themselves")
            files += [file for file in found if file.stat().st_size]
        elif not path.exists():
            raise InputError(f"there is no file {path}")
        elif not path.is_file():
            raise InputError(f"{path} is not a regular file, and cannot be read at any place; copy it into one")
        elif not path.stat().st_size:
            raise InputError(f"{path} is empty")
        else:
            files.append(path)
    if not files:
        raise InputError("all data files are empty")
    return files


def _text(file: Path) -> IntArray:
    array = np.memmap(file, dtype=np.uint8, mode="r")
    head = array[:_BYTES_LOOKED_AT].tobytes()
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=len(array) == len(head))
    except UnicodeDecodeError as error:
        line = head.count(b"\n", 0, error.start) + 1
        raise FormatError(file, line, "not UTF-8 text; convert it, or give token files (.bin, .npy)") from error
    if "\0" in text:
        raise FormatError(file, None, "holds zero bytes and is no text; token files end in .bin or .npy")
    return array


def _bin(file: Path, dtype: str) -> IntArray:
    kind = np.dtype(dtype).newbyteorder("<")
    size = file.stat().st_size
    if size % kind.itemsize:
        raise FormatError(
            file, None, f"has {size} bytes, which is no whole number of {dtype}; give the dtype it was written with"
        )
    return np.memmap(file, dtype=kind, mode="r")


def _npy(file: Path) -> IntArray:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise FormatError(file, None, f"not a readable .npy file: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "ui":
        shape, kind = getattr(array, "shape", None), getattr(array, "dtype", None)
        raise FormatError(file, None, f"holds an array of shape {shape} and {kind}; expected one dim of whole numbers")
    if not len(array):
        raise InputError(f"{file} holds no tokens")
    return array
