"""torch.distributed.pipelining as its users run it, timed: real Gloo processes, real messages, compute emulated by waiting.

A stage's module waits F in its forward, I where autograd computes the gradient of its input and W where it computes that of
its weight. The two gradients are different nodes of the graph, joined by an addition, so that torch's split backward takes
them apart as it does for real layers:

    x ──► _Forward (waits F, backward waits I) ──► + ──► y
    weight ──► _Weight (backward waits W) ─────────┘

As in training, the input of the model needs no gradient: the first stage has no I (``input_gradient=True`` gives it one).
For torch's sake: one thread, warm-up steps, no merged outputs, no copies of losses, no garbage collection inside a step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from wavetrain.runtime.emulation import Waiter

Placement = Literal["straight", "loop", "v"]

SCHEDULES: dict[str, Placement] = {
    "GPipe": "straight",
    "1F1B": "straight",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
"""torch's schedules, as ``get_schedule_class`` names them, and how each lays its stages on ranks."""


@dataclass(frozen=True, kw_only=True)
class TorchCase:
    """One of torch's schedules with its number of stages."""

    schedule: str
    """A key of :data:`SCHEDULES`."""
    stages_per_rank: int = 1

    @property
    def label(self) -> str:
        many = SCHEDULES[self.schedule] == "loop"
        return f"torch {self.schedule}" + (f", {self.stages_per_rank} stages a rank" if many else "")


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """What is run: counts, and the seconds that a rank's whole share takes for one micro-batch."""

    ranks: int
    micro_batches: int
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    message_shape: tuple[int, ...] = (128, 256)
    """Of one micro-batch's activations, float32."""
    steps: int = 5
    warmup: int = 2
    input_gradient: bool = False
    """Whether the first stage computes the gradient of its input, too."""
    defer_receives: bool = False
    """torch's ``defer_pp_recv``, for schedules with several stages a rank."""
    trace: bool = False
    """Record what every action takes."""

    @property
    def ideal_seconds(self) -> float:
        """Seconds of a step in which no rank idles."""
        return self.micro_batches * (self.forward_seconds + self.input_seconds + self.weight_seconds)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the timed steps of one schedule: from a barrier until the last rank is done."""

    case: TorchCase
    ranks: int
    micro_batches: int
    seconds: tuple[float, ...] = ()
    """One a step; empty if torch refused the schedule."""
    refusal: str = ""
    """What torch said if it does not take these counts."""
    actions: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """With ``trace``: seconds of every F, B, I and W, without the wait for its message."""

    peak: float = 0.0
    """Micro-batches of its share whose activations a rank holds at most."""

    @property
    def median(self) -> float:
        """Median step in seconds; infinite if torch refused."""
        return statistics.median(self.seconds) if self.seconds else float("inf")


def torch_cases(stages_per_rank: Sequence[int] = (2, 3, 4)) -> list[TorchCase]:
    """All schedules, those with loops with each number of stages a rank."""
    found = []
    for name, placement in SCHEDULES.items():
        counts = {"straight": (1,), "loop": tuple(stages_per_rank), "v": (2,)}[placement]
        found += [TorchCase(schedule=name, stages_per_rank=count) for count in counts]
    return found


def time_torch(
    schedule: str,
    *,
    ranks: int,
    micro_batches: int,
    seconds_per_rank: float,
    stages_per_rank: int | None = None,
    message_shape: tuple[int, ...] = (128, 256),
    steps: int = 5,
    warmup: int = 2,
    limit_seconds: float = 300.0,
) -> StepTimes:
    """Time one schedule.

    Args:
        schedule: a key of :data:`SCHEDULES`.
        ranks: P.
        micro_batches: B.
        seconds_per_rank: F of a rank's whole share and one micro-batch; I and W take the same.
        stages_per_rank: default 1, or 2 for loops and Vs.
        message_shape: of one micro-batch's activations, float32.
        steps: how many are timed.
        warmup: steps before them.
        limit_seconds: after which everything is ended with :class:`TimeoutError`.
    """
    count = stages_per_rank if stages_per_rank is not None else 1 if SCHEDULES[schedule] == "straight" else 2
    run = Emulated(
        ranks=ranks,
        micro_batches=micro_batches,
        forward_seconds=seconds_per_rank,
        input_seconds=seconds_per_rank,
        weight_seconds=seconds_per_rank,
        message_shape=message_shape,
        steps=steps,
        warmup=warmup,
    )
    return time_cases([TorchCase(schedule=schedule, stages_per_rank=count)], run, limit_seconds=limit_seconds)[0]


def time_cases(cases: Sequence[TorchCase], run: Emulated, *, limit_seconds: float = 600.0) -> list[StepTimes]:
    """Time several schedules, one after the other, in the same processes.

    Raises:
        TimeoutError: not done after ``limit_seconds``.
        RuntimeError: a rank failed; carries its traceback.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(run.ranks)]
        processes = [
            context.Process(target=_rank_main, args=(rank, cases, run, f"{folder}/store", sender, limit_seconds), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when a rank imports torch
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            answers = _collect([receiver for receiver, _ in pipes], limit_seconds)
            return [_slowest(ranks) for ranks in zip(*answers, strict=True)]
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
            grace = time.monotonic() + (5 if sys.exc_info()[0] is None else 0)
            for process in processes:
                if process.pid is not None:
                    process.join(timeout=max(0.0, grace - time.monotonic()))
                    process.kill()
                    process.join()


def _collect(receivers: list[Connection], limit_seconds: float) -> list[list[StepTimes]]:
    """What every rank sent; the first failure is raised."""
    deadline = time.monotonic() + limit_seconds
    answers: dict[int, list[StepTimes]] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"torch's ranks {sorted(waiting)} were not done after {limit_seconds:.0f} s")
        for rank in [r for r, receiver in waiting.items() if receiver in ready]:
            try:
                failure, answers[rank] = waiting.pop(rank).recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} of torch's pipeline died without a word") from None
            if failure:
                raise RuntimeError(f"rank {rank} of torch's pipeline failed:\n{failure}")
    return [answers[rank] for rank in sorted(answers)]


