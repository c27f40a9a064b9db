"""``wavetrain prove``: whether a schedule can run, before it is launched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from wavetrain.cli.common import Output, Problem, print_json
from wavetrain.schedule.proof import Certificate, Refusal, prove


@dataclass(frozen=True, kw_only=True)
class Prove(Output):
    """Prove that a schedule runs to its end and how much it holds, or say exactly why not.

    wavetrain prove --schedule my.csv --memory-cap 4

    Shown: every action once, no deadlock even if every send blocks until its receive is posted, the exact peak of activations.
    Exit code 0: proven. 1: refused. 2: there is nothing to prove: a file that cannot be read, a cap that a named family passes.
    """

    problem: Annotated[Problem, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Problem)

    def run(self) -> int:
        """Print the certificate or the refusal."""
        schedule, costs = self.problem.build()
        found = prove(schedule, costs)
        if self.json:
            print_json({"schedule": schedule.name, "proven": found.proven, **as_dict(found)})
        elif isinstance(found, Refusal):
            print(f"refused: {found.message}")
        else:
            _print_certificate(schedule.name, found)
        return 0 if found.proven else 1


def as_dict(found: Certificate | Refusal) -> dict[str, object]:
    """A certificate or refusal as plain data, actions in torch's spelling."""
    if isinstance(found, Certificate):
        return dataclasses.asdict(found)
    return {
        "reason": found.reason,
        "message": found.message,
        "rank": found.rank,
        "action": str(found.action) if found.action else None,
        "cycle": [
            {"rank": w.rank, "action": str(w.action), "needs": str(w.needs), "needs_rank": w.needs_rank} for w in found.cycle
        ],
    }


def _print_certificate(name: str, certificate: Certificate) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(
        f"[bold]{escape(name)}[/] is proven: {certificate.num_actions} actions, {certificate.num_messages} messages, "
        f"{certificate.weight_copies} cop{'y' if certificate.weight_copies == 1 else 'ies'} of the weights.\n"
        f"No deadlock with blocking sends, if a rank posts its receives {certificate.receive_ahead} "
        f"action{'' if certificate.receive_ahead == 1 else 's'} beyond its next one."
    )
    table = Table("rank", "peak activations", "stage activations", "receive buffers")
    rows = zip(certificate.peak_activations, certificate.peak_counts, certificate.receive_buffers, strict=True)
    for rank, (peak, count, buffers) in enumerate(rows):
        table.add_row(str(rank), f"{peak:g}", str(count), str(buffers))
    console.print(table)
