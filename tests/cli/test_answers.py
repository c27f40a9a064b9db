"""What the verbs answer when all is well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wavetrain import SCHEDULE_NAMES

from .command import ENVIRONMENT, PATIENCE, WAVETRAIN, answer, answer_json

KEYS = {
    "schedule",
    "ranks",
    "micro_batches",
    "waves",
    "makespan",
    "ideal",
    "bubble",
    "peak_activations",
    "messages",
    "weight_copies",
    "proven",
}


def test_help_lists_the_verbs_and_what_they_take() -> None:
    general = answer("--help")
    assert answer() == general, "no arguments: the help"
    for verb, flags in {
        "simulate": ("--compare", "--html", "--trace", "--save", "--comms"),
        "prove": (),
        "view": ("--compare", "--host", "--port", "--open"),
    }.items():
        assert verb in general
        text = answer(verb, "--help")
        for flag in (
            *flags,
            "--schedule",
            "--ranks",
            "--micro-batches",
            "--waves",
            "--costs",
            "--memory-cap",
            "--json",
            "--debug",
        ):
            assert flag in text, (verb, flag)
        for name in SCHEDULE_NAMES:
            assert name in text, (verb, name)


def test_simulate_json_has_the_figures() -> None:
    found = answer_json("simulate", "--schedule", "1f1b", "--ranks", 4, "--micro-batches", 8)
    assert found.keys() >= KEYS
    assert found["schedule"] == "1f1b"
    assert (found["ranks"], found["micro_batches"], found["waves"]) == (4, 8, None)
    assert (found["makespan"], found["ideal"]) == (33, 24)
    assert found["bubble"] == pytest.approx(3 / 11)
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert (found["messages"], found["weight_copies"], found["proven"]) == (48, 1, True)


def test_defaults_are_two_zero_bubble_waves_on_eight_ranks() -> None:
    found = answer_json("simulate")
    assert (found["schedule"], found["ranks"], found["micro_batches"], found["waves"]) == ("zb-wave", 8, 8, 2)
    assert found["bubble"] == pytest.approx(7 / (6 * 2 * 8 + 7))


def test_compare_all_is_sorted_and_auto_is_first() -> None:
    arguments = ("simulate", "--ranks", 4, "--micro-batches", 4, "--compare", "all", "--iterations", 0)
    rows = answer_json(*arguments)
    assert {row["schedule"] for row in rows} == set(SCHEDULE_NAMES)
    assert all(row.keys() >= KEYS and row["proven"] for row in rows)
    times = [row["makespan"] for row in rows]
    assert times == sorted(times)
    assert times[0] == next(row["makespan"] for row in rows if row["schedule"] == "auto")
    # the same as a table for people: one line a schedule, in the same order
    table = answer(*arguments)
    lines = [line for line in table.splitlines() if any(f"│ {name} " in line for name in SCHEDULE_NAMES)]
    assert [line.split()[1] for line in lines] == [row["schedule"] for row in rows]
    for row, line in zip(rows, lines, strict=True):
        assert f"{row['makespan']:.6g}" in line
        assert f"{row['bubble']:.2%}" in line


def test_compare_names_takes_only_those() -> None:
    rows = answer_json("simulate", "--schedule", "hanayo", "--ranks", 2, "--compare", "gpipe", "1f1b", "hanayo", "--waves", 1)
    assert sorted(row["schedule"] for row in rows) == ["1f1b", "gpipe", "hanayo"]
    assert next(row["waves"] for row in rows if row["schedule"] == "hanayo") == 1


def test_text_is_a_lane_and_a_row_for_every_rank() -> None:
    text = answer("simulate", "--schedule", "gpipe", "--ranks", 3, "--micro-batches", 2)
    assert "3 ranks" in text
    assert "2 micro-batches" in text
    assert "bubble 50.0%" in text
    lanes = [line for line in text.splitlines() if line.startswith("rank")]
    assert len(lanes) == 3
    assert all(set(lane.split()[-1]) <= set("FBIW·") for lane in lanes)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["0", "1", "2"]


def test_prove_says_what_is_shown() -> None:
    text = answer("prove", "--schedule", "hanayo", "--ranks", 4)
    assert "hanayo is proven: 128 actions, 96 messages, 1 copy of the weights" in text
    found = answer_json("prove", "--schedule", "hanayo", "--ranks", 4)
    assert (found["schedule"], found["proven"], found["num_actions"], found["num_messages"]) == ("hanayo", True, 128, 96)
    assert found["peak_activations"] == [3.25, 3.5, 3.75, 4]


@pytest.mark.parametrize(
    ("schedule", "file", "more"),
    [
        ("hanayo", "order.csv", ()),
        ("zb-wave", "order.csv", ("--comms",)),
        ("auto", "order.json", ("--iterations", 0)),
        ("chimera", "order.json", ()),
    ],
)
def test_a_saved_schedule_comes_back_the_same(tmp_path: Path, schedule: str, file: str, more: tuple[object, ...]) -> None:
    costs = ("--hop-latency", 0.1, "--memory-cap", 4)
    saved = answer_json(
        "simulate", "--schedule", schedule, "--ranks", 4, "--micro-batches", 6, *costs, "--save", file, *more, cwd=tmp_path
    )
    loaded = answer_json("simulate", "--schedule", file, *costs, cwd=tmp_path)
    assert loaded.pop("schedule") in (file, saved.pop("schedule"))
    assert loaded.pop("makespan") == pytest.approx(saved.pop("makespan"))
    assert loaded.pop("ideal") == pytest.approx(saved.pop("ideal"))
    assert loaded.pop("bubble") == pytest.approx(saved.pop("bubble"))
    assert loaded == saved
    proof = answer_json("prove", "--schedule", file, *costs, cwd=tmp_path)
    assert proof["proven"]
    assert proof["num_messages"] == saved["messages"]


def test_page_and_trace_are_written(tmp_path: Path) -> None:
    done = answer(
        "simulate", "--schedule", "1f1b", "--ranks", 2, "--html", "new/page.html", "--trace", "trace.json", cwd=tmp_path
    )
    assert done.splitlines()[-2:] == ["wrote trace.json", "wrote new/page.html"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 1] == ["1F0", "1B0", "1F1", "1B1"]
    page = (tmp_path / "new" / "page.html").read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert "1f1b" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_costs_file_with_a_cap_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(
        "ranks = 2\nforward = [1.0, 2.0, 1.0, 1.0]\nbackward_input = 1.0\nbackward_weight = 0.5\nspeed = [1.0, 2.0]\n"
    )
    found = answer_json("simulate", "--costs", "costs.toml", "--micro-batches", 6, "--waves", 1, "--memory-cap", 2, cwd=tmp_path)
    assert (found["ranks"], found["stages"]) == (2, 4)
    assert max(found["peak_activations"]) <= 2
    flat = answer_json("simulate", "--costs", "costs.toml", "--schedule", "1f1b", "--micro-batches", 6, cwd=tmp_path)
    assert flat["stages"] == 2
    assert flat["makespan"] >= found["ideal"]


def test_no_verb_imports_torch_or_anything_else_heavy() -> None:
    program = """if True:
        import contextlib, io, sys
        from wavetrain.cli import main
        from wavetrain.cli.view import simulate_query
        from wavetrain.view.server import ViewServer
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["simulate", "--ranks", "2"]) == 0
            assert main(["simulate", "--schedule", "auto", "--ranks", "2", "--iterations", "10"]) == 0
            assert main(["prove", "--schedule", "1f1b", "--ranks", "2", "--json"]) == 0
            with ViewServer(simulate_query):
                assert simulate_query({"schedule": "hanayo", "ranks": "2"})
        print(*sorted({"torch", "numpy", "ortools", "selenium"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [*WAVETRAIN, "simulate", "--ranks", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=PATIENCE)[1] == ""
