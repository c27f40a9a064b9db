"""``wavetrain rehearse``: a schedule run for real, on ranks that only wait."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import tyro

from wavetrain.cli.common import File, Number, Output, Problem, print_json
from wavetrain.errors import InputError
from wavetrain.schedule.analysis import critical_path
from wavetrain.schedule.costs import MAX_VALUE, Costs
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.timeline import Timeline

if TYPE_CHECKING:
    from wavetrain.runtime.rehearsal import Rehearsal

_FORWARD_SECONDS = 0.05
_MESSAGE_BYTES = 131072.0


@dataclass(frozen=True, kw_only=True)
class RehearsalProblem(Problem):
    """The pipeline to rehearse."""

    forward: Number = None
    """Seconds of F of one micro-batch on a rank's whole share of the model. Default: 0.05."""
    backward_input: Number = None
    """Seconds of I, likewise. Default: as F."""
    backward_weight: Number = None
    """Seconds of W, likewise; B takes I and W together. Default: as F."""
    message_bytes: Number = None
    """Bytes of every message between stages. Default: 131072, 128 tokens of 256 floats."""

    def load_costs(self, num_ranks: int | None) -> Costs:
        """Costs from the file or the flags."""
        if self.costs is not None:
            if self.message_bytes is not None:
                raise InputError("--message-bytes and --costs are both given; the file says what a message has")
            return super().load_costs(num_ranks)
        size = self.message_bytes if self.message_bytes is not None else _MESSAGE_BYTES
        if not 0 <= size <= MAX_VALUE:
            raise InputError(f"--message-bytes is {size}; give a number of bytes, 0 or more")
        forward = self.forward if self.forward is not None else _FORWARD_SECONDS
        whole = dataclasses.replace(
            self,
            forward=forward,
            backward_input=self.backward_input if self.backward_input is not None else forward,
            backward_weight=self.backward_weight if self.backward_weight is not None else forward,
        )
        costs = super(RehearsalProblem, whole).load_costs(num_ranks)
        return dataclasses.replace(costs, message_bytes=(float(size),) * costs.num_stages)


@dataclass(frozen=True, kw_only=True)
class Rehearse(Output):
    """Run a schedule in real processes with real messages, before the machines for it are rented; compute is waiting.

    wavetrain rehearse --ranks 8 --schedule zb-wave --waves 2 --micro-batches 8 --forward 0.08

    wavetrain rehearse --schedule my.csv --costs costs.toml --html out.html

    wavetrain rehearse plan.toml --time-scale 2 --message-scale 0.01

    Shown: the step as predicted with this machine's own hop, as measured, and what lies between the two.
    """

    plan: Annotated[Optional[Path], tyro.conf.Positional, tyro.conf.arg(metavar="[PLAN]", help_behavior_hint="")] = None  # noqa: UP045
    """What wavetrain plan wrote: its slowest replica's pipeline is rehearsed. The flags of schedules and costs do not apply."""
    time_scale: Annotated[float, tyro.conf.arg(metavar="X")] = 1.0
    """Rehearse a plan's seconds times this."""
    message_scale: Annotated[float, tyro.conf.arg(metavar="X")] = 1.0
    """Rehearse a plan's messages with so many times the bytes, and as slow: whole ones may be too much for a laptop."""
    problem: Annotated[RehearsalProblem, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RehearsalProblem)
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Steps that count; the median is reported."""
    warmup: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Steps before them."""
    html: File = None
    """Write the timeline page: the median step as measured and as predicted, on one axis."""

    def _problem(self) -> tuple[Schedule, Costs]:
        if self.plan is None:
            return self.problem.build()
        if self.problem != RehearsalProblem():
            raise InputError("a plan says which schedule and costs to rehearse; leave the flags of schedules and costs out")
        from wavetrain.plan.plan import load_plan

        for flag, value in (("--time-scale", self.time_scale), ("--message-scale", self.message_scale)):
            if not 0 < value < math.inf:
                raise InputError(f"{flag} is {value}; give a number above 0")
        schedule, costs = load_plan(self.plan).pipeline()
        return schedule, costs.scaled(self.time_scale, self.message_scale)

    def run(self) -> int:
        """Rehearse, and print the figures."""
        if self.steps < 1 or self.warmup < 0:
            raise InputError(f"--steps {self.steps} --warmup {self.warmup}: at least 1 step must count, and 0 or more go before")
        schedule, costs = self._problem()
        from wavetrain.runtime.rehearsal import rehearse

        found = rehearse(schedule, costs, steps=self.steps, warmup=self.warmup)
        if self.html is not None:
            from wavetrain.view.page import write_page

            write_page(self.html, [found.measured, found.predicted])
        if self.json:
            print_json(found.to_dict())
        else:
            _print(found, costs)
            if self.html is not None:
                print(f"wrote {self.html}")
        return 0


