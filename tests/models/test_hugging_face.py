"""Checkpoints of transformers as lists of layers: the same logits and gradients, and nothing run that was not asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wavetrain.errors import InputError
from wavetrain.models import from_pretrained, layer_cost

LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16}),
    "llama": ("llama", LLAMA),
    "llama, tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama, scaled": ("llama", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": None}),
    "mistral, window": ("mistral", {**LLAMA, "sliding_window": 4}),
    "qwen2": ("qwen2", LLAMA),
    "qwen2, window": ("qwen2", {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}


def make_checkpoint(kind: str, folder: Path) -> Any:
    """A tiny random model of transformers, saved."""
    transformers = pytest.importorskip("transformers")
    model_type, shape = KINDS[kind]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **shape)).float()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = make_checkpoint(kind, tmp_path)
    ours = from_pretrained(tmp_path)
    assert ours.training
    ours.eval()
    assert [name for name, _ in ours.named_children()] == ["embed", "block0", "block1", "block2", "head"]
    tokens = torch.randint(0, 40, (2, 11))
    expected, found = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected.square().mean().backward()
    found.square().mean().backward()
    head = ours.get_submodule("head.projection")
    torch.testing.assert_close(head.weight.grad, theirs.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    token = ours.get_submodule("embed.token")
    torch.testing.assert_close(token.weight.grad, theirs.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-6)
    assert (head.weight is token.weight) == theirs.config.tie_word_embeddings
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert layer_cost(ours[1]) > layer_cost(ours[0])


def test_positions_end_where_the_checkpoint_says(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    with pytest.raises(InputError, match=r"17 tokens.*16 positions"):
        from_pretrained(tmp_path)(torch.zeros(1, 17, dtype=torch.int64))


def test_dtype_is_of_the_parameters_and_not_of_rotary_frequencies(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    model = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert model(torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.bfloat16


def config_only(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no config\.json"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"'t5'.*gpt2, llama"):
        from_pretrained(config_only(tmp_path, model_type="t5"))
    with pytest.raises(InputError, match="quantised"):
        from_pretrained(config_only(tmp_path, model_type="llama", quantization_config={}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(InputError, match="no \\*\\.safetensors"):
        from_pretrained(config_only(tmp_path, model_type="gpt2"))


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot load"):
        from_pretrained(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint("gpt2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if name.endswith("h.1.mlp.c_fc.weight"))
    save_file({n: w for n, w in weights.items() if n != lost}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks.*h\.1\.mlp\.c_fc\.weight"):
        from_pretrained(tmp_path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_only(tmp_path, model_type="gpt2")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes the import fail
    with pytest.raises(InputError, match=r"pip install 'wavetrain\[hf\]'"):
        from_pretrained(tmp_path)
