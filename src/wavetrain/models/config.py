"""The shape of a model as frozen data: checked once, kept as JSON in a checkpoint, built by ``registry.build_model``.

The constructors of the models check their arguments by making a :class:`ModelConfig` of them, so both refuse the same things
with the same words. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from wavetrain.errors import InputError, UnknownNameError, require_keys

MODEL_NAMES: Final = ("gpt", "bert", "uneven")
"""The models that :func:`wavetrain.models.build_model` can build."""

_ONLY_UNEVEN: Final = ("wide_layers", "wide_hidden", "wide_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one model; a field's rule is checked when it is made."""

    name: str = "gpt"
    """One of :data:`MODEL_NAMES`."""
    num_layers: int
    """Transformer blocks; of an uneven model, the narrow ones."""
    hidden: int
    """Width of the residual stream; of an uneven model, of its narrow part."""
    num_heads: int
    """Attention heads a block; divides ``hidden``."""
    vocab: int
    """Tokens that the embedding knows, and logits a position."""
    max_length: int = 1024
    """The longest sequence, in tokens."""
    mlp_ratio: int = 4
    """Inner width of an MLP over ``hidden``."""
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

    def __post_init__(self) -> None:
        if self.name not in MODEL_NAMES:
            raise UnknownNameError("model", self.name, MODEL_NAMES)
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}; give a probability from 0 to below 1")
        if self.tied is not None and not isinstance(self.tied, bool):
            raise InputError(f"tied is {self.tied!r}; give true or false")
        self._fill_in()
        for field in ("num_layers", "hidden", "num_heads", "vocab", "max_length", "mlp_ratio", *self._wide_fields()):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{field} is {value!r}; give a whole number of at least 1")
        _check_heads("hidden", self.hidden, "num_heads", self.num_heads)
        if self.wide_hidden is not None and self.wide_heads is not None:
            _check_heads("wide_hidden", self.wide_hidden, "wide_heads", self.wide_heads)

    def _wide_fields(self) -> tuple[str, ...]:
        return _ONLY_UNEVEN if self.name == "uneven" else ()

    def _fill_in(self) -> None:
        """Put what None stands for in its place, and refuse fields of another model."""
        if self.name == "uneven":
            if self.tied:
                raise InputError("an uneven model's embedding is narrow and its head wide: they cannot be tied; leave tied out")
            defaults: dict[str, Any] = {"tied": False, "wide_layers": 12}
            for wide, narrow in (("wide_hidden", self.hidden), ("wide_heads", self.num_heads)):
                defaults[wide] = 2 * narrow if isinstance(narrow, int) else narrow  # what is no number is refused after this
        else:
            for field in _ONLY_UNEVEN:
                if getattr(self, field) is not None:
                    raise InputError(f"{field} belongs to the model 'uneven', not to {self.name!r}; leave it out")
            defaults = {"tied": True}
        for field, value in defaults.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)

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


def _check_heads(width_name: str, width: int, heads_name: str, heads: int) -> None:
    if width % heads:
        near = [n for n in range(1, width + 1) if width % n == 0]
        below = max((n for n in near if n < heads), default=1)
        above = min((n for n in near if n > heads), default=width)
        raise InputError(
            f"{width_name}={width} cannot be split into {heads_name}={heads} equal heads; "
            f"take {heads_name}={below} or {above}, or {width_name}={-(-width // heads) * heads}"
        )
