"""A model's config: as data, as JSON, and back to the model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.models import MODEL_NAMES, ModelConfig, build_model
from wavetrain.models.registry import MODELS

SHAPE: dict[str, Any] = {"num_layers": 1, "hidden": 8, "num_heads": 2, "vocab": 11}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_can_be_rebuilt_from_the_json_of_its_config(name: str) -> None:
    more = {"wide_layers": 2, "wide_hidden": 24, "wide_heads": 3} if name == "uneven" else {"tied": False}
    config = ModelConfig(name=name, max_length=7, mlp_ratio=2, dropout=0.1, **SHAPE, **more)
    model = build_model(config)
    assert model.config == config
    again = build_model(json.loads(json.dumps(model.config.to_dict())))
    assert again.config == config
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert again(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, 11)


def test_every_name_has_a_model() -> None:
    assert tuple(MODELS) == MODEL_NAMES


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_what_is_left_out_is_filled_in(name: str) -> None:
    config = ModelConfig(name=name, **SHAPE)
    assert config.tied == (name != "uneven")
    assert (config.wide_layers, config.wide_hidden, config.wide_heads) == ((12, 16, 4) if name == "uneven" else (None,) * 3)
    assert build_model(config).config == ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({**SHAPE, "hiden": 8}, "'hidden'"),
        ({**SHAPE, "name": "gtp"}, "'gpt'"),
        ({"name": "gpt", "hidden": 8, "vocab": 3}, "does not say num_layers, num_heads"),
        ({**SHAPE, "hidden": "8"}, "hidden is '8'"),
        ({**SHAPE, "hidden": None}, "hidden is None"),
        ({**SHAPE, "num_layers": True}, "num_layers is True"),
        ({**SHAPE, "tied": 1}, "tied is 1"),
        ({**SHAPE, "dropout": "0.1"}, "dropout is '0.1'"),
        ({**SHAPE, "num_heads": 3}, "num_heads=2 or 4"),
        ({**SHAPE, "wide_layers": 3}, "belongs to the model 'uneven'"),
        ({**SHAPE, "name": "uneven", "tied": True}, "cannot be tied"),
        ({**SHAPE, "name": "uneven", "wide_hidden": 10, "wide_heads": 4}, "wide_hidden=10"),
        ({**SHAPE, "name": "uneven", "hidden": "8"}, "hidden is '8'"),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model(given)


def test_an_unknown_key_names_the_place() -> None:
    with pytest.raises(UnknownNameError, match=r"plan\.toml"):
        ModelConfig.from_dict({**SHAPE, "colour": 1}, where="plan.toml")


def test_naming_a_shape_needs_no_torch() -> None:
    code = "import sys; from wavetrain.models import ModelConfig; import wavetrain.data.corpus; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
