"""Rehearsal: a real run of the real runtime with real messages, on ranks whose compute is emulated by waiting.

It answers, before a cluster is rented, whether a schedule runs as the simulator says, and if not, what the difference is made of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from wavetrain.errors import InputError
from wavetrain.runtime.blackbox import Recorder
from wavetrain.runtime.emulation import EmulatedStage, Waiter, message_tensor
from wavetrain.runtime.executor import Executor, Moment
from wavetrain.runtime.launch import launch
from wavetrain.runtime.mesh import join
from wavetrain.runtime.program import compile_program
from wavetrain.runtime.trace import gather_moments, measured_timeline
from wavetrain.runtime.transport import DistributedTransport
from wavetrain.schedule.actions import KINDS
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import costs_for, simulate
from wavetrain.schedule.timeline import Timeline

NUM_PINGS = 30
MARGIN_SECONDS = 0.02
"""How far ahead the common start of a step is agreed on."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found; seconds are of one step."""

    schedule: Schedule
    predicted: Timeline
    """Simulated with the measured hop."""
    measured: Timeline
    """The median step."""
    step_seconds: tuple[float, ...]
    """Of every step that counted, from the common start to the end of the last rank."""
    hop_seconds: float
    """From the end of the sender's compute to the receiver's start, idle ranks, messages of the real size."""
    late_seconds: float
    """Mean over actions: how much longer an action took than it was told to wait (the operating system's share)."""
    between_seconds: float
    """Mean over actions: from the end of an action until the rank is free for the next (sending, bookkeeping)."""

    @property
    def measured_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def predicted_seconds(self) -> float:
        return self.predicted.makespan

    @property
    def ideal_seconds(self) -> float:
        """No rank ever idles."""
        return self.predicted.ideal

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
            "ideal_seconds": self.ideal_seconds,
            "bubble": self.bubble,
            "step_seconds": list(self.step_seconds),
            "hop_seconds": self.hop_seconds,
            "late_seconds_per_action": self.late_seconds,
            "between_seconds_per_action": self.between_seconds,
        }


def rehearse(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    steps: int = 5,
    warmup: int = 1,
    timeout_seconds: float = 60.0,
    on_step: Callable[[int, float], None] | None = None,
) -> Rehearsal:
    """Run ``schedule`` in as many processes of this machine as it has ranks.

    Args:
        schedule: is proven first.
        costs: seconds of every action, bytes of every message. Latency and bandwidth are those of this machine's loopback: what
            the costs say about links beyond that is emulated by the sender's message arriving later.
        steps: that count.
        warmup: steps before them.
        timeout_seconds: how long a message may take.
        on_step: unused while ranks run; called afterwards with (step, seconds).

    Raises:
        ProofError: the schedule cannot run.
        RankFailedError: a rank died.
    """
    if steps < 1 or warmup < 0:
        raise InputError(f"steps={steps}, warmup={warmup}: at least one step must count")
    costs = costs_for(schedule, costs)
    prove(schedule, costs).require()
    found = launch(_rehearse_rank, ranks=schedule.num_ranks, args=(schedule, costs, warmup + steps, timeout_seconds))
    counted = [[[Moment(*m) for m in rank] for rank in ranks] for ranks in found["steps"][warmup:]]
    hop = float(found["hop_seconds"])
    seconds = [max(m[-1].end for m in ranks if m) - start for ranks, start in zip(counted, found["starts"][warmup:], strict=True)]
    if on_step is not None:
        for i, s in enumerate(seconds):
            on_step(i, s)
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]
    known = replace(
        costs,
        latency=tuple(tuple(max(v, hop) for v in row) for row in costs.latency),
    )
    late, between = _overheads(schedule, costs.cut(schedule.placements), counted)
    return Rehearsal(
        schedule=schedule,
        predicted=simulate(schedule, known),
        measured=measured_timeline(schedule, counted[middle], costs),
        step_seconds=tuple(seconds),
        hop_seconds=hop,
        late_seconds=late,
        between_seconds=between,
    )


def _overheads(schedule: Schedule, costs: Costs, steps: Sequence[Sequence[Sequence[Moment]]]) -> tuple[float, float]:
    late, between, count = 0.0, 0.0, 0
    for ranks in steps:
        for rank, (actions, moments) in enumerate(zip(schedule.actions, ranks, strict=True)):
            for i, ((kind, stage, _), m) in enumerate(zip(actions, moments, strict=True)):
                late += m.end - m.start - costs.seconds(kind, stage, rank)
                if i + 1 < len(moments):
                    between += moments[i + 1].waited_from - m.end
                count += 1
    return late / count, between / count


def _rehearse_rank(schedule: Schedule, costs: Costs, num_steps: int, timeout_seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    join()
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    certificate = prove(schedule).require()
    cut = costs.cut(schedule.placements)
    waiter = Waiter()
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
    program = compile_program(schedule, rank, receive_ahead=certificate.receive_ahead)
    transport = DistributedTransport(range(schedule.num_ranks), program.channels, rank, torch.device("cpu"), timeout_seconds)
    recorder = Recorder.from_environment()
    executor = Executor(workers, transport, recorder)
    hop = 0.0 if alone else _measure_hop(rank, message_tensor(max(cut.message_bytes)), waiter)
    steps, starts = [], []
    keys = [0] * schedule.num_micro_batches
    for step in range(num_steps):
        recorder.step = step
        start = _common_start(alone)
        waiter.wait(start - time.monotonic())
        moments = executor.run(program, keys)
        steps.append(gather_moments(moments, schedule) if not alone else [moments])
        starts.append(start)
    if not alone:
        dist.barrier()
        dist.destroy_process_group()
    return {"steps": steps, "starts": starts, "hop_seconds": hop}


def _common_start(alone: bool) -> float:
    """A moment that all ranks of this machine (one monotonic clock) have agreed on."""
    start = torch.tensor([time.monotonic() + MARGIN_SECONDS], dtype=torch.float64)
    if not alone:
        dist.barrier()
        start = torch.tensor([time.monotonic() + MARGIN_SECONDS], dtype=torch.float64)
        dist.broadcast(start, 0)
    return float(start)


def _measure_hop(rank: int, message: torch.Tensor, waiter: Waiter) -> float:
    """Half the median round trip of a message between ranks 0 and 1, each asleep when it comes, as in a pipeline."""
    trips = []
    inbox = torch.empty_like(message)
    for _ in range(NUM_PINGS):
        if rank == 0:
            waiter.wait(0.002)
            start = time.monotonic()
            dist.send(message, 1)
            dist.recv(inbox, 1)
            trips.append(time.monotonic() - start)
        elif rank == 1:
            dist.recv(inbox, 0)
            dist.send(message, 0)
    found = torch.tensor([statistics.median(trips) / 2 if trips else 0.0], dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)
