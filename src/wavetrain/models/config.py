"""The shape of a model as frozen data: checked once, kept as JSON in a checkpoint, built by ``registry.build_model``.

The constructors of the models check their arguments by making a :class:`ModelConfig` of them, so both refuse the same things
with the same words. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypedDict

from wavetrain.errors import InputError, UnknownNameError, require_keys

MODEL_NAMES: Final = ("gpt", "bert", "uneven", "parallel", "ladder", "kraken")
"""The models that :func:`wavetrain.models.build_model` can build."""
DECODERS: Final = ("gpt", "parallel", "ladder", "kraken")
"""Those that predict the next token, can be written in several styles, and can be served."""

POSITIONS: Final = ("learned", "rotary")
NORMS: Final = ("layer", "rms")
MLPS: Final = ("gelu", "swiglu")

_ONLY_UNEVEN: Final = ("wide_layers", "wide_hidden", "wide_heads")
_STYLE: Final = ("kv_heads", "head_dim", "inner", "positions", "norm", "mlp", "bias", "norm_eps", "rope_theta")


class Style(TypedDict, total=False):
    """How the blocks of a decoder are written; the keys are fields of :class:`ModelConfig`."""

    kv_heads: int
    head_dim: int
    inner: int
    positions: str
    norm: str
    mlp: str
    bias: bool
    norm_eps: float
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one model; a field's rule is checked when it is made."""

    name: str = "gpt"
    """One of :data:`MODEL_NAMES`."""
    num_layers: int
    """Transformer blocks; of an uneven model, the narrow ones."""
    hidden: int
    """Width of the residual stream; of an uneven model, of its narrow part; of Kraken, of each of its streams."""
    num_heads: int
    """Query heads a block; of Kraken, of all its sub-layers together. Divides ``hidden``, unless ``head_dim`` is given."""
    vocab: int
    """Tokens that the embedding knows, and logits a position."""
    max_length: int = 1024
    """The longest sequence, in tokens."""
    mlp_ratio: int | None = None
    """Inner width of an MLP over ``hidden``; None: 4, of Kraken 2 a sub-layer."""
    dropout: float = 0.0
    """Probability with which an element of the embedding and of each residual branch is dropped, 0 to below 1."""
    tied: bool | None = None
    """Whether embedding and head share one weight; None: yes where widths allow it (all but the uneven model)."""
    wide_layers: int | None = None
    """Uneven model only: blocks after the widening; None: 12."""
    wide_hidden: int | None = None
    """Uneven model only: width after the widening; None: twice ``hidden``."""
    wide_heads: int | None = None
    """Uneven model only: heads of the wide blocks; None: twice ``num_heads``."""
    degree: int | None = None
    """Kraken only: N, its sub-layers a block; divides ``num_heads`` and ``kv_heads``; None: 2."""
    kv_heads: int | None = None
    """Decoders: heads of keys and values, shared by groups of query heads; None: ``num_heads``."""
    head_dim: int | None = None
    """Decoders: width of a head; None: ``hidden`` over the heads of a block (of Kraken, of a sub-layer)."""
    inner: int | None = None
    """Decoders: inner width of the MLP (of Kraken, of each sub-layer's); None: ``mlp_ratio`` · ``hidden``."""
    positions: str | None = None
    """Decoders: ``learned``, or ``rotary`` as in Llama; None: learned."""
    norm: str | None = None
    """Decoders: ``layer`` or ``rms``; None: layer."""
    mlp: str | None = None
    """Decoders: ``gelu`` (tanh form) or ``swiglu``; None: gelu."""
    bias: bool | None = None
    """Decoders: whether linear layers and norms have one; None: as GPT-2, of the other decoders none."""
    norm_eps: float | None = None
    """Decoders: what keeps norms from dividing by zero; None: 1e-5."""
    rope_theta: float | None = None
    """Decoders with rotary positions: the base of their angles; None: 10,000."""

    def __post_init__(self) -> None:
        if self.name not in MODEL_NAMES:
            raise UnknownNameError("model", self.name, MODEL_NAMES)
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}; give a probability from 0 to below 1")
        for field in ("tied", "bias"):
            if getattr(self, field) is not None and not isinstance(getattr(self, field), bool):
                raise InputError(f"{field} is {getattr(self, field)!r}; give true or false")
        if self.mlp_ratio is None:
            object.__setattr__(self, "mlp_ratio", 2 if self.name == "kraken" else 4)
        self._refuse_fields_of_others()
        for field in ("num_layers", "hidden", "num_heads", "vocab", "max_length", "mlp_ratio"):
            _check_count(field, getattr(self, field))
        if self.name in DECODERS:
            self._check_decoder()
        else:
            _check_heads("hidden", self.hidden, "num_heads", self.num_heads)
            self._fill_in_others()

    def _refuse_fields_of_others(self) -> None:
        for belongs, owner, names in (
            (self.name == "uneven", "the model 'uneven'", _ONLY_UNEVEN),
            (self.name == "kraken", "the model 'kraken'", ("degree",)),
            (self.name in DECODERS, f"decoders ({', '.join(DECODERS)})", _STYLE),
        ):
            for field in () if belongs else names:
                if getattr(self, field) is not None:
                    raise InputError(f"{field} belongs to {owner}, not to {self.name!r}; leave it out")
        if self.name == "uneven" and self.tied:
            raise InputError("an uneven model's embedding is narrow and its head wide: they cannot be tied; leave tied out")

    def _fill(self, **defaults: Any) -> None:
        """Put what None stands for in its place."""
        for field, value in defaults.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)

    def _fill_in_others(self) -> None:
        if self.name == "bert":
            self._fill(tied=True)
            return
        self._fill(tied=False, wide_layers=12, wide_hidden=2 * self.hidden, wide_heads=2 * self.num_heads)
        for field in _ONLY_UNEVEN:
            _check_count(field, getattr(self, field))
        _check_heads("wide_hidden", self.wide_hidden or 0, "wide_heads", self.wide_heads or 0)

    def _check_decoder(self) -> None:
        if self.name == "kraken":
            self._fill(degree=2)
            _check_count("degree", self.degree)
            if self.bias:
                raise InputError("kraken has no biases; leave bias out")
        streams = self.degree or 1
        self._fill(tied=True, kv_heads=self.num_heads, positions="learned", norm="layer", mlp="gelu", bias=self.name == "gpt")
        self._fill(norm_eps=1e-5, rope_theta=10_000.0, inner=(self.mlp_ratio or 0) * self.hidden)
        for field, known in (("positions", POSITIONS), ("norm", NORMS), ("mlp", MLPS)):
            if getattr(self, field) not in known:
                raise UnknownNameError(field, getattr(self, field), known)
        for field in ("norm_eps", "rope_theta"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise InputError(f"{field} is {value!r}; give a number above 0")
        for field in ("kv_heads", "inner"):
            _check_count(field, getattr(self, field))
        for field in ("num_heads", "kv_heads"):
            if getattr(self, field) % streams:
                raise InputError(
                    f"{field}={getattr(self, field)} cannot be shared evenly by degree={streams} sub-layers; "
                    f"take a multiple of {streams}"
                )
        if self.num_heads % (self.kv_heads or 1):
            raise InputError(f"kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}; take a divisor of it")
        if self.head_dim is None:
            _check_heads("hidden", self.hidden, "num_heads" + "/degree" * (streams > 1), self.num_heads // streams)
            self._fill(head_dim=self.hidden // (self.num_heads // streams))
        _check_count("head_dim", self.head_dim)
        if self.positions == "rotary" and (self.head_dim or 0) % 2:
            raise InputError(f"rotary positions turn pairs, but head_dim={self.head_dim} is odd; give head_dim an even number")

    def arguments(self) -> dict[str, Any]:
        """What the model's constructor takes: all that applies to it but its name."""
        own = self.to_dict()
        del own["name"]
        return own

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or TOML; fields that do not apply to the model are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            key: value for key, value in values.items() if value is not None and not (key == "tied" and self.name == "uneven")
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: object = "the model's config") -> ModelConfig:
        """The inverse of :meth:`to_dict`.

        Args:
            values: field to value.
            where: what an error names as the place of a bad key, e.g. a file.
        """
        require_keys(where, values, [field.name for field in fields(cls)])
        missing = [field for field in ("num_layers", "hidden", "num_heads", "vocab") if field not in values]
        if missing:
            raise InputError(f"{where} does not say {', '.join(missing)}")
        return cls(**values)


@dataclass(frozen=True)
class DecoderShape:
    """The numbers that a decoder's blocks are made of, none of them optional; those of one sub-layer if there are several."""

    config: ModelConfig

    @property
    def streams(self) -> int:
        """Sub-layers a block."""
        return self.config.degree or 1

    @property
    def heads(self) -> int:
        return self.config.num_heads // self.streams

    @property
    def kv_heads(self) -> int:
        return (self.config.kv_heads or self.config.num_heads) // self.streams

    @property
    def head_dim(self) -> int:
        assert self.config.head_dim is not None
        return self.config.head_dim

    @property
    def inner(self) -> int:
        assert self.config.inner is not None
        return self.config.inner

    @property
    def norm_eps(self) -> float:
        assert self.config.norm_eps is not None
        return self.config.norm_eps

    @property
    def rope_theta(self) -> float | None:
        """The base of rotary angles; None where positions are learned."""
        return self.config.rope_theta if self.config.positions == "rotary" else None

    @property
    def num_kv_elements(self) -> int:
        """Numbers that a KV cache keeps for one token of one sequence, over all blocks and sub-layers."""
        return 2 * self.config.num_layers * self.streams * self.kv_heads * self.head_dim


def _check_count(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{field} is {value!r}; give a whole number of at least 1")


def _check_heads(width_name: str, width: int, heads_name: str, heads: int) -> None:
    if width % heads:
        near = [n for n in range(1, width + 1) if width % n == 0]
        below = max((n for n in near if n < heads), default=1)
        above = min((n for n in near if n > heads), default=width)
        raise InputError(
            f"{width_name}={width} cannot be split into {heads_name}={heads} equal heads; "
            f"take {heads_name}={below} or {above}, or {width_name}={-(-width // heads) * heads}"
        )
