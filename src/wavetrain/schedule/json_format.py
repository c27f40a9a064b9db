"""Schedules as JSON: the format that holds everything, Chimera's two routes included.

    {
      "format": "wavetrain-schedule",
      "version": 1,
      "name": "1f1b",
      "num_micro_batches": 2,
      "placements": [[0, 1]],
      "routes": [0, 0],
      "actions": ["0F0 0F1 0B0 0B1",
                  "1F0 1B0 1F1 1B1"]
    }

A rank's actions are one string of words, or a list of them. "shares", a list of numbers, says how large the stages are relative
to each other; where it is left out, they are all alike.
"""

from __future__ import annotations

import json
from typing import Any, Final

from wavetrain.errors import FormatError, InputError, require_keys
from wavetrain.files import MAX_BYTES
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import MAX_VALUE
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.torch_csv import MAX_ACTIONS, MAX_NUMBER, MAX_RANKS, check_size, read_token

FORMAT: Final = "wavetrain-schedule"
VERSION: Final = 1
_KEYS: Final = ("format", "version", "name", "num_micro_batches", "placements", "routes", "actions")


def dump_json(schedule: Schedule) -> str:
    """``schedule`` as JSON text, one line a rank."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "num_micro_batches": schedule.num_micro_batches,
        "placements": schedule.placements,
        "routes": schedule.routes,
    }
    if schedule.shares is not None:
        head["shares"] = schedule.shares
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
    rows = ",\n    ".join(json.dumps(" ".join(map(str, actions))) for actions in schedule.actions)
    return "{\n" + ",\n".join([*lines, f'  "actions": [\n    {rows}\n  ]']) + "\n}\n"


def parse_json(text: str, *, path: object = "<json>") -> Schedule:
    """The schedule in ``text``.

    Raises:
        FormatError: the text is no JSON, or a value is not of the kind the format asks for.
        UnknownNameError: a key that the format does not have.
    """
    data = _decoded(text, path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(path, None, f'not a schedule: expected an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise FormatError(path, None, f"version is {data.get('version')!r}; this wavetrain reads version {VERSION}")
    require_keys(path, data, (*_KEYS, "shares"))
    for key in _KEYS:
        if key not in data:
            raise FormatError(path, None, f"no {key!r}")
    if not isinstance(data["name"], str) or not data["name"].isprintable():
        raise FormatError(path, None, f"name is {_shown(data['name'])}, not a string of printable characters")
    num_micro_batches = _number(path, "num_micro_batches", data["num_micro_batches"])
    placements = tuple(_numbers(path, f"placements[{i}]", p) for i, p in enumerate(_list(path, "placements", data["placements"])))
    ranks = _list(path, "actions", data["actions"])
    if len(ranks) > MAX_RANKS:
        raise FormatError(path, None, f"actions of {len(ranks)} ranks; at most {MAX_RANKS} are read")
    check_size(path, max(map(len, placements), default=0), num_micro_batches)
    actions = tuple(_actions(path, rank, words) for rank, words in enumerate(ranks))
    if sum(map(len, actions)) > MAX_ACTIONS:
        raise FormatError(path, None, f"more than {MAX_ACTIONS} actions")
    try:
        return Schedule(
            name=data["name"],
            num_micro_batches=num_micro_batches,
            placements=placements,
            routes=_numbers(path, "routes", data["routes"]),
            actions=actions,
            shares=_shares(path, data["shares"]) if "shares" in data else None,
        )
    except FormatError:
        raise
    except InputError as error:
        raise FormatError(path, None, str(error)) from None


def _decoded(text: str, path: object) -> Any:
    if len(text) > MAX_BYTES:
        raise FormatError(path, None, f"larger than {MAX_BYTES >> 20} MiB")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise FormatError(path, None, f"key {key!r} comes twice")
            found[key] = value
        return found

    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique)
    except FormatError:
        raise
    except json.JSONDecodeError as error:
        raise FormatError(path, error.lineno, f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise FormatError(path, None, f"not JSON that can be read: {error}") from None
    except RecursionError:
        raise FormatError(path, None, "nested too deeply") from None


def _actions(path: object, rank: int, words: object) -> tuple[Action, ...]:
    if isinstance(words, str):
        words = words.split()
    found = []
    for i, word in enumerate(_list(path, f"actions[{rank}]", words)):
        try:
            stage, kind, micro_batch = read_token(word) if isinstance(word, str) else (0, "", -1)
        except ValueError as error:
            raise FormatError(path, None, f"actions[{rank}][{i}] is {_shown(word)}: {error}") from None
        if kind not in ("F", "B", "I", "W"):
            raise FormatError(path, None, f"actions[{rank}][{i}] is {_shown(word)}, not an action like 0F0, 1I2, 1W2 or 2B1")
        found.append(Action(kind, stage, micro_batch))  # type: ignore[arg-type]  # narrowed by the line above
    return tuple(found)


def _list(path: object, key: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(path, None, f"{key} is {_shown(value)}, not a list")
    return value


def _numbers(path: object, key: str, value: object) -> tuple[int, ...]:
    return tuple(_number(path, f"{key}[{i}]", v) for i, v in enumerate(_list(path, key, value)))


def _shares(path: object, value: object) -> tuple[float, ...]:
    for i, share in enumerate(found := _list(path, "shares", value)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= MAX_VALUE:
            raise FormatError(path, None, f"shares[{i}] is {_shown(share)}; expected a number above 0, up to {MAX_VALUE:g}")
    return tuple(float(share) for share in found)


def _number(path: object, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(path, None, f"{key} is {_shown(value)}, not a whole number")
    if not 0 <= value <= MAX_NUMBER:
        raise FormatError(path, None, f"{key} is {_shown(value)}; expected 0 to {MAX_NUMBER}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
