"""How a run shows itself while it goes on: a bar in a terminal, plain lines elsewhere, nothing where it is to be quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

_SECONDS_BETWEEN_LINES: Final = 2.0


class Display(Protocol):
    """Shows steps."""

    def step(self, record: Mapping[str, Any], done: float, left_seconds: float) -> None:
        """Show a step.

        Args:
            record: its numbers, as of ``metrics.jsonl``.
            done: the share of the run that is done, 0 to 1.
            left_seconds: how long the rest will take.
        """

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def step(self, record: Mapping[str, Any], done: float, left_seconds: float) -> None:
        return

    def say(self, text: str) -> None:
        return

    def close(self) -> None:
        return


class Lines:
    """A plain line every few seconds, for files and pipes."""

    def __init__(self) -> None:
        self._last = 0.0

    def step(self, record: Mapping[str, Any], done: float, left_seconds: float) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES or done >= 1 or "validation_loss" in record:
            self._last = now
            self.say(f"step {record['step']:>5}  {described(record)}  {done:4.0%}  {clock(left_seconds)} left")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        return


class Bar:
    """A live bar in the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console()
        self._progress = Progress(
            TextColumn("step {task.fields[number]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("{task.fields[left]} left"),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=1.0, number=0, numbers="", left="?")
        self._progress.start()

    def step(self, record: Mapping[str, Any], done: float, left_seconds: float) -> None:
        if "validation_loss" in record:
            self.say(f"step {record['step']}  validation loss {record['validation_loss']:.4f}")
        text = described({k: v for k, v in record.items() if k != "validation_loss"})
        self._progress.update(self._task, completed=done, number=record["step"], numbers=text, left=clock(left_seconds))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def open_display(*, quiet: bool) -> Display:
    """What fits the place where stdout goes."""
    if quiet:
        return Silent()
    return Bar() if sys.stdout.isatty() else Lines()


def described(record: Mapping[str, Any]) -> str:
    """The numbers of a step in one line."""
    parts = [f"loss {record['loss']:.4f}"]
    if "validation_loss" in record:
        parts.append(f"validation {record['validation_loss']:.4f}")
    parts += [f"{record['tokens_per_second']:,.0f} tokens/s", f"bubble {record['bubble']:.1%}"]
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