def difference(found: Rehearsal, costs: Costs) -> dict[str, float]:
    """Seconds by which the measured step is longer than the predicted one, by what they are made of; they add up to all of it.

    Both steps are followed along their critical paths: seconds there are those of actions as told, of actions beyond that, of
    messages, or of neither.
    """
    cut = found.schedule.cut(costs)
    measured, predicted = (_along_the_path(t, cut) for t in (found.measured, found.predicted))
    parts = {name: measured[name] - predicted[name] for name in measured}
    parts["before the first action"] = found.measured_seconds - found.predicted_seconds - sum(parts.values())
    return parts


def _along_the_path(timeline: Timeline, costs: Costs) -> dict[str, float]:
    told = late = messages = covered = 0.0
    for step in critical_path(timeline):
        covered += step.end - step.start
        if step.what == "message":
            messages += step.end - step.start
        else:
            seconds = costs.seconds(step.action.kind, step.action.stage, step.rank)
            told += seconds
            late += step.end - step.start - seconds
    return {
        "actions that took longer than told": late,
        "messages, beyond the predicted": messages,
        "between actions": timeline.makespan - covered,
        "another critical path": told,
    }


def _print(found: Rehearsal, costs: Costs) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    schedule = found.schedule
    waves = f" W={schedule.waves}" if schedule.waves else ""
    title = f"{escape(schedule.name)}{waves}, {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches"
    excess = found.measured_seconds - found.predicted_seconds
    table = Table("", "seconds", "", title=title, title_justify="left")
    table.columns[1].justify = "right"
    steps = ", ".join(f"{s:.4f}" for s in found.step_seconds[:8])
    table.add_row(
        "predicted", f"{found.predicted_seconds:.4f}", f"bubble {1 - found.ideal_seconds / found.predicted_seconds:.1%}"
    )
    table.add_row("measured", f"{found.measured_seconds:.4f}", f"bubble {found.bubble:.1%}, median of {steps}")
    table.add_row("ideal", f"{found.ideal_seconds:.4f}", "no rank ever waits")
    table.add_section()
    table.add_row(
        "a hop",
        f"{found.hop_seconds:.6f}",
        f"{max(costs.message_bytes):,.0f} bytes to a rank that waits, beyond the link",
    )
    table.add_row("an action, late by", f"{found.late_seconds:.6f}", "mean: woken late by the operating system")
    table.add_row("between two actions", f"{found.between_seconds:.6f}", "mean: sending and bookkeeping")
    table.add_section()
    table.add_row("measured - predicted", f"{excess:+.4f}", f"{excess / found.predicted_seconds:+.1%}, of which")
    for name, seconds in difference(found, costs).items():
        table.add_row(f"  {name}", f"{seconds:+.4f}", f"{seconds / found.predicted_seconds:+.1%}")
    console = Console()
    (console if console.is_terminal else Console(width=max(console.width, 120))).print(table)
