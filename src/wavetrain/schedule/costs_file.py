"""Costs from a TOML file.

    ranks = 4
    stages = 8                       # needed only where no list says how many
    forward = 1.0e-3                 # seconds of one stage and micro-batch: one number for all stages, or a list
    backward_input = 1.0e-3
    backward_weight = [1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 2e-3]
    activation_bytes = 4e6
    message_bytes = 1e6
    speed = [1.0, 1.0, 2.0, 2.0]     # one number for all ranks, or a list
    memory_cap = 32e6                # bytes of activations, likewise; or in micro-batches of a rank's even share:
    # memory_cap_micro_batches = 4
    overhead = 20e-6                 # seconds of every action beside its work
    input_release = 0.0
    latency = 5e-6                   # seconds, one number for all pairs of ranks, or a row a sender
    bandwidth = 1e9                  # bytes per second, likewise

    [[links]]                        # pairs that differ
    from = 1
    to = 2
    latency = 50e-6
    bandwidth = 1e8
    both = true                      # and the way back; the default

What is left out costs nothing and knows no limit; only the three times, and the numbers of ranks and stages, must be said.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from wavetrain.errors import FormatError, InputError, UnknownNameError, require_keys
from wavetrain.files import parse_toml, read_text
from wavetrain.schedule.costs import MAX_VALUE, Costs

MAX_RANKS: Final = 4096
"""More would make matrices of pairs that no file is meant to describe."""
MAX_STAGES: Final = 1_000_000

_PER_STAGE: Final = ("forward", "backward_input", "backward_weight", "activation_bytes", "message_bytes")
_PER_RANK: Final = ("speed", "memory_cap")
_PER_PAIR: Final = ("latency", "bandwidth")
_SINGLE: Final = ("overhead", "input_release")
_KEYS: Final = ("ranks", "stages", *_PER_STAGE, *_PER_RANK, "memory_cap_micro_batches", *_SINGLE, *_PER_PAIR, "links")
_LINK_KEYS: Final = ("from", "to", *_PER_PAIR, "both")
_DEFAULTS: Final = {
    "activation_bytes": 1.0,
    "message_bytes": 0.0,
    "speed": 1.0,
    "memory_cap": math.inf,
    "latency": 0.0,
    "bandwidth": math.inf,
}
_ABOVE_ZERO: Final = ("speed", "memory_cap", "memory_cap_micro_batches", "bandwidth")
_MAY_BE_INFINITE: Final = ("memory_cap", "memory_cap_micro_batches", "bandwidth")


def load_costs(path: str | os.PathLike[str]) -> Costs:
    """The costs in a TOML file.

    Raises:
        FormatError: the file cannot be read, or a value in it is not what its key asks for.
        UnknownNameError: a key that costs do not have.
    """
    text = read_text(path)
    data = parse_toml(text, os.fspath(path))
    return _Reader(data, os.fspath(path), text).costs()


def costs_from_dict(data: Mapping[str, Any], path: object = "<costs>") -> Costs:
    """The costs in plain data, as :meth:`wavetrain.schedule.costs.Costs.to_dict` gives them; ``path`` is what errors name."""
    return _Reader(data, path, "").costs()


class _Reader:
    """One file: its data, and its text to find lines in."""

    def __init__(self, data: Mapping[str, Any], path: object, text: str) -> None:
        self.data = data
        self.path = path
        self.text = text

    def costs(self) -> Costs:
        require_keys(self.path, self.data, _KEYS)
        for key in ("forward", "backward_input", "backward_weight"):
            if key not in self.data:
                raise FormatError(
                    self.path, None, f"no {key!r}: give the seconds of one stage and micro-batch, or a list of them"
                )
        self._refuse_what_has_no_effect()
        num_stages = self._count("stages", _PER_STAGE, MAX_STAGES)
        num_ranks = self._count("ranks", (*_PER_RANK, *_PER_PAIR), MAX_RANKS)
        values: dict[str, Any] = {key: self._vector(key, num_stages, "stages") for key in _PER_STAGE}
        values |= {key: self._vector(key, num_ranks, "ranks") for key in _PER_RANK}
        values |= {key: self._matrix(key, num_ranks) for key in _PER_PAIR}
        self._override_links(values, num_ranks)
        values |= {key: self._number(key, self.data[key]) for key in _SINGLE if key in self.data}
        try:
            costs = Costs(**values)
        except UnknownNameError:
            raise
        except InputError as error:
            raise self._error(str(error).partition(" ")[0].partition("[")[0], str(error)) from None
        shares = self.data.get("memory_cap_micro_batches")
        return costs if shares is None else costs.with_cap(self._number("memory_cap_micro_batches", shares))

    def _refuse_what_has_no_effect(self) -> None:
        links: Any = self.data.get("links", [])
        if "memory_cap" in self.data and "memory_cap_micro_batches" in self.data:
            raise self._error("memory_cap_micro_batches", "give memory_cap (bytes) or memory_cap_micro_batches, not both")
        if "memory_cap" in self.data and "activation_bytes" not in self.data:
            raise self._error(
                "memory_cap", "memory_cap is in bytes, but there is no activation_bytes; or use memory_cap_micro_batches"
            )
        in_links = isinstance(links, list) and any(isinstance(link, dict) and "bandwidth" in link for link in links)
        if ("bandwidth" in self.data or in_links) and "message_bytes" not in self.data:
            raise self._error("bandwidth", "bandwidth has no effect without message_bytes")

    def _count(self, key: str, fields: tuple[str, ...], most: int) -> int:
        """The number of stages or ranks: given, or the length of the first list."""
        lengths = {field: len(self.data[field]) for field in fields if isinstance(self.data.get(field), list)}
        if key not in self.data:
            if not lengths:
                raise FormatError(
                    self.path, None, f"no {key!r}, and no list among {', '.join(fields)} that says how many there are"
                )
            key, count = next(iter(lengths.items()))
        else:
            count = self.data[key]
        if isinstance(count, bool) or not isinstance(count, int):
            raise self._error(key, f"{key} is {_shown(count)}, not a whole number")
        if not 1 <= count <= most:
            raise self._error(key, f"{key}: {_shown(count)} of them; expected 1 to {most}")
        return count

    def _vector(self, key: str, count: int, of: str) -> tuple[float, ...]:
        value = self.data.get(key, _DEFAULTS.get(key))
        if not isinstance(value, list):
            return (self._number(key, value),) * count
        return self._row(key, key, value, count, of)

    def _matrix(self, key: str, count: int) -> tuple[tuple[float, ...], ...]:
        value = self.data.get(key, _DEFAULTS[key])
        if not isinstance(value, list):
            return ((self._number(key, value),) * count,) * count
        self._check_length(key, key, value, count, "ranks")
        return tuple(self._row(key, f"{key}[{i}]", row, count, "ranks") for i, row in enumerate(value))

    def _row(self, key: str, where: str, value: object, count: int, of: str) -> tuple[float, ...]:
        if not isinstance(value, list):
            raise self._error(key, f"{where} is {_shown(value)}, not a list")
        self._check_length(key, where, value, count, of)
        return tuple(self._number(key, v, f"{where}[{i}]") for i, v in enumerate(value))

    def _check_length(self, key: str, where: str, value: list[Any], count: int, of: str) -> None:
        if len(value) != count:
            raise self._error(key, f"{where} has {len(value)} entries, but there are {count} {of}")

    def _override_links(self, values: dict[str, Any], num_ranks: int) -> None:
        links: Any = self.data.get("links", [])
        if not isinstance(links, list):
            raise self._error("links", f"links is {_shown(links)}, not [[links]] tables")
        matrices = {key: list(values[key]) for key in _PER_PAIR}  # rows are replaced, not changed: they may be one and the same
        for i, link in enumerate(links):
            where = f"links[{i}]"
            if not isinstance(link, dict):
                raise self._error("links", f"{where} is {_shown(link)}, not a table")
            require_keys(f"{self.path}, {where}", link, _LINK_KEYS)
            source, target = (self._rank(i, link, key, num_ranks) for key in ("from", "to"))
            both = link.get("both", True)
            if not isinstance(both, bool):
                raise FormatError(self.path, self._link_line(i), f"{where}: both is {_shown(both)}, not true or false")
            for key in _PER_PAIR:
                if key in link:
                    value = self._number(key, link[key], f"{where}: {key}", self._link_line(i))
                    for a, b in ((source, target), (target, source))[: 2 if both else 1]:
                        row = matrices[key][a]
                        matrices[key][a] = (*row[:b], value, *row[b + 1 :])
        values.update({key: tuple(matrix) for key, matrix in matrices.items()})

    def _rank(self, i: int, link: dict[str, Any], key: str, num_ranks: int) -> int:
        rank = link.get(key)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < num_ranks:
            given = f"{key} is {_shown(rank)}" if key in link else f"no {key!r}"
            raise FormatError(self.path, self._link_line(i), f"links[{i}]: {given}; expected a rank, 0 to {num_ranks - 1}")
        return rank

    def _number(self, key: str, value: object, where: str = "", line: int | None = None) -> float:
        where = where or key

        def refused(rule: str) -> FormatError:
            return FormatError(self.path, line or self._line(key), f"{where} is {_shown(value)}{rule}")

        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(", not a number")
        try:
            number = float(value)
        except OverflowError:
            number = MAX_VALUE * 2
        if math.isnan(number) or (math.isinf(number) and key not in _MAY_BE_INFINITE):
            raise refused("; give a finite number")
        if number < 0 or (number == 0 and key in _ABOVE_ZERO):
            raise refused(f"; it must be {'above 0' if key in _ABOVE_ZERO else '0 or more'}")
        if MAX_VALUE < number < math.inf or (key in _ABOVE_ZERO and number < 1 / MAX_VALUE):
            raise refused(f"; that is too {'large' if number > 1 else 'small'} to compute with")
        if key == "input_release" and number > 1:
            raise refused("; I cannot free more than all (1.0)")
        return number

    def _error(self, key: str, problem: str) -> FormatError:
        return FormatError(self.path, self._line(key), problem)

    def _line(self, key: str) -> int | None:
        return self._find(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=", 0)

    def _link_line(self, i: int) -> int | None:
        return self._find(r"^[ \t]*\[\[[ \t]*links[ \t]*\]\]", i)

    def _find(self, pattern: str, i: int) -> int | None:
        for n, match in enumerate(re.finditer(pattern, self.text, re.MULTILINE)):
            if n == i:
                return self.text.count("\n", 0, match.start()) + 1
        return None


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a very large number"
    return text if len(text) <= 40 else text[:37] + "..."
