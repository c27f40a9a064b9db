"""The command line: one file a verb, no logic of its own.

Every verb is a frozen dataclass whose field docstrings are its help, with a ``run`` method that returns the exit code. What goes
wrong for reasons a user can mend is one or two lines on stderr and exit code 2, a run that was begun and failed is exit code 1;
``--debug`` shows the traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wavetrain.errors import CheckpointError, RuntimeFailure, WavetrainError

if TYPE_CHECKING:
    from wavetrain.cli.common import Verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        return _parse(given or ["--help"]).run()
    except WavetrainError as error:
        if debug:
            raise
        print(f"wavetrain: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeFailure | CheckpointError) else 2
    except KeyboardInterrupt:
        if debug:
            raise
        print("wavetrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader has gone (`| head`): not an error, but Python would complain when it flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        print(f"wavetrain: {error.strerror or error}", file=sys.stderr)
        return 2


def _parse(arguments: list[str]) -> Verb:
    if arguments == ["--version"]:
        from wavetrain import __version__

        print(f"wavetrain {__version__}")
        raise SystemExit(0)
    import tyro

    from wavetrain.cli.convert import Convert
    from wavetrain.cli.doctor import Doctor
    from wavetrain.cli.explain import Compare, Explain
    from wavetrain.cli.export import Export, Lint
    from wavetrain.cli.generate import Chat, Generate
    from wavetrain.cli.plan import PlanVerb
    from wavetrain.cli.profile import ProfileVerb
    from wavetrain.cli.prove import Prove
    from wavetrain.cli.rehearse import Rehearse
    from wavetrain.cli.score import ScoreVerb
    from wavetrain.cli.simulate import Simulate
    from wavetrain.cli.train import Train
    from wavetrain.cli.view import View

    arguments = _joined(arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            verb: Verb = tyro.extras.subcommand_cli_from_dict(
                {
                    "plan": PlanVerb,
                    "explain": Explain,
                    "compare": Compare,
                    "export": Export,
                    "lint": Lint,
                    "profile": ProfileVerb,
                    "score": ScoreVerb,
                    "simulate": Simulate,
                    "prove": Prove,
                    "view": View,
                    "rehearse": Rehearse,
                    "train": Train,
                    "generate": Generate,
                    "chat": Chat,
                    "convert": Convert,
                    "doctor": Doctor,
                },
                args=arguments,
                prog="wavetrain",
                description="From a model and a set of uneven machines to a trained, served model.",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        print(f"wavetrain: {_first_lines(complaint.getvalue())}", file=sys.stderr)
        raise SystemExit(2) from None
    return verb


def _joined(arguments: list[str]) -> list[str]:
    """``--megatron "--flags of another program"`` as one argument: the parser would take its value for flags of ours."""
    found: list[str] = []
    for argument in arguments:
        if found and found[-1] == "--megatron":
            found[-1] = f"--megatron={argument}"
        else:
            found.append(argument)
    return found


def _first_lines(complaint: str) -> str:
    """What the argument parser complains of, without its box, in at most two lines."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", complaint)
    lines = [re.sub(r"^[│|]\s?|\s*[│|]$", "", line).rstrip() for line in plain.splitlines() if not re.match(r"^[╭╰]", line)]
    first: list[str] = []
    for line in lines:
        if first and (not line or line.startswith("─")):
            break
        first.append(line.strip())
    near = [line.split()[0] for line in lines if re.match(r"^\s+--?\w", line)]
    message = " ".join(first) or "the arguments could not be read"
    if wrong := re.match(r"Error parsing (--[\w-]+): .*(INT|FLOAT).* could be instantiated from \['(.*)'\]", message):
        message = f"{wrong[1]} takes a {'whole ' if wrong[2] == 'INT' else ''}number, not {wrong[3]!r}"
    if "Perhaps you meant:" in plain and near:
        return f"{message}\n  did you mean {' or '.join(dict.fromkeys(near[:2]))}?"
    return f"{message}\n  see wavetrain --help"
