"""Stages and the executor: all ranks in one process, with a transport that spoils memory as soon as it may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.memory import CPU, Outcome, run_step
from tests.schedule.random_schedules import random_schedule, randoms
from wavetrain.errors import InputError
from wavetrain.runtime.stage import Stage, StepData
from wavetrain.schedule.actions import Action
from wavetrain.schedule.families import build
from wavetrain.schedule.schedule import Schedule

WIDTH = 6


class Front(nn.Module):
    """Puts a row of its own before what comes: autograd gives it a view of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.row, x])


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


class Both(nn.Module):
    """Takes and gives a tensor; in between a stream that carries numbers, a mask and something unused."""

    def __init__(self, opens: bool) -> None:
        super().__init__()
        self.opens, self.linear = opens, nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        if self.opens:
            return {"x": self.linear(value), "more": (value > 0, value, value.argmax(-1)), "unused": value.sum()}
        mask, kept, numbers = value["more"]
        return self.linear(value["x"]) * mask + kept + numbers[:, None]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


LAYERS: list[Callable[[], Sequence[nn.Module]]] = [
    lambda: [nn.Linear(WIDTH, WIDTH)],
    lambda: [nn.Linear(WIDTH, WIDTH)],
    lambda: [nn.Identity()],
    lambda: [View()],
    lambda: [Front()],
    lambda: [nn.Dropout(0.5)],
    lambda: [nn.LayerNorm(WIDTH)],
    lambda: [Both(True), Both(False)],
    lambda: [Both(True), nn.Identity(), Both(False)],
    lambda: [Checkpointed(False)],
    lambda: [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))],
]


def loss_fn(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def data(number: int) -> StepData:
    numbers = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, WIDTH, generator=numbers) for _ in range(number)]
    return StepData(inputs=inputs, targets=[None] * number, weights=[1 / number] * number, seed=0, training=True)


def one_rank(num_stages: int, number: int) -> Schedule:
    """One micro-batch after another, whole backwards."""
    forth, back = range(num_stages), range(num_stages - 1, -1, -1)
    actions = [a for m in range(number) for a in (*(Action("F", s, m) for s in forth), *(Action("B", s, m) for s in back))]
    return Schedule.single_route("one", (0,) * num_stages, number, [actions])


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert set(ours.gradients) == set(theirs.gradients)
    assert all(torch.equal(ours.gradients[name], theirs.gradients[name]) for name in theirs.gradients)
    assert all(torch.equal(ours.losses[m], theirs.losses[m]) for m in theirs.losses)


@settings(max_examples=60, deadline=None)
@given(randoms())
def test_any_schedule_of_any_layers_gives_the_same_bits(random: Random) -> None:
    """A layer a stage, in any order that can run: what one rank gives, all ranks give."""
    schedule = random_schedule(random)
    picked: list[Callable[[], Sequence[nn.Module]]] = []
    while sum(len(make()) for make in picked) < schedule.num_stages:
        picked.append(random.choice(LAYERS))
    num_layers = sum(len(make()) for make in picked)

    def model() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[layer for make in picked for layer in make()])

    number, num_stages = schedule.num_micro_batches, schedule.num_stages
    cut = [1] * num_stages
    cut[random.randrange(num_stages)] += num_layers + 1 - num_stages
    theirs = run_step(model, one_rank(num_stages, number), lambda: data(number), loss_fn, cut=cut)
    for recompute in (False, True):
        assert_same(run_step(model, schedule, lambda: data(number), loss_fn, cut=cut, recompute=recompute), theirs)


def test_one_rank_is_plain_torch() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(*[layer for make in LAYERS if "ropout" not in repr(make()) for layer in make()])

    whole = model()
    for x in data(4).inputs:
        torch.autograd.backward(loss_fn(whole(x), None) * 0.25)
    ours = run_step(model, one_rank(4, 4), lambda: data(4), loss_fn)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(ours.gradients[name], parameter.grad), name


def test_a_layer_that_hands_on_what_it_was_given_where_a_wave_turns() -> None:
    """The next stage sits on the same rank: what it keeps for its W must outlive the message that it came in."""
    late_w = [
        [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)],
        [
            *(Action("F", 1, 0), Action("F", 2, 0), Action("I", 2, 0), Action("I", 1, 0), Action("W", 1, 0)),
            *(Action("F", 1, 1), Action("F", 2, 1), Action("I", 2, 1), Action("I", 1, 1), Action("W", 1, 1)),
            *(Action("W", 2, 1), Action("W", 2, 0)),
        ],
    ]

    def model() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), View(), nn.Linear(WIDTH, WIDTH))

    schedule = Schedule.single_route("late", (0, 1, 1), 2, late_w)
    assert_same(run_step(model, schedule, lambda: data(2), loss_fn), run_step(model, one_rank(3, 2), lambda: data(2), loss_fn))


