"""All benchmarks in sequence, or those named, and their results in RESULTS.md. Sections of benchmarks that are not run stay."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import timed

NAMES = (
    *("formulas", "zero_bubble_waves", "hop_latency", "lean_memory", "uneven", "speed"),
    *("accuracy", "planner", "mixed_clusters"),
    *("kraken_quality", "kraken_conversion", "kraken_elastic", "kraken_first_token", "kraken_decode", "deferred_sums"),
    *("optex_synthetic", "optex_networks", "optex_reinforcement", "optex_theory"),
    *("optex_wall_clock", "optex_cost", "optex_threads"),
    *("paper", "paper_rehearsed", "against_torch", "chimera", "many_ranks", "split_backward", "real_compute"),
)
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
TITLE = """# Results

Written by `make bench` (`python benchmarks/run.py`). One table a claim; `MISS` marks a target that was not met.
"""


def sections(text: str) -> dict[str, str]:
    """The sections of a results file, by name."""
    return {part.split("\n", 1)[0].removeprefix("## "): part for part in re.split(r"^(?=## )", text, flags=re.M)[1:]}


def write(path: Path, new: dict[str, str]) -> None:
    """Put the new sections in place of the old ones."""
    found = (sections(path.read_text()) if path.exists() else {}) | new
    kept = [found[name].strip() + "\n" for name in NAMES if name in found]
    path.write_text("\n".join([TITLE, *kept]))


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds each; nothing is written unless asked")
    parser.add_argument("--output", type=Path, help="default: benchmarks/RESULTS.md")
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in NAMES:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(NAMES)}")
    missed = 0
    for name in given.names or NAMES:
        print(f"{name} …", file=sys.stderr, flush=True)
        report, seconds = timed(importlib.import_module(f"benchmarks.{name}").run, given.quick)
        text = report.markdown(seconds=seconds)
        print(text, flush=True)
        missed += len(report.missed)
        output = given.output or (None if given.quick else RESULTS)
        if output is not None:
            write(output, {name: text})
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
