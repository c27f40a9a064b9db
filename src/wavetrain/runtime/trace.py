"""From the moments that ranks noted to one measured timeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from wavetrain.runtime.executor import Moment
from wavetrain.runtime.program import compile_program
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import held_bytes
from wavetrain.schedule.timeline import Message, Span, Timeline


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
    costs = (costs or Costs.uniform(schedule.num_ranks)).cut(schedule.placements)
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


def gather_moments(moments: Sequence[Moment], schedule: Schedule, group: dist.ProcessGroup | None = None) -> list[list[Moment]]:
    """The moments of every pipeline rank, on every rank."""
    longest = max(len(a) for a in schedule.actions)
    mine = torch.zeros(longest, 3, dtype=torch.float64)
    if moments:
        mine[: len(moments)] = torch.tensor(moments, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(schedule.num_ranks)]
    dist.all_gather(found, mine, group=group)
    return [
        [Moment(*row) for row in rows[: len(actions)].tolist()] for rows, actions in zip(found, schedule.actions, strict=True)
    ]
