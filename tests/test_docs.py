"""What README and docs/ show is what happens: every ``console`` and ``python`` block is run, in a folder that has ``examples/``.

In a ``console`` block, lines that begin with ``$`` are run one after the other, and what they print is compared with the lines
that follow; ``...`` stands for anything. In a ``python`` block, ``print(...)  # → text`` says what is printed. The blocks of a
page share their names. Other kinds of blocks (``sh``, ``toml``, ``text``) are only shown.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .cli.command import ENVIRONMENT, PATIENCE, WAVETRAIN, interrupt, start

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")
CAPABILITIES = {
    *("schedules.md", "proof.md", "simulation.md", "optimizer.md", "view.md"),
    *("training.md", "rehearsal.md", "checkpoints.md", "failures.md", "planning.md", "optex.md"),
    *("kraken.md", "generation.md"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_do_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            run_python(text, names)
        elif language == "console":
            for command, shown in commands(text):
                run_command(command, shown)


def run_python(text: str, names: dict[str, Any]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "<example>", "exec"), names)
    said = re.findall(r"# → (.*)$", text, re.MULTILINE)
    if said:
        assert printed.getvalue().splitlines() == said


def commands(text: str) -> list[tuple[str, str]]:
    """Every command of a block with the output shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in found]


def run_command(command: str, shown: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "wavetrain" and arguments[0] == "view":
        process = start(*arguments)
        try:
            assert process.stdout
            printed = process.stdout.readline()
            assert interrupt(process)[0] == 0
        finally:
            process.kill()
            process.communicate()
    else:
        known = {"wavetrain": WAVETRAIN, "python": (sys.executable,), "cat": ("cat",)}
        assert program in known, f"{program!r} in a console block is not run; use an sh block"
        done = subprocess.run(
            [*known[program], *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
            timeout=PATIENCE,
            check=False,
        )
        printed = done.stdout
        expected = 2 if shown.startswith("wavetrain: ") else 1 if shown.startswith("refused: ") else 0
        assert done.returncode == expected, f"$ {command}\n{printed}"
    if shown.strip():
        got, want = ("".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip()) for text in (printed, shown))
        assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), f"$ {command}\n{printed}\nbut shown is\n{shown}"


def test_every_capability_has_a_page_with_an_example() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert pages.keys() >= CAPABILITIES | {"architecture.md"}
    for name in CAPABILITIES:
        assert {"python", "console"} & {language for language, _ in BLOCK.findall(pages[name])}, name
        assert f"(docs/{name})" in pages["README.md"], name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_is_short_and_its_picture_light() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert os.path.getsize(ROOT / "docs" / "timeline.png") < 300_000
