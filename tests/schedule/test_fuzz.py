"""Whatever a file holds, what comes out is a result or a WavetrainError."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.schedule.random_schedules import random_costs, random_schedule, randoms
from wavetrain.errors import WavetrainError
from wavetrain.schedule.analysis import critical_path, idle_by_cause
from wavetrain.schedule.chrome import chrome_trace
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.costs_file import load_costs
from wavetrain.schedule.files import load, save
from wavetrain.schedule.json_format import dump_json
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.torch_csv import dump_csv, in_loss_order

fuzz = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

WORDS = ["0F0", "1F0", "0B0", "0I0", "0W0", "0SEND_F0", "1RECV_F0", "0UNSHARD", "(0F0;0B0)OVERLAP_F_B", ",", "\n", "", "999999"]
COSTS = """ranks = 4
stages = 8
forward = 1.5
backward_input = [1, 1, 1, 1, 1, 1, 1, 2]
backward_weight = 1
activation_bytes = 2
message_bytes = 3.5
memory_cap = [1e3, inf, 2e3, 9]
latency = 0.25
bandwidth = 10
[[links]]
from = 0
to = 3
latency = 1
"""


def use(path: Path) -> None:
    """Everything that a command would do with a file."""
    with contextlib.suppress(WavetrainError):
        schedule = load(path)
        found = prove(schedule)
        try:
            timeline = simulate(schedule)
        except WavetrainError:
            assert not found.proven
            return
        critical_path(timeline)
        idle_by_cause(timeline)
        json.dumps(chrome_trace(timeline), allow_nan=False)


def mutated(random: Random, text: str) -> str:
    """A few characters or pieces of the text lost, doubled, moved or replaced."""
    pieces = list(text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(pieces) + 1)
        to = at + random.choice([1, 1, 2, 5])
        other = random.randrange(len(pieces) + 1)
        pieces[at:to] = random.choice(
            [[], pieces[at:to] * 2, pieces[other : other + 3], [random.choice("0123456789FBIW,;()\n\"'{}[]=.-e_ \0é")]]
        )
    return "".join(pieces)


@fuzz
@given(text=st.text() | st.text(alphabet="0123FBIW,;()\n") | st.lists(st.sampled_from(WORDS)).map(",".join))
@example(text="999999F999999")
@example(text="0F999999")
@example(text="0F1999999,0B0")
@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_any_text(text: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    use(path)


@fuzz
@given(data=st.binary())
def test_any_bytes(data: bytes, tmp_path: Path) -> None:
    for name in ("fuzz.csv", "fuzz.json", "fuzz.toml"):
        (tmp_path / name).write_bytes(data)
    use(tmp_path / "fuzz.csv")
    use(tmp_path / "fuzz.json")
    with contextlib.suppress(WavetrainError):
        load_costs(tmp_path / "fuzz.toml")


@fuzz
@given(random=randoms())
def test_a_schedule_that_was_tampered_with(random: Random, tmp_path: Path) -> None:
    schedule = in_loss_order(random_schedule(random, every_rank=True))
    for name, text in (
        ("fuzz.csv", dump_csv(schedule)),
        ("lowered.csv", dump_csv(schedule, comms=True)),
        ("fuzz.json", dump_json(schedule)),
    ):
        (tmp_path / name).write_text(mutated(random, text))
        use(tmp_path / name)


@fuzz
@given(random=randoms())
def test_costs_that_were_tampered_with(random: Random, tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(mutated(random, COSTS))
    schedule = random_schedule(random, every_rank=True)
    while schedule.num_ranks != 4:
        schedule = random_schedule(random, every_rank=True)
    with contextlib.suppress(WavetrainError):
        costs = load_costs(path)
        prove(schedule, costs)
        timeline = simulate(schedule, costs)
        critical_path(timeline)
        idle_by_cause(timeline)
        chrome_trace(timeline)


@fuzz
@given(random=randoms())
def test_what_is_saved_is_what_is_loaded(random: Random, tmp_path: Path) -> None:
    schedule = in_loss_order(random_schedule(random, every_rank=True))
    costs: Costs = random_costs(random, schedule)
    want = prove(schedule, costs)

    def same(other: Schedule) -> bool:
        return other.renamed(schedule.name) == schedule and prove(other, costs) == want

    for name, comms in (("s.csv", False), ("s.csv", True), ("s.json", False)):
        save(schedule, tmp_path / name, comms=comms)
        assert same(load(tmp_path / name))
