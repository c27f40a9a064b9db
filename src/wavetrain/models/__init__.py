"""Models as lists of layers, imported when first used (naming a shape needs no torch).

GPT, BERT, Uneven           each an ``nn.Sequential`` of named layers: ``x = layer(x)`` in order
Kraken, Parallel, Ladder    decoders that leave room for communication between ranks
ModelConfig, build_model    a model's shape as frozen data, to and from JSON, and the model of it
MODEL_NAMES                 what ``ModelConfig.name`` takes
layer_cost                  relative FLOPs of any layer, to cut a model into stages
parallelize_layer           tensor parallelism inside a layer
from_pretrained             a Hugging Face checkpoint directory as a list of layers (extra ``hf``)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavetrain.models.bert import BERT
    from wavetrain.models.config import MODEL_NAMES, ModelConfig
    from wavetrain.models.costs import layer_cost
    from wavetrain.models.gpt import GPT, Ladder, Parallel
    from wavetrain.models.hugging_face import from_pretrained
    from wavetrain.models.kraken import Kraken
    from wavetrain.models.layers import Layer, LayeredModel
    from wavetrain.models.registry import build_model
    from wavetrain.models.tensor_parallel import parallelize_layer
    from wavetrain.models.uneven import Uneven

_HOMES = {
    "BERT": "wavetrain.models.bert",
    "GPT": "wavetrain.models.gpt",
    "Kraken": "wavetrain.models.kraken",
    "Ladder": "wavetrain.models.gpt",
    "Parallel": "wavetrain.models.gpt",
    "MODEL_NAMES": "wavetrain.models.config",
    "Layer": "wavetrain.models.layers",
    "LayeredModel": "wavetrain.models.layers",
    "ModelConfig": "wavetrain.models.config",
    "Uneven": "wavetrain.models.uneven",
    "build_model": "wavetrain.models.registry",
    "from_pretrained": "wavetrain.models.hugging_face",
    "layer_cost": "wavetrain.models.costs",
    "parallelize_layer": "wavetrain.models.tensor_parallel",
}

__all__ = [
    "BERT",
    "GPT",
    "MODEL_NAMES",
    "Kraken",
    "Ladder",
    "Layer",
    "LayeredModel",
    "ModelConfig",
    "Parallel",
    "Uneven",
    "build_model",
    "from_pretrained",
    "layer_cost",
    "parallelize_layer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wavetrain.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
