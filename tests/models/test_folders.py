"""Folders of config.json and safetensors: ours, GPT-2's and Llama's, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wavetrain.errors import CheckpointError, FormatError, InputError, UnknownNameError
from wavetrain.models import GPT, Kraken, LayeredModel
from wavetrain.models.folders import Folder, save_folder
from wavetrain.models.sharding import build_part, share

from .test_hugging_face import make_checkpoint

SMALL: dict[str, Any] = {"num_layers": 3, "hidden": 16, "num_heads": 4, "vocab": 40, "max_length": 16}


def loaded(folder: Path) -> LayeredModel:
    opened = Folder(folder)
    return build_part(opened.config, share(opened.config, 1), 0, opened.read, device=torch.device("cpu"), dtype=torch.float32)


def tokens() -> Tensor:
    return torch.randint(0, 40, (2, 11))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama, tied"])
def test_checkpoints_of_transformers_there_and_back(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = make_checkpoint(kind, tmp_path / "theirs")
    ours, x = loaded(tmp_path / "theirs"), tokens()
    with torch.no_grad():
        expected = theirs(x).logits
        torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
        save_folder(ours, tmp_path / "ours", kind=kind.split(",")[0])
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
        torch.testing.assert_close(again(x).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [lambda: GPT(**SMALL), lambda: Kraken(**SMALL, degree=2, positions="rotary", tied=False)])
def test_our_own_there_and_back_and_by_transformers_auto_classes(model: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import wavetrain.models.auto  # noqa: F401

    torch.manual_seed(0)
    original, x = model(), tokens()
    save_folder(original, tmp_path)
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = original(x)
        assert torch.equal(loaded(tmp_path)(x), expected)
        torch.testing.assert_close(auto(x).logits, expected)
        assert float(auto(x, labels=x).loss) > 0
    auto.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "again")(x), expected)
    grown = auto.generate(x[:1], max_new_tokens=3, do_sample=False)
    assert grown.shape == (1, 14)
    with pytest.raises(InputError, match="padding_side"):
        auto(x, attention_mask=torch.tensor([[0] + [1] * 10] * 2))


def test_what_a_folder_may_lack(tmp_path: Path) -> None:
    save_folder(GPT(**SMALL), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "block1.mlp.up.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks block1\.mlp\.up\.weight"):
        loaded(tmp_path)
    save_file({**weights, "block1.mlp.up.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"block1\.mlp\.up\.weight has shape \(3, 3\)"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which could run code"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ("{", FormatError, "not JSON"),
        ("[]", FormatError, "holds a list"),
        ({"model_type": "gpt3"}, UnknownNameError, "'gpt2'"),
        ({"model_type": "wavetrain"}, FormatError, "object called model"),
        ({"model_type": "wavetrain", "model": {**SMALL, "hiden": 3}}, UnknownNameError, "'hidden'"),
        ({"model_type": "gpt2", "n_embd": "8"}, FormatError, "n_embd is '8'"),
        ({"model_type": "gpt2", "activation_function": "relu"}, InputError, "gelu_new"),
        ({"model_type": "llama", "attention_bias": True}, InputError, "attention_bias"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}, InputError, "scales its rotary"),
        ({"model_type": "llama", "quantization_config": {}}, InputError, "quantised"),
    ],
)
def test_configs_that_cannot_be_read(values: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(error, match=words):
        Folder(tmp_path)


def test_what_cannot_be_written_as_another_kind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learned positions"):
        save_folder(Kraken(**SMALL), tmp_path, kind="gpt2")
    with pytest.raises(InputError, match="rotary"):
        save_folder(GPT(**SMALL), tmp_path, kind="llama")
    with pytest.raises(UnknownNameError, match="gpt2"):
        save_folder(GPT(**SMALL), tmp_path, kind="gpt")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_folder(GPT(**SMALL), tmp_path / "file")


def test_a_kraken_begins_as_the_gpt_it_is_made_of() -> None:
    """Without attention the streams of a converted Kraken add up to the standard one's: the same logits."""
    from wavetrain.models.conversion import kraken_from

    torch.manual_seed(0)
    for tied, degree in ((True, 2), (False, 4)):
        standard = GPT(**SMALL, bias=False, tied=tied)
        for name, p in standard.named_parameters():
            nn.init.normal_(p, mean=float("norm" in name), std=0.5)
            if ".out." in name:
                nn.init.zeros_(p)
        x = tokens()
        with torch.no_grad():
            torch.testing.assert_close(kraken_from(standard, degree)(x), standard(x), rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="divides the 4 kv heads"):
        kraken_from(standard, 3)
    with pytest.raises(InputError, match="only a gpt"):
        kraken_from(Kraken(**SMALL), 2)
