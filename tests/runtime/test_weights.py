"""What a rank holds of a model: its layers, under names that do not depend on the plan, with ties kept."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from tests.runtime.memory import CPU
from tests.schedule.random_schedules import random_schedule, randoms
from wavetrain.errors import InputError
from wavetrain.models import BERT, GPT
from wavetrain.runtime.weights import Holding, take_over
from wavetrain.schedule.families import build
from wavetrain.schedule.schedule import Schedule


def hold(make: Callable[[], nn.Sequential], schedule: Schedule, seed: int = 0) -> list[Holding]:
    """What every rank holds of a model with a layer a stage."""
    stages = [range(s, s + 1) for s in range(schedule.num_stages)]
    found = []
    for rank in range(schedule.num_ranks):
        torch.manual_seed(0)
        found.append(take_over(make(), stages, schedule, rank, CPU, seed))
    return found


class Twice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def test_every_layer_is_held_by_its_rank_and_by_no_other() -> None:
    schedule = build("zb-wave", num_ranks=2, num_micro_batches=2, waves=1)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    holding = take_over(model, [range(s, s + 1) for s in range(4)], schedule, 1, CPU, 0)
    assert list(holding.layers) == [(0, 1), (0, 2)]
    assert [w.name for w in holding.weights] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert [w.index for w in holding.weights] == [2, 3, 4, 5]
    assert holding.num_names == 8
    assert [p.is_meta for p in model.parameters()] == [True] * 2 + [False] * 4 + [True] * 2, "the memory of others is let go"


@settings(max_examples=50, deadline=None)
@given(randoms())
def test_the_ranks_hold_the_model_together(random: Random) -> None:
    """With random ties between layers, and random placements: names, values and uses are those of the whole model."""
    schedule = random_schedule(random)
    first = [random.randrange(i + 1) for i in range(schedule.num_stages)]  # which layer's weight a layer takes

    def make() -> nn.Sequential:
        layers = [nn.Linear(3, 3) for _ in first]
        for layer, tied in zip(layers, first, strict=True):
            layer.weight = layers[tied].weight
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    whole = dict(make().named_parameters())
    held: dict[str, int] = {}
    for rank, holding in enumerate(hold(make, schedule)):
        assert [w.name for w in holding.weights] == [name for name in whole if name in {w.name for w in holding.weights}]
        for weight in holding.weights:
            held[weight.name] = weight.index
            assert torch.equal(weight.parameter, whole[weight.name])
            assert rank in weight.ranks
            assert {use for use in weight.uses if use.rank == rank} == set(weight.local)
            assert list(weight.uses) == sorted(weight.uses)
            assert any(weight.parameter is p for p in weight.local.values())
            assert {p.data_ptr() for p in weight.local.values()} == {weight.parameter.data_ptr()}, "one memory"
            assert len({id(p) for p in weight.local.values()}) == len(weight.local), "a gradient for each use"
            for use, p in weight.local.items():
                layer = holding.layers[use.route, use.layer]
                assert isinstance(layer, nn.Linear)
                assert p is layer.get_parameter(weight.name.partition(".")[2])
    assert held == {name: index for index, name in enumerate(whole)}


def test_parameters_of_a_stage_come_in_order_and_without_frozen_ones() -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].bias.requires_grad_(False)
        return model

    (holding,) = hold(make, Schedule.single_route("one", (0, 0), 1, [[]]))
    layers = [holding.layers[0, i] for i in (0, 1)]
    wanted = [layers[0].get_parameter("weight"), *layers[1].parameters()]
    assert all(a is b for a, b in zip(holding.parameters_of(0, (0, 1)), wanted, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_weight_under_two_names_of_a_layer_and_in_another(device: str) -> None:
    def make() -> nn.Sequential:
        with torch.device(device):
            first, second = nn.Linear(4, 4, bias=False), Twice()
        second.a.weight = second.b.weight = first.weight
        return nn.Sequential(first, second)

    schedule = Schedule.single_route("one", (0, 0), 1, [[]])
    (holding,) = hold(make, schedule)
    (weight,) = holding.weights
    second = holding.layers[0, 1]
    assert isinstance(second, Twice)
    assert second.a.weight is second.b.weight
    assert second.a.weight is not weight.parameter
    assert second.a.weight.data_ptr() == weight.parameter.data_ptr()
    assert len(weight.uses) == 2


def test_a_layer_that_is_listed_twice() -> None:
    act = nn.GELU()
    shared = nn.Linear(2, 2)

    def make() -> nn.Sequential:
        return nn.Sequential(shared, act, shared, act)

    (holding,) = hold(make, Schedule.single_route("one", (0,) * 4, 1, [[]]))
    assert [w.name for w in holding.weights] == ["0.weight", "0.bias"]
    assert holding.layers[0, 0] is not holding.layers[0, 2]
    assert [len(w.uses) for w in holding.weights] == [2, 2]


def test_buffers_have_names() -> None:
    schedule = build("1f1b", num_ranks=2, num_micro_batches=1)
    found = hold(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), schedule)
    assert [list(holding.buffers) for holding in found] == [[], ["1.running_mean", "1.running_var", "1.num_batches_tracked"]]


# ---- the meta device


@pytest.mark.parametrize("make", [GPT, BERT])
def test_layers_from_the_meta_device_do_not_depend_on_the_plan(make: Callable[..., nn.Sequential]) -> None:
    def on_meta() -> nn.Sequential:
        with torch.device("meta"):
            return make(num_layers=2, hidden=64, num_heads=2, vocab=50, max_length=4)

    values: list[dict[str, Tensor]] = []
    for placement in ((0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 1, 0)):
        schedule = Schedule.single_route("one", placement, 1, [[]] * 2)
        first: dict[str, Tensor] = {}
        for rank, holding in enumerate(hold(on_meta, schedule, seed=3)):
            first |= {w.name: w.parameter.detach() for w in holding.weights if w.uses[0].rank == rank}  # others get theirs sent
        values.append(first)
    for name, value in values[0].items():
        assert all(torch.equal(value, other[name]) for other in values), name
    assert len(values[0]) == len(dict(on_meta().named_parameters()))
    assert values[0]["block0.mlp.up.weight"].std() == pytest.approx(0.02, rel=0.1), "drawn as the model says, not as torch does"
    assert values[0]["block0.mlp.down.weight"].std() == pytest.approx(0.01, rel=0.1)
    assert not torch.equal(values[0]["block0.mlp.up.weight"], values[0]["block1.mlp.up.weight"])


class Scale(nn.Module):
    """Does not say how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))


