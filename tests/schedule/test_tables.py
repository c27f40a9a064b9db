"""The tables in the docstrings of the families are what ``draw`` prints."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from wavetrain.errors import InputError, ProofError
from wavetrain.schedule import families, table
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import FAMILIES, build
from wavetrain.schedule.placement import straight
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.table import draw

CAPTION = re.compile(r'^`build\("(?P<name>[\w-]+)", (?P<options>[\w=, ]+)\)` draws as\n\n(?P<table>(?: {4}.+\n?)+)', re.MULTILINE)

MODULES = [f"{families.__name__}.{m.name}" for m in pkgutil.iter_modules(families.__path__)]


def documented() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Module, family, options and table of every table in a docstring."""
    for module in (*MODULES, table.__name__):
        for found in CAPTION.finditer(importlib.import_module(module).__doc__ or ""):
            pairs = (pair.split("=") for pair in found["options"].split(", "))
            options = {key: ast.literal_eval(value) for key, value in pairs}
            yield module.rpartition(".")[2], found["name"], options, textwrap.dedent(found["table"]).rstrip("\n")


TABLES = list(documented())


@pytest.mark.parametrize(("module", "name", "options", "drawn"), TABLES, ids=[f"{t[0]}-{t[1]}" for t in TABLES])
def test_a_docstring_shows_what_is_drawn(module: str, name: str, options: dict[str, Any], drawn: str) -> None:
    assert draw(build(name, **options)) == drawn
    assert max(len(line) for line in drawn.splitlines()) <= 126, "with its indentation, a line of at most 130 columns"


def test_every_family_shows_its_table() -> None:
    assert {name for _, name, _, _ in TABLES} == set(FAMILIES)


def test_every_caption_is_read() -> None:
    docstrings = [importlib.import_module(module).__doc__ or "" for module in MODULES]
    assert sum(text.count("draws as") for text in docstrings) == len(TABLES) - 1


def test_wide_cells_long_labels_and_long_actions_stay_aligned() -> None:
    lines = draw(build("1f1b", num_ranks=11, num_micro_batches=11)).splitlines()
    assert lines[0].startswith("rank 0   0F0   0F1   0F2")
    assert lines[10].startswith("rank 10  ·     ·     ·")
    assert "10F10 10B10 -----" in lines[10]
    assert not any(line.endswith(" ") for line in lines)
    columns = {(len(line[: m.start()]) - 9) % 6 for line in lines for m in re.finditer(r"\d+[FB]\d+", line)}
    assert columns == {0}


def test_the_unit_is_the_shortest_action() -> None:
    costs = Costs.uniform(2, forward=0.3, backward_input=0.6, backward_weight=0.3)
    assert draw(build("zb-h1", num_ranks=2, num_micro_batches=1), costs) == (
        "rank 0  0F0 ·   ·   ·   0I0 --- 0W0\nrank 1  ·   1F0 1I0 --- 1W0"
    )


def test_a_hop_of_whole_units_is_idle_time() -> None:
    schedule = build("1f1b", num_ranks=2, num_micro_batches=1)
    drawn = draw(schedule, Costs.uniform(2, hop_latency=1.0))
    assert drawn == "rank 0  0F0 ·   ·   ·   ·   ·   0B0 ---\nrank 1  ·   ·   1F0 1B0 ---"


def test_a_rank_without_actions_keeps_its_line() -> None:
    schedule = Schedule.single_route("idle", (1,), 1, [[], [Action("F", 0, 0), Action("B", 0, 0)]])
    assert draw(schedule) == "rank 0\nrank 1  0F0 0B0 ---"


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (Costs.uniform(2, hop_latency=0.5), "not on a grid of 1 s"),
        (Costs.uniform(2, forward=2.0, backward_input=1.0, backward_weight=2.0), "not on a grid of 2 s"),
        (Costs.uniform(2, forward=0.0), "F of stage 0, micro-batch 0, takes no time"),
        (Costs.uniform(2, forward=1e-6), "more than 10000 columns"),
    ],
)
def test_times_off_the_grid_are_an_error(costs: Costs, words: str) -> None:
    with pytest.raises(InputError, match=words):
        draw(build("1f1b", num_ranks=2, num_micro_batches=2), costs)


def test_what_cannot_run_is_not_drawn() -> None:
    backward_first = Schedule.single_route("wrong", straight(1), 1, [[Action("B", 0, 0), Action("F", 0, 0)]])
    with pytest.raises(ProofError):
        draw(backward_first)
