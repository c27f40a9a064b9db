"""What a benchmark hands back, and how it is written down: one table a claim."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

HEADER = ("case", "target", "measured", "limit", "distance to it", "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    case: str
    target: str = ""
    """What was promised; empty for a number that is only shown."""
    measured: str
    limit: str = ""
    """What nothing can beat: a lower bound, a bubble of zero."""
    distance: str = ""
    """From ``measured`` to ``limit``."""
    passed: bool | None = None
    """Whether the target was met; None where there is none."""

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = "" if self.passed is None else "pass" if self.passed else "MISS"
        return (self.case, self.target, self.measured, self.limit, self.distance, verdict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows of one claim."""

    name: str
    """The script, without its ending."""
    claim: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def missed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.passed is False)

    def markdown(self, *, seconds: float) -> str:
        """The section of RESULTS.md."""
        judged = [row for row in self.rows if row.passed is not None]
        verdict = f"{len(judged) - len(self.missed)} of {len(judged)} targets met."
        lines = [
            f"## {self.name}",
            "",
            f"{self.claim} **{verdict}**",
            "",
            *("| " + " | ".join(cells) + " |" for cells in (HEADER, ("---",) * len(HEADER))),
            *("| " + " | ".join(row.cells) + " |" for row in self.rows),
            "",
            *(f"- {note}" for note in self.notes),
            f"- Measured on {date.today().isoformat()} in {seconds:.0f} s on {machine()}. "
            f"Repeat with `python benchmarks/{self.name}.py`.",
            "",
        ]
        return "\n".join(lines)


def machine() -> str:
    """Processor, cores and Python."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, {platform.system()}, Python {platform.python_version()}"


def percent(fraction: float, digits: int = 2) -> str:
    return f"{100 * fraction:.{digits}f} %"


def points(fraction: float) -> str:
    """A difference of two percentages."""
    return f"{round(100 * fraction, 2) + 0.0:.2f} points"


def timed(run: Callable[[bool], Report], quick: bool) -> tuple[Report, float]:
    """The report and the seconds it took."""
    begin = time.perf_counter()
    report = run(quick)
    return report, time.perf_counter() - begin


def main(run: Callable[[bool], Report]) -> None:
    """A script on its own: print the section."""
    parser = argparse.ArgumentParser(description=(run.__doc__ or "").strip() or None)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    report, seconds = timed(run, parser.parse_args().quick)
    print(report.markdown(seconds=seconds))
    raise SystemExit(1 if report.missed else 0)
