"""The pipeline as a user sees it, in one process: the same code as for many, without the messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multiprocess.ranks import gpt, loss_fn, padded, tokens
from wavetrain import Pipeline, build, save
from wavetrain.errors import InputError, ProofError
from wavetrain.models import BERT
from wavetrain.schedule.actions import Action
from wavetrain.schedule.families.one_f_one_b import one_f_one_b
from wavetrain.schedule.schedule import Schedule


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


def pipeline(model: nn.Sequential | None = None, **options: Any) -> Pipeline:
    options = {"schedule": "zb-wave", "waves": 2, "num_micro_batches": 3, "loss_fn": loss_fn, **options}
    return Pipeline(gpt(num_layers=6) if model is None else model, **options)


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


# ---- what comes out


def test_loss_and_gradients_are_those_of_the_whole_batch() -> None:
    """Not a mean of means: micro-batches of 3, 2 and 2 sequences count by their targets."""
    x, y = tokens(0, batch=7)
    whole = gpt(num_layers=6)
    loss = loss_fn(whole(x), y)
    torch.autograd.backward(loss)
    torch.manual_seed(0)
    pipe = pipeline()
    torch.testing.assert_close(pipe.step(x, y), loss.detach())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients(pipe)[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert pipe.num_steps == 1


def test_a_masked_model_counts_its_targets() -> None:
    (x, mask), y = padded(0)
    whole = BERT(num_layers=2, hidden=16, num_heads=2, vocab=29, max_length=8)
    wanted = loss_fn(whole((x, mask)), y).detach()
    torch.manual_seed(0)
    pipe = pipeline(BERT(num_layers=2, hidden=16, num_heads=2, vocab=29, max_length=8), waves=1)
    torch.testing.assert_close(pipe.step((x, mask), y), wanted)


def test_one_can_count_otherwise() -> None:
    """By sequences instead of targets: here micro-batches of unequal length count the same."""
    x, y = [tokens(i, 2, seq)[0] for i, seq in enumerate((2, 5, 7))], [tokens(i, 2, seq)[1] for i, seq in enumerate((2, 5, 7))]
    whole = gpt(num_layers=6)
    wanted = sum(loss_fn(whole(a), b).detach() for a, b in zip(x, y, strict=True)) / 3
    torch.manual_seed(0)
    torch.testing.assert_close(pipeline(count_fn=len).step(x, y), torch.as_tensor(wanted))


def test_evaluation_is_a_plain_forward_pass() -> None:
    x, y = tokens(0, batch=7)
    whole = gpt(num_layers=6, dropout=0.5).eval()
    with torch.no_grad():
        logits = whole(x)
    torch.manual_seed(0)
    pipe = pipeline(gpt(num_layers=6, dropout=0.5))
    torch.testing.assert_close(pipe.evaluate(x, y), loss_fn(logits, y))
    predicted = pipe.predict(x)
    assert predicted is not None
    assert [len(p) for p in predicted] == [3, 2, 2]
    torch.testing.assert_close(torch.cat(predicted), logits)
    assert not gradients(pipe)
    assert pipe.num_steps == 0
    assert not any(p.requires_grad for p in predicted)
    trained = pipe.step(x, y)
    assert float(trained) != pytest.approx(float(pipe.evaluate(x, y))), "training has dropout again"


def test_predict_needs_no_loss_and_takes_any_inputs() -> None:
    pipe = pipeline(
        nn.Sequential(nn.Linear(2, 2), nn.Identity()), schedule="gpipe", waves=None, loss_fn=None, num_micro_batches=2
    )
    found = pipe.predict([torch.zeros(1, 2), torch.zeros(4, 2)])
    assert found is not None
    assert [tuple(p.shape) for p in found] == [(1, 2), (4, 2)]


def test_dropout_depends_on_seed_and_step_alone() -> None:
    x, y = tokens(0)

    def run(num_steps: int = 0, noise: int = 0, **options: Any) -> float:
        torch.manual_seed(0)
        pipe = pipeline(gpt(num_layers=6, dropout=0.3), **options)
        torch.manual_seed(noise)
        pipe.num_steps = num_steps
        return float(pipe.step(x, y))

    assert run() == run(noise=5) == run(schedule="1f1b", waves=None)
    assert len({run(), run(num_steps=1), run(seed=1), run(num_steps=1, seed=1)}) == 4


def test_gradients_add_up_over_steps() -> None:
    pipe = pipeline()
    pipe.step(*tokens(0))
    first = gradients(pipe)
    pipe.step(*tokens(1))
    both = gradients(pipe)
    for p in pipe.parameters():
        p.grad = None
    pipe.num_steps = 1
    pipe.step(*tokens(1))
    for name, second in gradients(pipe).items():
        assert torch.equal(both[name], first[name] + second)


def test_names_and_parameters() -> None:
    whole = gpt(num_layers=6)
    names = [name for name, _ in whole.named_parameters()]
    pipe = pipeline()
    assert [name for name, _ in pipe.named_parameters()] == names
    assert len({id(p) for p in pipe.parameters()}) == len(names)
    assert list(pipe.named_buffers()) == []


def test_clipping() -> None:
    pipe = pipeline()
    pipe.step(*tokens(0))
    before = gradients(pipe)
    norm = float(pipe.clip_grad_norm_(math.inf))
    assert all(torch.equal(before[name], g) for name, g in gradients(pipe).items())
    assert norm == pytest.approx(math.sqrt(sum(float(g.double().square().sum()) for g in before.values())), rel=1e-5)
    assert float(pipe.clip_grad_norm_(norm / 2)) == pytest.approx(norm)
    assert float(pipe.clip_grad_norm_(1.0)) == pytest.approx(norm / 2, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast(recompute: bool) -> None:
    pipe = pipeline(autocast=torch.bfloat16, recompute=recompute)
    x, y = tokens(0)
    loss = pipe.step(x, y)
    assert loss.dtype == torch.float32
    assert {g.dtype for g in gradients(pipe).values()} == {torch.float32}
    torch.manual_seed(0)
    exact = pipeline()
    torch.testing.assert_close(loss, exact.step(x, y), rtol=0.02, atol=0.02)
    assert not torch.equal(loss, exact.evaluate(x, y))


def test_recompute_counts_a_loss_once() -> None:
    pipe, plain = pipeline(recompute=True), None
    torch.manual_seed(0)
    plain = pipeline()
    assert torch.equal(pipe.step(*tokens(0)), plain.step(*tokens(0)))


def test_a_timeline() -> None:
    pipe = pipeline()
    with pytest.raises(InputError, match="before the first step"):
        pipe.timeline()
    pipe.step(*tokens(0))
    found = pipe.timeline()
    assert [(s.kind, s.stage, s.micro_batch) for s in found.spans[0]] == list(pipe.schedule.actions[0])
    assert (found.source, found.waves, found.num_micro_batches) == ("measured", 2, 3)
    pipe.evaluate(*tokens(0))
    assert {s.kind for s in pipe.timeline().spans[0]} == {"F"}


@pytest.mark.parametrize("name", ["mine.csv", "mine.json"])
def test_a_schedule_from_a_file(tmp_path: Path, name: str) -> None:
    save(build("zb-wave", num_ranks=1, num_micro_batches=3, waves=2), tmp_path / name)
    for schedule in (tmp_path / name, str(tmp_path / name)):
        torch.manual_seed(0)
        pipe = pipeline(schedule=schedule, waves=None, num_micro_batches=None)
        torch.manual_seed(0)
        assert torch.equal(pipe.step(*tokens(0)), pipeline().step(*tokens(0)))


def test_auto_takes_no_more_stages_than_there_are_layers() -> None:
    assert pipeline(nn.Sequential(nn.Linear(2, 2)), schedule="auto", waves=None).schedule.num_stages == 1


def test_a_batch_of_which_a_part_has_no_targets() -> None:
    x, y = tokens(0)
    y[:2] = -100  # the whole first micro-batch
    pipe = pipeline()
    torch.manual_seed(0)
    whole = gpt(num_layers=6)
    torch.testing.assert_close(pipe.step(x, y), loss_fn(whole(x), y).detach())
    assert all(g.isfinite().all() for g in gradients(pipe).values())


# ---- what is refused


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (nn.Linear(2, 2), "the model is a Linear; a pipeline needs an nn.Sequential"),
        (Own(nn.Linear(2, 2)), r"Own has a forward\(\) of its own"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "the model has 2 layers, but zb-wave on 1 ranks has 4 stages"),
        (nn.Sequential(), "the model has no layers"),
    ],
)
def test_models_that_cannot_be_cut(model: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        pipeline(model)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"schedule": "zb-wav"}, "did you mean 'zb-wave'"),
        ({"schedule": "no/such/file.csv", "waves": None}, "no/such/file.csv"),
        ({"schedule": "1f1b", "waves": 2}, "1f1b takes no waves"),
        ({"num_micro_batches": 0}, "0 micro-batches"),
        ({"waves": 0}, "waves"),
        ({"cut": [1, 2, 3]}, r"cut=\[1, 2, 3\] names 6 layers in 3 stages, but the model has 8 layers"),
        ({"cut": [0, 2, 2, 4]}, "each with at least one layer"),
        ({"recompute": [0, 4]}, "recompute"),
        ({"dp": 2}, "needs a multiple of 2 ranks, but 1 were launched"),
        ({"tp": 0}, "each must be at least 1"),
        ({"schedule": one_f_one_b(2, 3), "waves": None}, r"for 2 pipeline ranks, but 1 were launched; launch\(main, ranks=2\)"),
        ({"schedule": one_f_one_b(1, 4), "waves": None}, "the schedule has 4 micro-batches, not num_micro_batches=3"),
        ({"schedule": one_f_one_b(1, 3)}, "waves, stages_per_rank, growth belong to a schedule given by name"),
        ({"schedule": "hanayo", "growth": 2.0}, "only zb-wave can grow"),
        ({"schedule": None}, "schedule is None; give a name, a Schedule or a path"),
        ({"num_micro_batches": "4"}, "num_micro_batches is '4'; give a whole number"),
        ({"num_micro_batches": 2.5}, "num_micro_batches is 2.5; give a whole number"),
        ({"cut": "4"}, "cut is '4'; give a list of whole numbers"),
        ({"seed": "a"}, "seed is 'a'; give a whole number"),
        ({"loss_fn": "mse"}, "loss_fn is 'mse'; give a function"),
        ({"timeout_seconds": -1}, "timeout_seconds is -1; give a number above 0"),
        ({"schedule": "chimera", "waves": None, "num_micro_batches": 2}, "chimera"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        pipeline(**options)


def test_a_schedule_that_is_not_proven() -> None:
    order = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)]
    with pytest.raises(ProofError, match="deadlock: rank 0 does B of stage 0, micro-batch 0, before B of stage 1, micro-batch 0"):
        pipeline(schedule=Schedule.single_route("mine", (0, 0), 1, [order]), waves=None, num_micro_batches=None)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (tokens(0, batch=2), "inputs hold 2 samples, which cannot be split into 3 micro-batches"),
        ((tokens(0)[0], tokens(0, batch=2)[1]), "targets hold 2 samples"),
        (([tokens(0)[0]] * 2, [tokens(0)[1]] * 3), "inputs are a list of 2 micro-batches, but the schedule has 3"),
        ((tokens(0)[0], torch.full((6, 5), -100)), "the batch has no targets that count"),
        (("text", tokens(0)[1]), "inputs"),
        ((tokens(0)[0].float(), tokens(0)[1]), "give token numbers"),
        ((tokens(0)[0], None), "needs targets"),
    ],
)
def test_batches_that_do_not_fit(batch: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        pipeline().step(*batch)


def test_no_loss() -> None:
    pipe = pipeline(loss_fn=None)
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(InputError, match=r"needs a loss: give Pipeline a loss_fn\(output, target\)"):
            call(*tokens(0))


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = torch.fft.fft(x)
        return changed


class Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = torch.fft.ifft(x * 1j).imag
        return changed


@pytest.mark.parametrize("schedule", ["hanayo", "zb-wave"])
def test_recompute_changes_nothing_that_can_be_seen(schedule: str) -> None:
    """Complex numbers between stages take gradients; what layers count and average in a forward pass is counted once."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), spectral, Fourier(), Back(), nn.Linear(8, 8))
        pipe = Pipeline(
            model,
            schedule=schedule,
            waves=1,
            cut=(4, 2),
            num_micro_batches=4,
            loss_fn=nn.functional.mse_loss,
            recompute=recompute,
        )
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) + 3
        pipe.step(x, x)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        found.append((gradients, {name: b.clone() for name, b in pipe.named_buffers()}))
    for plain, again in zip(*found, strict=True):
        assert plain.keys() == again.keys()
        for name, value in plain.items():
            assert value is not None
            assert again[name] is not None
            assert torch.equal(value, again[name]), name


def test_inputs_and_targets_must_be_as_many() -> None:
    pipe = Pipeline(nn.Sequential(nn.Linear(8, 8)), num_micro_batches=4, loss_fn=nn.functional.mse_loss)
    with pytest.raises(InputError, match="inputs hold 8 samples, targets 6"):
        pipe.step(torch.zeros(8, 8), torch.zeros(6, 8))
