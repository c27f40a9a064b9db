from __future__ import annotations

import itertools
import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_costs, random_schedule, randoms
from wavetrain.schedule.chrome import chrome_trace
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.torch_csv import parse_csv


@settings(deadline=None)
@given(randoms())
def test_the_trace_holds_every_action_message_and_change_of_memory(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    timeline = simulate(schedule, random_costs(random, schedule))
    trace = json.loads(json.dumps(chrome_trace(timeline), allow_nan=False))
    events = trace["traceEvents"]
    assert all(isinstance(e["ts"], float) and e["ts"] >= 0 for e in events if e["ph"] != "M")
    slices = [e for e in events if e["ph"] == "X"]
    assert Counter(e["name"] for e in slices) == Counter(str(a) for row in schedule.actions for a in row)
    for rank in range(timeline.num_ranks):
        mine = [e for e in slices if e["tid"] == rank]
        assert sum(e["dur"] for e in mine) == pytest.approx(1e6 * timeline.work[rank])
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == len(timeline.messages)
    for number, begin in starts.items():
        end = ends[number]
        assert (begin["name"], begin["cat"], begin["args"]) == (end["name"], end["cat"], end["args"])
        assert (begin["tid"], end["tid"]) == (begin["args"]["from_rank"], begin["args"]["to_rank"])
        assert begin["ts"] <= begin["args"]["sent"] <= begin["args"]["arrived"] <= end["ts"] + 1e-3
        for e in (begin, end):  # a viewer ties an arrow to the slice around it
            assert any(s["tid"] == e["tid"] and s["ts"] <= e["ts"] <= s["ts"] + s["dur"] for s in slices)
    counters = Counter(e["name"] for e in events if e["ph"] == "C")
    assert set(counters) == {f"activations of rank {r}" for r in range(timeline.num_ranks)}


def test_a_small_trace_in_full() -> None:
    trace = chrome_trace(simulate(parse_csv("0F0,0B0\n1F0,1B0\n", name="tiny")))
    events = trace["traceEvents"]
    names = {(e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert names[0, "process_name"] == {"name": "tiny (simulated)"}
    assert names[1, "thread_name"] == {"name": "rank 1"}
    assert [(e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, "0F0", "forward", 0.0, 1e6),
        (0, "0B0", "backward", 4e6, 2e6),
        (1, "1F0", "forward", 1e6, 1e6),
        (1, "1B0", "backward", 2e6, 2e6),
    ]
    assert [(e["ph"], e["id"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"] == [
        ("s", 0, 0, 0.5e6),
        ("f", 0, 1, 1e6),
        ("s", 1, 1, 3e6),
        ("f", 1, 0, 4e6),
    ]
    held = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["name"].endswith("rank 0")]
    assert held == [(0.0, 0.0), (0.0, 1.0), (6e6, 0.0)]
    assert trace["otherData"]["makespan_seconds"] == 6.0
