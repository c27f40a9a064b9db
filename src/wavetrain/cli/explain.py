"""``wavetrain explain`` and ``wavetrain compare``: plans looked at again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from wavetrain.cli.common import File, Flag, Output, print_json
from wavetrain.cli.planning import Costing, console, draw_plan, print_explanation, progress_line, rank_table

if TYPE_CHECKING:
    from wavetrain.plan.plan import Plan
    from wavetrain.plan.shapes import Limits


@dataclass(frozen=True, kw_only=True)
class Explain(Costing):
    """Where the time of a plan goes, what binds it, what else one would have run, and what would change with the cluster.

    wavetrain explain plan.toml
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """What wavetrain plan wrote."""
    no_what_if: Flag = False
    """Do not plan for other clusters, which takes a second or two each."""
    html: File = None
    """Write the page: the pipeline of the plan, simulated, and all of this."""

    def run(self) -> int:
        """Explain."""
        from wavetrain.plan.explain import explain
        from wavetrain.plan.plan import load_plan

        plan = load_plan(self.plan)
        cluster = plan.sources.nodes()
        model = self.cost_model(plan.sources)
        with progress_line() as progress:
            told = explain(plan, model, cluster, _limits(plan), what_ifs=not self.no_what_if, progress=progress)
        if self.html is not None:
            draw_plan(self.html, plan, told)
        if self.json:
            print_json({"plan": plan.to_dict(), "explanation": told.to_dict()})
            return 0
        low, high = plan.interval
        print(f"{plan.describe()}: {plan.seconds:.4g} s a step ({low:.3g} to {high:.3g})")
        console().print(rank_table(plan))
        print_explanation(plan, told)
        return 0


def _limits(plan: Plan) -> Limits:
    """What the plan's runtime can do."""
    from wavetrain.plan.shapes import limits_of

    return limits_of(plan.sources.runtime)


@dataclass(frozen=True, kw_only=True)
class Compare(Output):
    """Two plans side by side: which is faster, whether that can be told, and where the difference comes from.

    wavetrain compare a.toml b.toml
    """

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A plan."""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """Another."""

    def run(self) -> int:
        """Compare."""
        from rich.table import Table

        from wavetrain.plan.estimate import PARTS
        from wavetrain.plan.plan import load_plan

        a, b = load_plan(self.first), load_plan(self.second)
        told_apart = a.differs_from(b)
        if self.json:
            parts = {n: b.parts.get(n, 0.0) - a.parts.get(n, 0.0) for n in PARTS}
            print_json(
                {
                    "a": a.to_dict(),
                    "b": b.to_dict(),
                    "ratio": b.seconds / a.seconds,
                    "told_apart": told_apart,
                    "difference": parts,
                }
            )
            return 0
        table = Table(show_header=True)
        for name in ("", str(self.first), str(self.second), "difference"):
            table.add_column(name, justify="right" if name else "left")
        for name in PARTS:
            x, y = a.parts.get(name, 0.0), b.parts.get(name, 0.0)
            table.add_row(name, f"{x:.4g} s", f"{y:.4g} s", f"{y - x:+.4g} s")
        table.add_section()
        table.add_row("step", f"{a.seconds:.4g} s", f"{b.seconds:.4g} s", f"{b.seconds / a.seconds - 1:+.1%}")
        table.add_row("fullest device", f"{max(a.memory_share):.0%}", f"{max(b.memory_share):.0%}", "")
        table.add_row("devices", str(a.num_devices), str(b.num_devices), "")
        console().print(table)
        for name, plan in (("A", a), ("B", b)):
            print(f"{name}: {plan.describe()}")
        faster = "A" if a.seconds <= b.seconds else "B"
        ratio = max(a.seconds, b.seconds) / min(a.seconds, b.seconds)
        if ratio == 1:
            print("both are predicted to take as long")
        else:
            print(f"{faster} is {ratio:.3f}× as fast" + ("" if told_apart else ", which the predictions cannot tell: run both"))
        if a.global_batch != b.global_batch or a.sources.model != b.sources.model:
            print("note: the plans are for another model or batch")
        return 0
