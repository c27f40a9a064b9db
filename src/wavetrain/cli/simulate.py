"""``wavetrain simulate``: a schedule on paper."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from wavetrain.cli.common import File, Flag, Names, Output, Problem, print_json, summary
from wavetrain.errors import InputError
from wavetrain.files import write_text
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import NAMES
from wavetrain.schedule.files import save
from wavetrain.schedule.proof import Certificate, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.timeline import Timeline


@dataclass(frozen=True)
class Result:
    """A schedule, proven and simulated."""

    schedule: Schedule
    timeline: Timeline
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class Simulate(Output):
    """Build or load a schedule, prove it, simulate a step, and show where the time goes.

    wavetrain simulate --schedule zb-wave --ranks 8 --micro-batches 16 --waves 2 --hop-latency 0.05 --html out.html

    Times are seconds of one micro-batch on a rank's whole share of the model; caps are micro-batches of that share.
    """

    problem: Annotated[Problem, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Problem)
    compare: Names = None
    """Other schedules to set beside it: names, or `all`."""
    html: File = None
    """Write the timeline page: one self-contained file. With --compare: the two best, on one axis."""
    trace: File = None
    """Write a Chrome/Perfetto trace (JSON)."""
    save: File = None
    """Write the schedule: .csv as torch.distributed.pipelining reads it, or .json."""
    comms: Flag = False
    """With --save to .csv: lowered, with sends and receives."""

    def run(self) -> int:
        """Print the figures of the schedule, or of all that are compared."""
        results = self._results()
        best = results[0]
        if self.save is not None:
            from wavetrain.schedule.torch_csv import in_loss_order

            is_csv = self.save.suffix.lower() == ".csv" and best.schedule.num_routes == 1
            save(in_loss_order(best.schedule) if is_csv else best.schedule, self.save, comms=self.comms)
            if is_csv and best.schedule.shares is not None:
                print("note: CSV cannot say that stages are not alike; save as .json to keep how they grow", file=sys.stderr)
        if self.trace is not None:
            from wavetrain.schedule.chrome import chrome_trace

            write_text(self.trace, json.dumps(chrome_trace(best.timeline)))
        if self.html is not None:
            from wavetrain.view.page import write_page

            write_page(self.html, [r.timeline for r in results[:2]])
        if self.json:
            rows = [summary(r.schedule, r.timeline, r.certificate) for r in results]
            print_json(rows if self.compare else rows[0])
        else:
            from wavetrain.cli.report import print_comparison, print_result

            if self.compare:
                print_comparison(results)
            else:
                print_result(best)
            for path in (self.save, self.trace, self.html):
                if path is not None:
                    print(f"wrote {path}")
        return 0

    def _results(self) -> list[Result]:
        """What was asked for; of a comparison, the fastest first."""
        with _progress(quiet=self.json) as progress:
            if not self.compare:
                return [self._result(self.problem.schedule, progress)]
            if "all" in self.compare:
                names = list(dict.fromkeys([*NAMES, *(n for n in self.compare if n != "all")]))
                if self.problem.schedule not in names:
                    names.insert(0, self.problem.schedule)
            else:
                names = list(dict.fromkeys([self.problem.schedule, *self.compare]))
            results, problems = [], []
            for name in names:
                progress(name)
                try:
                    results.append(self._result(name, progress))
                except InputError as error:
                    if "all" not in self.compare or name not in NAMES:
                        raise
                    problems.append(error)
                    if not self.json:
                        print(f"without {name}: {error}", file=sys.stderr)
            if not results:
                raise problems[-1]
            return sorted(results, key=lambda r: r.timeline.makespan)

    def _result(self, name: str, progress: Callable[[str], None]) -> Result:
        schedule, costs = self.problem.build(
            name, strict=not self.compare, progress=lambda message: progress(f"{name}: {message}")
        )
        return checked(schedule, costs)


def checked(schedule: Schedule, costs: Costs) -> Result:
    """Prove and simulate; raises what the proof refuses."""
    certificate = prove(schedule, costs).require()
    return Result(schedule, simulate(schedule, costs), certificate)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done, gone when it is done."""
    if quiet or not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
