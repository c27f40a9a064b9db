"""Staging: a candidate as the stages of its schedule, proven and simulated.

The search knows ranks; a schedule with waves has several stages a rank, in places of their own. Here the layers are cut again for
those places, the schedule is built for what the stages take on the devices they are on, and the simulator says how long a step of
the slowest replica is, and the proof what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import CapError, InputError
from wavetrain.plan.cut import best_cut
from wavetrain.plan.estimate import CostModel
from wavetrain.plan.pipeline_time import build_options, passes, placement_of
from wavetrain.plan.search import Candidate
from wavetrain.plan.shapes import room_of
from wavetrain.schedule.balance import even_ranks
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate

Floats = NDArray[np.float64]

MAX_ACTIONS: Final = 30_000
"""Actions of a schedule that is still built for a plan."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A candidate with its schedule."""

    candidate: Candidate
    points: tuple[int, ...]
    """Boundaries of the stages' layers, (num_stages + 1,)."""
    schedule: Schedule
    costs: Costs
    """Of the slowest replica: seconds of every stage on its own device, links between its ranks."""
    pipeline_seconds: float
    """Simulated."""
    peak_bytes: tuple[float, ...]
    """At the peak of every rank's device, all included."""
    memory_share: tuple[float, ...]
    """Of what the device has."""

    @property
    def seconds(self) -> float:
        """Of a step: the pipeline as simulated, the rest as estimated."""
        parts = self.candidate.estimate.parts
        return self.pipeline_seconds + parts["reduction"] + parts["optimizer"] + parts["other"]

    @property
    def rank_seconds(self) -> tuple[float, ...]:
        """Of every rank's stages for one micro-batch, forward and backward."""
        found = [0.0] * self.schedule.num_ranks
        for s, rank in enumerate(self.schedule.placements[0]):
            found[rank] += self.costs.forward[s] + self.costs.backward_input[s] + self.costs.backward_weight[s]
        return tuple(found)

    @property
    def fits(self) -> bool:
        return max(self.memory_share) <= 1.0


def num_actions(candidate: Candidate) -> int:
    """Actions of the schedule of one replica, its backwards split."""
    s, ranks = candidate.strategy, candidate.layout.num_ranks
    return 3 * ranks * passes(s.schedule, s.waves) * max(s.num_micro_batches)


def can_stage(candidate: Candidate) -> bool:
    """Whether the schedule is small enough to be built."""
    return num_actions(candidate) <= MAX_ACTIONS


def stage(candidate: Candidate, model: CostModel) -> Staged | None:
    """The candidate's stages and schedule; None if its stages do not fit the devices after all."""
    layout, strategy = candidate.layout, candidate.strategy
    _, replica = candidate.estimate.slowest
    placement = placement_of(strategy.schedule, layout.num_ranks, strategy.waves)
    columns = [
        model.layers(layout, int(layout.group[k, replica]), int(layout.tp[k, replica]), strategy.micro_batch, strategy.recompute)
        for k in range(layout.num_ranks)
    ]
    points = _points(candidate, model, placement, [c.both for c in columns])
    costs = _costs(candidate, model, placement, points, replica)
    options = build_options(strategy.schedule, strategy.waves)
    try:
        schedule = build(
            strategy.schedule,
            num_ranks=layout.num_ranks,
            num_micro_batches=strategy.num_micro_batches[replica],
            costs=costs,
            **options,
        )
    except CapError:
        return None
    certificate = prove(schedule, costs).require()
    held, share = _held(candidate, model, placement, points, certificate.peak_bytes, replica)
    return Staged(
        candidate=candidate,
        points=points,
        schedule=schedule,
        costs=costs,
        pipeline_seconds=simulate(schedule, costs).makespan,
        peak_bytes=held,
        memory_share=share,
    )


