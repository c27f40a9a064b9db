"""``wavetrain rehearse``: real ranks that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from wavetrain.cli.rehearse import RehearsalProblem, difference
from wavetrain.runtime.rehearsal import Rehearsal
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.simulator import simulate

from .command import answer, answer_json, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

QUICK = ("--steps", 2, "--warmup", 1, "--forward", 0.005)


def test_json_has_the_figures() -> None:
    found = answer_json("rehearse", "--ranks", 2, "--schedule", "zb-wave", "--waves", 1, "--micro-batches", 4, *QUICK)
    assert (found["schedule"], found["ranks"], found["waves"], found["micro_batches"]) == ("zb-wave", 2, 1, 4)
    assert found["ideal_seconds"] == pytest.approx(4 * 3 * 0.005)
    assert found["ideal_seconds"] <= found["predicted_seconds"]
    assert found["ideal_seconds"] <= found["measured_seconds"]
    assert 0 <= found["bubble"] < 1
    assert len(found["step_seconds"]) == 2


def test_a_schedule_file_a_table_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    page = tmp_path / "page.html"
    said = answer("rehearse", "--schedule", tmp_path / "mine.csv", *QUICK, "--html", page)
    for phrase in ("predicted", "measured", "ideal", "a hop", "between two actions", "measured - predicted", f"wrote {page}"):
        assert phrase in said
    assert page.read_text().count('"source":"') == 2


def test_refusals() -> None:
    for flags, phrase in (
        ("--steps 0", "at least 1 step must count"),
        ("--schedule zb-wav", "did you mean 'zb-wave'"),
        ("--forward -1", "--forward is -1.0"),
        ("--message-bytes -1", "--message-bytes is -1.0"),
        ("--message-bytes 1 --costs x.toml", "both given"),
    ):
        done = run("rehearse", *flags.split())
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) <= 2
        assert phrase in done.stderr


def test_waits_follow_the_forward_unless_said() -> None:
    _, costs = RehearsalProblem(ranks=2, forward=0.08).build()
    assert (costs.forward[0], costs.backward_input[0], costs.backward_weight[0]) == (0.08, 0.08, 0.08)
    _, costs = RehearsalProblem(ranks=2, backward_weight=0.5, message_bytes=7).build()
    assert (costs.forward[0], costs.backward_input[0], costs.backward_weight[0]) == (0.05, 0.05, 0.5)
    assert set(costs.message_bytes) == {7.0}


def test_the_parts_of_a_difference_add_up() -> None:
    schedule = build("zb-wave", num_ranks=4, num_micro_batches=4)
    told, slow = (Costs.uniform(4, forward=0.1, backward_input=0.1, backward_weight=w, hop_latency=0.01) for w in (0.1, 0.2))
    predicted, measured = simulate(schedule, told), simulate(schedule, slow)
    found = Rehearsal(
        schedule=schedule,
        predicted=predicted,
        measured=measured,
        step_seconds=(measured.makespan + 0.5,),
        ideal_seconds=predicted.ideal,
        hop_only_seconds=predicted.makespan,
        hop_seconds=0.01,
        late_seconds=0.0,
        between_seconds=0.0,
    )
    parts = difference(found, told)
    assert sum(parts.values()) == pytest.approx(measured.makespan + 0.5 - predicted.makespan)
    assert parts["before the first action"] == pytest.approx(0.5)
    assert parts["actions that took longer than told"] > 0.1
