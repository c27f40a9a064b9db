"""From the moments that ranks noted to one measured timeline."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from wavetrain.runtime.executor import Moment
from wavetrain.runtime.program import compile_program
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import held_bytes
from wavetrain.schedule.timeline import Message, Span, Timeline

NUM_CLOCK_TRIPS = 10
"""Round trips by which the clocks of two machines are compared."""


def measured_timeline(schedule: Schedule, moments: Sequence[Sequence[Moment]], costs: Costs | None = None) -> Timeline:
    """One step as it ran.

    When a message arrived is known where its rank sat waiting for it: then. Otherwise it came while the rank was busy, and counts
    as there when the action before was done.

    Args:
        schedule: what ran.
        moments: of every rank, one an action, on one clock.
        costs: give the timeline its memory; without it a stage counts as one.
    """
    origin = min((m.waited_from for rank in moments for m in rank[:1]), default=0.0)
    spans, ends, uses = [], {}, {}
    for rank, (actions, times) in enumerate(zip(schedule.actions, moments, strict=True)):
        spans.append(tuple(Span(*a, t.start - origin, t.end - origin) for a, t in zip(actions, times, strict=True)))
        busy_until = 0.0
        for instruction, t in zip(compile_program(schedule, rank).instructions, times, strict=True):
            if instruction.send is not None:
                ends[instruction.send] = t.end - origin
            if instruction.receive is not None:
                uses[instruction.receive] = (busy_until, t.start - origin)
            busy_until = t.end - origin
    costs = schedule.cut(costs or Costs.uniform(schedule.num_ranks))
    return Timeline(
        name=schedule.name,
        source="measured",
        num_stages=schedule.num_stages,
        num_micro_batches=schedule.num_micro_batches,
        waves=schedule.waves,
        spans=tuple(spans),
        messages=tuple(Message(*parcel, sent, sent, _arrival(sent, *uses[parcel])) for parcel, sent in ends.items()),
        held_bytes=held_bytes(costs),
        memory_cap=costs.memory_cap,
        share_bytes=tuple(
            sum(costs.activation_bytes[s] for p in schedule.placements for s, r in enumerate(p) if r == rank)
            / schedule.num_routes
            for rank in range(schedule.num_ranks)
        ),
    )


def _arrival(sent: float, busy_until: float, used: float) -> float:
    return max(sent, used) if sent > busy_until else min(busy_until, used)


def clock_offset(group: dist.ProcessGroup | None = None) -> float:
    """Seconds to add to this rank's monotonic clock to get that of the group's first rank; 0 where all share one machine.

    Of several round trips the quickest counts; its middle is taken for the moment at which the first rank looked at its clock.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = torch.zeros(64, dtype=torch.uint8)
    text = socket.gethostname().encode()[:64]
    name[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    names = [torch.empty_like(name) for _ in range(size)]
    dist.all_gather(names, name, group=group)
    if all(torch.equal(n, names[0]) for n in names):
        return 0.0
    best, offset = float("inf"), 0.0
    clock = torch.zeros(1, dtype=torch.float64)
    for other in range(1, size):
        for _ in range(NUM_CLOCK_TRIPS):
            if rank == 0:
                dist.recv(clock, group=group, group_src=other)
                clock[0] = time.monotonic()
                dist.send(clock, group=group, group_dst=other)
            elif rank == other:
                sent = time.monotonic()
                dist.send(clock, group=group, group_dst=0)
                dist.recv(clock, group=group, group_src=0)
                back = time.monotonic()
                if back - sent < best:
                    best, offset = back - sent, float(clock) - (sent + back) / 2
    return offset


def gather_moments(
    moments: Sequence[Moment], schedule: Schedule, group: dist.ProcessGroup | None = None, offset: float = 0.0
) -> list[list[Moment]]:
    """The moments of every pipeline rank; ``offset`` (:func:`clock_offset`) is added to this rank's."""
    longest = max(len(a) for a in schedule.actions)
    mine = torch.zeros(longest, 3, dtype=torch.float64)
    if moments:
        mine[: len(moments)] = torch.tensor(moments, dtype=torch.float64) + offset
    found = [torch.empty_like(mine) for _ in range(schedule.num_ranks)]
    dist.all_gather(found, mine, group=group)
    return [
        [Moment(*row) for row in rows[: len(actions)].tolist()] for rows, actions in zip(found, schedule.actions, strict=True)
    ]