def test_a_weight_in_three_places_of_two_layers() -> None:
    """Under two names of one layer, and in another: each layer's use is counted once, by every schedule."""

    class Twice(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            assert isinstance(weight, nn.Parameter)
            self.a.weight = self.b.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]

    def model() -> nn.Sequential:
        torch.manual_seed(7)
        first = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.GELU(), Twice(first.weight))

    theirs = run_step(model, one_rank(4, 4), lambda: data(4), loss_fn)
    for name, options in (
        ("zb-wave", {"waves": 1}),
        ("zbv", {}),
        ("hanayo", {"waves": 1}),
        ("interleaved", {"stages_per_rank": 2}),
    ):
        schedule = build(name, num_ranks=2, num_micro_batches=4, **options)  # type: ignore[arg-type]
        assert_same(run_step(model, schedule, lambda: data(4), loss_fn), theirs)
    whole = model()
    for x in data(4).inputs:
        torch.autograd.backward(loss_fn(whole(x), None) * 0.25)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(theirs.gradients[name], parameter.grad)


def test_a_micro_batch_that_does_not_count() -> None:
    """Its mean loss is 0 / 0, and must not spoil the others."""

    def step() -> StepData:
        found = data(3)
        found.weights = [0.5, 0.0, 0.5]
        return found

    def mean(output: Tensor, _: object) -> Tensor:
        counts = 0.0 if torch.equal(output.detach(), spoiled) else 1.0
        return output.square().sum() * counts / (counts * output.numel())

    def model() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    spoiled = model()(step().inputs[1]).detach()
    whole = model()
    for m in (0, 2):
        torch.autograd.backward(mean(whole(step().inputs[m]), None) * 0.5)
    for name in ("gpipe", "zb-h1"):
        ours = run_step(model, build(name, num_ranks=2, num_micro_batches=3), step, mean)
        assert ours.losses[1] == 0
        for what, parameter in whole.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(ours.gradients[what], parameter.grad)


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_recompute_of_a_layer_that_works_in_place() -> None:
    """The input is still what it was when it is computed again; in the first stage that of the user is."""

    def model() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(AddOne(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    schedule = build("1f1b", num_ranks=2, num_micro_batches=2)
    theirs = run_step(model, one_rank(2, 2), lambda: data(2), loss_fn)
    assert_same(run_step(model, schedule, lambda: data(2), loss_fn, recompute=True), theirs)
    plain = run_step(lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), one_rank(2, 1), _small, loss_fn)
    assert plain.losses


def _small() -> StepData:
    return StepData(inputs=[torch.ones(1, 1)], targets=[None], weights=[1.0], seed=0, training=True)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
def test_reentrant_checkpointing() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(True), Checkpointed(True), nn.Linear(WIDTH, WIDTH))

    theirs = run_step(model, one_rank(4, 4), lambda: data(4), loss_fn)
    for name, waves in (("zb-wave", 1), ("1f1b", None)):
        schedule = build(name, num_ranks=2, num_micro_batches=4, waves=waves)
        assert_same(run_step(model, schedule, lambda: data(4), loss_fn), theirs)


# ---- what goes wrong in a layer


def stage(*layers: nn.Module, loss: Any = loss_fn, index: int = 0, num_stages: int = 1, **options: Any) -> Stage:
    found = Stage(
        index=index,
        num_stages=num_stages,
        layers=list(enumerate(layers, start=3)),
        parameters=[p for layer in layers for p in layer.parameters()],
        micro_batches=[0],
        loss_fn=loss,
        device=CPU,
        **options,
    )
    found.begin(data(1))
    return found


class Wrong(nn.Module):
    def __init__(self, result: object) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> object:
        return self.result


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_a_layer_that_returns_the_wrong_type() -> None:
    with pytest.raises(InputError, match=r"what layer 3 \(Wrong\) returns is a set; what passes between layers must be a tensor"):
        stage(Wrong({1}), num_stages=2).forward(0, (), None)
    with pytest.raises(TypeError) as caught:  # from within a stage: the layer after it cannot use it, in its own words
        stage(Wrong({1}), nn.Linear(2, 2)).forward(0, (), None)
    assert notes(caught.value) == "in layer 4 (Linear) of stage 0, which was given a set"


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        stage(nn.Linear(WIDTH, 5), nn.Linear(4, 2)).forward(0, (), None)
    assert notes(caught.value) == "in layer 4 (Linear) of stage 0, which was given float32 (3, 5)"


class Looks(nn.Module):
    def forward(self, x: Any) -> Any:
        return x["nothing"] if isinstance(x, dict) else x.nothing


def test_any_error_in_a_layer_says_where() -> None:
    with pytest.raises(AttributeError) as caught:
        stage(Looks()).forward(0, (), None)
    assert notes(caught.value) == "in layer 3 (Looks) of stage 0, which was given float32 (3, 6)"


def test_working_in_place_at_the_beginning_of_a_stage() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    with pytest.raises(RuntimeError, match="in-place operation") as caught:
        run_step(model, build("1f1b", num_ranks=2, num_micro_batches=1), lambda: data(1), loss_fn)
    assert "use inplace=False, or another cut" in notes(caught.value)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (None, "a step needs a loss"),
        (lambda y, _: y, r"loss_fn must return one number, the mean over the micro-batch; it returned \(3, 6\)"),
        (lambda y, _: float(y.sum()), "it returned float"),
        (lambda y, _: None, "it returned NoneType"),
    ],
)
def test_a_loss_that_is_none(loss: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        stage(nn.Identity(), loss=loss).forward(0, (), None)


def test_the_random_numbers_of_the_program_are_left_alone() -> None:
    first = stage(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    first.forward(0, (), None)
    first.backward(0, ())
    assert torch.equal(torch.rand(2), wanted)
