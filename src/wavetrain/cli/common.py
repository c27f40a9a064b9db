"""What the verbs share: the flags for schedules and costs, and how results are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, Protocol, TypeAlias, Union

import tyro

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.costs_file import load_costs
from wavetrain.schedule.families import FAMILIES, build
from wavetrain.schedule.files import load
from wavetrain.schedule.proof import Certificate
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.timeline import Timeline

# Optional and not `| None`: tyro knows it without importing typeguard, which takes a quarter of the time to answer.
Count: TypeAlias = Annotated[Optional[int], tyro.conf.arg(metavar="N", help_behavior_hint="")]  # noqa: UP045
Number: TypeAlias = Annotated[Optional[float], tyro.conf.arg(metavar="X", help_behavior_hint="")]  # noqa: UP045
File: TypeAlias = Annotated[Optional[Path], tyro.conf.arg(metavar="FILE", help_behavior_hint="")]  # noqa: UP045
Name: TypeAlias = Annotated[Optional[str], tyro.conf.arg(metavar="NAME", help_behavior_hint="")]  # noqa: UP045
Names: TypeAlias = Annotated[  # None first, so that the default is known without a look at the tuple
    Union[None, tuple[str, ...]],  # noqa: UP007, RUF036
    tyro.conf.arg(metavar="NAME ...", help_behavior_hint=""),
]
Counts: TypeAlias = Annotated[
    Union[None, tuple[int, ...]],  # noqa: UP007, RUF036
    tyro.conf.arg(metavar="N ...", help_behavior_hint=""),
]
Flag: TypeAlias = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]

MAX_ACTIONS = 4_000_000
"""The most actions that the command line builds."""
MAX_RANKS = 4096
"""The most ranks that the command line builds for: links are kept for every pair."""


class Verb(Protocol):
    """A parsed command."""

    def run(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a verb answers."""

    json: Flag = False
    """Print one machine-readable value on stdout, and nothing else."""
    debug: Flag = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The pipeline to schedule."""

    schedule: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "zb-wave"
    """A name (gpipe, 1f1b, interleaved, chimera, hanayo, zb-h1, zb-h2, zbv, dualpipev, zb-wave, auto) or a .csv or .json file."""
    ranks: Count = None
    """P, pipeline ranks. Default: what the costs or the file are for, else 8."""
    micro_batches: Count = None
    """B, micro-batches a step. Default: P."""
    waves: Count = None
    """W, for hanayo and zb-wave: 2·W stages a rank. Default: 2. auto considers it beside 1 to 4."""
    stages_per_rank: Count = None
    """v, for interleaved. Default: 2."""
    growth: Number = None
    """For zb-wave: work of a pass over the ranks over that of the pass before. Default: 1; up to B/P it shortens the step."""
    breadth_first: Flag = False
    """For hanayo: all micro-batches in flight instead of groups of P."""
    forward: Number = None
    """Seconds of F of one micro-batch on a rank's whole share of the model. Default: 1."""
    backward_input: Number = None
    """Seconds of I, likewise. Default: 1."""
    backward_weight: Number = None
    """Seconds of W, likewise; B takes I and W together. Default: 1."""
    hop_latency: Number = None
    """Seconds for a message to reach another rank. Default: 0."""
    overhead: Number = None
    """Seconds of every action beside its work, to launch it and hand it on. Default: 0."""
    memory_cap: Number = None
    """Micro-batches of a rank's share whose activations it may hold. Default: no cap (zb-wave: P)."""
    costs: File = None
    """A TOML file of uneven costs per stage, rank and link, instead of the five flags of seconds; a cap may still be given."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """For auto: of its random numbers."""
    iterations: Count = None
    """For auto: annealing moves on each of the best orders; 0 for none. Default: 4000, fewer for large schedules."""
    seconds: Number = None
    """For auto: stop searching after about so many seconds."""
    solver_seconds: Annotated[float, tyro.conf.arg(metavar="X")] = 0.0
    """For auto: let CP-SAT polish the best order for so long (pip install 'wavetrain[solve]')."""

    def build(
        self, name: str | None = None, *, strict: bool = True, progress: Callable[[str], None] | None = None
    ) -> tuple[Schedule, Costs]:
        """The schedule called ``name`` (default: the one asked for) and the costs to judge it by.

        ``strict``: a flag that the family does not know is an error; in a comparison, flags go to those that know them.
        """
        name = name if name is not None else self.schedule
        if is_file(name):
            schedule = load(name)
            for given, found, what in (
                (self.ranks, schedule.num_ranks, "ranks"),
                (self.micro_batches, schedule.num_micro_batches, "micro-batches"),
            ):
                if given is not None and given != found:
                    raise InputError(f"{name} has {found} {what}, not {given}; leave the flag out")
            for flag in ("waves", "stages_per_rank", "growth"):
                if strict and getattr(self, flag) is not None:
                    raise InputError(f"--{flag.replace('_', '-')} says how to build a schedule, but {name} holds one already")
            return schedule, self.load_costs(schedule.num_ranks)
        self._check_size()
        costs = self.load_costs(None)
        num_micro_batches = self.micro_batches if self.micro_batches is not None else costs.num_ranks
        options: dict[str, Any] = {}
        if name == "auto":
            if strict and self.breadth_first:
                raise InputError("auto has no breadth-first order; only hanayo has")
            options = {
                "growth": self.growth if strict else None,
                "stages_per_rank": self.stages_per_rank if strict else None,
                "seed": self.seed,
                "iterations": self.iterations,
                "seconds": self.seconds,
            }
            options |= {"solver_seconds": self.solver_seconds, "waves": self.waves}
            if progress is not None:
                options["progress"] = progress
        elif name in FAMILIES:
            family = FAMILIES[name]
            if family.takes_waves or strict:
                options["waves"] = self.waves
            if family.takes_stages_per_rank or strict:
                options["stages_per_rank"] = self.stages_per_rank
            if family.takes_growth or strict:
                options["growth"] = self.growth
            if name == "hanayo" or strict:
                options["breadth_first"] = self.breadth_first
        return build(name, num_ranks=costs.num_ranks, num_micro_batches=num_micro_batches, costs=costs, **options), costs

    def load_costs(self, num_ranks: int | None) -> Costs:
        """Costs from the file or the flags, for ``num_ranks`` or as many as are asked for."""
        flags = {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
            "hop_latency": self.hop_latency,
            "overhead": self.overhead,
        }
        cap = self.memory_cap
        if cap is not None and not (cap > 0 and not math.isnan(cap)):
            raise InputError(f"a memory cap of {cap} micro-batches; it must be above 0")
        if self.costs is None:
            ranks = num_ranks or (self.ranks if self.ranks is not None else 8)
            given = {name: value for name, value in flags.items() if value is not None}
            for name, seconds in given.items():
                if not (seconds >= 0 and math.isfinite(seconds)):
                    raise InputError(f"--{name.replace('_', '-')} is {seconds}; give a number of seconds, 0 or more")
            return Costs.uniform(ranks, **given, memory_cap=cap if cap is not None else math.inf)
        for name, value in flags.items():
            if value is not None:
                raise InputError(f"--{name.replace('_', '-')} and --costs are both given; the file says what a stage takes")
        costs = load_costs(self.costs)
        wanted = num_ranks if num_ranks is not None else self.ranks
        if wanted is not None and wanted != costs.num_ranks:
            raise InputError(f"{self.costs} is for {costs.num_ranks} ranks, not {wanted}")
        return costs if cap is None else costs.with_cap(cap)

    def _check_size(self) -> None:
        num_ranks = self.ranks or 8
        num_micro_batches = self.micro_batches or num_ranks
        per_rank = max(2 * (self.waves or 2), self.stages_per_rank or 2)
        if num_ranks > MAX_RANKS:
            raise InputError(f"{num_ranks} ranks; at most {MAX_RANKS} can be simulated")
        if 3 * num_ranks * per_rank * num_micro_batches > MAX_ACTIONS:
            raise InputError(f"{num_ranks} ranks, {per_rank} stages each and {num_micro_batches} micro-batches: too many actions")


def is_file(name: str) -> bool:
    """Whether ``--schedule`` names a file and not a family."""
    return name.lower().endswith((".csv", ".json")) or "/" in name


def summary(schedule: Schedule, timeline: Timeline, certificate: Certificate) -> dict[str, Any]:
    """The figures of a schedule, as ``--json`` prints them."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "micro_batches": schedule.num_micro_batches,
        "waves": schedule.waves,
        "stages": schedule.num_stages,
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble": timeline.bubble,
        "peak_activations": list(certificate.peak_activations),
        "messages": certificate.num_messages,
        "weight_copies": certificate.weight_copies,
        "receive_ahead": certificate.receive_ahead,
        "proven": certificate.proven,
    }


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))
