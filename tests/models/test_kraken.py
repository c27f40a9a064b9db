"""Kraken and its rivals compute what their papers say, and have as many parameters as they claim."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.models import GPT, Kraken, Ladder, ModelConfig, Parallel, build_model
from wavetrain.models.config import DECODERS, DecoderShape
from wavetrain.models.sizes import PUBLISHED, kraken_like, num_parameters

SMALL: dict[str, Any] = {"num_layers": 3, "hidden": 16, "num_heads": 4, "vocab": 31, "max_length": 12}
STYLES: list[dict[str, Any]] = [
    {},
    {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "kv_heads": 2},
    {"positions": "rotary", "head_dim": 6, "inner": 24},
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def scattered(model: Any) -> Any:
    """Weights that are not near zero, so that every term shows."""
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def tokens(seq: int = 9) -> Tensor:
    return torch.randint(0, 31, (2, seq))


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """Textbook attention with rows (head, [q, k, v], head_dim)."""
    parts = torch.unflatten(x @ qkv.mT, -1, (heads, 3, -1))
    q, k, v = (parts[..., i, :].transpose(1, 2) for i in range(3))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2) @ out.mT


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_kraken_is_the_papers_equations(degree: int) -> None:
    model = scattered(Kraken(**SMALL, degree=degree))
    x = tokens()

    def norm(value: Tensor, weight: Tensor) -> Tensor:
        return layer_norm(value, (16,), weight)

    e = model.embed.token(x) + model.embed.position.weight[:9]
    streams = [e] * degree
    for number in range(3):
        block = model.get_submodule(f"block{number}")
        total = sum(streams)
        after = []
        for i, own in enumerate(streams):
            first, second = (w.weight.view(degree, 16)[i] for w in (block.attention_norm, block.mlp_norm))
            y = attention(norm(own, first), block.attention.qkv.weight[i], block.attention.out.weight[i], 4 // degree)
            a = own + y
            m = a if number == 0 else a + (total - own)  # the paper's m_i: its own a_i and the others' x_j
            after.append(a + gelu(norm(m, second) @ block.mlp.up.weight[i].mT, approximate="tanh") @ block.mlp.down.weight[i].mT)
        streams = after
    mixed = sum(s @ w.mT for s, w in zip(streams, model.head.concat.weight, strict=True))
    expected = norm(mixed, model.head.norm.weight) @ model.embed.token.weight.mT
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # where sub-layers are computed one by one
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_ladder_reads_the_stream_before_the_last_branch() -> None:
    model = scattered(Ladder(**SMALL))
    x = tokens()
    stream = [model.embed.token(x) + model.embed.position.weight[:9]] * 2  # x_{k−2}, x_{k−1}; nothing came before the first
    for number in range(3):
        block = model.get_submodule(f"block{number}")
        for branch in ("attention", "mlp"):
            older, latest = stream
            normed = layer_norm(older, (16,), block.get_submodule(f"{branch}_norm").weight)
            if branch == "attention":
                h = attention(normed, block.attention.qkv.weight, block.attention.out.weight, 4)
            else:
                h = gelu(normed @ block.mlp.up.weight.mT, approximate="tanh") @ block.mlp.down.weight.mT
            stream = [latest, latest + h]
    expected = layer_norm(stream[1], (16,), model.head.norm.weight) @ model.embed.token.weight.mT
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_parallel_adds_both_branches_of_one_norm() -> None:
    model = scattered(Parallel(**SMALL, mlp="swiglu"))
    x = tokens()
    stream = model.embed.token(x) + model.embed.position.weight[:9]
    for number in range(3):
        block = model.get_submodule(f"block{number}")
        normed = layer_norm(stream, (16,), block.attention_norm.weight)
        gated = silu(normed @ block.mlp.gate.weight.mT) * (normed @ block.mlp.up.weight.mT)
        stream = (
            stream
            + attention(normed, block.attention.qkv.weight, block.attention.out.weight, 4)
            + gated @ block.mlp.down.weight.mT
        )
    expected = layer_norm(stream, (16,), model.head.norm.weight) @ model.embed.token.weight.mT
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_grouped_queries_are_queries_of_repeated_keys_and_values() -> None:
    grouped, whole = (scattered(GPT(**SMALL, kv_heads=kv, bias=False)) for kv in (2, 4))
    for (name, a), b in zip(grouped.named_parameters(), whole.parameters(), strict=True):
        if ".qkv." in name:
            rows = a.unflatten(0, (2, 4, 4))  # kv head, [two queries, key, value], head_dim
            each = [torch.stack((rows[g, q], rows[g, 2], rows[g, 3])) for g in range(2) for q in range(2)]
            b.data.copy_(torch.cat(each).flatten(0, 1))
        else:
            b.data.copy_(a)
    x = tokens()
    torch.testing.assert_close(grouped(x), whole(x), rtol=1e-5, atol=1e-5)


def test_rotary_attention_depends_on_distances_only() -> None:
    from wavetrain.models.context import Context, whole_sequences

    q, k = torch.randn(1, 6, 1, 1, 8), torch.randn(1, 6, 1, 1, 8)

    def scores(shift: int) -> Tensor:
        context = Context(positions=torch.arange(6) + shift, attend=whole_sequences(6, q.device).attend)
        return torch.einsum("bqhgd,bkhgd->qk", context.rotate(q, 10_000.0), context.rotate(k, 10_000.0))

    torch.testing.assert_close(scores(0), scores(17), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(0), torch.einsum("bqhgd,bkhgd->qk", q, k))


@pytest.mark.parametrize(("name", "style"), list(itertools.product(DECODERS, STYLES)))
def test_parameters_are_counted_without_building(name: str, style: dict[str, Any]) -> None:
    for tied in (True, False):
        config = ModelConfig(name=name, **SMALL, tied=tied, **style)
        assert num_parameters(config) == build_model(config).num_parameters
    if name == "gpt":
        config = ModelConfig(name=name, **SMALL, bias=False, **style)
        assert num_parameters(config) == build_model(config).num_parameters


@pytest.mark.parametrize(("degree", "width"), [(2, 678), (4, 504), (6, 418)])
def test_the_published_widths_come_out(degree: int, width: int) -> None:
    config = kraken_like("gpt2", degree=degree)
    assert (config.hidden, config.inner, config.positions) == (width, 2 * width, "learned")
    assert DecoderShape(config).heads * DecoderShape(config).head_dim == width
    bare = num_parameters(dataclasses.replace(PUBLISHED["gpt2"], bias=False))
    assert num_parameters(config) == pytest.approx(bare, rel=0.01)


@pytest.mark.parametrize(
    ("name", "degree"), [(name, n) for name in PUBLISHED for n in (2, 4, 5) if PUBLISHED[name].num_heads % n == 0]
)
def test_a_modern_kraken_is_as_large_and_its_cache_no_larger(name: str, degree: int) -> None:
    standard, config = PUBLISHED[name], kraken_like(name, degree=degree, mode="modern")
    assert num_parameters(config) == pytest.approx(num_parameters(standard), rel=0.005)
    assert DecoderShape(config).num_kv_elements <= DecoderShape(standard).num_kv_elements
    assert config.positions == "rotary"
    assert (config.head_dim or 0) % 8 == 0


def test_like_builds_it() -> None:
    standard = ModelConfig(num_layers=2, hidden=32, num_heads=4, vocab=64, max_length=16)
    model = Kraken.like(standard, degree=2, mode="modern", norm="rms")
    assert (model.config.degree, model.config.norm) == (2, "rms")
    assert model(torch.zeros(1, 16, dtype=torch.int64)).shape == (1, 16, 64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kraken_like("gpt3", degree=2), "'gpt2'"),
        (lambda: kraken_like("gpt2", degree=5), "take a divisor of the 12 heads: 1, 2, 3, 4, 6, 12"),
        (lambda: kraken_like("gpt2", degree=2, mode="moderm"), "'modern'"),
        (lambda: Kraken(**SMALL, degree=3), "multiple of 3"),
        (lambda: Kraken(**SMALL, degree=2, kv_heads=1), "kv_heads=1"),
        (lambda: Kraken(**SMALL, degree=2, bias=True), "no biases"),
        (lambda: GPT(**SMALL, positions="rotary", head_dim=5), "odd"),
        (lambda: GPT(**SMALL, kv_heads=3), "does not divide"),
        (lambda: GPT(**SMALL, norm="batch"), "unknown norm"),
        (lambda: GPT(**SMALL, norm_eps=0), "norm_eps is 0"),
        (lambda: build_model({"name": "bert", **SMALL, "norm": "rms"}), "belongs to decoders"),
        (lambda: build_model({"name": "gpt", **SMALL, "degree": 2}), "belongs to the model 'kraken'"),
        (lambda: kraken_like(ModelConfig(name="kraken", **SMALL), degree=2), "standard model"),
    ],
)
def test_what_cannot_be_built_is_refused(call: Any, words: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=words):
        call()
