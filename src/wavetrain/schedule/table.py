"""Schedules as text: one line a rank, one column a unit of time. What the docstrings of the families show.

`build("1f1b", num_ranks=2, num_micro_batches=2)` draws as

    rank 0  0F0 0F1 ·   ·   0B0 --- ·   0B1 ---
    rank 1  ·   1F0 1B0 --- 1F1 1B1 ---
"""

from __future__ import annotations

from wavetrain.errors import InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.timeline import Span

_TOLERANCE = 1e-6  # of a column
_MAX_COLUMNS = 10_000


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """Who does what when, one line a rank.

    A column is as long as the shortest action. A cell is an action in torch's spelling, such as ``3F0``; a longer action goes on
    in dashes, and ``·`` is idle.

    Args:
        schedule: any that can run.
        costs: as :func:`wavetrain.simulate` takes them; by default F, I and W of a rank's share take as long as one another.

    Raises:
        InputError: actions do not begin and end on a grid of the shortest one.
        ProofError: the schedule cannot run to its end.
    """
    timeline = simulate(schedule, costs)
    spans = [s for row in timeline.spans for s in row]
    shortest = min(spans, key=lambda s: s.end - s.start)
    unit = shortest.end - shortest.start
    if unit <= 0.0:
        raise InputError(f"{shortest.action.describe()}, takes no time and cannot be drawn; give costs above 0 for all stages")
    if timeline.makespan > _MAX_COLUMNS * unit:
        raise InputError(f"the table would have more than {_MAX_COLUMNS} columns: a column is as long as the shortest action")

    def column(span: Span, seconds: float) -> int:
        at = round(seconds / unit)
        if abs(seconds / unit - at) > _TOLERANCE:
            raise InputError(
                f"{span.action.describe()}, runs from {span.start:.6g} to {span.end:.6g} s: not on a grid of {unit:.6g} s, the "
                "shortest action; a table needs all times to be multiples of it, a timeline (simulate) does not"
            )
        return at

    width = max(len(str(s.action)) for s in spans)
    label = len(f"rank {timeline.num_ranks - 1}")
    lines = []
    for rank, row in enumerate(timeline.spans):
        cells: list[str] = []
        for span in row:
            start, end = column(span, span.start), column(span, span.end)
            cells += ["·"] * (start - len(cells))
            cells += [str(span.action)] + ["-" * width] * (end - start - 1)
        lines.append(f"{f'rank {rank}':<{label}}  {' '.join(c.ljust(width) for c in cells)}".rstrip())
    return "\n".join(lines)
