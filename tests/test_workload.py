"""What models cost, from presets, shapes, files and Hugging Face configurations."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wavetrain.errors import FormatError, InputError, UnknownNameError
from wavetrain.workload import PRESET_NAMES, Shape, Workload, block, human, load_workload, workload_from_text

SHAPES = {
    "gpt2": 124e6,
    "gpt2-medium": 355e6,
    "gpt2-xl": 1558e6,
    "gpt3-175b": 175e9,
    "llama-7b": 6.74e9,
    "llama-70b": 69e9,
    "llama3-8b": 8.03e9,
    "bert-large": 335e6,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    assert load_workload(name).num_parameters == pytest.approx(SHAPES[name], rel=0.012)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset(name: str) -> None:
    workload = load_workload(name)
    assert workload.num_layers > 10
    assert all(layer.output_bytes > 0 for layer in workload.layers)
    assert load_workload(name, precision="fp32").layers[1].output_bytes == 2 * workload.layers[1].output_bytes


def test_operations_are_those_of_the_formula() -> None:
    """72·B·L·s·h²(1 + s/6h + V/12hL) for forward and backward."""
    shape = Shape(layers=24, hidden=1024, heads=16, seq=1024, vocab=50257)
    workload = shape.workload("x")
    s, h, layers, vocab = 1024, 1024, 24, 50257
    assert 3 * workload.flops == pytest.approx(72 * layers * s * h * h * (1 + s / (6 * h) + vocab / (12 * h * layers)), rel=1e-3)


def test_activations_are_those_of_the_formula() -> None:
    """s·h·(34 + 5·a·s/h) bytes, of which 10·s·h stay whole."""
    layer = block(Shape(layers=1, hidden=1024, heads=16, seq=2048, vocab=100), 2)
    assert layer.activation_split + layer.activation_whole == pytest.approx(2048 * 1024 * (34 + 5 * 16 * 2))
    assert layer.activation_whole == 10 * 2048 * 1024
    assert layer.score_bytes == 5 * 16 * 2048 * 2048


def test_fused_attention_keeps_no_scores() -> None:
    fused = block(Shape(layers=1, hidden=64, heads=4, seq=128, vocab=100, fused_attention=True), 2)
    assert fused.score_bytes == 0
    assert fused.attention_flops == 4 * 128 * 128 * 64


TOML = """
layers = 4
hidden = 64
heads = 4
seq = 32
vocab = 100
precision = "fp32"
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    found = load_workload(path)
    assert (found.name, found.num_layers, found.element_bytes) == ("small", 6, 4)
    assert load_workload(path, seq=64, precision="bf16").layers[1].output_bytes == found.layers[1].output_bytes


def test_parts_of_different_width() -> None:
    text = "seq = 16\nheads = 2\nvocab = 10\n[[parts]]\nlayers = 2\nhidden = 8\n[[parts]]\nlayers = 3\nhidden = 32\nseq = 64\n"
    found = workload_from_text(text, "x.toml")
    assert [layer.output_bytes for layer in found.layers] == [256] * 3 + [4096] * 3 + [4]


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (("layers = 4", "layers = 0"), 2, "layers is 0"),
        (("layers = 4", "layers = -4"), 2, "layers is -4"),
        (("layers = 4", "layers = 1.5"), 2, "layers is 1.5"),
        (("hidden = 64", ""), None, "no 'hidden'"),
        (("heads = 4", "heads = 5"), None, "heads must divide the width"),
        (("seq = 32", 'seq = "a"'), 5, "seq is 'a'"),
        (("seq = 32", "seq = 32\ntied = 1"), 6, "tied is 1; expected true or false"),
        (("layers = 4", "layers = 9999999"), None, "at most 4096"),
        (("layers = 4", "layers = ["), 3, "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file(change: tuple[str, str], line: int | None, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        workload_from_text(TOML.replace(*change), "x.toml")
    assert caught.value.line == line


def test_names_that_are_not_known() -> None:
    with pytest.raises(UnknownNameError, match="gpt2-xl"):
        load_workload("gpt2-lx")
    with pytest.raises(UnknownNameError, match="did you mean 'fp16'"):
        load_workload("gpt2", precision="fp61")
    with pytest.raises(UnknownNameError, match="hidden"):
        workload_from_text(TOML.replace("hidden", "hiden"))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = load_workload(tmp_path)
    assert found.num_layers == 4
    assert found.num_parameters == pytest.approx(2 * 1000 * 64 + 2 * (64 * 64 * 3 + 3 * 64 * 128), rel=0.02)
    assert load_workload(tmp_path / "config.json", seq=64).tokens == 64


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "mamba"}, "unknown architecture .* 'mamba'"),
        ({"model_type": None}, "unknown architecture"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": "x"}, "vocab_size is 'x'"),
        ({"num_attention_heads": 5}, "heads must divide the width"),
    ],
)
def test_hugging_face_configurations_that_cannot_be_read(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    with pytest.raises(InputError, match=problem):
        load_workload(path)


@given(st.text(max_size=200))
@example("parts = [1]\nlayers = 2\nhidden = 2\nheads = 2\nseq = 1")
@example("precision = 3")
@settings(deadline=None)
def test_any_text_is_a_model_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert isinstance(workload_from_text(text), Workload)


def test_counts_in_words() -> None:
    assert [human(n) for n in (12, 1.5e3, 124e6, 1.558e9, 2e12)] == ["12", "1.5 k", "124 M", "1.56 B", "2 T"]