def _points(candidate: Candidate, model: CostModel, placement: Placement, times: Sequence[Floats]) -> tuple[int, ...]:
    """Boundaries of the stages: the rank's own where it has one, else cut anew and evened out over the ranks."""
    if len(placement) == candidate.layout.num_ranks:
        return candidate.cut
    edges = model.edge_seconds(candidate.layout, candidate.strategy.micro_batch)
    mean = edges[0] if edges else np.zeros(model.workload.num_layers)
    found = best_cut(
        [times[r] for r in placement],
        [mean if a != b else 0.0 * mean for a, b in pairwise(placement)],
        max(candidate.strategy.num_micro_batches),
    )
    if found is None:
        raise InputError(f"{model.workload.num_layers} layers cannot be cut into {len(placement)} stages")
    return tuple(even_ranks(found.points, [t.tolist() for t in times], [placement]))


def _costs(candidate: Candidate, model: CostModel, placement: Placement, points: Sequence[int], replica: int) -> Costs:
    layout, strategy = candidate.layout, candidate.strategy
    ranks = layout.num_ranks
    forward, half, kept = [], [], []
    states = np.zeros(ranks)
    working = np.zeros(ranks)
    for s, rank in enumerate(placement):
        group, tp = int(layout.group[rank, replica]), int(layout.tp[rank, replica])
        run = slice(points[s], points[s + 1])
        seconds = model.layers(layout, group, tp, strategy.micro_batch, strategy.recompute)
        memory = model.memory(layout, tp, strategy)
        forward.append(float(seconds.forward[run].sum()))
        half.append(0.5 * float(seconds.backward[run].sum()))
        kept.append(max(1.0, float(memory.activation[run].sum())))
        states[rank] += float(memory.states[run].sum())
        working[rank] = max(working[rank], float(memory.working[run].max()))
    caps = []
    for rank in range(ranks):
        room = room_of(model, layout.groups[int(layout.group[rank, replica])]) - states[rank] - working[rank]
        caps.append(max(room, 1.0))
    latency, bandwidth = _links(candidate, model, replica)
    sizes = strategy.micro_batch * model.arrays.output_bytes
    return Costs(
        forward=tuple(forward),
        backward_input=tuple(half),
        backward_weight=tuple(half),
        activation_bytes=tuple(kept),
        message_bytes=tuple(float(sizes[b - 1]) for b in points[1:]),
        speed=(1.0,) * ranks,
        latency=latency,
        bandwidth=bandwidth,
        memory_cap=tuple(caps),
    )


def _links(
    candidate: Candidate, model: CostModel, replica: int
) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Latency and bandwidth between the ranks of one replica; pairs that are not neighbours get the slowest in between."""
    ranks = candidate.layout.num_ranks
    latency = np.zeros((ranks, ranks))
    bandwidth = np.full((ranks, ranks), math.inf)
    if ranks > 1:
        beside, per_byte = model.channel_rates(candidate.layout)
        for a in range(ranks):
            for b in range(a + 1, ranks):
                between = slice(a, b)
                latency[a, b] = latency[b, a] = float(beside[between, replica].max())
                bandwidth[a, b] = bandwidth[b, a] = 1.0 / float(per_byte[between, replica].max())
    return tuple(tuple(row) for row in latency.tolist()), tuple(tuple(row) for row in bandwidth.tolist())


def _held(
    candidate: Candidate,
    model: CostModel,
    placement: Placement,
    points: Sequence[int],
    peaks: Sequence[float],
    replica: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes at the peak of every rank's device, and as a share of what it has."""
    layout, strategy = candidate.layout, candidate.strategy
    held, share = [], []
    for rank in range(layout.num_ranks):
        device = layout.groups[int(layout.group[rank, replica])].device
        constants = model.calibration.of(device.name)
        memory = model.memory(layout, int(layout.tp[rank, replica]), strategy)
        runs = [slice(points[s], points[s + 1]) for s, r in enumerate(placement) if r == rank]
        fixed = sum(float(memory.states[run].sum()) for run in runs) + max(float(memory.working[run].max()) for run in runs)
        total = constants.memory_base + constants.memory_extra * (fixed + peaks[rank])
        held.append(total)
        share.append(total / device.memory_bytes)
    return tuple(held), tuple(share)
