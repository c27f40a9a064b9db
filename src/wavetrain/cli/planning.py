"""What the planning verbs share: where costs come from, and how plans are shown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeAlias

import tyro

from wavetrain.cli.common import File, Output

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from wavetrain.plan.calibration import Calibration
    from wavetrain.plan.estimate import CostModel
    from wavetrain.plan.explain import Explanation
    from wavetrain.plan.plan import Plan
    from wavetrain.plan.sources import Sources
    from wavetrain.profile import Profiles

Folder: TypeAlias = Annotated[Optional[str], tyro.conf.arg(metavar="DIR", help_behavior_hint="")]  # noqa: UP045


@dataclass(frozen=True, kw_only=True)
class Costing(Output):
    """Where costs come from."""

    profiles: Folder = None
    """A folder of measured layers and links (wavetrain profile writes one). Default: datasheets."""
    calibration: File = None
    """A calibration of your own (wavetrain score --calibrate-on … --save-calibration). Default: the one that comes along."""

    def cost_model(self, sources: Sources, *, overlaps: bool = True) -> CostModel:
        """What the layers of the model cost."""
        from wavetrain.plan.estimate import CostModel

        workload = sources.workload()
        return CostModel(workload=workload, calibration=self.load_calibration(), profiles=self.load_profiles(), overlaps=overlaps)

    def load_calibration(self) -> Calibration:
        """The constants of devices."""
        from wavetrain.plan.calibration import load_calibration, shipped

        return shipped() if self.calibration is None else load_calibration(str(self.calibration))

    def load_profiles(self) -> Profiles:
        """What was measured."""
        from wavetrain.profile import Profiles, load_profiles

        return Profiles() if self.profiles is None else load_profiles(self.profiles)


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None] | None]:
    """A line on a terminal that says how far the work is; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        yield lambda text: status.update(text)


def console() -> Console:
    """Wide enough for tables where the output is not a terminal."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, 120))


def plan_table(plans: Sequence[Plan], title: str) -> Any:
    """Plans, the best first."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name, right in (
        ("", True),
        ("seconds", True),
        ("between", True),
        ("over best", True),
        ("fullest", True),
        ("plan", False),
    ):
        table.add_column(name, justify="right" if right else "left")
    best = plans[0]
    for i, plan in enumerate(plans):
        low, high = plan.interval
        over = "" if i == 0 else f"{plan.seconds / best.seconds:.3f}×" + ("" if best.differs_from(plan) else " ?")
        table.add_row(
            str(i + 1), f"{plan.seconds:.4g}", f"{low:.3g} – {high:.3g}", over, f"{max(plan.memory_share):.0%}", plan.describe()
        )
    return table


def rank_table(plan: Plan) -> Any:
    """What every rank holds."""
    from rich.table import Table

    table = Table(title="ranks along the pipeline", title_justify="left")
    for name in ("rank", "layers", "devices", "nodes", "ms a micro-batch", "memory"):
        table.add_column(name, justify="left" if name in ("devices", "nodes") else "right")
    shown = range(plan.pp) if plan.pp <= 32 else [*range(16), *range(plan.pp - 16, plan.pp)]
    for k in shown:
        names = list(dict.fromkeys(plan.devices[k]))
        nodes = sorted(set(plan.nodes[k]))
        text = ", ".join(map(str, nodes)) if len(nodes) <= 6 else f"{nodes[0]} … {nodes[-1]} ({len(nodes)})"
        table.add_row(
            str(k),
            plan.layers_of(k),
            " + ".join(f"{plan.devices[k].count(n) * plan.tp} {n}" for n in names),
            text,
            f"{1e3 * plan.rank_seconds[k]:.2f}",
            f"{plan.memory_bytes[k] / 1e9:.1f} GB, {plan.memory_share[k]:.0%}",
        )
    return table


def waterfall(explanation: Explanation) -> Any:
    """Where the time goes."""
    from rich.table import Table

    from wavetrain.plan.explain import WORDS

    table = Table(title="where the time goes", title_justify="left", show_header=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    table.add_column()
    for name, seconds, share in explanation.parts:
        if share >= 0.0005:
            table.add_row(f"{seconds:.4g} s", f"{share:.1%}", "█" * max(1, round(40 * share)), WORDS[name])
    return table


def print_explanation(plan: Plan, explanation: Explanation) -> None:
    """An explanation in words."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(waterfall(explanation))
    for line in explanation.binds:
        out.print(f"binds: {escape(line)}")
    for base in explanation.baselines:
        if base.ratio is None:
            out.print(escape(f"{base.name}: {base.why}"))
        else:
            out.print(escape(f"{base.ratio:.2f}× over {base.name} ({base.plan}, {base.seconds:.4g} s): {base.why}"))
    if explanation.what_ifs:
        table = Table(title="what if", title_justify="left")
        for name, right in (("", False), ("seconds", True), ("faster", True), ("$ a step", True)):
            table.add_column(name, justify="right" if right else "left")
        dollars = explanation.dollars_per_step
        table.add_row("as it is", f"{plan.seconds:.4g}", "", "" if dollars is None else f"{dollars:.3g}")
        for what in explanation.what_ifs:
            price = "" if what.dollars_per_step is None else f"{what.dollars_per_step:.3g}"
            faster = "" if what.speedup is None else f"{what.speedup:.2f}×"
            table.add_row(what.change, "does not fit" if what.seconds is None else f"{what.seconds:.4g}", faster, price)
        out.print(table)
    if len(explanation.pareto) > 1:
        out.print(escape(f"no other is both faster and cheaper than: {'; '.join(explanation.pareto)}"))


def explanation_notes(plan: Plan, explanation: Explanation) -> list[tuple[str, str]]:
    """An explanation for the page: words, and what is to be said of each."""
    from wavetrain.plan.explain import WORDS

    low, high = plan.interval
    notes = [("plan", plan.describe()), ("a step", f"{plan.seconds:.4g} s ({low:.3g} to {high:.3g})")]
    notes += [(f"{seconds:.4g} s, {share:.1%}", WORDS[name]) for name, seconds, share in explanation.parts if share >= 0.0005]
    notes += [("binds", line) for line in explanation.binds]
    for base in explanation.baselines:
        over = f"{base.ratio:.2f}× over it ({base.plan}, {base.seconds:.4g} s): " if base.ratio is not None else ""
        notes.append((base.name, over + base.why))
    for what in explanation.what_ifs:
        price = "" if what.dollars_per_step is None else f", ${what.dollars_per_step:.3g} a step"
        faster = "does not fit" if what.seconds is None else f"{what.seconds:.4g} s, {what.speedup or 0:.2f}×{price}"
        notes.append((f"if {what.change}", faster))
    if len(explanation.pareto) > 1:
        notes.append(("time and money", f"no other is both faster and cheaper than: {'; '.join(explanation.pareto)}"))
    return notes


def draw_plan(path: Path, plan: Plan, explanation: Explanation) -> None:
    """The page of a plan: its pipeline, simulated, and why it is as it is."""
    from wavetrain.schedule.simulator import simulate
    from wavetrain.view.page import write_page

    schedule, costs = plan.pipeline()
    write_page(path, [simulate(schedule, costs)], notes=explanation_notes(plan, explanation))
