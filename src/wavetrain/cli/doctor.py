"""``wavetrain doctor``: what this machine can do, tried out."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from wavetrain.cli.common import Output, print_json


@dataclass(frozen=True, kw_only=True)
class Doctor(Output):
    """Try out what wavetrain needs of this machine: torch, two ranks that meet, bf16 products, optional packages.

    wavetrain doctor

    Exit code 1: something that was tried does not work; its line says what to do.
    """

    def run(self) -> int:
        """Examine, and print."""
        from wavetrain.runtime.doctor import examine

        findings = examine()
        if self.json:
            print_json([asdict(finding) for finding in findings])
        else:
            from rich.console import Console
            from rich.table import Table

            table = Table(show_header=False)
            for finding in findings:
                mark = "" if finding.ok is None else "ok" if finding.ok else "NO"
                table.add_row(finding.what, finding.found, mark, finding.advice if finding.ok is not True else "")
            Console().print(table)
        return 1 if any(finding.ok is False for finding in findings) else 0
