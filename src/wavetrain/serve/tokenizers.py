"""Text to tokens and back: bytes, which need no file, or a ``tokenizer.json`` of the tokenizers library."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Protocol

from wavetrain.errors import InputError


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    vocab: int
    """Tokens that it knows; all are below this."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str:
        """The text; what is no whole character yet is U+FFFD."""
        ...


class Bytes:
    """Token n is the byte n of the text's UTF-8 form."""

    vocab = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class JSON:
    """A ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        try:
            library: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise InputError(f"{path} needs the tokenizers library; type: pip install 'wavetrain[serve]'") from error
        try:
            self._inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise InputError(f"{path} is no tokenizer that can be read: {error}") from error
        self.vocab = int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens))


def open_tokenizer(path: str | os.PathLike[str] | None, folder: Path, vocab: int) -> Tokenizer:
    """The tokenizer that was named, or the one beside the weights, or bytes.

    Args:
        path: a ``tokenizer.json``, ``"bytes"``, or None.
        folder: of the checkpoint.
        vocab: tokens that the model knows.
    """
    if path is not None and os.fspath(path) != "bytes":
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"there is no tokenizer {file}; give a tokenizer.json, or 'bytes'")
    else:
        file = folder / "tokenizer.json"
    found: Tokenizer = JSON(file) if file.is_file() and path != "bytes" else Bytes()
    if isinstance(found, Bytes) and vocab < 256:
        raise InputError(f"the model knows {vocab} tokens, fewer than bytes; name its tokenizer.json")
    if found.vocab > vocab:
        raise InputError(
            f"the tokenizer has {found.vocab} tokens, but the model knows {vocab}; name the tokenizer it was trained with"
        )
    return found
