"""How schedules are shown in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from wavetrain.schedule.analysis import CAUSES, idle_by_cause
from wavetrain.schedule.timeline import Timeline

if TYPE_CHECKING:
    from wavetrain.cli.simulate import Result

_STYLES = {"F": "black on bright_blue", "B": "black on yellow", "I": "black on bright_green", "W": "white on magenta"}


def print_result(result: Result) -> None:
    """One schedule: its figures, its lanes, and idle time by cause for every rank."""
    console = _console()
    timeline, certificate = result.timeline, result.certificate
    waves = f", {timeline.waves} waves" if timeline.waves else ""
    console.print(
        f"[bold]{escape(timeline.name)}[/]: {timeline.num_ranks} ranks, {timeline.num_stages} stages{waves}, "
        f"{timeline.num_micro_batches} micro-batches; proven, {certificate.num_messages} messages"
    )
    console.print(
        f"step [bold]{timeline.makespan:.6g}[/] s, ideal {timeline.ideal:.6g} s, bubble [bold]{timeline.bubble:.1%}[/], "
        f"at most {max(certificate.peak_activations):g} micro-batches held, {certificate.weight_copies} x weights"
    )
    width = min(max(console.width - 9, 20), 160)
    for rank in range(min(timeline.num_ranks, 32)):
        console.print(Text(f"rank {rank:>2} ").append_text(_lane(timeline, rank, width)), no_wrap=True)
    idle = idle_by_cause(timeline)
    shown = [cause for cause in CAUSES if any(row[cause] > 1e-12 for row in idle)]
    table = Table("rank", "busy", *shown, "peak held", title="share of the step, by rank")
    for rank, (row, work, peak) in enumerate(zip(idle, timeline.work, certificate.peak_activations, strict=True)):
        share = [f"{row[cause] / timeline.makespan:.1%}" if row[cause] > 1e-12 else "" for cause in shown]
        table.add_row(str(rank), f"{work / timeline.makespan:.1%}", *share, f"{peak:g}")
    console.print(table)


def print_comparison(results: Sequence[Result]) -> None:
    """A table of schedules, fastest first."""
    table = Table(title=_title(results[0].timeline))
    for column in ("schedule", "stages", "step", "bubble", "slower by", "held", "messages", "copies"):
        table.add_column(column, no_wrap=True, justify="left" if column == "schedule" else "right")
    best = results[0].timeline.makespan
    for r in results:
        t = r.timeline
        table.add_row(
            escape(f"{t.name} W={t.waves}" if t.waves else t.name),
            str(t.num_stages),
            f"{t.makespan:.6g}",
            f"{t.bubble:.2%}",
            f"{t.makespan / best - 1:.1%}" if t.makespan > best else "",
            f"{max(r.certificate.peak_activations):g}",
            str(r.certificate.num_messages),
            f"{r.certificate.weight_copies}x",
        )
    _console().print(table)


def _console() -> Console:
    """The terminal; what is piped is not squeezed into 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 120))


def _title(timeline: Timeline) -> str:
    return f"{timeline.num_ranks} ranks, {timeline.num_micro_batches} micro-batches; seconds, all proven"


def _lane(timeline: Timeline, rank: int, width: int) -> Text:
    """What a rank does, one character for an equal slice of the step."""
    lane, spans, at = Text(), timeline.spans[rank], 0
    for column in range(width):
        now = (column + 0.5) / width * timeline.makespan
        while at < len(spans) and spans[at].end <= now:
            at += 1
        if at < len(spans) and spans[at].start <= now:
            lane.append(spans[at].kind, style=_STYLES[spans[at].kind])
        else:
            lane.append("·", style="dim")
    return lane
