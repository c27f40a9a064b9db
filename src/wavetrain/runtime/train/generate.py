"""Text from a checkpoint: the whole model on one process, one token after the other."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from wavetrain.data.text import decode, encode
from wavetrain.errors import CheckpointError, InputError
from wavetrain.models.config import ModelConfig
from wavetrain.models.registry import build_model
from wavetrain.runtime.checkpoint import read_extra, read_model


def load_model(path: str | os.PathLike[str]) -> nn.Sequential:
    """The model of a checkpoint (or of a directory's newest), built by the config that it carries, in eval mode on the CPU."""
    shape = read_extra(path).get("model")
    if not isinstance(shape, dict):
        raise CheckpointError(f"{os.fspath(path)} does not say which model it is of; it was not saved by wavetrain train")
    config = ModelConfig.from_dict(shape, where=os.fspath(path))
    weights = read_model(path)
    with torch.device("meta"):
        model = build_model(config)
    names = {name for name, _ in model.named_parameters()}  # a tied weight once, under its first name
    if names - weights.keys():
        raise CheckpointError(f"{os.fspath(path)} lacks {', '.join(sorted(names - weights.keys())[:3])}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def sample(
    model: nn.Sequential, tokens: Tensor, *, num_tokens: int, max_length: int, temperature: float = 0.8, seed: int = 0
) -> Tensor:
    """Continue ``tokens`` (length,) int64 by ``num_tokens``; the result is (length + num_tokens,).

    Args:
        model: tokens (1, seq) → logits (1, seq, vocab), each of the token that follows.
        tokens: at least one.
        num_tokens: how many are drawn.
        max_length: the longest sequence that the model takes; only so many of the last tokens are looked at.
        temperature: 0 takes the likeliest token, 1 draws as the model says.
        seed: of the draw.
    """
    if not temperature >= 0:
        raise InputError(f"temperature is {temperature}; give 0 or more")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        logits: Tensor = model(tokens[None, -max_length:])[0, -1].float()
        if temperature == 0:
            following = logits.argmax(keepdim=True)
        else:
            following = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, following])
    return tokens


def generate_text(
    path: str | os.PathLike[str], prompt: str, *, num_bytes: int = 120, temperature: float = 0.8, seed: int = 0
) -> str:
    """``prompt`` continued by the byte-level model of a checkpoint (or of a directory's newest)."""
    if not prompt:
        raise InputError("the prompt is empty; give at least one character to continue")
    model = load_model(path)
    max_length = int(read_extra(path)["model"]["max_length"])
    tokens = sample(model, encode(prompt), num_tokens=num_bytes, max_length=max_length, temperature=temperature, seed=seed)
    return decode(tokens)
