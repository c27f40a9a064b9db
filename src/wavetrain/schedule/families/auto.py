"""``auto``: the best schedule that can be found for given costs and memory caps.

1. Every named family that fits the cap is built and simulated: the answer is never worse than any of them.
2. For every placement that the costs allow (waves, also growing ones, straight, loops, snakes),
   :func:`wavetrain.schedule.optimizer.construct.construct` builds orders with split backwards, within the cap.
3. The best few are annealed; with ``solver_seconds``, CP-SAT polishes the winner.

It stops early when a schedule meets the lower bound of every placement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families.zb_wave import growing_shares, schedule_of, with_default_cap
from wavetrain.schedule.graph import Graph, build_graph
from wavetrain.schedule.optimizer.anneal import anneal
from wavetrain.schedule.optimizer.bound import lower_bound
from wavetrain.schedule.optimizer.construct import Candidate, construct, has_room, require_room
from wavetrain.schedule.placement import Placement, loop, snake, straight, wave
from wavetrain.schedule.schedule import Schedule, check_counts
from wavetrain.schedule.simulator import simulate

MAX_STAGES_PER_RANK = 8
_ANNEALED = 3  # how many of the best orders are annealed
_ITERATIONS = 4000
_OTHER_EFFORT = 0.3  # in constructing orders for placements that are no waves
_MOST_GROWTH = 2.0  # beyond it little is left to gain, at the price of more memory


def auto(
    num_ranks: int,
    num_micro_batches: int,
    *,
    costs: Costs | None = None,
    waves: int | None = None,
    iterations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    solver_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda message: None,
) -> Schedule:
    """The best schedule found.

    Args:
        num_ranks: P.
        num_micro_batches: B.
        costs: stage times, links, activation bytes and memory caps. Default: F = I = W, free links, no cap.
        waves: a number of waves to consider beside 1 to 4.
        iterations: annealing moves tried on each of the best orders; 0 for none. Large schedules stop earlier, by work done.
        seconds: stop searching after about this long; named families are always tried. The result is then no longer determined by
            ``seed`` and ``iterations``.
        seed: of the random numbers.
        solver_seconds: let CP-SAT (extra ``solve``) polish the best order for so long.
        progress: told in a few words what is being done.

    Raises:
        CapError: a rank's cap is below one micro-batch, which is the least a schedule with that rank's stages holds.
    """
    check_counts(num_ranks, num_micro_batches)
    if (iterations or 0) < 0 or not (seconds or 0) >= 0 or not solver_seconds >= 0:
        raise InputError("iterations, seconds and solver_seconds must be 0 or more")
    costs = costs if costs is not None else Costs.uniform(num_ranks)
    deadline = time.monotonic() + seconds if seconds is not None else math.inf

    def out_of_time() -> bool:
        return time.monotonic() > deadline

    wave_graphs, other_graphs = _graphs(num_ranks, num_micro_batches, costs, waves)
    bound = min(lower_bound(g) for g in wave_graphs + other_graphs)
    best, best_seconds = _best_named(num_ranks, num_micro_batches, costs, progress)
    candidates: list[Candidate] = []
    for i, graph in enumerate(wave_graphs + sorted(other_graphs, key=lower_bound)):
        named = i < len(wave_graphs)
        if best_seconds <= bound * (1 + 1e-9) or (out_of_time() and not named):
            break
        if lower_bound(graph) >= best_seconds:
            continue
        progress(f"{graph.num_stages} stages: {'waves' if named else 'other placements'}")
        found = construct(graph, effort=1.0 if named else _OTHER_EFFORT, target=bound)
        candidates.append(found)
        if found.makespan < best_seconds * (1 - 1e-9):
            best, best_seconds = schedule_of("auto", graph, found.orders), found.makespan
    candidates.sort(key=lambda c: c.makespan)
    for i, candidate in enumerate(candidates[:_ANNEALED]):
        if best_seconds <= bound * (1 + 1e-9) or out_of_time():
            break
        progress(f"annealing order {i + 1} of {min(_ANNEALED, len(candidates))}")
        orders, makespan = anneal(
            candidate.graph,
            candidate.orders,
            iterations=iterations if iterations is not None else _ITERATIONS,
            seed=seed + i,
            temperature=0.05 if i % 2 else 0.2,
            target=bound,
            out_of_time=out_of_time,
        )
        if makespan < best_seconds:
            best, best_seconds = schedule_of("auto", candidate.graph, orders), makespan
    assert best is not None, "one micro-batch at a time always fits where a graph has room"
    if solver_seconds:
        from wavetrain.schedule.optimizer.polish import polish

        progress("polishing with CP-SAT")
        best = polish(best, costs, seconds=solver_seconds, seed=seed)
    return best.renamed("auto")


def _graphs(num_ranks: int, num_micro_batches: int, costs: Costs, waves: int | None) -> tuple[list[Graph], list[Graph]]:
    """Graphs of wave placements, each as zb-wave would take it, and of all others, where one micro-batch fits on every rank."""
    wave_counts = [w for w in (1, 2, 3, 4) if 2 * w <= _most_stages_per_rank(num_ranks, costs)]
    if waves is not None and waves not in wave_counts:
        wave_counts.append(waves)
    found = []
    for w in wave_counts:
        for shares in wave_shares(num_ranks, num_micro_batches, w):
            true = _graph(wave(num_ranks, w), num_micro_batches, costs, shares)
            capped = with_default_cap(true)
            found += [capped] if capped.cap == true.cap else [capped, true]
    others = [_graph(p, num_micro_batches, costs) for p in placements(num_ranks, costs)]
    with_room = [[g for g in graphs if has_room(g)] for graphs in (found, others)]
    if not any(with_room):
        require_room(min(found + others, key=lambda g: max(s / c for s, c in zip(g.share, g.cap, strict=True))))
    return with_room[0], with_room[1]


def _graph(placement: Placement, num_micro_batches: int, costs: Costs, shares: tuple[float, ...] | None = None) -> Graph:
    return build_graph((placement,), (0,) * num_micro_batches, costs.num_ranks, costs, shares)


def wave_shares(num_ranks: int, num_micro_batches: int, waves: int) -> list[tuple[float, ...] | None]:
    """How large the stages of waves are tried to be: all alike, and growing where there are more micro-batches than ranks."""
    growth = min(_MOST_GROWTH, num_micro_batches / num_ranks)
    return [None, growing_shares(num_ranks, waves, growth)] if growth > 1 and num_ranks > 1 else [None]


def _most_stages_per_rank(num_ranks: int, costs: Costs) -> int:
    most = MAX_STAGES_PER_RANK if costs.divisible else min(MAX_STAGES_PER_RANK, costs.num_stages // num_ranks)
    if most < 1:
        raise InputError(f"{num_ranks} ranks need at least as many stages, but the costs only name {costs.num_stages}")
    return most


def placements(num_ranks: int, costs: Costs) -> list[Placement]:
    """The placements that ``auto`` considers beside waves: straight, loops, and snakes that end at the far side."""
    most = _most_stages_per_rank(num_ranks, costs)
    found = [straight(num_ranks)]
    if num_ranks > 1:
        found += [loop(num_ranks, count) for count in (2, 3, 4) if count <= most]
        found += [snake(num_ranks, passes) for passes in (3, 5) if passes <= most]
    return found


def named_options(num_ranks: int, costs: Costs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every named family with every number of stages a rank, up to 8, that the costs allow."""
    from wavetrain.schedule.families import FAMILIES

    most = _most_stages_per_rank(num_ranks, costs)
    for name, family in FAMILIES.items():
        if family.takes_waves:
            yield from ((name, {"waves": w}) for w in (1, 2, 3, 4) if 2 * w <= most)
        elif family.takes_stages_per_rank:
            yield from ((name, {"stages_per_rank": v}) for v in (2, 3, 4) if v <= most)
        elif (family.stages_per_rank or 1) <= most:
            yield name, {}


def _best_named(
    num_ranks: int, num_micro_batches: int, costs: Costs, progress: Callable[[str], None]
) -> tuple[Schedule | None, float]:
    """The fastest named schedule within the cap, with its makespan; zb-wave is left to the search."""
    from wavetrain.schedule.families import build

    best, best_seconds = None, math.inf
    for name, options in named_options(num_ranks, costs):
        if name == "zb-wave":
            continue
        progress(f"named families: {name}")
        try:
            schedule = build(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, costs=costs, **options)
        except InputError:
            continue  # above the cap, or a count that the scheme cannot take
        makespan = simulate(schedule, costs).makespan
        if makespan < best_seconds * (1 - 1e-9):  # of equals the first, with the fewest stages
            best, best_seconds = schedule, makespan
    return best, best_seconds
