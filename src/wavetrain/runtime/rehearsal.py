"""Rehearsal: a real run of the real runtime with real messages, on ranks whose compute is emulated by waiting.

It answers, before a cluster is rented, whether a schedule runs as the simulator says, and if not, what the difference is made of.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from wavetrain.errors import InputError
from wavetrain.runtime.blackbox import Recorder
from wavetrain.runtime.emulation import EmulatedLinks, EmulatedStage, Waiter, message_tensor
from wavetrain.runtime.executor import Executor, Moment
from wavetrain.runtime.launch import launch
from wavetrain.runtime.local import open_transport
from wavetrain.runtime.mesh import join
from wavetrain.runtime.program import Parcel, Program, compile_program
from wavetrain.runtime.trace import gather_moments, measured_timeline
from wavetrain.runtime.transport import Transport
from wavetrain.schedule.actions import KINDS
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import costs_for, simulate
from wavetrain.schedule.timeline import Timeline

MARGIN_SECONDS = 0.02
"""How far ahead the common start of a step is agreed on."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found; seconds are of one step."""

    schedule: Schedule
    predicted: Timeline
    """Simulated with the hop and the overhead of an action as the warm-up steps had them."""
    ideal_seconds: float
    """No rank ever idles, and no action has an overhead."""
    hop_only_seconds: float
    """Simulated with the measured hop alone, as if actions had no overhead."""
    measured: Timeline
    """The median step."""
    step_seconds: tuple[float, ...]
    """Of every step that counted, from the common start to the end of the last rank."""
    hop_seconds: float
    """What a message takes beyond its link: from the end of the sender's compute to the start of the receiver's, where that one
    was waiting for it. The median over all schedules of the warm-up steps, which do not count otherwise (of all steps if there
    is no warm-up)."""
    late_seconds: float
    """How much longer an action took than it was told to wait (the operating system's share), in the warm-up steps: the mean over
    a rank's actions, of which the median over ranks."""
    between_seconds: float
    """From the end of an action until the rank is free for the next (sending, bookkeeping); likewise."""

    @property
    def measured_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def predicted_seconds(self) -> float:
        return self.predicted.makespan

    @property
    def bubble(self) -> float:
        """The share of the measured step in which a rank does not compute, mean over ranks."""
        return 1.0 - self.ideal_seconds / self.measured_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as ``wavetrain rehearse --json`` prints it."""
        return {
            "schedule": self.schedule.name,
            "ranks": self.schedule.num_ranks,
            "waves": self.schedule.waves,
            "micro_batches": self.schedule.num_micro_batches,
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.measured_seconds,
            "hop_only_seconds": self.hop_only_seconds,
            "ideal_seconds": self.ideal_seconds,
            "bubble": self.bubble,
            "step_seconds": list(self.step_seconds),
            "hop_seconds": self.hop_seconds,
            "late_seconds_per_action": self.late_seconds,
            "between_seconds_per_action": self.between_seconds,
        }


def rehearse(
    schedule: Schedule, costs: Costs | None = None, *, steps: int = 5, warmup: int = 1, timeout_seconds: float = 60.0
) -> Rehearsal:
    """Run ``schedule`` in as many processes of this machine as it has ranks; see :func:`rehearse_all`."""
    return rehearse_all([schedule], costs, steps=steps, warmup=warmup, timeout_seconds=timeout_seconds)[0]


def rehearse_all(
    schedules: Sequence[Schedule],
    costs: Costs | None = None,
    *,
    steps: int = 5,
    warmup: int = 1,
    timeout_seconds: float = 60.0,
) -> list[Rehearsal]:
    """Run schedules of equal rank counts in the same processes, one step of each in turn: a machine's mood meets them all alike.

    Args:
        schedules: are proven first.
        costs: seconds of every action, bytes of every message. Links are those of this machine's loopback; where the costs say
            that a message takes longer, it is held back until then.
        steps: that count, of each schedule.
        warmup: steps of each before them.
        timeout_seconds: how long a message may take.

    Raises:
        ProofError: a schedule cannot run.
        RankFailedError: a rank died.
    """
    if steps < 1 or warmup < 0:
        raise InputError(f"steps={steps}, warmup={warmup}: at least one step must count")
    if not schedules or len({s.num_ranks for s in schedules}) != 1:
        raise InputError("schedules that are rehearsed together must have the same number of ranks")
    costs = costs_for(schedules[0], costs)
    for schedule in schedules:
        prove(schedule, costs).require()
    args = (tuple(schedules), costs, warmup + steps, timeout_seconds)
    found = launch(rehearse_rank, ranks=schedules[0].num_ranks, args=args)
    runs = [[[[Moment(*m) for m in rank] for rank in ranks] for ranks in run["steps"]] for run in found["runs"]]
    early = [(s, ranks) for s, steps in zip(schedules, runs, strict=True) for ranks in steps[: warmup or None]]
    hops = [seconds for s, ranks in early for seconds in _hops(s, costs, ranks)]
    hop = statistics.median(hops) if hops else 0.0
    return [
        _summary(s, costs, steps[warmup:], run["starts"][warmup:], hop, _overheads(s, costs, steps[: warmup or None]))
        for s, steps, run in zip(schedules, runs, found["runs"], strict=True)
    ]


def _summary(
    schedule: Schedule,
    costs: Costs,
    moments: Sequence[list[list[Moment]]],
    starts: Sequence[float],
    hop: float,
    overheads: tuple[float, float],
) -> Rehearsal:
    seconds = [max(m[-1].end for m in ranks if m) - start for ranks, start in zip(moments, starts, strict=True)]
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]
    by_hop = simulate(schedule, _slower(costs, hop=hop))
    late, between = overheads
    known = _slower(costs, hop=max(0.0, hop - between), overhead=late + between)  # a hop begins where the sender's compute ends
    return Rehearsal(
        schedule=schedule,
        predicted=simulate(schedule, known),
        ideal_seconds=by_hop.ideal,
        hop_only_seconds=by_hop.makespan,
        measured=measured_timeline(schedule, moments[middle], costs),
        step_seconds=tuple(seconds),
        hop_seconds=hop,
        late_seconds=late,
        between_seconds=between,
    )


def _slower(costs: Costs, *, hop: float, overhead: float = 0.0) -> Costs:
    latency = tuple(tuple(v + hop for v in row) for row in costs.latency)
    return replace(costs, latency=latency, overhead=costs.overhead + overhead)


def _hops(schedule: Schedule, costs: Costs, ranks: Sequence[Sequence[Moment]]) -> list[float]:
    """Of one step: seconds that messages came later than their links say, those for which a rank was waiting."""
    cut = schedule.cut(costs)
    runs = [list(zip(compile_program(schedule, rank).instructions, moments, strict=True)) for rank, moments in enumerate(ranks)]
    due: dict[Parcel, float] = {}
    for rank, run in enumerate(runs):
        free: dict[int, float] = {}
        for instruction, moment in run:
            if (parcel := instruction.send) is not None:
                boundary = parcel.stage if parcel.kind == "F" else parcel.stage - 1
                begin = max(moment.end, free.get(parcel.target, 0.0))
                free[parcel.target] = begin + cut.message_bytes[boundary] / cut.bandwidth[rank][parcel.target]
                due[parcel] = free[parcel.target] + cut.latency[rank][parcel.target]
    return [
        moment.start - due[instruction.receive]
        for run in runs
        for instruction, moment in run
        if instruction.receive is not None and due[instruction.receive] > moment.waited_from
    ]


def _overheads(schedule: Schedule, costs: Costs, steps: Sequence[Sequence[Sequence[Moment]]]) -> tuple[float, float]:
    """Seconds by which an action is late, and seconds between two: means over a rank's step, of which the median.

    The largest fiftieth is left out: a machine that stands still for a while is no property of an action.
    """
    cut = schedule.cut(costs)
    late, between = [], []
    for ranks in steps:
        for rank, (actions, moments) in enumerate(zip(schedule.actions, ranks, strict=True)):
            if not moments:
                continue
            told = [cut.seconds(kind, stage, rank) for kind, stage, _ in actions]
            late.append(_usual([m.end - m.start - seconds for m, seconds in zip(moments, told, strict=True)]))
            between.append(_usual([after.waited_from - m.end for m, after in pairwise(moments)]))
    return statistics.median(late), statistics.median(between)


def _usual(seconds: list[float]) -> float:
    kept = sorted(seconds)[: max(1, len(seconds) - math.ceil(len(seconds) / 50))]
    return statistics.fmean(kept) if kept else 0.0


def rehearse_rank(schedules: Sequence[Schedule], costs: Costs, num_steps: int, timeout_seconds: float) -> dict[str, Any]:
    """What every rank does; rank 0's result is brought home."""
    torch.set_num_threads(1)
    join()
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    waiter, recorder = Waiter(), Recorder.from_environment()
    programs = [compile_program(s, rank, receive_ahead=prove(s).require().receive_ahead) for s in schedules]
    channels = sorted({channel for program in programs for channel in program.channels})
    ranks = range(schedules[0].num_ranks)
    transport = open_transport(None, ranks, channels, rank, torch.device("cpu"), timeout_seconds)
    executors = [_executor(s, p, costs, transport, waiter, recorder) for s, p in zip(schedules, programs, strict=True)]
    runs: list[dict[str, list[Any]]] = [{"steps": [], "starts": []} for _ in schedules]
    for step in range(num_steps):
        for i, (schedule, program, executor, run) in enumerate(zip(schedules, programs, executors, runs, strict=True)):
            recorder.step = step
            start = _common_start(alone)
            waiter.wait_until(start)
            moments = executor.run(program, [i] * schedule.num_micro_batches)
            run["steps"].append([moments] if alone else gather_moments(moments, schedule))
            run["starts"].append(start)
    if not alone:
        dist.barrier()
    return {"runs": runs}


