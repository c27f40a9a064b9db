"""What GPT, BERT and Uneven compute, how they are laid out, and what they refuse."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wavetrain.models
from wavetrain.errors import InputError
from wavetrain.models import BERT, GPT, Kraken, Ladder, LayeredModel, Parallel, Uneven, layer_cost
from wavetrain.models.blocks import Block

VOCAB, SEQ, BATCH = 50, 9, 3
SMALL: dict[str, Any] = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": VOCAB, "max_length": 12}
MODELS: dict[str, Any] = {
    "gpt": lambda **more: GPT(**SMALL, **more),
    "bert": lambda **more: BERT(**SMALL, **more),
    "uneven": lambda **more: Uneven(**SMALL, wide_layers=3, **more),
    "parallel": lambda **more: Parallel(**SMALL, **more),
    "ladder": lambda **more: Ladder(**SMALL, **more),
    "kraken": lambda **more: Kraken(**SMALL, degree=2, **more),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ))


@pytest.mark.parametrize("name", MODELS)
def test_layers_one_after_the_other_are_the_model(name: str) -> None:
    model, x = MODELS[name](), tokens()
    expected = model(x)
    assert expected.shape == (BATCH, SEQ, VOCAB)
    for layer in model.children():
        x = layer(x)
    assert torch.equal(x, expected)


def test_layers_have_names_that_say_what_they_are() -> None:
    assert [name for name, _ in MODELS["gpt"]().named_children()] == ["embed", "block0", "block1", "head"]
    uneven = ["embed", "narrow0", "narrow1", "widen", "wide0", "wide1", "wide2", "head"]
    assert [name for name, _ in MODELS["uneven"]().named_children()] == uneven


def test_a_slice_is_a_sequential_of_the_same_layers() -> None:
    model = MODELS["gpt"]()
    part = model[1:3]
    assert type(part) is nn.Sequential
    assert [name for name, _ in part.named_children()] == ["block0", "block1"]
    assert part[0] is model[1]


@pytest.mark.parametrize("name", ["gpt", "bert", "kraken"])
def test_tied_weights_are_one_parameter(name: str) -> None:
    tied, untied = MODELS[name](), MODELS[name](tied=False)
    assert tied.head.projection.weight is tied.embed.token.weight
    assert untied.head.projection.weight is not untied.embed.token.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCAB * 16
    again = copy.deepcopy(tied)
    assert again.head.projection.weight is again.embed.token.weight


@pytest.mark.parametrize("name", ["gpt", "uneven", "parallel", "ladder", "kraken"])
def test_language_models_do_not_look_ahead(name: str) -> None:
    model, x = MODELS[name](), tokens()
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_bert_looks_both_ways_but_not_at_padding() -> None:
    model, x = MODELS["bert"](), tokens()
    mask = torch.arange(SEQ).expand(BATCH, SEQ) < 6
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    assert not torch.allclose(model(x)[:, 0], model(changed)[:, 0])
    torch.testing.assert_close(model((x, mask))[:, :6], model((changed, mask))[:, :6])
    torch.testing.assert_close(model((x, mask))[:, :6], model(x[:, :6]))


def test_bert_carries_its_mask_from_layer_to_layer() -> None:
    model, x = MODELS["bert"](), tokens()
    mask = torch.ones(BATCH, SEQ, dtype=torch.bool)
    hidden, carried = model[:2]((x, mask))
    assert hidden.shape == (BATCH, SEQ, 16)
    assert carried is mask
    torch.testing.assert_close(model((x, mask)), model(x))


def test_a_row_of_padding_only_gives_finite_gradients() -> None:
    model, x = MODELS["bert"](), tokens()
    mask = torch.ones(BATCH, SEQ, dtype=torch.bool)
    mask[1] = False
    model((x, mask)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_attention_is_attention() -> None:
    """One block against the textbook formula, head by head, with the documented layout of the fused projection."""
    block = Block(hidden=16, num_heads=4)
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 5, 16)
    h = block.attention_norm(x)
    weight, bias = block.attention.qkv.weight.view(4, 3, 4, 16), block.attention.qkv.bias.view(4, 3, 4)
    heads = []
    for i in range(4):
        q, k, v = (h @ weight[i, j].mT + bias[i, j] for j in range(3))
        scores = (q @ k.mT / math.sqrt(4)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    y = x + block.attention.out(torch.cat(heads, -1))
    y = y + block.mlp.down(nn.functional.gelu(block.mlp.up(block.mlp_norm(y)), approximate="tanh"))
    torch.testing.assert_close(block(x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_is_made_real_layer_by_layer(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, math.nan)
    torch.manual_seed(3)
    model.reset_parameters()
    assert model(tokens()).isfinite().all()
    if model.config.tied:
        assert model.head.projection.weight is model.embed.token.weight

    by_hand = MODELS[name]()
    torch.manual_seed(3)
    for layer in by_hand.children():
        layer.reset_parameters()
    for (key, p), q in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(p, q), key


def test_initial_weights_are_those_of_gpt2() -> None:
    model = GPT(num_layers=8, hidden=64, num_heads=4, vocab=256)
    block = model.get_submodule("block3")
    assert isinstance(block, Block)
    assert float(model.embed.token.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.mlp.down.bias.any()


def test_dropout_is_on_in_training_only() -> None:
    model, x = MODELS["gpt"](dropout=0.5), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden": 18}, "num_heads=3 or 6"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab": -1}, "vocab is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"hidden": 16.0}, "hidden is 16.0"),
    ],
)
@pytest.mark.parametrize("kind", [GPT, BERT, Uneven])
def test_shapes_that_cannot_be_are_refused(kind: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        kind(**{**SMALL, **given})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(1, 13, dtype=torch.int64), "13 tokens.*max_length=12"),
        (torch.zeros(13, dtype=torch.int64), r"shape \(13,\)"),
        (torch.zeros(1, 3), "float32"),
        ({"tokens": torch.zeros(1, 3)}, "given a dict"),
    ],
)
def test_inputs_that_are_no_tokens_are_refused(name: str, bad: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        MODELS[name]()(bad)


def test_a_mask_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="padding mask"):
        MODELS["bert"]()((tokens(), torch.ones(BATCH, SEQ)))


def test_costs_follow_the_matrices() -> None:
    model = MODELS["uneven"]()
    costs = {name: layer_cost(layer, seq=SEQ) for name, layer in model.named_children()}
    assert costs["narrow0"] == 2 * (12 * 16 * 16) + 4 * 16 * SEQ / 2
    assert costs["wide0"] == 2 * (12 * 32 * 32) + 4 * 32 * SEQ / 2
    assert costs["widen"] == 2 * 16 * 32
    assert costs["head"] == 2 * 32 * VOCAB
    assert 0 < costs["embed"] < costs["narrow0"] / 100
    assert model.head.cost(BATCH, SEQ) == BATCH * SEQ * costs["head"]
    bidirectional = MODELS["bert"]().get_submodule("block0")
    assert layer_cost(bidirectional, seq=SEQ) == 2 * (12 * 16 * 16) + 4 * 16 * SEQ


def test_costs_are_what_torch_counts() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for model in (MODELS["bert"](), MODELS["gpt"](), MODELS["uneven"]()):
        x: Any = tokens()
        for name, layer in model.named_children():
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                x = layer(x)
            counted = counter.get_total_flops()
            if isinstance(layer, Block) and layer.causal:  # torch counts what is masked away too
                counted -= BATCH * SEQ * 4 * layer.mlp.up.in_features * SEQ // 2
            assert layer.cost(BATCH, SEQ) == pytest.approx(counted, abs=BATCH * SEQ * 16), name


def test_any_module_has_a_cost() -> None:
    assert layer_cost(nn.Linear(3, 5)) == 30
    assert layer_cost(nn.ReLU()) > 0
    assert 0 < layer_cost(nn.Embedding(1000, 8)) < layer_cost(nn.Linear(8, 8))
    block = Block(hidden=16, num_heads=4)
    assert layer_cost(nn.Sequential(block, nn.Linear(16, 2))) == layer_cost(block) + 64


def test_public_names_are_there_and_light() -> None:
    for name in wavetrain.models.__all__:
        assert getattr(wavetrain.models, name) is not None
    assert sorted(wavetrain.models.__all__) == sorted(set(wavetrain.models.__all__))
    with pytest.raises(AttributeError):
        wavetrain.models.NoSuchModel  # noqa: B018
    assert issubclass(GPT, LayeredModel)
    assert issubclass(GPT, nn.Sequential)
