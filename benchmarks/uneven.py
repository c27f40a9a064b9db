"""Uneven stages, ranks, links and caps: ``auto`` on random instances, against a lower bound and every named family.

The bound is the least over the placements that ``auto`` considers of: the largest over ranks of earliest start + work + shortest
tail, and the critical path. It knows nothing of memory caps nor of links that serialise messages, so that under a tight cap part
of the distance to it cannot be closed by any schedule. A second bound also counts what must be held for how long.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bounds import considered, least_bounds
from benchmarks.report import Report, Row, main, percent

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs, square
from wavetrain.schedule.families import build
from wavetrain.schedule.families.auto import named_options
from wavetrain.schedule.proof import prove
from wavetrain.schedule.simulator import simulate

NUM_INSTANCES = 200
MAX_ACTIONS = 2500
SPREAD = 0.3  # sigma of the log-normal stage times
HALVES = (0.7, 1.5)  # I and W, times F
SPEEDS = (0.6, 1.4)
LINK = 0.1  # most latency, and most transfer time, as a fraction of the mean stage time
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One pipeline to schedule."""

    seed: int
    num_micro_batches: int
    costs: Costs
    tightness: float
    """The least cap over ranks, in micro-batches of the rank's share, over P; infinite without a cap."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What ``auto`` made of an instance."""

    seed: int
    tightness: float
    proven: bool
    ratio: float
    """Makespan over the lower bound, were memory free."""
    memory_ratio: float
    """Makespan over the lower bound with the memory that any order must hold."""
    to_named: float
    """Makespan over that of the best named family within the cap; 0 if none fits."""


def instance(seed: int, max_actions: int = MAX_ACTIONS) -> Instance:
    """Instance ``seed``; see the constants above for what is drawn."""
    for attempt in range(1000):
        rng = Random(seed * 1000 + attempt)
        num_ranks, per_rank = rng.randint(2, 8), rng.choice((2, 3, 4, 6, 8))
        num_stages, num_mb = num_ranks * per_rank, num_ranks * rng.choice((2, 3, 4))
        if 3 * num_stages * num_mb > max_actions:
            continue
        costs, tightness = _costs(rng, num_ranks, num_stages)
        if considered(num_ranks, num_mb, costs):  # else no placement has room for one micro-batch
            return Instance(seed=seed, num_micro_batches=num_mb, costs=costs, tightness=tightness)
    raise AssertionError("no instance is that small")