def _executor(
    schedule: Schedule, program: Program, costs: Costs, transport: Transport, waiter: Waiter, recorder: Recorder
) -> Executor:
    """An executor whose stages wait."""
    rank = program.rank
    cut = schedule.cut(costs)
    workers = {
        (route, stage): EmulatedStage(
            waiter,
            {kind: cut.seconds(kind, stage, rank) for kind in KINDS},
            message_tensor(max(cut.message_bytes)),
            first=stage == 0,
            last=stage == schedule.num_stages - 1,
        )
        for route, placement in enumerate(schedule.placements)
        for stage, home in enumerate(placement)
        if home == rank
    }
    if any(v > 0 for row in cut.latency for v in row) or any(v < math.inf for row in cut.bandwidth for v in row):
        transport = EmulatedLinks(transport, waiter, cut)
    return Executor(workers, transport, recorder)


def _common_start(alone: bool) -> float:
    """A moment that all ranks of this machine (one monotonic clock) have agreed on."""
    start = torch.tensor([time.monotonic() + MARGIN_SECONDS], dtype=torch.float64)
    if not alone:
        dist.barrier()
        start = torch.tensor([time.monotonic() + MARGIN_SECONDS], dtype=torch.float64)
        dist.broadcast(start, 0)
    return float(start)
