"""From a config to its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from wavetrain.errors import UnknownNameError
from wavetrain.models.bert import BERT
from wavetrain.models.config import ModelConfig
from wavetrain.models.gpt import GPT, Ladder, Parallel
from wavetrain.models.kraken import Kraken
from wavetrain.models.layers import LayeredModel
from wavetrain.models.uneven import Uneven

MODELS: Final[Mapping[str, Callable[..., LayeredModel]]] = MappingProxyType(
    {"gpt": GPT, "bert": BERT, "uneven": Uneven, "parallel": Parallel, "ladder": Ladder, "kraken": Kraken}
)
"""Name to constructor."""


def build_model(config: ModelConfig | Mapping[str, Any]) -> LayeredModel:
    """The model of a config, or of the plain data that a checkpoint carries.

    Its weights are drawn from torch's default generator; under ``torch.device("meta")`` nothing is allocated or drawn.
    """
    if not isinstance(config, ModelConfig):
        config = ModelConfig.from_dict(config)
    if config.name not in MODELS:
        raise UnknownNameError("model", config.name, MODELS)
    return MODELS[config.name](**config.arguments())