def _slowest(ranks: Sequence[StepTimes]) -> StepTimes:
    """One case as all ranks saw it: a step ends when the last rank is done."""
    refusal = next((r.refusal for r in ranks if r.refusal), "")
    seconds = () if refusal else tuple(max(step) for step in zip(*(r.seconds for r in ranks), strict=True))
    kinds = sorted({kind for r in ranks for kind in r.actions})
    actions = {kind: tuple(value for r in ranks for value in r.actions.get(kind, ())) for kind in kinds}
    return replace(ranks[0], seconds=seconds, refusal=refusal, actions=actions)


# What follows runs in the ranks.


class _Forward(torch.autograd.Function):
    """Identity that waits F, and I on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait_forward: Callable[[], None], wait_input: Callable[[], None]) -> torch.Tensor:
        ctx.wait_input = wait_input
        wait_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.wait_input()
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Identity whose way back waits W."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, wait_weight: Callable[[], None]) -> torch.Tensor:
        ctx.wait_weight = wait_weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.wait_weight()
        return grads[0], None


class _Stage(torch.nn.Module):
    """Waits for F, I and W seconds; adds a weight that is one number."""

    def __init__(self, seconds: Sequence[float], waiter: Waiter) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self._waits = tuple(partial(waiter.wait, s) for s in seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Forward.apply(x, *self._waits[:2]) + _Weight.apply(self.weight, self._waits[2])  # type: ignore[no-untyped-call]
        return out


class _TracedStage(PipelineStage):
    """Records what its actions take, from when their messages have come."""

    spans: dict[str, list[float]]

    def _timed(self, kind: str, do: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = do()
        self.spans.setdefault(kind, []).append(time.monotonic() - begin)
        return result

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        call = super().forward_one_chunk
        return self._timed("F", lambda: call(*args, **kwargs))

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        call = super().backward_one_chunk
        kind = "B" if kwargs.get("full_backward", True) else "I"
        return self._timed(f"{kind} of stage 0" if self.is_first else kind, lambda: call(*args, **kwargs))

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        call = super().backward_weight_one_chunk
        return self._timed("W of stage 0" if self.is_first else "W", lambda: call(*args, **kwargs))


def _rank_main(
    rank: int, cases: Sequence[TorchCase], run: Emulated, store: str, sender: Connection, limit_seconds: float
) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != os.getppid():
        raise SystemExit("the process that started the ranks is gone")
    try:
        torch.set_num_threads(1)
        files = dist.FileStore(store, run.ranks)  # type: ignore[attr-defined]
        limit = timedelta(seconds=limit_seconds)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=run.ranks, timeout=limit)
        sender.send(("", [_time_case(case, run, rank) for case in cases]))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        sender.send((traceback.format_exc(), []))
        raise


def _time_case(case: TorchCase, run: Emulated, rank: int) -> StepTimes:
    """Times as one rank sees them."""
    times = StepTimes(case=case, ranks=run.ranks, micro_batches=run.micro_batches)
    waiter = Waiter()
    num_stages = run.ranks * case.stages_per_rank
    share = [s / case.stages_per_rank for s in (run.forward_seconds, run.input_seconds, run.weight_seconds)]
    indices = [rank + i * run.ranks for i in range(case.stages_per_rank)]
    if SCHEDULES[case.schedule] == "v":
        indices = [rank, num_stages - 1 - rank]
    build = _TracedStage if run.trace else PipelineStage
    stages = [build(_Stage(share, waiter), i, num_stages, torch.device("cpu")) for i in indices]
    spans: dict[str, list[float]] = {}
    for stage in stages:
        if isinstance(stage, _TracedStage):
            stage.spans = spans
    options: dict[str, Any] = {"n_microbatches": run.micro_batches, "loss_fn": lambda output, target: output.mean()}
    kind = get_schedule_class(case.schedule)
    try:
        if issubclass(kind, pipelining.schedules.PipelineScheduleSingle):
            schedule = kind(stages[0], **options)
        else:
            schedule = kind(stages, defer_pp_recv=run.defer_receives, **options)
    except ValueError as error:  # e.g. DualPipeV: fewer micro-batches than stages
        return replace(times, refusal=str(error))
    batch = torch.zeros(run.micro_batches * run.message_shape[0], *run.message_shape[1:], requires_grad=run.input_gradient)
    arguments: tuple[torch.Tensor, ...] = (batch,) if 0 in indices else ()
    keywords = {"target": batch.detach()} if num_stages - 1 in indices else {}
    taken = []
    for step in range(run.warmup + run.steps):
        for stage in stages:
            stage.submod.zero_grad()
        batch.grad = None
        gc.collect()
        gc.disable()
        if step == run.warmup:
            spans.clear()
        dist.barrier()
        begin = time.monotonic()
        schedule.step(*arguments, return_outputs=False, **keywords)
        taken.append(time.monotonic() - begin)
        gc.enable()
    traced = {k: tuple(v) for k, v in spans.items()}
    return replace(times, seconds=tuple(taken[run.warmup :]), actions=traced, peak=_peak(schedule, run, case.stages_per_rank))


def _peak(schedule: Any, run: Emulated, stages_per_rank: int) -> float:
    """What torch's order holds: from a stage's forward to its whole or weight backward."""
    if isinstance(schedule, pipelining.schedules.PipelineScheduleSingle):
        return float(run.micro_batches if type(schedule).__name__ == "ScheduleGPipe" else min(run.ranks, run.micro_batches))
    change = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
    peak = 0
    for actions in schedule.pipeline_order.values():
        parts = (part for a in actions if a is not None for part in (a.sub_actions or (a,)))
        peak = max(peak, *accumulate(change.get(part.computation_type.name, 0) for part in parts))
    return peak / stages_per_rank


def main() -> None:
    """Time torch's schedules and print a line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.08, help="F of a rank and micro-batch; I and W take the same")
    parser.add_argument("--stages-per-rank", type=int, nargs="+", default=[2, 3, 4], help="of the schedules with loops")
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--input-gradient", action="store_true", help="the first stage has an I, too")
    parser.add_argument("--defer-receives", action="store_true", help="torch's defer_pp_recv")
    parser.add_argument("--trace", action="store_true", help="print what the actions take")
    given = parser.parse_args()
    run = Emulated(
        ranks=given.ranks,
        micro_batches=given.micro_batches,
        forward_seconds=given.seconds,
        input_seconds=given.seconds,
        weight_seconds=given.seconds,
        steps=given.steps,
        input_gradient=given.input_gradient,
        defer_receives=given.defer_receives,
        trace=given.trace,
    )
    cases = [case for case in torch_cases(given.stages_per_rank) if case.schedule in given.schedules]
    print(f"P={run.ranks} B={run.micro_batches}, no rank idle: {1000 * run.ideal_seconds:.0f} ms")
    for times in time_cases(cases, run):
        steps = " ".join(f"{1000 * s:.0f}" for s in times.seconds)
        print(f"{times.case.label:42s} {f'{1000 * times.median:7.1f} ms   ({steps})' if steps else times.refusal}", flush=True)
        for kind, values in sorted(times.actions.items()):
            print(f"    {kind:12s} {1000 * statistics.median(values):7.2f} ms, at most {1000 * max(values):7.2f} ms")


if __name__ == "__main__":
    main()
