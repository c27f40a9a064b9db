"""Numbers do not depend on the schedule: models × schedules × ranks give the bits of one process, which are those of plain torch.

Starting a rank takes seconds and a run of a small model a part of one: all runs of a number of ranks share one launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multiprocess.ranks import (
    KINDS,
    NUM_MICRO_BATCHES,
    SINGLE_ROUTE,
    Cargo,
    Job,
    Trained,
    by_gloo,
    close,
    loss_fn,
    tokens,
    train,
    train_plainly,
)
from wavetrain import Pipeline, build, launch, save
from wavetrain.models import GPT

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

CLOSE = 1e-6

EVERY_SCHEDULE = ("gpt, tied", "plain")
"""Kinds that run by every schedule; the others by one of each sort."""
ONE_OF_EACH = {2: ("1f1b", "interleaved", "hanayo W=2", "zb-wave W=2"), 4: ("zbv", "zb-wave W=2")}


def matrix(num_ranks: int) -> dict[str, Job]:
    return {
        f"{kind}: {schedule}": Job(kind=kind, schedule=schedule, steps=3 if kind == "gpt, tied" else 2)
        for kind in KINDS
        for schedule in (SINGLE_ROUTE if kind in EVERY_SCHEDULE else ONE_OF_EACH[num_ranks])
        if kind != "llama" or num_ranks == 2
        if not (schedule == "auto" and num_ranks == 2)  # it takes Chimera there
    }


def variants(num_ranks: int) -> dict[str, Job]:
    """What can be asked of a pipeline beside the schedule: none of it changes a bit."""
    if num_ranks > 2:
        return {
            "gloo": Job(schedule="zb-wave W=2", gloo=True, steps=2),
            "gloo, ragged": Job(kind="gpt, ragged", schedule="hanayo W=2", gloo=True, steps=2),
            "gloo, plain": Job(kind="plain", schedule="interleaved", gloo=True, steps=2),
            "recompute": Job(kind="gpt, dropout", schedule="zb-wave W=2", options={"recompute": True}, steps=2),
        }
    first = num_ranks * 2 - 1
    return {
        "recompute": Job(schedule="zb-wave W=2", options={"recompute": True}),
        "recompute, dropout": Job(kind="gpt, dropout", schedule="1f1b", options={"recompute": True}),
        "recompute, split, dropout": Job(kind="gpt, dropout", schedule="zb-wave W=2", options={"recompute": True}),
        "recompute of some stages": Job(kind="plain", schedule="zb-wave W=1", options={"recompute": [0, first]}),
        "recompute, frozen": Job(kind="gpt, frozen", schedule="zbv", options={"recompute": True}),
        "recompute, ragged": Job(kind="gpt, ragged", schedule="hanayo W=1", options={"recompute": True}),
        "recompute, mask": Job(kind="bert", schedule="zb-wave W=1", options={"recompute": True}),
        "accumulated": Job(schedule="zb-wave W=2", accumulate=2, steps=2),
        "five micro-batches": Job(schedule="zb-wave W=2", micro_batches=5),
        "one micro-batch": Job(schedule="hanayo W=2", micro_batches=1),
        "six micro-batches": Job(kind="plain", schedule="interleaved", micro_batches=6),
        "another cut": Job(
            kind="gpt, dropout", schedule="1f1b", options={"cut": [16 - 3 * (num_ranks - 1)] + [3] * (num_ranks - 1)}
        ),
        **{f"gloo: {schedule}": Job(schedule=schedule, gloo=True) for schedule in ("1f1b", "zb-wave W=2")},
        "gloo, ragged": Job(kind="gpt, ragged", schedule="zbv", gloo=True),
        "gloo, plain": Job(kind="plain", schedule="interleaved", gloo=True),
        "another seed": Job(kind="gpt, dropout", schedule="1f1b", options={"seed": 5}),
    }


def split_otherwise(num_ranks: int) -> dict[str, Job]:
    """Gradients are added in another order: the same within 1e-6."""
    if num_ranks == 2:
        return {
            "dp": Job(kind="gpt, dropout, even", options={"dp": 2}, micro_batches=2, optimizer="SGD"),
            "tp": Job(kind="gpt, dropout, even", options={"tp": 2}, optimizer="SGD"),
            "chimera, 2 ranks": Job(schedule="chimera", optimizer="SGD"),
            "auto, 2 ranks": Job(schedule="auto", optimizer="SGD"),
        }
    return {
        "chimera": Job(schedule="chimera", optimizer="SGD"),
        "chimera, frozen": Job(kind="gpt, frozen", schedule="chimera", optimizer="SGD", steps=2),
        "chimera, plain": Job(kind="plain", schedule="chimera", optimizer="SGD", steps=2),
        "chimera, from meta": Job(kind="gpt, from meta", schedule="chimera", optimizer="SGD", steps=2),
        "chimera, ragged": Job(kind="gpt, ragged", schedule="chimera", optimizer="SGD", steps=2),
        "dp × pp": Job(kind="gpt, dropout, even", schedule="zb-wave W=2", options={"dp": 2}, micro_batches=2, optimizer="SGD"),
        "dp, accumulated": Job(
            kind="gpt, dropout, even", options={"dp": 2}, micro_batches=2, steps=2, accumulate=2, optimizer="SGD"
        ),
        "dp, plain": Job(kind="plain, even", options={"dp": 2}, micro_batches=2, steps=2, optimizer="SGD"),
        "dp × chimera": Job(
            kind="gpt, dropout, even", schedule="chimera", options={"dp": 2}, micro_batches=2, steps=2, optimizer="SGD"
        ),
        "tp × pp": Job(kind="gpt, dropout", schedule="zb-wave W=1", options={"tp": 2}, steps=2, optimizer="SGD"),
        "tp × pp, mask": Job(kind="bert", schedule="1f1b", options={"tp": 2}, steps=1, optimizer="SGD"),
        "tp × dp": Job(kind="gpt, dropout, even", options={"tp": 2, "dp": 2}, micro_batches=2, steps=1, optimizer="SGD"),
    }


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the ranks have it: how a kernel divides its work among threads shows in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def one_process(kind: str, micro_batches: int, steps: int, accumulate: int, optimizer: str, seed: int) -> Trained:
    """The reference: all of it on one rank, one micro-batch after another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(
            Job(
                kind=kind,
                schedule="1f1b",
                micro_batches=micro_batches,
                steps=steps,
                accumulate=accumulate,
                optimizer=optimizer,
                options={"seed": seed},
            )
        )
    finally:
        torch.set_num_threads(threads)


