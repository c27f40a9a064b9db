"""Models as folders of ``config.json`` and safetensors: our own, GPT-2's and Llama's, read and written without running any code.

    model_type   who writes it                        here
    wavetrain    save_folder                          any model of ours, by our names
    gpt2         transformers' GPT2LMHeadModel        a GPT with biases, learned positions, LayerNorm, GELU
    llama        transformers' LlamaForCausalLM       a GPT with rotary positions, RMSNorm, SwiGLU, grouped queries

GPT-2 stores its linear layers as (inputs, outputs), and queries, keys and values one after the other; Llama stores each on its
own. Ours are (kv head, [its queries, key, value], head_dim): see :class:`wavetrain.models.attention.Attention`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wavetrain.errors import CheckpointError, FormatError, InputError, UnknownNameError
from wavetrain.models.config import DecoderShape, ModelConfig
from wavetrain.models.layers import LayeredModel

MODEL_TYPES: Final = ("wavetrain", "gpt2", "llama")
"""The ``model_type`` of config.json that :func:`open_folder` reads."""
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Folder:
    """A model's folder, opened: its shape, and its weights by our names.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.values = _read_config(self.path)
        model_type = str(self.values.get("model_type"))
        if model_type not in MODEL_TYPES:
            raise UnknownNameError(f"model_type in {self.path / 'config.json'}", model_type, MODEL_TYPES)
        self._files = _Files(self.path)
        self.config = _CONFIGS[model_type](self.values, self.path / "config.json")
        self._translate = _WEIGHTS[model_type](self.config, self._files)

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        found = self.values.get("eos_token_id")
        return tuple(t for t in (found if isinstance(found, list) else [found]) if type(t) is int)

    def read(self, name: str) -> Tensor:
        """A whole weight by our name, on the CPU."""
        return self._translate(name)


def save_folder(model: LayeredModel, path: str | os.PathLike[str], *, kind: str = "wavetrain", **more: Any) -> Path:
    """Write a model as a folder.

    Args:
        model: whole, on any device.
        path: made if it is not there; its config.json and model.safetensors are replaced.
        kind: ``wavetrain``, or ``gpt2`` or ``llama`` for a GPT of that style.
        more: further entries of config.json, e.g. ``eos_token_id``.
    """
    if kind not in MODEL_TYPES:
        raise UnknownNameError("kind of folder", kind, MODEL_TYPES)
    folder = Path(path)
    own = {name: p.detach().cpu() for name, p in model.named_parameters()}
    values, weights = _WRITERS[kind](model.config, own)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / ".model.safetensors.part"
        save_file({name: w.contiguous() for name, w in weights.items()}, draft, metadata={"format": "pt"})
        draft.replace(folder / "model.safetensors")
        text = json.dumps({**values, "torch_dtype": "float32", **more}, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give one that holds config.json and model.safetensors")
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} has no config.json; give a directory that holds config.json and model.safetensors")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(file, getattr(error, "lineno", None), f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise FormatError(file, None, f"holds a {type(values).__name__}; expected an object with a model_type")
    if "quantization_config" in values:
        raise InputError(f"{folder} is quantised; give the checkpoint it was made from")
    return values


