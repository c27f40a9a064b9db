from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wavetrain.schedule.actions import Kind
from wavetrain.schedule.analysis import CAUSES, critical_path, idle_by_cause, memory_curve
from wavetrain.schedule.timeline import Message, Span, Timeline
from wavetrain.view.payload import dump_payloads, timeline_payload

from .conftest import MakeTimeline


def strict_json(text: str) -> Any:
    """As a browser reads it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def spans_of(payload: dict[str, Any]) -> list[list[Span]]:
    return [
        [
            Span(kind, *values)
            for kind, *values in zip(lane["kind"], lane["stage"], lane["micro_batch"], lane["start"], lane["end"], strict=True)
        ]
        for lane in payload["lanes"]
    ]


def test_a_small_timeline_is_what_the_module_says(make_timeline: MakeTimeline) -> None:
    payload = timeline_payload(make_timeline(2, 2))
    assert payload["lanes"][0] == {
        "kind": "FFBB",
        "stage": [0, 0, 0, 0],
        "micro_batch": [0, 1, 0, 1],
        "start": [0, 1, 5, 7],
        "end": [1, 2, 7, 9],
        "held": [1, 2, 1, 0],
    }
    assert payload["messages"]["kind"] == "FFBB"
    assert (payload["makespan"], payload["ideal"], payload["bubble"]) == (9, 6, 0.333333333)
    assert payload["cap"] == [None, None]
    assert payload["peak_activations"] == [2, 2]
    assert payload["waves"] is None
    assert payload["source"] == "simulated"
    # F0 on rank 0; F0, F1, B0 on rank 1; B0, B1 on rank 0
    assert payload["critical"] == {"rank": [0, 1, 1, 1, 0, 0], "index": [0, 0, 1, 2, 2, 3]}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_ranks=st.integers(1, 6),
    num_micro_batches=st.integers(1, 6),
    waves=st.none() | st.integers(1, 2),
    split=st.booleans(),
    forward=st.floats(1e-6, 1e4),
    backward_input=st.floats(0, 1e4),
    hop_latency=st.floats(0, 1e3),
    memory_cap=st.just(math.inf) | st.floats(0.5, 20),
)
def test_it_holds_the_timeline_and_what_analysis_says_of_it(make_timeline: MakeTimeline, **drawn: Any) -> None:
    timeline = make_timeline(**drawn)
    (payload,) = strict_json(dump_payloads([timeline]))["timelines"]
    near = pytest.approx
    tolerance = 1e-7 * timeline.makespan
    for spans, expected in zip(spans_of(payload), timeline.spans, strict=True):
        assert [s[:3] for s in spans] == [s[:3] for s in expected]
        assert [s.start for s in spans] == near([s.start for s in expected], abs=tolerance)
        assert [s.end for s in spans] == near([s.end for s in expected], abs=tolerance)
    columns = payload["messages"]
    messages = list(zip(*(columns[key] for key in ("kind", "stage", "micro_batch", "source", "target")), strict=True))
    assert messages == [m[:5] for m in timeline.messages]
    assert columns["end"] == near([m.end for m in timeline.messages], abs=tolerance)
    assert payload["bubble"] == near(timeline.bubble, abs=1e-8)
    assert payload["peak_activations"] == near(list(timeline.peak_activations), abs=1e-5)
    assert payload["idle"]["causes"] == list(CAUSES)
    for seconds, idle in zip(payload["idle"]["seconds"], idle_by_cause(timeline), strict=True):
        assert seconds == near([idle[c] for c in CAUSES], abs=tolerance)
    path = [(step.rank, step.action) for step in critical_path(timeline) if step.what == "action"]
    at = zip(payload["critical"]["rank"], payload["critical"]["index"], strict=True)
    assert [(rank, timeline.spans[rank][index].action) for rank, index in at] == path


def test_held_is_the_memory_curve(make_timeline: MakeTimeline) -> None:
    timeline = make_timeline(3, 4, split=True)
    payload = timeline_payload(timeline)
    for lane, curve, share in zip(payload["lanes"], memory_curve(timeline), timeline.share_bytes, strict=True):
        points = [
            (start if kind == "F" else end, held)
            for kind, start, end, held in zip(lane["kind"], lane["start"], lane["end"], lane["held"], strict=True)
            if kind != "I"  # frees nothing here
        ]
        assert points == [(t, held / share) for t, held in curve[1:]]


def test_caps_are_in_shares_and_null_where_there_is_none(make_timeline: MakeTimeline) -> None:
    timeline = replace(make_timeline(3, 2), memory_cap=(3.0, math.inf, 8.0), share_bytes=(2.0, 2.0, 0.0))
    assert timeline_payload(timeline)["cap"] == [1.5, None, None]


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e6])
def test_times_keep_eight_digits_at_any_scale(make_timeline: MakeTimeline, scale: float) -> None:
    timeline = make_timeline(2, 2, forward=scale / 3, backward_input=scale / 7, backward_weight=scale / 9)
    payload = timeline_payload(timeline)
    assert payload["makespan"] == pytest.approx(timeline.makespan, rel=1e-7)
    assert payload["lanes"][0]["end"][0] == pytest.approx(scale / 3, rel=1e-6)


def test_an_empty_rank_and_a_measured_run() -> None:
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    timeline = Timeline(
        name="run 7",
        source="measured",
        num_stages=1,
        num_micro_batches=1,
        waves=None,
        spans=((Span("F", 0, 0, 0.0, 0.5), Span("B", 0, 0, 0.75, 2.0)), ()),
        messages=(Message("F", 0, 0, 0, 1, 0.5, 0.5, 0.6),),
        held_bytes=dict.fromkeys(kinds, (0.0,)),
        memory_cap=(math.inf, math.inf),
        share_bytes=(0.0, 0.0),
    )
    payload = strict_json(dump_payloads([timeline]))["timelines"][0]
    assert payload["source"] == "measured"
    assert payload["lanes"][1]["kind"] == ""
    assert payload["lanes"][0]["held"] == [0, 0]


def test_a_hundred_thousand_actions_are_a_few_megabytes(make_timeline: MakeTimeline) -> None:
    timeline = make_timeline(32, 128, waves=4, hop_latency=0.017)
    assert timeline.num_actions == 98_304
    assert len(dump_payloads([timeline])) < 8_000_000


def test_import_is_light() -> None:
    code = "import sys, wavetrain.view.page, wavetrain.view.server; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
