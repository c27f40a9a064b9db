"""Workloads: what a model costs, layer by layer, before anyone has run it.

A :class:`Layer` says how many operations its matrix products take, how many bytes everything else moves, what it leaves behind
for the backward pass, and which part of each is divided when tensor parallelism shares the layer. Seconds follow from these on a
device, or from a profile that was measured (:mod:`wavetrain.profile`).

Sources: presets by name, shapes, a TOML file of shapes,

    name = "my-gpt"
    layers = 24
    hidden = 1024
    heads = 16
    seq = 1024
    vocab = 50257
    precision = "bf16"               # fp16, bf16 or fp32; default: bf16
    ffn = 4096                       # width of the MLP; default: 4 · hidden
    kv_heads = 4                     # of grouped-query attention; default: heads
    gated = true                     # an MLP with a gate (SwiGLU); default: false
    tied = true                      # embedding and head share their weights; default: true
    fused_attention = true           # FlashAttention: scores are never written; default: false

    [[parts]]                        # in the place of layers, hidden and heads: models whose layers are not alike
    layers = 12
    hidden = 384
    heads = 4
    seq = 1024

and ``config.json`` of a Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from wavetrain.errors import FormatError, InputError, UnknownNameError, require_keys
from wavetrain.files import parse_toml, read_text

PRECISIONS: Final = {"fp16": 2, "bf16": 2, "fp32": 4}
"""Bytes of an element."""
MAX_LAYERS: Final = 4096
_MAX_SIZE: Final = 2**31


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. Numbers are of one sample's forward pass; tensor parallelism divides ``split`` ones, and not ``whole`` ones."""

    name: str
    flops: float = 0.0
    """Operations of matrix products."""
    attention_flops: float = 0.0
    """Of these, the ones of attention's own two products: selective recompute does them again."""
    width: float = 1.0
    """Elements of a token's vector: products of narrow matrices reach less of a device's peak."""
    moved_split: float = 0.0
    """Bytes that everything but matrix products reads and writes."""
    moved_whole: float = 0.0
    moved_scores: float = 0.0
    """The same for attention's scores where they are written to memory; divided too."""
    moved_logits: float = 0.0
    """The same for logits and their loss; divided too."""
    parameters_split: float = 0.0
    """How many."""
    parameters_whole: float = 0.0
    activation_split: float = 0.0
    """Bytes that are kept for the backward pass."""
    activation_whole: float = 0.0
    score_bytes: float = 0.0
    """Of ``activation_split``, attention's scores and what is made of them: selective recompute does not keep them."""
    working_split: float = 0.0
    """Bytes that are needed while the backward pass of the layer runs, beside what was kept."""
    output_bytes: float = 0.0
    """Bytes of the layer's output."""
    reductions: int = 0
    """All-reduces of an output in the forward pass under tensor parallelism; the backward pass has as many."""
    kernels: float = 1.0
    """How much there is to launch, in units of a transformer block."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model as a list of layers."""

    name: str
    layers: tuple[Layer, ...]
    element_bytes: int = 2
    """Of weights, activations and messages."""
    tied: bool = False
    """Whether the first and the last layer share their weights: on different ranks both hold them, and reduce their gradients."""
    tokens: int = 1
    """Of one sample; only to tell throughput in tokens."""
    tensor_limit: int = 2**20
    """Tensor parallelism must divide it: the number of attention heads, where the layers have any."""
    shape: Shape | None = None
    """Of a transformer of equal blocks."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InputError(f"{self.name} has {len(self.layers)} layers; expected 1 to {MAX_LAYERS}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_parameters(self) -> float:
        return sum(layer.parameters_split + layer.parameters_whole for layer in self.layers)

    @cached_property
    def flops(self) -> float:
        """Operations of matrix products of one sample, forward."""
        return sum(layer.flops for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer of equal blocks."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    tied: bool = True
    fused_attention: bool = False
    positions: bool = True
    """Whether positions have weights of their own."""

    @property
    def is_gpt2(self) -> bool:
        """Whether :class:`wavetrain.models.GPT` builds such a model: whole heads, an MLP four times as wide, no gate."""
        return not self.gated and self.kv_heads in (None, self.heads) and self.ffn in (None, 4 * self.hidden)

    def workload(self, name: str, precision: str = "bf16") -> Workload:
        """Embedding, blocks and head as layers."""
        if precision not in PRECISIONS:
            raise UnknownNameError("precision", precision, PRECISIONS)
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and not 1 <= value <= _MAX_SIZE:
                raise InputError(f"{name}: {field.name} is {value}; expected 1 to {_MAX_SIZE}")
        if self.layers > MAX_LAYERS:
            raise InputError(f"{name}: {self.layers} layers; at most {MAX_LAYERS} are planned for")
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise InputError(
                f"{name}: {self.hidden} wide with {self.heads} heads and {self.kv_heads or self.heads} key-value heads: heads "
                "must divide the width, and key-value heads the heads"
            )
        size = PRECISIONS[precision]
        blocks = [replace(block(self, size), name=f"block {i}") for i in range(self.layers)]
        return Workload(
            name=name,
            layers=(embedding(self, size), *blocks, head(self, size)),
            element_bytes=size,
            tied=self.tied,
            tokens=self.seq,
            tensor_limit=self.heads,
            shape=self,
        )


def block(shape: Shape, element_bytes: int) -> Layer:
    """A transformer block: attention and MLP, each with its norm, residual and (under tensor parallelism) all-reduce.

    Activations are those of Korthikanti et al. (2022): s·h·(34 + 5·a·s/h) bytes in half precision, of which 10·s·h are whole.
    """
    s, h, a = shape.seq, shape.hidden, shape.heads
    f = shape.ffn if shape.ffn is not None else 4 * h
    kv = shape.kv_heads if shape.kv_heads is not None else a
    matrices = h * h * (2 + 2 * kv / a) + (3 if shape.gated else 2) * h * f
    attention = 4.0 * s * s * h
    scores = 0.0 if shape.fused_attention else float(a) * s * s
    wide = f / (4 * h) * (1.5 if shape.gated else 1.0)
    half = element_bytes / 2
    return Layer(
        name="block",
        flops=2.0 * s * matrices + attention,
        attention_flops=attention,
        width=float(h),
        moved_split=element_bytes * s * h * (6 + 8 * wide),
        moved_whole=element_bytes * 20.0 * s * h,
        moved_scores=element_bytes * 5.0 * scores,
        parameters_split=matrices + (2 + 2 * kv / a) * h + f,
        parameters_whole=6.0 * h,
        activation_split=half * (s * h * (8 + 16 * wide) + 5 * scores),
        activation_whole=half * 10.0 * s * h,
        score_bytes=half * 5 * scores,
        output_bytes=float(element_bytes) * s * h,
        reductions=2,
    )


def embedding(shape: Shape, element_bytes: int) -> Layer:
    """Tokens and positions to vectors."""
    out = float(element_bytes) * shape.seq * shape.hidden
    return Layer(
        name="embedding",
        moved_whole=4 * out,
        parameters_split=float(shape.vocab) * shape.hidden,
        parameters_whole=float(shape.seq) * shape.hidden if shape.positions else 0.0,
        activation_whole=0.5 * out,
        output_bytes=out,
        reductions=1,
        kernels=0.25,
    )


def head(shape: Shape, element_bytes: int) -> Layer:
    """The last norm, the logits and the loss. Logits are taken to 4 bytes for the loss, which keeps them and their softmax."""
    logits = float(shape.seq) * shape.vocab
    return Layer(
        name="head",
        flops=2.0 * logits * shape.hidden,
        width=float(shape.hidden),
        moved_logits=logits * (3.0 * element_bytes + 16.0),
        moved_whole=6.0 * element_bytes * shape.seq * shape.hidden,
        parameters_split=0.0 if shape.tied else float(shape.vocab) * shape.hidden,
        parameters_whole=2.0 * shape.hidden,
        activation_split=logits * (element_bytes + 8.0),
        working_split=logits * (element_bytes + 4.0),
        activation_whole=2.0 * element_bytes * shape.seq * shape.hidden,
        output_bytes=4.0,
        reductions=1,
        kernels=0.5,
    )


def _gpt(layers: int, hidden: int, heads: int, seq: int = 1024, vocab: int = 50257) -> Shape:
    return Shape(layers=layers, hidden=hidden, heads=heads, seq=seq, vocab=vocab)


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None, seq: int = 4096, vocab: int = 32000
) -> Shape:
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq=seq,
        vocab=vocab,
        ffn=ffn,
        kv_heads=kv_heads,
        gated=True,
        tied=False,
        fused_attention=True,
        positions=False,
    )


PRESETS: Final[dict[str, Shape]] = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "llama-7b": _llama(32, 4096, 32, 11008),
    "llama-13b": _llama(40, 5120, 40, 13824),
    "llama-33b": _llama(60, 6656, 52, 17920, seq=2048),
    "llama-65b": _llama(80, 8192, 64, 22016, seq=2048),
    "llama-70b": _llama(80, 8192, 64, 28672, 8),
    "llama3-8b": _llama(32, 4096, 32, 14336, 8, 8192, 128256),
    "llama3-70b": _llama(80, 8192, 64, 28672, 8, 8192, 128256),
    "bert-base": Shape(layers=12, hidden=768, heads=12, seq=512, vocab=30522),
    "bert-large": Shape(layers=24, hidden=1024, heads=16, seq=512, vocab=30522),
}
"""Models by name."""
PRESET_NAMES: Final = (*PRESETS, "transgan")


def load_workload(source: str | os.PathLike[str], *, seq: int | None = None, precision: str | None = None) -> Workload:
    """A model by the name of a preset, from a TOML file of shapes, or from a Hugging Face ``config.json`` (or its folder).

    Args:
        source: the name or path.
        seq: tokens of a sample; default: the model's own.
        precision: fp16, bf16 or fp32; default: what the source says, else bf16.

    Raises:
        FormatError: a file that cannot be read, or a value in it that is not what its key asks for.
        UnknownNameError: no such preset, key or architecture.
    """
    name = os.fspath(source)
    if name == "transgan":
        return transgan(precision or "bf16")
    if name in PRESETS:
        shape = PRESETS[name] if seq is None else replace(PRESETS[name], seq=seq)
        return shape.workload(name, precision or "bf16")
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_hugging_face(path, seq, precision)
    if path.suffix == ".toml":
        return workload_from_text(read_text(path), path, seq=seq, precision=precision)
    raise UnknownNameError("model", name, PRESET_NAMES)


def transgan(precision: str = "bf16") -> Workload:
    """An uneven model in the manner of TransGAN: 12 narrow blocks on few tokens, then 12 on four times as many."""
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    narrow = Shape(layers=12, hidden=1024, heads=16, seq=256, vocab=256)
    wide = Shape(layers=12, hidden=512, heads=16, seq=4096, vocab=256)
    return _of_parts("transgan", [narrow, wide], PRECISIONS[precision])


def _of_parts(name: str, parts: list[Shape], element_bytes: int) -> Workload:
    layers = [embedding(parts[0], element_bytes)]
    for n, part in enumerate(parts):
        layers += [replace(block(part, element_bytes), name=f"block {n}.{i}") for i in range(part.layers)]
    layers.append(head(replace(parts[-1], tied=False), element_bytes))
    return Workload(
        name=name,
        layers=tuple(layers),
        element_bytes=element_bytes,
        tokens=parts[0].seq,
        tensor_limit=math.gcd(*(p.heads for p in parts)),
    )


_SHAPE_KEYS: Final = tuple(field.name for field in fields(Shape))
_REQUIRED: Final = ("layers", "hidden", "heads", "seq")


def workload_from_text(text: str, path: object = "<model>", *, seq: int | None = None, precision: str | None = None) -> Workload:
    """The model in the text of a TOML file; ``path`` is what errors name."""
    data = parse_toml(text, path)
    require_keys(path, data, ("name", "precision", "parts", *_SHAPE_KEYS))
    given = precision or data.get("precision", "bf16")
    name = data.get("name", Path(str(path)).stem)
    if not isinstance(name, str) or not isinstance(given, str):
        raise FormatError(path, None, "name and precision must be texts")
    common = {key: value for key, value in data.items() if key in _SHAPE_KEYS}
    parts = data.get("parts")
    if parts is None:
        shape = _shape(path, text, common)
        return _built(path, lambda: (shape if seq is None else replace(shape, seq=seq)).workload(name, given))
    if not isinstance(parts, list) or not parts or not all(isinstance(p, dict) for p in parts):
        raise FormatError(path, None, "parts is no list of [[parts]] tables")
    shapes = []
    for i, part in enumerate(parts):
        require_keys(f"{path}, parts[{i}]", part, _SHAPE_KEYS)
        shapes.append(_shape(path, text, common | part))
    if given not in PRECISIONS:
        raise UnknownNameError("precision", given, PRECISIONS)
    for shape in shapes:
        _built(path, lambda shape=shape: shape.workload(name, given))
    return _built(path, lambda: _of_parts(name, shapes, PRECISIONS[given]))


def _built(path: object, make: Any) -> Workload:
    try:
        return make()  # type: ignore[no-any-return]
    except UnknownNameError:
        raise
    except InputError as error:
        raise FormatError(path, None, str(error)) from None


def _shape(path: object, text: str, data: Mapping[str, Any]) -> Shape:
    values = dict(data)
    for key in _REQUIRED:
        if key not in values:
            raise FormatError(path, None, f"no {key!r}: a model needs {', '.join(_REQUIRED)}")
    values.setdefault("vocab", 50257)
    for key, value in values.items():
        flag = key in ("gated", "tied", "fused_attention", "positions")
        right = isinstance(value, bool) if flag else type(value) is int and 1 <= value <= _MAX_SIZE
        if not right:
            found = re.search(rf"^[ \t]*{key}[ \t]*=", text, re.MULTILINE)
            line = text.count("\n", 0, found.start()) + 1 if found else None
            wanted = "true or false" if flag else f"a whole number, 1 to {_MAX_SIZE}"
            raise FormatError(path, line, f"{key} is {value!r}; expected {wanted}")
    return Shape(**values)


_HUGGING_FACE: Final[dict[str, dict[str, str]]] = {
    "gpt2": {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "seq": "n_positions", "ffn": "n_inner"},
    "gpt_neo": {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "heads": "num_heads",
        "seq": "max_position_embeddings",
        "ffn": "intermediate_size",
    },
    "opt": {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "seq": "max_position_embeddings",
        "ffn": "ffn_dim",
    },
}
_COMMON: Final = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "seq": "max_position_embeddings",
    "ffn": "intermediate_size",
    "kv_heads": "num_key_value_heads",
}
for _name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt_neox", "bert", "roberta"):
    _HUGGING_FACE[_name] = _COMMON
_GATED: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")


def _from_hugging_face(path: Path, seq: int | None, precision: str | None) -> Workload:
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, getattr(error, "lineno", None), f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise FormatError(path, None, "not a Hugging Face configuration: expected an object")
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _HUGGING_FACE:
        raise UnknownNameError(f"architecture (model_type in {path})", str(kind), _HUGGING_FACE)
    values: dict[str, Any] = {}
    for ours, theirs in _HUGGING_FACE[kind].items():
        value = data.get(theirs)
        if value is None and ours in ("ffn", "kv_heads"):
            continue
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise FormatError(path, _line_of(text, theirs), f"{theirs} is {value!r}; expected a whole number, 1 to {_MAX_SIZE}")
        values[ours] = value
    vocab = data.get("vocab_size")
    if type(vocab) is not int or vocab < 1:
        raise FormatError(path, _line_of(text, "vocab_size"), f"vocab_size is {vocab!r}; expected a whole number above 0")
    gated = kind in _GATED
    shape = Shape(
        **(values | ({"seq": seq} if seq is not None else {})),
        vocab=vocab,
        gated=gated,
        tied=bool(data.get("tie_word_embeddings", not gated)),
        fused_attention=gated,
        positions=not gated and kind != "gpt_neox",
    )
    dtype = str(data.get("torch_dtype", data.get("dtype", "bfloat16")))
    known = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    name = str(data.get("_name_or_path") or path.parent.name or kind)
    return _built(path, lambda: shape.workload(name, precision or known.get(dtype, "bf16")))


def _line_of(text: str, key: str) -> int | None:
    at = text.find(f'"{key}"')
    return None if at < 0 else text.count("\n", 0, at) + 1


def human(number: float) -> str:
    """A count in words: 1.56 B, 124 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}" if math.isfinite(number) else str(number)
