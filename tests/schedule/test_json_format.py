from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_schedule, randoms
from wavetrain.errors import FormatError, UnknownNameError
from wavetrain.schedule.json_format import dump_json, parse_json

GOOD: dict[str, Any] = {
    "format": "wavetrain-schedule",
    "version": 1,
    "name": "chimera",
    "num_micro_batches": 2,
    "placements": [[0, 1], [1, 0]],
    "routes": [0, 1],
    "actions": ["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"],
}


@settings(deadline=None)
@given(randoms())
def test_a_schedule_comes_back_as_it_was(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 3))
    assert parse_json(dump_json(schedule)) == schedule
    assert json.loads(dump_json(schedule))["version"] == 1


def test_a_rank_is_one_line_of_text_or_a_list() -> None:
    schedule = parse_json(json.dumps(GOOD))
    assert dump_json(schedule).splitlines()[-4:-2] == ['    "0F0 1F1 1B1 0B0",', '    "0F1 1F0 1B0 0B1"']
    assert parse_json(json.dumps(GOOD | {"actions": [row.split() for row in GOOD["actions"]]})) == schedule
    assert parse_json("\ufeff" + json.dumps(GOOD)) == schedule


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a schedule"),
        ({"version": 2}, "version is 2; this wavetrain reads version 1"),
        ({"version": True}, "version is True"),
        ({"name": 3}, "name is 3"),
        ({"name": "a\u001b[2J"}, "printable"),
        ({"num_micro_batches": 0}, "0 micro-batches: a step needs at least 1"),
        ({"num_micro_batches": "2"}, 'num_micro_batches is "2", not a whole number'),
        ({"num_micro_batches": 2.0}, "not a whole number"),
        ({"num_micro_batches": True}, "not a whole number"),
        ({"num_micro_batches": 10**9}, "expected 0 to 1000000"),
        ({"placements": []}, "at least one route"),
        ({"placements": [[]]}, "at least one route"),
        ({"placements": [0, 1]}, "placements[0] is 0, not a list"),
        ({"placements": [[0, 1], [1]]}, "same number of stages"),
        ({"placements": [[0, 2], [1, 0]]}, "stage 1 is placed on rank 2, but the ranks are 0..1"),
        ({"placements": [[0, -1], [1, 0]]}, "placements[0][1] is -1"),
        ({"placements": [[0] * 3000], "num_micro_batches": 1000}, "at most 4000000 are read"),
        ({"routes": [0]}, "1 routes given for 2 micro-batches"),
        ({"routes": [0, 2]}, "not among the 2 placements"),
        ({"actions": {}}, "actions is an object, not a list"),
        ({"actions": []}, "0 ranks"),
        ({"actions": [1, 2]}, "actions[0] is 1, not a list"),
        ({"actions": ["0F0", "0G0"]}, 'actions[1][0] is "0G0"'),
        ({"actions": ["0F0", ["0F1", 3]]}, "actions[1][1] is 3, not an action"),
        ({"actions": ["0F0", "0SEND_F0"]}, "not an action like 0F0"),
        ({"actions": ["0F0", "9999999F0"]}, "numbered up to 1000000"),
    ],
)
def test_wrong_values_are_format_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_json(json.dumps(GOOD | change), path="bad.json")
    assert str(caught.value).startswith("bad.json: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("key", [key for key in GOOD if key not in ("format", "version")])
def test_every_key_is_needed(key: str) -> None:
    with pytest.raises(FormatError, match=f"no '{key}'"):
        parse_json(json.dumps({k: v for k, v in GOOD.items() if k != key}))


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown key in x\.json 'placement'; did you mean 'placements'"):
        parse_json(json.dumps(GOOD | {"placement": []}), path="x.json")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "not JSON"),
        ("[]", None, "not a schedule"),
        ('{\n"format": }', 2, "not JSON"),
        ('{"format": 1, "format": 2}', None, "'format' comes twice"),
        ("[" * 200_000, None, "nested too deeply"),
        ("1" * 5000, None, "not JSON that can be read"),
    ],
)
def test_what_is_no_json_names_its_line(text: str, line: int | None, words: str) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        parse_json(text)
    assert caught.value.line == line
