"""Text and byte tokens: token n is the byte n of the text's UTF-8 form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wavetrain.errors import InputError


def encode(text: str) -> Tensor:
    """The byte tokens of ``text``, (length,) int64, each below 256."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: Tensor | Sequence[int] | Any) -> str:
    """The text of byte tokens (a tensor, array or sequence of one dim); bytes that are no UTF-8 become U+FFFD."""
    values = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if not isinstance(values, list) or any(not isinstance(value, int) for value in values):
        raise InputError("decode takes the tokens of one text, a flat list of whole numbers; call it once for every row")
    for value in values:
        if not 0 <= value < 256:
            raise InputError(f"token {value} is not a byte (0 to 255); only byte-level tokens can be decoded without a tokenizer")
    return bytes(values).decode("utf-8", errors="replace")
