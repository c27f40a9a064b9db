"""From bytes and token files to batches, imported when first used.

TextData, TokenData, Tokens    text files as bytes, files of token numbers, either from memory
open_data                      whichever of them fits the files; without files, the embedded corpus
stdlib_corpus                  the sources of Python's standard library: text that is always there
Batches                        an endless, shuffled stream of (inputs, targets) that any batch can be asked of
MaskedLM, mask_tokens, collate_masked    masked-language modelling
encode, decode                 text to byte tokens and back
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavetrain.data.batches import Batches
    from wavetrain.data.corpus import stdlib_corpus
    from wavetrain.data.masking import MaskedLM, collate_masked, mask_tokens
    from wavetrain.data.text import decode, encode
    from wavetrain.data.tokens import TextData, TokenData, Tokens, open_data

_HOMES = {
    "Batches": "wavetrain.data.batches",
    "MaskedLM": "wavetrain.data.masking",
    "TextData": "wavetrain.data.tokens",
    "TokenData": "wavetrain.data.tokens",
    "Tokens": "wavetrain.data.tokens",
    "collate_masked": "wavetrain.data.masking",
    "decode": "wavetrain.data.text",
    "encode": "wavetrain.data.text",
    "mask_tokens": "wavetrain.data.masking",
    "open_data": "wavetrain.data.tokens",
    "stdlib_corpus": "wavetrain.data.corpus",
}

__all__ = [
    "Batches",
    "MaskedLM",
    "TextData",
    "TokenData",
    "Tokens",
    "collate_masked",
    "decode",
    "encode",
    "mask_tokens",
    "open_data",
    "stdlib_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wavetrain.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