class _Files:
    """The safetensors of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            pickled = [file.name for kind in _PICKLED for file in folder.glob(kind)]
            why = f" (only {pickled[0]}, which could run code when it is loaded, and is not read)" if pickled else ""
            raise CheckpointError(f"{folder} has no *.safetensors{why}")
        self._home: dict[str, Path] = {}
        for file in found:
            try:
                with safe_open(file, framework="pt") as opened:
                    self._home.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def read(self, name: str) -> Tensor:
        if name not in self._home:
            raise CheckpointError(f"{self._folder} lacks {name}")
        try:
            with safe_open(self._home[name], framework="pt") as opened:
                weight: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} of {self._home[name]} cannot be read: {error}") from error
        return weight


# ── ours ──


def _own_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    shape = values.get("model")
    if not isinstance(shape, dict):
        raise FormatError(file, None, "does not say which model it is of: there is no object called model")
    return ModelConfig.from_dict(shape, where=file)


def _own_weights(config: ModelConfig, files: _Files) -> Callable[[str], Tensor]:
    return files.read


def _write_own(config: ModelConfig, own: Mapping[str, Tensor]) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    return {"model_type": "wavetrain", "architectures": ["WavetrainForCausalLM"], "model": config.to_dict()}, own


# ── GPT-2 ──


def _gpt2_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    get = _getter(values, file)
    if values.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise InputError(f"{file} asks for the activation {values['activation_function']!r}; of GPT-2 only gelu_new is known")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if values.get(key):
            raise InputError(f"{file} asks for {key}, which is not known here")
    if not values.get("scale_attn_weights", True):
        raise InputError(f"{file} asks for attention that is not scaled, which is not known here")
    hidden = get("n_embd")
    return ModelConfig(
        num_layers=get("n_layer"),
        hidden=hidden,
        num_heads=get("n_head"),
        vocab=get("vocab_size"),
        max_length=get("n_positions"),
        inner=values.get("n_inner") or 4 * hidden,
        norm_eps=float(values.get("layer_norm_epsilon", 1e-5)),
        tied=bool(values.get("tie_word_embeddings", True)),
    )


def _gpt2_names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Our name, and theirs."""
    yield from (("embed.token.weight", "wte.weight"), ("embed.position.weight", "wpe.weight"))
    for i in range(config.num_layers):
        for ours, theirs in (
            ("attention_norm", "ln_1"),
            ("attention.qkv", "attn.c_attn"),
            ("attention.out", "attn.c_proj"),
            ("mlp_norm", "ln_2"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            for kind in ("weight", "bias"):
                yield f"block{i}.{ours}.{kind}", f"h.{i}.{theirs}.{kind}"
    yield from (("head.norm.weight", "ln_f.weight"), ("head.norm.bias", "ln_f.bias"))


def _gpt2_weights(config: ModelConfig, files: _Files) -> Callable[[str], Tensor]:
    names = dict(_gpt2_names(config)) | {"head.projection.weight": "lm_head.weight"}
    heads, head_dim = config.num_heads, DecoderShape(config).head_dim

    def read(name: str) -> Tensor:
        theirs = names[name]
        weight = files.read(theirs if theirs in files else f"transformer.{theirs}")
        if weight.dim() == 2 and name.startswith("block"):
            weight = weight.t()
        if ".qkv." in name:
            _require_rows(weight, 3 * heads * head_dim, name)
            weight = torch.unflatten(weight, 0, (3, heads, head_dim)).transpose(0, 1).flatten(0, 2)
        return weight

    return read


def _write_gpt2(config: ModelConfig, own: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    style = (config.name, config.positions, config.norm, config.mlp, config.bias, config.kv_heads == config.num_heads)
    if style != ("gpt", "learned", "layer", "gelu", True, True) or config.head_dim != config.hidden // config.num_heads:
        raise InputError("only a GPT with biases, learned positions, LayerNorm and GELU can be written as gpt2")
    heads, head_dim = config.num_heads, DecoderShape(config).head_dim
    weights: dict[str, Tensor] = {}
    for name, theirs in _gpt2_names(config):
        weight = own[name]
        if ".qkv." in name:
            weight = torch.unflatten(weight, 0, (heads, 3, head_dim)).transpose(0, 1).flatten(0, 2)
        if weight.dim() == 2 and name.startswith("block"):
            weight = weight.t()
        weights[f"transformer.{theirs}"] = weight
    if not config.tied:
        weights["lm_head.weight"] = own["head.projection.weight"]
    values = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_embd": config.hidden,
        "n_head": heads,
        "n_inner": config.inner,
        "n_positions": config.max_length,
        "vocab_size": config.vocab,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return values, weights


# ── Llama ──


def _llama_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    get = _getter(values, file)
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise InputError(f"{file} asks for {key}, which is not known here")
    scaling = values.get("rope_scaling") or {}
    parameters = values.get("rope_parameters") or scaling
    if parameters.get("rope_type", parameters.get("type", "default")) != "default":
        raise InputError(f"{file} scales its rotary positions ({parameters}), which is not known here")
    if values.get("hidden_act", "silu") != "silu":
        raise InputError(f"{file} asks for the activation {values['hidden_act']!r}; of Llama only silu is known")
    heads, hidden = get("num_attention_heads"), get("hidden_size")
    return ModelConfig(
        num_layers=get("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        vocab=get("vocab_size"),
        max_length=get("max_position_embeddings"),
        inner=get("intermediate_size"),
        positions="rotary",
        rope_theta=float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        norm="rms",
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        mlp="swiglu",
        bias=False,
        tied=bool(values.get("tie_word_embeddings", False)),
    )


def _llama_names(config: ModelConfig) -> dict[str, str]:
    names = {"embed.token.weight": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight"}
    names["head.projection.weight"] = "lm_head.weight"
    for i in range(config.num_layers):
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("attention.out", "self_attn.o_proj"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp.up", "mlp.up_proj"),
            ("mlp.gate", "mlp.gate_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            names[f"block{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
    return names


def _llama_weights(config: ModelConfig, files: _Files) -> Callable[[str], Tensor]:
    names, shape = _llama_names(config), DecoderShape(config)
    group = shape.heads // shape.kv_heads

    def read(name: str) -> Tensor:
        if ".qkv." not in name:
            return files.read(names[name])
        block = name.split(".")[0].removeprefix("block")
        parts = []
        for part, count in (("q", group), ("k", 1), ("v", 1)):
            theirs = f"model.layers.{block}.self_attn.{part}_proj.weight"
            weight = files.read(theirs)
            _require_rows(weight, shape.kv_heads * count * shape.head_dim, theirs)
            parts.append(torch.unflatten(weight, 0, (shape.kv_heads, count, shape.head_dim)))
        return torch.cat(parts, 1).flatten(0, 2)

    return read


def _write_llama(config: ModelConfig, own: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if (config.name, config.positions, config.norm, config.mlp, config.bias) != ("gpt", "rotary", "rms", "swiglu", False):
        raise InputError("only a GPT with rotary positions, RMSNorm, SwiGLU and no biases can be written as llama")
    shape = DecoderShape(config)
    group = shape.heads // shape.kv_heads
    weights = {theirs: own[name] for name, theirs in _llama_names(config).items() if name in own}
    for i in range(config.num_layers):
        rows = torch.unflatten(own[f"block{i}.attention.qkv.weight"], 0, (shape.kv_heads, group + 2, shape.head_dim))
        for part, cut in (("q", slice(0, group)), ("k", slice(group, group + 1)), ("v", slice(group + 1, group + 2))):
            weights[f"model.layers.{i}.self_attn.{part}_proj.weight"] = rows[:, cut].flatten(0, 2)
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.inner,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return values, weights


def _getter(values: Mapping[str, Any], file: Path) -> Callable[[str], int]:
    def get(key: str) -> int:
        if type(values.get(key)) is not int:
            raise FormatError(file, None, f"{key} is {values.get(key)!r}; expected a whole number")
        return int(values[key])

    return get


def _require_rows(weight: Tensor, rows: int, name: str) -> None:
    if weight.shape[0] != rows:
        raise CheckpointError(f"{name} has shape {tuple(weight.shape)} in the checkpoint, but its config asks for {rows} outputs")


_CONFIGS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], ModelConfig]]] = {
    "wavetrain": _own_config,
    "gpt2": _gpt2_config,
    "llama": _llama_config,
}
_WEIGHTS: Final[Mapping[str, Callable[[ModelConfig, _Files], Callable[[str], Tensor]]]] = {
    "wavetrain": _own_weights,
    "gpt2": _gpt2_weights,
    "llama": _llama_weights,
}
_WRITERS: Final[Mapping[str, Callable[[ModelConfig, Mapping[str, Tensor]], tuple[dict[str, Any], Mapping[str, Tensor]]]]] = {
    "wavetrain": _write_own,
    "gpt2": _write_gpt2,
    "llama": _write_llama,
}
