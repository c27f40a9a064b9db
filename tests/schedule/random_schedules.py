"""Hypothesis strategies: schedules that can run, in any order that can, and costs for them."""

from __future__ import annotations

import math
from random import Random

from hypothesis import strategies as st

from wavetrain.schedule.actions import Action, Kind
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.schedule import Schedule


def random_schedule(random: Random, *, max_ranks: int = 4, num_routes: int = 1, every_rank: bool = False) -> Schedule:
    """Any placement, any topological order of its actions, whole and split backwards mixed."""
    num_ranks = random.randint(1, max_ranks)
    num_stages, num_micro_batches = random.randint(num_ranks if every_rank else 1, 2 * max_ranks), random.randint(1, 4)
    placements = []
    for _ in range(num_routes):
        placement = [random.randrange(num_ranks) for _ in range(num_stages)]
        if every_rank:
            placement[:num_ranks] = random.sample(range(num_ranks), num_ranks)
        placements.append(tuple(placement))
    routes = tuple(random.randrange(num_routes) for _ in range(num_micro_batches))
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready = [Action("F", 0, mb) for mb in range(num_micro_batches)]

    def backward(stage: int, mb: int) -> Action:
        kind: Kind = "B" if random.random() < 0.5 else "I"
        return Action(kind, stage, mb)

    while ready:
        action = ready.pop(random.randrange(len(ready)))
        kind, stage, mb = action
        rows[placements[routes[mb]][stage]].append(action)
        if kind == "F":
            ready.append(Action("F", stage + 1, mb) if stage + 1 < num_stages else backward(stage, mb))
        elif kind != "W" and stage > 0:
            ready.append(backward(stage - 1, mb))
        if kind == "I":
            ready.append(Action("W", stage, mb))
    return Schedule(
        name="random",
        num_micro_batches=num_micro_batches,
        placements=tuple(placements),
        routes=routes,
        actions=tuple(tuple(row) for row in rows),
    )


def random_costs(random: Random, schedule: Schedule, *, links: bool = True) -> Costs:
    """Uneven costs, zeros among them; with ``links``, latencies and finite bandwidths."""
    num_stages, num_ranks = schedule.num_stages, schedule.num_ranks

    def times() -> tuple[float, ...]:
        return tuple(random.choice([0.0, 0.5, 1.0, 1.75, 3.0]) for _ in range(num_stages))

    def pairs(values: list[float], free: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(random.choice(values) if links else free for _ in range(num_ranks)) for _ in range(num_ranks))

    return Costs(
        forward=(1.0, *times()[1:]),
        backward_input=times(),
        backward_weight=times(),
        activation_bytes=times(),
        message_bytes=times(),
        speed=tuple(random.choice([0.5, 1.0, 2.0]) for _ in range(num_ranks)),
        latency=pairs([0.0, 0.25, 1.0], 0.0),
        bandwidth=pairs([0.5, 1.0, 4.0, math.inf], math.inf),
        memory_cap=(math.inf,) * num_ranks,
        input_release=random.choice([0.0, 0.25, 1.0]),
    )


def randoms() -> st.SearchStrategy[Random]:
    """A source of choices. Seeded, and not Hypothesis' own, whose choices stay close to the simplest ones."""
    return st.builds(Random, st.integers(0, 2**64))