class Angles(nn.Module):
    """Has a buffer only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(2))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Scale, r"0 \(Scale\) is on the meta device and has no reset_parameters\(\) to fill scale, shift"),
        (Angles, "to fill angles"),
        (lambda: nn.Sequential(nn.Linear(2, 2), Scale()), r"0\.1 \(Scale\)"),
        (lambda: nn.MultiheadAttention(2, 1), "to fill in_proj_weight, in_proj_bias"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make: Callable[[], nn.Module], problem: str) -> None:
    def on_meta() -> nn.Sequential:
        with torch.device("meta"):
            return nn.Sequential(make())

    with pytest.raises(InputError, match=problem):
        hold(on_meta, Schedule.single_route("one", (0,), 1, [[]]))


def test_both_routes_on_one_rank() -> None:
    schedule = Schedule(name="two", num_micro_batches=2, placements=((0, 1), (0, 1)), routes=(0, 1), actions=((), ()))
    with pytest.raises(InputError, match="two places both copies of layer 0 on rank 0; use a schedule of one route"):
        hold(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), schedule)


def test_dtypes_and_the_generator_are_left_alone() -> None:
    def make() -> nn.Sequential:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16))

    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    holding = take_over(make(), [range(1)], Schedule.single_route("one", (0,), 1, [[]]), 0, CPU, 0)
    assert torch.equal(torch.rand(1), wanted)
    assert {w.parameter.dtype for w in holding.weights} == {torch.bfloat16}