def reference(job: Job) -> Trained:
    micro_batches = job.micro_batches * job.options.get("dp", 1)
    return one_process(job.kind, micro_batches, job.steps, job.accumulate, job.optimizer, job.options.get("seed", 0))


# ---- one process


@pytest.mark.parametrize("kind", [kind for kind, about in KINDS.items() if about.same_as_torch])
def test_one_process_gives_the_bits_of_plain_torch(kind: str) -> None:
    job = Job(kind=kind, steps=2)
    ours, theirs = reference(job), train_plainly(job)
    assert ours.digest == theirs.digest
    assert ours.norms == theirs.norms
    assert all(map(close, ours.losses + ours.evaluated, theirs.losses + theirs.evaluated))


@pytest.mark.parametrize("kind", ["gpt, tied", "plain"])
def test_one_process_by_every_schedule(kind: str) -> None:
    for schedule in SINGLE_ROUTE:
        assert train(Job(kind=kind, schedule=schedule, steps=2)).summary() == one_process(kind, 4, 2, 1, "AdamW", 0).summary()


def test_tied_weights_and_accumulation_are_those_of_plain_torch() -> None:
    """But for the order in which a tied weight's two gradients, and those of several steps, are added."""
    for job in (Job(optimizer="SGD"), Job(accumulate=2, steps=2, kind="gpt, untied", optimizer="SGD")):
        ours, theirs = reference(job), train_plainly(job)
        assert ours.distance(theirs.weights) < CLOSE
        assert all(map(close, ours.losses, theirs.losses))


# ---- many ranks


def run_all(jobs: dict[str, Job], folder: str) -> dict[str, Any]:
    """On every rank: run the jobs one after another; distances are found here, where the weights are."""
    torch.set_num_threads(1)
    found = {}
    for name, job in jobs.items():
        trained = train(job)
        found[name] = trained.summary()
        if job.optimizer == "SGD":
            wanted: dict[str, Tensor] = torch.load(Path(folder, f"{name}.pt"), weights_only=True)
            found[name]["distance"] = trained.distance(wanted)
    found["others"] = {
        "carried": carries(gloo=True) and carries(gloo=False, empty=False),
        "predicted": predicts(),
        "alternating": alternates(),
        "timeline": timeline(),
    }
    return found


