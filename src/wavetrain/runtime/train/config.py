"""What a training run is told: one frozen record, the same for flags, plan files, checkpoints and :func:`train`.

Nothing here imports torch. What is None is a choice that depends on others; :meth:`TrainConfig.resolved` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from wavetrain.errors import FormatError, InputError, UnknownNameError, require_keys
from wavetrain.files import parse_toml, read_text
from wavetrain.models.config import ModelConfig
from wavetrain.models.sizes import kraken_like

LOGGERS: Final = ("tensorboard", "wandb")
"""Where metrics can go beside the file."""
PRECISIONS: Final = ("fp32", "bf16", "fp16")

_STYLE: Final = ("kv_heads", "head_dim", "inner", "positions", "norm", "mlp")
_MODEL: Final = (
    *("model", "layers", "hidden", "heads", "vocab", "seq", "dropout", "wide_layers", "wide_hidden", "wide_heads"),
    *("degree", "kraken", "no_bias", *_STYLE),
)
KRAKENS: Final = ("modern", "paper", "exact")
"""How a Kraken is sized: as the GPT of the same flags, in either mode, or by the flags themselves."""
_PLAN: Final = ("schedule", "waves", "stages_per_rank", "growth", "cut")
TABLES: Final = ("plan", "ranks", "costs", "train")
"""Of a plan file."""
_KINDS: Final = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list of texts"}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    out: str
    """The run's directory: metrics, checkpoints and pictures."""
    model: str = "gpt"
    """gpt, bert, uneven, kraken, parallel or ladder."""
    layers: int = 8
    """Transformer blocks; of an uneven model, the narrow ones."""
    hidden: int = 256
    """Width of the model."""
    heads: int = 8
    """Attention heads a block."""
    vocab: int | None = None
    """Tokens that the model knows. Default: 256, the bytes (bert: 257, with the mask)."""
    dropout: float = 0.0
    """Of the embedding and of each residual branch."""
    wide_layers: int | None = None
    """Uneven model: blocks after the widening."""
    wide_hidden: int | None = None
    """Uneven model: width after the widening."""
    wide_heads: int | None = None
    """Uneven model: heads of the wide blocks."""
    degree: int | None = None
    """Kraken: sub-layers a block, the most ranks that can serve it. Default: 2."""
    kraken: str | None = None
    """Kraken: ``modern`` or ``paper``, as many parameters as the GPT of the same flags; ``exact``: the flags as they are."""
    kv_heads: int | None = None
    """Decoders: heads of keys and values. Default: heads."""
    head_dim: int | None = None
    """Decoders: width of a head. Default: hidden / heads."""
    inner: int | None = None
    """Decoders: inner width of the MLP. Default: 4 · hidden."""
    positions: str | None = None
    """Decoders: learned or rotary."""
    norm: str | None = None
    """Decoders: layer or rms."""
    mlp: str | None = None
    """Decoders: gelu or swiglu."""
    no_bias: bool = False
    """A gpt whose linear layers and norms have no biases, as the other decoders have none."""
    data: tuple[str, ...] = ()
    """Text files, .bin or .npy token files, or directories. Default: the sources of Python's standard library, byte by byte."""
    data_dtype: str = "uint16"
    """Of the numbers in .bin files."""
    seq: int = 128
    """Tokens a sequence."""
    batch: int | None = None
    """Sequences a step, over all replicas. Default: 2 a micro-batch."""
    ranks: int | None = None
    """Processes. Default: 2 · dp · tp."""
    dp: int = 1
    """Replicas of the pipeline."""
    tp: int = 1
    """Ranks that share every stage."""
    schedule: str = "zb-wave"
    """A schedule's name, or a .csv or .json file."""
    waves: int | None = None
    """Of hanayo and zb-wave. Default: 2, or 1 where the model has too few layers."""
    stages_per_rank: int | None = None
    """Of interleaved."""
    growth: float | None = None
    """Of zb-wave: the work of a pass over the ranks over that of the pass before. Default: 1, all stages alike."""
    micro_batches: int | None = None
    """Micro-batches a step and replica. Default: 2 a pipeline rank, or what the schedule's file has."""
    cut: tuple[int, ...] = ()
    """Layers of every stage, in the order of the forward pass. Default: by the layers' estimated costs."""
    recompute: bool = False
    """Keep only the inputs of stages, and compute the rest again in the backward pass."""
    precision: str = "fp32"
    """fp32, or bf16 or fp16 for matrix products (fp16 with a loss scale)."""
    steps: int | None = None
    """Steps of the whole run. Default: 200, or what fits in ``minutes``."""
    minutes: float | None = None
    """Minutes of training of the whole run, instead of steps."""
    optex: int | None = None
    """OptEx: gradients at so many points of the way ahead a step, by as many replicas at once (dp), or by one pipeline one after
    another; up to as many steps of the optimizer."""
    lr: float = 1e-3
    """The highest learning rate."""
    warmup: int = 20
    """Steps until it is reached; then a cosine to a tenth of it at the end."""
    weight_decay: float = 0.1
    """Of matrices; vectors have none."""
    clip: float = 1.0
    """The largest norm of the gradients."""
    seed: int = 0
    """Of weights, dropout and the order of the data."""
    validate_every: int = 50
    """Steps between validations, on the last twentieth of the data; 0: only at the end."""
    validation_batches: int = 4
    """Batches of a validation."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Checkpoints that are kept."""
    resume: bool = False
    """Go on from the newest checkpoint in ``out``, whatever plan it was saved under."""
    stop_on_nan: bool = True
    """End the run at a loss or gradient that is no number; if false, the step is left out instead."""
    log: tuple[str, ...] = ()
    """tensorboard, wandb."""
    prompt: str = "def "
    """What the line of text begins with that is generated at the end."""
    timeout_seconds: float = 600.0
    """How long a message may take before the run is ended."""
    quiet: bool = False
    """Print nothing while training."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "dp", "tp", "keep", "validation_batches"):
            _at_least(name, getattr(self, name), 1)
        for name in ("vocab", "batch", "ranks", "waves", "stages_per_rank", "micro_batches", "steps", "degree", "optex"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "seed", "validate_every", "checkpoint_every"):
            _at_least(name, getattr(self, name), 0)
        for name in ("lr", "clip", "timeout_seconds"):
            _positive(name, getattr(self, name))
        for name in ("minutes", "growth"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.weight_decay < 0 or not math.isfinite(self.weight_decay):
            raise InputError(f"weight_decay is {self.weight_decay}; give a number, 0 or more")
        if self.steps is not None and self.minutes is not None:
            raise InputError("steps and minutes are both given; one of them says when the run ends")
        if self.precision not in PRECISIONS:
            raise UnknownNameError("precision", self.precision, PRECISIONS)
        if self.optex is not None:
            self._check_optex(self.optex)
        for name in self.log:
            if name not in LOGGERS:
                raise UnknownNameError("log", name, LOGGERS)
        if not self.out:
            raise InputError("out is empty; give the run a directory, such as runs/first")

    def _check_optex(self, optex: int) -> None:
        if self.dp not in (1, optex):
            raise InputError(f"optex = {optex} with dp = {self.dp}: every replica is one point; take dp = {optex}, or dp = 1")
        if self.tp > 1:
            raise InputError(f"optex = {optex} with tp = {self.tp}: weights that ranks share are not supported; take tp = 1")
        if self.precision == "fp16":
            raise InputError("optex with fp16: its loss scale is not supported in a pipeline; take bf16 or fp32")

    @property
    def num_minibatches(self) -> int:
        """Parts of a step's batch whose gradients are computed apart: by replicas, or one after another."""
        return self.optex or self.dp

    @property
    def pipeline_ranks(self) -> int:
        """Ranks of one pipeline."""
        ranks = self.ranks if self.ranks is not None else 2 * self.dp * self.tp
        if ranks % (self.dp * self.tp):
            raise InputError(f"{ranks} ranks cannot be shared by dp={self.dp} · tp={self.tp}; take {self.dp * self.tp * 2} ranks")
        return ranks // (self.dp * self.tp)

    @property
    def checkpoints(self) -> Path:
        """The directory of the run's checkpoints."""
        return Path(self.out) / "checkpoints"

    def model_config(self) -> ModelConfig:
        """The model's shape."""
        style = {key: getattr(self, key) for key in _STYLE if getattr(self, key) is not None}
        if self.no_bias:
            style["bias"] = False
        common: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden": self.hidden,
            "num_heads": self.heads,
            "vocab": self.vocab if self.vocab is not None else 257 if self.model == "bert" else 256,
            "max_length": self.seq,
            "dropout": self.dropout,
        }
        if self.model != "kraken":
            if self.kraken is not None:
                raise InputError(f"kraken = {self.kraken!r} belongs to the model 'kraken', not to {self.model!r}; leave it out")
            wide = {key: getattr(self, key) for key in ("wide_layers", "wide_hidden", "wide_heads")}
            return ModelConfig(name=self.model, **common, **wide, degree=self.degree, **style)
        degree = self.degree if self.degree is not None else 2
        mode = self.kraken or "modern"
        if mode not in KRAKENS:
            raise UnknownNameError("kraken", mode, KRAKENS)
        if mode == "exact":
            return ModelConfig(name="kraken", degree=degree, **common, **style)
        return kraken_like(ModelConfig(**common), degree=degree, mode=mode, **style)

    def resolved(self, *, num_layers: int, takes_waves: bool, num_micro_batches: int | None = None) -> TrainConfig:
        """The same with every choice made.

        Args:
            num_layers: pieces that the model can be cut into.
            takes_waves: whether the schedule has waves to choose.
            num_micro_batches: of a schedule that is fixed already.
        """
        ranks = self.pipeline_ranks * self.dp * self.tp
        waves = self.waves
        if waves is None and takes_waves:
            waves = max(1, min(2, num_layers // (2 * self.pipeline_ranks)))
        micro_batches = self.micro_batches or num_micro_batches or 2 * self.pipeline_ranks
        parts = self.num_minibatches
        batch = self.batch if self.batch is not None else 2 * micro_batches * parts
        if batch % parts or batch // parts < micro_batches:
            each = f"of optex={self.optex} minibatches" if self.optex else f"of dp={self.dp} replicas"
            raise InputError(
                f"a batch of {batch} sequences cannot be split into {micro_batches} micro-batches for each {each}; "
                f"take a batch of {2 * micro_batches * parts}, or fewer micro-batches"
            )
        steps = 200 if self.steps is None and self.minutes is None else self.steps
        return replace(self, ranks=ranks, waves=waves, micro_batches=micro_batches, batch=batch, steps=steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is None is left out."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items() if v is not None}


def merge_settings(*sources: Mapping[str, Any]) -> TrainConfig:
    """One config of several partial ones; later sources win. Those that name another schedule drop what belonged to the last."""
    merged: dict[str, Any] = {}
    for source in sources:
        if source.get("schedule", merged.get("schedule")) != merged.get("schedule"):
            merged = {key: value for key, value in merged.items() if key not in _PLAN}
        if "steps" in source or "minutes" in source:
            merged = {key: value for key, value in merged.items() if key not in ("steps", "minutes")}
        merged |= source
    return TrainConfig(**merged)


def saved_settings(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The settings a checkpoint carries, as far as a resumed run takes them over.

    Raises:
        InputError: ``wanted`` asks for another model than the one that was saved.
    """
    for key in _MODEL:
        if key in wanted and wanted[key] != saved.get(key):
            raise InputError(
                f"{key} = {wanted[key]!r}, but the run to be resumed has {saved.get(key)!r}; leave {key} out, or start a new run"
            )
    known = {field.name for field in fields(TrainConfig)}
    left_out = {"out", "resume", "quiet", "log"}
    if any(key in wanted for key in ("ranks", "dp", "tp")):
        left_out |= {"ranks", "dp", "tp", "waves", "growth", "cut"}
    return {key: _as_field(value) for key, value in saved.items() if key in known - left_out}


def read_plan(path: Path) -> dict[str, Any]:
    """The ``[train]`` table of a plan file, checked; keys may be written with dashes, as the flags are."""
    document = parse_toml(read_text(path), path)
    require_keys(path, document, TABLES)
    if "train" not in document and "plan" in document:
        raise InputError(
            f"{path} was planned for a model or a strategy that wavetrain train cannot run (its first lines say why); export it, "
            "or give a [train] table"
        )
    table = document.get("train", {})
    if not isinstance(table, dict):
        raise FormatError(path, None, "train is not a table; write [train] above its keys")
    found = {key.replace("-", "_"): value for key, value in table.items()}
    hints = get_type_hints(TrainConfig)
    require_keys(f"[train] of {path}", found, hints)
    for key, value in found.items():
        kind = _kind(hints[key])
        if kind is tuple and isinstance(value, str) and key != "cut":
            found[key] = (value,)
        elif (key == "cut" and isinstance(value, list) and all(type(item) is int and item >= 1 for item in value)) or (
            key != "cut" and kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            found[key] = tuple(value)
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            found[key] = float(value)
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(
                path, None, f"{key} = {value!r}; give {'a list of whole numbers' if key == 'cut' else _KINDS[kind]}"
            )
    return found


def _kind(hint: Any) -> type:
    """The one type that a field takes beside None."""
    options = [option for option in getattr(hint, "__args__", ()) if option in (int, float, str, bool)]
    if getattr(hint, "__origin__", None) is tuple:
        return tuple
    return options[0] if options else hint  # type: ignore[no-any-return]


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}; give a whole number of at least {least}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} is {value}; give a number above 0")
