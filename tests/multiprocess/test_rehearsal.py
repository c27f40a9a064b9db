"""Rehearsal: real ranks and messages, compute that only waits."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wavetrain import Costs, build, rehearse
from wavetrain.errors import InputError, ProofError
from wavetrain.runtime.rehearsal import Rehearsal, rehearse_all
from wavetrain.schedule.actions import Action
from wavetrain.schedule.schedule import Schedule

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

NAMES = ["gpipe", "1f1b", "interleaved", "chimera", "hanayo", "zb-h1", "zbv", "zb-wave"]
SECONDS = 0.004


def costs(num_ranks: int, **options: float) -> Costs:
    uneven = {"forward": SECONDS, "backward_input": SECONDS, "backward_weight": 2 * SECONDS}
    return Costs.uniform(num_ranks, **uneven, message_bytes=4096.0, **options)


@pytest.fixture(scope="module")
def rehearsed() -> list[Rehearsal]:
    schedules = [build(name, num_ranks=4, num_micro_batches=4) for name in NAMES]
    return rehearse_all(schedules, costs(4), steps=3, warmup=1)


def test_promised_figures(rehearsed: list[Rehearsal]) -> None:
    for name, found in zip(NAMES, rehearsed, strict=True):
        told = found.to_dict()
        assert (told["schedule"], told["ranks"], told["micro_batches"]) == (name, 4, 4)
        assert {"predicted_seconds", "measured_seconds", "ideal_seconds", "bubble"} <= set(told)
        assert told["ideal_seconds"] == pytest.approx(4 * 4 * SECONDS)
        assert told["measured_seconds"] >= told["ideal_seconds"]
        assert told["predicted_seconds"] >= told["ideal_seconds"] - 1e-9
        assert told["bubble"] == pytest.approx(1 - told["ideal_seconds"] / told["measured_seconds"])
        assert len(told["step_seconds"]) == 3
        assert told["measured_seconds"] == sorted(told["step_seconds"])[1]
        assert told["hop_seconds"] > 0
        assert found.predicted.source == "simulated"
        assert found.measured.source == "measured"


def test_the_measured_timeline_is_the_schedule(rehearsed: list[Rehearsal]) -> None:
    for found in rehearsed:
        cut = found.schedule.cut(costs(4))
        ends = {(s.kind, s.stage, s.micro_batch): s.end for spans in found.measured.spans for s in spans}
        for rank, (actions, spans) in enumerate(zip(found.schedule.actions, found.measured.spans, strict=True)):
            assert [(s.kind, s.stage, s.micro_batch) for s in spans] == list(actions)
            assert spans[0].start >= 0
            assert all(a.end <= b.start for a, b in pairwise(spans))
            for span in spans:
                assert span.end - span.start >= cut.seconds(span.kind, span.stage, rank) - 1e-6, "it waits as long as it is told"
                if span.kind == "F" and span.stage:
                    assert span.start >= ends["F", span.stage - 1, span.micro_batch], "nothing starts before what it needs"
        crossing = [m for m in found.measured.messages if m.source != m.target]
        assert len(crossing) == len(found.measured.messages) > 0
        assert all(m.end >= m.sent for m in crossing)


def test_links_that_are_slower_than_this_machines() -> None:
    """A message is held back for as long as the costs say that it takes; alone there is none."""
    schedule = build("1f1b", num_ranks=2, num_micro_batches=1)
    found = rehearse(schedule, costs(2, hop_latency=0.05), steps=1, warmup=0)
    assert found.measured_seconds >= 2 * 4 * SECONDS + 2 * 0.05
    assert found.predicted_seconds >= 2 * 4 * SECONDS + 2 * 0.05


def test_one_rank() -> None:
    found = rehearse(build("zb-wave", num_ranks=1, num_micro_batches=3, waves=1), costs(1), steps=2, warmup=0)
    assert found.hop_seconds == 0
    assert found.measured_seconds >= found.ideal_seconds == pytest.approx(3 * 4 * SECONDS)


def test_refusals() -> None:
    schedule = build("1f1b", num_ranks=2, num_micro_batches=2)
    for steps, warmup in ((0, 1), (1, -1)):
        with pytest.raises(InputError, match=f"steps={steps}, warmup={warmup}"):
            rehearse(schedule, steps=steps, warmup=warmup)
    with pytest.raises(InputError, match="the same number of ranks"):
        rehearse_all([schedule, build("1f1b", num_ranks=3, num_micro_batches=2)])
    with pytest.raises(InputError, match="the same number of ranks"):
        rehearse_all([])
    with pytest.raises(ProofError, match="deadlock"):
        rehearse(Schedule.single_route("mine", (0,), 1, [[Action("B", 0, 0), Action("F", 0, 0)]]))
    with pytest.raises(InputError, match="the costs are for 3"):
        rehearse(schedule, costs(3))