def _costs(rng: Random, num_ranks: int, num_stages: int) -> tuple[Costs, float]:
    forward = tuple(rng.lognormvariate(0.0, SPREAD) for _ in range(num_stages))
    speed = (1.0,) * num_ranks if rng.random() < 0.25 else tuple(rng.uniform(*SPEEDS) for _ in range(num_ranks))
    activations = tuple(f * rng.uniform(0.7, 1.4) for f in forward)
    stage_seconds = sum(forward) / num_stages

    def pairs(draw: Iterator[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(next(draw) for _ in range(num_ranks)) for _ in range(num_ranks))

    latency = pairs(iter(lambda: rng.uniform(0.0, LINK) * stage_seconds, None))
    bandwidth = pairs(iter(lambda: 1.0 / max(1e-9, rng.uniform(0.0, LINK) * stage_seconds), None))
    kind = rng.random()
    if kind < 0.25:
        caps = [math.inf] * num_ranks
    elif kind < 0.5:
        caps = [rng.uniform(1.5, num_ranks + 2)] * num_ranks
    else:
        caps = [rng.uniform(1.5, num_ranks + 2) for _ in range(num_ranks)]
    share = [sum(activations) * s / sum(speed) for s in speed]  # of a rank that gets work by its speed
    costs = Costs(
        forward=forward,
        backward_input=tuple(f * rng.uniform(*HALVES) for f in forward),
        backward_weight=tuple(f * rng.uniform(*HALVES) for f in forward),
        activation_bytes=activations,
        message_bytes=tuple(rng.uniform(0.5, 1.0) for _ in range(num_stages)),
        speed=speed,
        latency=latency if rng.random() < 0.8 else square(num_ranks, 0.0),
        bandwidth=bandwidth if rng.random() < 0.8 else square(num_ranks, math.inf),
        memory_cap=tuple(c * s for c, s in zip(caps, share, strict=True)),
        input_release=rng.choice((0.0, 0.0, 0.3)),
    )
    return costs, min(caps) / num_ranks


def solve(problem: Instance) -> Outcome:
    """Run ``auto`` and every named family on one instance."""
    costs, num_mb = problem.costs, problem.num_micro_batches
    num_ranks = costs.num_ranks
    bound, memory_bound = least_bounds(num_ranks, num_mb, costs)
    schedule = build("auto", num_ranks=num_ranks, num_micro_batches=num_mb, costs=costs)
    makespan = simulate(schedule, costs).makespan
    named = math.inf
    for name, options in named_options(num_ranks, costs):
        try:
            rival = build(name, num_ranks=num_ranks, num_micro_batches=num_mb, costs=costs, **options)
        except InputError:
            continue  # above the cap, or a count that the scheme cannot take
        if prove(rival, costs).proven:
            named = min(named, simulate(rival, costs).makespan)
    return Outcome(
        seed=problem.seed,
        tightness=problem.tightness,
        proven=prove(schedule, costs).proven,
        ratio=makespan / bound,
        memory_ratio=makespan / memory_bound,
        to_named=makespan / named,
    )


def run(quick: bool) -> Report:
    """``auto`` on random uneven instances."""
    count, max_actions = (3, 200) if quick else (NUM_INSTANCES, MAX_ACTIONS)
    problems = [instance(seed, max_actions) for seed in range(count)]
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(solve, problems))
    ratios = [o.ratio for o in outcomes]
    proven, worst = sum(o.proven for o in outcomes), max(o.to_named for o in outcomes)
    middle = median(ratios) - 1
    rows = [
        Row(case="proven", target=f"{count} of {count}", measured=f"{proven} of {count}", passed=proven == count),
        Row(
            case="makespan over the best named family, worst",
            target="≤ 1",
            measured=f"{worst:.4f}",
            passed=worst <= 1 + 1e-9,
        ),
        Row(
            case="makespan above the lower bound, median",
            target="≤ 5 %",
            measured=percent(middle),
            limit="0 %",
            distance=percent(middle),
            passed=middle <= 0.05,
        ),
        *_spread("all", ratios)[1:],
        *_spread("all, bound with memory", [o.memory_ratio for o in outcomes]),
    ]
    kinds = (
        ("no cap", math.inf, math.inf),
        ("least cap ≥ P/2", 0.5, 1e9),
        ("least cap P/3 to P/2", 1 / 3, 0.5),
        ("least cap < P/3", 0.0, 1 / 3),
    )
    for label, low, high in kinds:
        some = [o.ratio for o in outcomes if (o.tightness == low if low == high else low <= o.tightness < high)]
        if some:
            rows += _spread(f"{label} ({len(some)})", some)
            rows.append(_spread(f"{label}, bound with memory", [o.memory_ratio for o in outcomes if o.ratio in some])[0])
    notes = (
        "The bound ignores memory caps and messages that queue; it is the least over the placements that `auto` considers. "
        "The bound with memory also asks that bytes times seconds of all activations fit under the caps.",
        f"Instances (seeds 0 to {count - 1}): P in 2…8, stages P·{{2, 3, 4, 6, 8}}, B in {{2P, 3P, 4P}}, "
        f"at most {max_actions} actions; F log-normal with sigma {SPREAD}, I and W each {HALVES[0]}–{HALVES[1]} of F, "
        f"rank speeds {SPEEDS[0]}–{SPEEDS[1]} (a quarter: equal), latency and transfer of every pair each "
        f"0–{LINK:.0%} of the mean stage time (a fifth each: free), activations 0.7–1.4 of F, 0 or 30 % of them freed by I; "
        "caps per rank 1.5 to P+2 micro-batches of the rank's share by speed: each its own (half), one for all (a quarter), "
        "none (a quarter).",
    )
    return Report(name="uneven", claim="Uneven stages, ranks, links and caps, B ≥ 2P.", rows=tuple(rows), notes=notes)


def _spread(label: str, ratios: list[float]) -> list[Row]:
    ordered = sorted(ratios)
    values = (("median", median(ordered)), ("90th percentile", ordered[math.ceil(0.9 * len(ordered)) - 1]), ("max", ordered[-1]))
    return [Row(case=f"{label}: above the bound, {what}", measured=percent(v - 1), limit="0 %") for what, v in values]


if __name__ == "__main__":
    main(run)