def predicts() -> list[Any]:
    """Where the last layer sits there is an output, elsewhere None."""
    torch.manual_seed(0)
    pipe = Pipeline(
        GPT(num_layers=6, hidden=8, num_heads=2, vocab=5, max_length=8), schedule="zb-wave", waves=1, num_micro_batches=2
    )
    found = pipe.predict(torch.arange(12).reshape(4, 3) % 5)
    holds = pipe.schedule.placements[0][-1] == pipe.mesh.pp_rank
    assert (found is not None) == holds
    return [] if found is None else [part.tolist() for part in found]


def carries(*, gloo: bool, empty: bool = True) -> bool:
    """Whatever may pass between layers arrives as it was sent, every time."""
    with by_gloo() if gloo else contextlib.nullcontext():
        layers = [Cargo(loads=True, empty=empty), *[Cargo(loads=False, empty=empty) for _ in range(7)]]
        pipe = Pipeline(nn.Sequential(*layers), schedule="gpipe", num_micro_batches=3)
        for _ in range(2):
            pipe.predict(torch.ones(3, 2))
    return True


def carries_empty_ones() -> bool:
    return carries(gloo=False)


def test_empty_tensors_pass_within_a_machine() -> None:
    assert launch(carries_empty_ones, ranks=2)


def alternates() -> float:
    """Training, evaluation and another shape by turns: what is agreed on about shapes stays right."""
    torch.manual_seed(0)
    pipe = Pipeline(
        GPT(num_layers=6, hidden=8, num_heads=2, vocab=29, max_length=8),
        schedule="zb-wave",
        waves=1,
        num_micro_batches=2,
        loss_fn=loss_fn,
    )
    total = 0.0
    for step in range(6):
        total += float(pipe.step(*tokens(step, batch=2 + step % 2, seq=3 + step % 3)))
        total += float(pipe.evaluate(*tokens(step, batch=2, seq=3)))
        pipe.predict(tokens(step, batch=2, seq=4)[0])
    return total


def timeline() -> bool:
    torch.manual_seed(0)
    pipe = Pipeline(
        GPT(num_layers=6, hidden=8, num_heads=2, vocab=29, max_length=8),
        schedule="zb-wave",
        waves=1,
        num_micro_batches=3,
        loss_fn=loss_fn,
    )
    pipe.step(*tokens(0))
    found = pipe.timeline()
    for actions, spans in zip(pipe.schedule.actions, found.spans, strict=True):
        assert [(s.kind, s.stage, s.micro_batch) for s in spans] == list(actions)
        assert all(a.end <= b.start and a.start <= a.end for a, b in pairwise(spans))
    return True


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Job], dict[str, Any]]:
    """All jobs of a number of ranks, and what they found."""
    num_ranks = request.param
    folder = tmp_path_factory.mktemp("reference")
    jobs = {**matrix(num_ranks), **variants(num_ranks), **split_otherwise(num_ranks)}
    for name, job in jobs.items():
        if job.optimizer == "SGD":
            torch.save(reference(job).weights, folder / f"{name}.pt")
    path = folder / "zb-wave.csv"
    save(build("zb-wave", num_ranks=num_ranks, num_micro_batches=NUM_MICRO_BATCHES, waves=1), path)
    jobs["a saved schedule"] = Job(schedule=path)
    return jobs, launch(run_all, ranks=num_ranks, args=(jobs, str(folder)), timeout_seconds=400)


def test_every_schedule_gives_the_bits_of_one_process(ran: tuple[dict[str, Job], dict[str, Any]]) -> None:
    jobs, found = ran
    exact = {name: job for name, job in jobs.items() if job.optimizer == "AdamW"}
    assert len(exact) > 40
    wrong = [name for name, job in exact.items() if found[name] != reference(job).summary()]
    assert not wrong


def test_replicas_routes_and_tensor_parallelism_are_close(ran: tuple[dict[str, Job], dict[str, Any]]) -> None:
    jobs, found = ran
    for name, job in jobs.items():
        if job.optimizer == "SGD":
            one = reference(job)
            assert found[name]["distance"] < (1e-5 if "tp" in job.options else CLOSE), name
            for what in ("losses", "norms", "evaluated"):
                assert all(map(close, found[name][what], getattr(one, what))), (name, what)


def test_what_else_a_pipeline_does(ran: tuple[dict[str, Job], dict[str, Any]]) -> None:
    _, found = ran
    others = found["others"]
    assert others["alternating"] == alternates()
    assert others["timeline"]
    assert others["carried"]
    predicted = torch.tensor(others["predicted"])  # W=1: the last layer is on rank 0
    assert predicted.shape == (2, 2, 3, 5)
    assert predicted.tolist() == predicts()
