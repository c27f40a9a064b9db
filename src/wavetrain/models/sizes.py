"""How many parameters a decoder has, and the Kraken that has as many as a standard model.

The paper (arXiv 2408.07802) solves V·d + L·N·8d² = the standard model's count for d: N sub-layers of full d → d attention and an
MLP of width 2d. Here all weights are counted: positions, norms and W_concat too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Unpack

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.models.config import DecoderShape, ModelConfig, Style

_GPT2: Final[dict[str, Any]] = {"vocab": 50257, "max_length": 1024}
PUBLISHED: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "gpt2": ModelConfig(num_layers=12, hidden=768, num_heads=12, **_GPT2),
        "gpt2-medium": ModelConfig(num_layers=24, hidden=1024, num_heads=16, **_GPT2),
        "gpt2-large": ModelConfig(num_layers=36, hidden=1280, num_heads=20, **_GPT2),
        "gpt2-xl": ModelConfig(num_layers=48, hidden=1600, num_heads=25, **_GPT2),
    }
)
"""Standard models by name."""
MODES: Final = ("paper", "modern")


def num_parameters(config: ModelConfig) -> int:
    """Weights of a decoder, a tied one counted once."""
    shape, d = DecoderShape(config), config.hidden
    bias = bool(config.bias)
    projections = d * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + d * shape.inner * (
        3 if config.mlp == "swiglu" else 2
    )
    norm = d * (1 + (bias and config.norm == "layer"))
    biases = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.inner * (2 if config.mlp == "swiglu" else 1) + 2 * d
    block = shape.streams * (projections + norm * (1 if config.name == "parallel" else 2)) + bias * biases
    embedding = config.vocab * d * (1 if config.tied else 2) + (config.max_length * d if config.positions == "learned" else 0)
    concat = shape.streams * d * d if config.name == "kraken" else 0
    return embedding + config.num_layers * block + concat + norm


def kraken_like(standard: ModelConfig | str, *, degree: int, mode: str = "paper", **style: Unpack[Style]) -> ModelConfig:
    """The shape of :meth:`wavetrain.models.Kraken.like`."""
    if isinstance(standard, str):
        if standard not in PUBLISHED:
            raise UnknownNameError("standard model", standard, PUBLISHED)
        standard = PUBLISHED[standard]
    if standard.name == "kraken":
        raise InputError("like takes the shape of a standard model, but was given one of a Kraken")
    if mode not in MODES:
        raise UnknownNameError("mode", mode, MODES)
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1 or standard.num_heads % degree:
        fitting = [n for n in range(1, standard.num_heads + 1) if standard.num_heads % n == 0]
        raise InputError(
            f"degree is {degree!r}; take a divisor of the {standard.num_heads} heads: {', '.join(map(str, fitting))}"
        )
    return _paper(standard, degree, style) if mode == "paper" else _modern(standard, degree, style)


def _paper(standard: ModelConfig, degree: int, style: Style) -> ModelConfig:
    """Heads of d·N/heads; d an even multiple of a sub-layer's heads.

    Compared is with the standard model without biases and, as nanoGPT counts, without its positions: only so do the published
    widths of all three degrees come out (418 is 0.9 % below, if all is counted).
    """
    bare = dataclasses.replace(standard, bias=False)
    goal = num_parameters(bare) - (bare.max_length * bare.hidden if bare.positions == "learned" else 0)
    heads = standard.num_heads // degree
    step = heads if heads % 2 == 0 else 2 * heads
    common = _common(standard, degree)
    return _closest([ModelConfig(**common, hidden=d, **style) for d in range(step, 2 * standard.hidden + step, step)], goal)


def _modern(standard: ModelConfig, degree: int, style: Style) -> ModelConfig:
    """Rotary positions; streams as wide as the standard model's, heads of its size, N-th parts of its heads and its MLP.

    Every rank then computes as much as with the standard model, the KV cache is as large, and what is free, the inner width of
    the MLPs, is chosen for an equal number of parameters.
    """
    bare = dataclasses.replace(standard, bias=False)
    head_dim = _round_to_8(DecoderShape(standard).head_dim)
    common: dict[str, Any] = _common(standard, degree) | {
        "hidden": standard.hidden,
        "head_dim": head_dim,
        "kv_heads": standard.kv_heads,
        "positions": "rotary",
    }
    common |= style
    if "inner" in style:
        return ModelConfig(**common)
    return _closest([ModelConfig(**common, inner=8 * n) for n in range(1, standard.hidden)], num_parameters(bare))


def _common(standard: ModelConfig, degree: int) -> dict[str, Any]:
    fields = ("num_layers", "num_heads", "vocab", "max_length", "dropout", "tied")
    return {"name": "kraken", "degree": degree, **{field: getattr(standard, field) for field in fields}}


def _closest(candidates: list[ModelConfig], goal: int) -> ModelConfig:
    return min(candidates, key=lambda config: abs(num_parameters(config) - goal))


def _round_to_8(value: int) -> int:
    return max(8, round(value / 8) * 8)
