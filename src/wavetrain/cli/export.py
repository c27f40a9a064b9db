"""``wavetrain export`` and ``wavetrain lint``: plans for other frameworks, and theirs for us."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wavetrain.cli.common import Count, File, Flag, Name, Output, print_json
from wavetrain.cli.planning import Costing
from wavetrain.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Export(Output):
    """A plan in the words of another framework; what it has no word for is a warning on stderr.

    wavetrain export plan.toml --to megatron
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """What wavetrain plan wrote."""
    to: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """megatron, torchtitan or deepspeed."""
    out: File = None
    """A file instead of stdout."""

    def run(self) -> int:
        """Export."""
        from wavetrain.files import write_text
        from wavetrain.plan.export import export
        from wavetrain.plan.plan import load_plan

        plan = load_plan(self.plan)
        found = export(plan, plan.sources.workload(), self.to)
        if self.out is not None:
            write_text(self.out, found.text)
        if self.json:
            print_json({"to": self.to, "text": found.text, "warnings": list(found.warnings)})
            return 0
        if self.out is None:
            print(found.text, end="")
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return 0


@dataclass(frozen=True, kw_only=True)
class Lint(Costing):
    """Launch flags of Megatron looked over for a cluster: what cannot run, what will run badly, what would be better.

    wavetrain lint --megatron "--num-layers 48 --hidden-size 1600 … --global-batch-size 64" --cluster cluster.toml

    Exit code 1: an error was found.
    """

    megatron: Annotated[str, tyro.conf.arg(metavar="FLAGS")]
    """The flags, in quotes."""
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")]
    """As for wavetrain plan."""
    model: Name = None
    """As for wavetrain plan. Default: what the flags say."""
    global_batch: Count = None
    """Where the flags do not say."""
    no_plan: Flag = False
    """Do not look for a better plan."""

    def run(self) -> int:
        """Look, and print."""
        from dataclasses import replace

        from wavetrain.cluster import load_cluster
        from wavetrain.plan.estimate import CostModel
        from wavetrain.plan.lint import Finding, lint, parse_flags
        from wavetrain.plan.search import search
        from wavetrain.workload import load_workload

        flags = parse_flags(self.megatron)
        if flags.global_batch is None and self.global_batch is not None:
            flags = replace(flags, global_batch=self.global_batch)
        workload = flags.workload() if self.model is None else load_workload(self.model)
        cluster = load_cluster(self.cluster)
        model = CostModel(workload=workload, calibration=self.load_calibration(), profiles=self.load_profiles())
        findings, estimate = lint(flags, model, cluster)
        better = None
        if not self.no_plan and flags.global_batch is not None:
            try:
                best = search(model, cluster, flags.global_batch).best
            except InputError:
                best = ()
            if best:
                better = best[0].seconds
                s, layout = best[0].strategy, best[0].layout
                line = (
                    f"tp {best[0].tp}, dp {layout.num_replicas}, pp {layout.num_ranks}, micro-batch {s.micro_batch}, {s.schedule}"
                )
                over = "" if estimate is None or not estimate.fits else f", {estimate.seconds / better:.2f}× as fast"
                findings.append(Finding(level="note", message=f"the best plan found: {line}, {better:.4g} s{over}"))
        if self.json:
            print_json(
                {
                    "findings": [{"level": f.level, "message": f.message} for f in findings],
                    "seconds": None if estimate is None else estimate.seconds,
                    "fits": None if estimate is None else estimate.fits,
                    "best_seconds": better,
                }
            )
        else:
            for finding in findings:
                print(f"{finding.level}: {finding.message}")
        return 1 if any(f.level == "error" for f in findings) else 0
