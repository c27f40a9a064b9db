"""Hugging Face language models from a local checkpoint directory, as a list of layers.

The model is loaded by transformers and taken apart along its own list of blocks; each block is wrapped so that it takes and
returns one tensor. Nothing is traced and no code of the checkpoint is run: only ``config.json`` and safetensors are read.

    embed → block0 → block1 → … → head
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wavetrain.errors import FormatError, InputError
from wavetrain.models.layers import check_tokens

MODEL_TYPES: Final = ("gpt2", "llama", "mistral", "qwen2")
"""The ``model_type`` of config.json that can be loaded."""


def from_pretrained(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The model of a checkpoint directory: tokens (batch, seq) int64 → logits (batch, seq, vocab).

    Sequences are taken as whole: there is no padding mask and no KV cache. Tied weights stay one Parameter. The model is in
    training mode, with the dropout that its config names.

    Args:
        path: a directory with config.json and model.safetensors (or its shards).
        dtype: of all parameters.
    """
    folder = Path(path)
    model_type = _check_folder(folder)
    try:
        transformers: Any = importlib.import_module("transformers")  # typed in some versions only
    except ImportError as error:
        raise InputError(f"loading {folder} needs transformers; type: pip install 'wavetrain[hf]'") from error
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"transformers cannot load {folder}: {error}") from error
    if info["missing_keys"]:  # transformers would draw them at random and only warn
        raise InputError(f"{folder} lacks {len(info['missing_keys'])} of the model's weights: {_listed(info['missing_keys'])}")
    rotary = None if model_type == "gpt2" else copy.deepcopy(model.model.rotary_emb)  # its frequencies keep their precision
    model.to(dtype).train()
    return _gpt2_layers(model) if model_type == "gpt2" else _llama_layers(model, rotary)


def _gpt2_layers(model: Any) -> nn.Sequential:
    body = model.transformer
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=GPT2Embedding(body))
    for i, block in enumerate(body.h):
        layers[f"block{i}"] = GPT2Block(block)
    layers["head"] = PretrainedHead(body.ln_f, model.lm_head)
    return nn.Sequential(layers)


def _llama_layers(model: Any, rotary: Any) -> nn.Sequential:
    body = model.model
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=LlamaEmbedding(body.embed_tokens))
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(body.layers)
    for i, (block, kind) in enumerate(zip(body.layers, kinds, strict=True)):
        window = getattr(model.config, "sliding_window", None) if kind == "sliding_attention" else None
        layers[f"block{i}"] = LlamaBlock(block, copy.deepcopy(rotary), window)
    layers["head"] = PretrainedHead(body.norm, model.lm_head)
    return nn.Sequential(layers)


class GPT2Embedding(nn.Module):
    """Token and position embedding of a GPT-2: (batch, seq) → (batch, seq, hidden)."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.token, self.position, self.dropout = body.wte, body.wpe, body.drop

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens)
        seq, longest = tokens.shape[1], self.position.num_embeddings
        if seq > longest:
            raise InputError(f"a sequence has {seq} tokens, but the checkpoint has {longest} positions; give shorter sequences")
        x: Tensor = self.dropout(self.token(tokens) + self.position.weight[:seq])
        return x


class GPT2Block(nn.Module):
    """A block of a GPT-2: (batch, seq, hidden) → the same."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return _first(self.block(x, attention_mask=None, use_cache=False))


class LlamaEmbedding(nn.Module):
    """Token embedding of a Llama: (batch, seq) → (batch, seq, hidden)."""

    def __init__(self, token: nn.Module) -> None:
        super().__init__()
        self.token = token

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens)
        x: Tensor = self.token(tokens)
        return x


class LlamaBlock(nn.Module):
    """A block of a Llama, Mistral or Qwen2: (batch, seq, hidden) → the same.

    Rotary angles are computed anew in each block: cheaper than sending them from stage to stage.
    """

    def __init__(self, block: nn.Module, rotary: nn.Module, window: int | None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        positions = torch.arange(seq, device=x.device).unsqueeze(0)  # (1, seq)
        allowed = None  # all tokens up to the own one
        if self.window is not None and seq > self.window:
            distance = positions.mT - positions  # (seq, seq), from the looking token back to the one looked at
            allowed = ((distance >= 0) & (distance < self.window))[None, None]
        angles = self.rotary(x, position_ids=positions)
        return _first(self.block(x, attention_mask=allowed, position_ids=positions, position_embeddings=angles, use_cache=False))


class PretrainedHead(nn.Module):
    """Final norm and projection: (batch, seq, hidden) → (batch, seq, vocab)."""

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits


def _first(output: Any) -> Tensor:
    """A block's hidden state; older transformers return it as the first of a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _listed(names: Iterable[str]) -> str:
    """The first few names."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (", …" if len(ordered) > 5 else "")


def _check_folder(folder: Path) -> str:
    """The model_type of a checkpoint directory that may be loaded."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give one that holds config.json and model.safetensors")
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} has no config.json; give a Hugging Face checkpoint directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(file, getattr(error, "lineno", None), f"not JSON: {error}") from error
    if not isinstance(config, dict):
        raise FormatError(file, None, f"holds a {type(config).__name__}; expected an object with a model_type")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InputError(f"{folder} holds a model of type {model_type!r}; can be loaded: {', '.join(MODEL_TYPES)}")
    if "quantization_config" in config:
        raise InputError(f"{folder} is quantised, and what is quantised cannot be trained; give the checkpoint it was made from")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no *.safetensors (other formats can run code when loaded, and are not read)")
    return str(model_type)
