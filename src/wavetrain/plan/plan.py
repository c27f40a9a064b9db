"""A plan: a strategy with its cut, its placement on devices, and what it is predicted to cost. Frozen data, and a TOML file.

[plan]        what was asked, what was chosen, what is predicted
[[ranks]]     along the pipeline: layers, nodes and devices of every replica, seconds and bytes
[costs]       of the slowest replica's pipeline, as ``wavetrain simulate`` and ``rehearse`` take them
[train]       for ``wavetrain train``, where the model is one that it can build
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Final

from wavetrain.errors import FormatError, InputError, require_keys
from wavetrain.files import parse_toml, read_text
from wavetrain.plan.clock import RECOMPUTES, Recompute
from wavetrain.plan.pipeline_time import build_options, placement_of
from wavetrain.plan.sources import Sources
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.costs_file import costs_from_dict
from wavetrain.schedule.families import FAMILIES, build
from wavetrain.schedule.schedule import Schedule

WIDTH_90: Final = 2.06
"""Half the width of an interval that holds nine of ten, in mean absolute errors of a normal distribution."""
SAME_CLUSTER: Final = 0.5
"""How much of the error of two plans for one model and cluster is not common to both."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """See the module. Tables are (num_ranks, num_replicas)."""

    sources: Sources
    global_batch: int
    tp: int
    micro_batch: int
    """Samples."""
    micro_batches: tuple[int, ...]
    """Of every replica."""
    schedule: str
    waves: int
    recompute: Recompute
    sharded_optimizer: bool
    cut: tuple[int, ...]
    """Boundaries of the ranks' layers as the search had them, (num_ranks + 1,)."""
    stages: tuple[int, ...]
    """Boundaries of the stages' layers in the order of the forward pass, (num_stages + 1,)."""
    devices: tuple[tuple[str, ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    seconds: float
    """Of a step."""
    error: float
    """Mean error to expect of ``seconds``, as a share."""
    parts: Mapping[str, float]
    """Seconds by what they go to; see :data:`wavetrain.plan.estimate.PARTS`."""
    rank_seconds: tuple[float, ...]
    """Of every rank's stages for one micro-batch, forward and backward, in the slowest replica."""
    memory_bytes: tuple[float, ...]
    """At the peak of every rank's fullest device."""
    memory_share: tuple[float, ...]
    slowest: tuple[int, int]
    """(rank, replica) that holds the others up."""
    simulated: bool = False
    """Whether the pipeline was simulated action by action, and not estimated."""
    costs: Costs | None = None
    pipeline_seconds: float | None = None

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.devices)

    @property
    def dp(self) -> int:
        """Replicas."""
        return len(self.devices[0])

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds that nine of ten such predictions lie between."""
        width = 1 + WIDTH_90 * self.error
        return self.seconds / width, self.seconds * width

    def differs_from(self, other: Plan) -> bool:
        """Whether the predictions tell the two apart: most of the error is the cluster's and the model's, and common to both."""
        apart = abs(math.log(self.seconds / other.seconds))
        return apart > SAME_CLUSTER * WIDTH_90 / 2 * max(self.error, other.error)

    def pipeline(self) -> tuple[Schedule, Costs]:
        """The schedule of the slowest replica, and its costs.

        Raises:
            InputError: the schedule was too large to be built.
        """
        if self.costs is None:
            raise InputError("the plan's schedule is too large to build: it has no [costs]")
        count = self.micro_batches[self.slowest[1]]
        options = build_options(self.schedule, self.waves)
        return build(self.schedule, num_ranks=self.pp, num_micro_batches=count, costs=self.costs, **options), self.costs

    def layers_of(self, rank: int) -> str:
        """The layers of a rank's stages: ``0–3, 20–25``."""
        return ", ".join(f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in self.runs_of(rank))

    def runs_of(self, rank: int) -> list[list[int]]:
        """[first, last + 1] of the layers of a rank's stages."""
        placement = placement_of(self.schedule, self.pp, self.waves)
        points = self.stages if len(self.stages) == len(placement) + 1 else self.cut
        ranks = placement if len(points) == len(placement) + 1 else tuple(range(self.pp))
        runs = [[a, b] for (a, b), r in zip(pairwise(points), ranks, strict=True) if r == rank]
        joined: list[list[int]] = []
        for a, b in runs:  # stages that meet where a wave turns
            if joined and joined[-1][1] == a:
                joined[-1][1] = b
            else:
                joined.append([a, b])
        return joined

    def describe(self) -> str:
        """In a line."""
        kinds = " + ".join(f"{sum(row.count(name) for row in self.devices) * self.tp} {name}" for name in self.device_names)
        waves = f" W={self.waves}" if self.schedule in ("hanayo", "zb-wave") else ""
        extra = "" if self.recompute == "none" else f", {self.recompute} recompute"
        extra += ", sharded optimizer" if self.sharded_optimizer else ""
        return (
            f"tp {self.tp}, dp {self.dp}, pp {self.pp}, micro-batch {self.micro_batch}, {self.schedule}{waves}{extra} on {kinds}"
        )

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.devices for name in row))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as ``--json`` prints it."""
        low, high = self.interval
        return {
            **{key: value for key, value in vars(self.sources).items() if value is not None},
            "global_batch": self.global_batch,
            "tp": self.tp,
            "dp": self.dp,
            "pp": self.pp,
            "micro_batch": self.micro_batch,
            "micro_batches": list(self.micro_batches),
            "schedule": self.schedule,
            "waves": self.waves,
            "recompute": self.recompute,
            "sharded_optimizer": self.sharded_optimizer,
            "cut": list(self.cut),
            "stages": list(self.stages),
            "predicted_seconds": self.seconds,
            "between": [low, high],
            "error": self.error,
            "simulated": self.simulated,
            "slowest": list(self.slowest),
            "parts": dict(self.parts),
            "ranks": [
                {
                    "layers": [list(run) for run in self.runs_of(k)],
                    "devices": list(self.devices[k]),
                    "nodes": list(self.nodes[k]),
                    "seconds": self.rank_seconds[k],
                    "memory_bytes": self.memory_bytes[k],
                    "memory_share": self.memory_share[k],
                }
                for k in range(self.pp)
            ],
            **({"pipeline_seconds": self.pipeline_seconds} if self.pipeline_seconds is not None else {}),
        }


def plan_text(plan: Plan, train: Mapping[str, Any] | None = None, notes: Sequence[str] = ()) -> str:
    """The TOML file of a plan.

    Args:
        plan: what to write.
        train: settings for ``wavetrain train``.
        notes: comments at the top.
    """
    data = plan.to_dict()
    ranks = data.pop("ranks")
    parts = data.pop("parts")
    lines = [f"# {note}" for note in ("Written by wavetrain plan.", *notes)]
    lines += ["", "[plan]", *_pairs(data), "", "[plan.parts]", *_pairs(parts)]
    for rank in ranks:
        lines += ["", "[[ranks]]", *_pairs(rank)]
    if plan.costs is not None:
        lines += ["", "[costs]", *_pairs({k: v for k, v in plan.costs.to_dict().items() if k not in ("latency", "bandwidth")})]
        lines += _links(plan.costs)
    if train:
        lines += ["", "[train]", *_pairs(train)]
    return "\n".join(lines) + "\n"


def _links(costs: Costs) -> list[str]:
    """Rows of both matrices."""
    found = []
    for name in ("latency", "bandwidth"):
        matrix = getattr(costs, name)
        same = {value for row in matrix for value in row}
        found.append(f"{name} = {_value(next(iter(same)) if len(same) == 1 else [list(row) for row in matrix])}")
    return found


def _pairs(data: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in data.items()]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.9g}" if "." in f"{value:.9g}" or "e" in f"{value:.9g}" or not math.isfinite(value) else f"{value:.9g}.0"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
    return "[" + ", ".join(_value(v) for v in value) + "]"


_PLAN_KEYS: Final = (
    *("model", "cluster", "seq", "precision", "runtime", "global_batch", "tp", "dp", "pp", "micro_batch", "micro_batches"),
    *("schedule", "waves", "recompute", "sharded_optimizer", "cut", "stages", "predicted_seconds", "between", "error"),
    *("simulated", "slowest", "parts", "pipeline_seconds"),
)
_RANK_KEYS: Final = ("layers", "devices", "nodes", "seconds", "memory_bytes", "memory_share")
TABLES: Final = ("plan", "ranks", "costs", "train")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a TOML file.

    Raises:
        FormatError: with the file and, where it has one, the line.
        UnknownNameError: a key that plans do not have.
    """
    found = plan_from_text(read_text(path), os.fspath(path))
    return replace(found, sources=found.sources.found_from(os.path.dirname(os.fspath(path)) or "."))


def plan_from_text(text: str, path: object = "<plan>") -> Plan:
    """The plan in the text of a TOML file; ``path`` is what errors name."""
    data = parse_toml(text, path)
    require_keys(path, data, TABLES)
    return _Reader(path, text, data).plan()


class _Reader:
    """One file: its data, and its text to find lines in."""

    def __init__(self, path: object, text: str, data: Mapping[str, Any]) -> None:
        self.path, self.text = path, text
        table = data.get("plan")
        if not isinstance(table, dict):
            raise FormatError(path, None, "no [plan] table: this is not a plan that wavetrain plan wrote")
        require_keys(f"{path}, [plan]", table, _PLAN_KEYS)
        ranks = data.get("ranks", [])
        if not isinstance(ranks, list) or not ranks or not all(isinstance(r, dict) for r in ranks):
            raise FormatError(path, None, "no [[ranks]]: a plan says what every rank holds")
        for i, rank in enumerate(ranks):
            require_keys(f"{path}, ranks[{i}]", rank, _RANK_KEYS)
        self.table, self.ranks, self.data = table, ranks, data

    def plan(self) -> Plan:
        counts = {key: self.count(key) for key in ("global_batch", "tp", "dp", "pp", "micro_batch", "waves")}
        schedule = self.text_of("schedule")
        if schedule not in FAMILIES:
            raise self.error("schedule", f"schedule is {schedule!r}; expected one of {', '.join(FAMILIES)}")
        recompute = next((r for r in RECOMPUTES if r == self.table.get("recompute")), None)
        if recompute is None:
            raise self.error("recompute", f"recompute is {self.table.get('recompute')!r}; expected {', '.join(RECOMPUTES)}")
        cut = self.rising("cut")
        if counts["pp"] != len(self.ranks) or len(cut) != counts["pp"] + 1:
            raise self.error(
                "pp", f"pp is {counts['pp']}, but there are {len(self.ranks)} [[ranks]] and {len(cut)} points in cut"
            )
        micro_batches = self.counts("micro_batches")
        if len(micro_batches) != counts["dp"]:
            raise self.error("micro_batches", f"{len(micro_batches)} micro_batches for dp = {counts['dp']} replicas")
        if sum(micro_batches) * counts["micro_batch"] != counts["global_batch"]:
            given = f"{sum(micro_batches)} micro-batches of {counts['micro_batch']}"
            raise self.error("global_batch", f"global_batch is {counts['global_batch']}, but the replicas have {given}")
        slowest = self.table.get("slowest", [0, 0])
        if not isinstance(slowest, list) or len(slowest) != 2 or not all(type(v) is int and v >= 0 for v in slowest):
            raise self.error("slowest", f"slowest is {slowest!r}; expected [rank, replica]")
        if slowest[0] >= counts["pp"] or slowest[1] >= counts["dp"]:
            raise self.error("slowest", f"slowest is {slowest!r}, but there are {counts['pp']} ranks and {counts['dp']} replicas")
        costs = self.data.get("costs")
        if costs is not None and not isinstance(costs, dict):
            raise FormatError(self.path, None, "costs is no table")
        parts = self.table.get("parts", {})
        if not isinstance(parts, dict) or not all(_number(v) and v >= 0 for v in parts.values()):
            raise self.error("parts", "parts is no table of seconds")
        return Plan(
            sources=self.sources(),
            global_batch=counts["global_batch"],
            tp=counts["tp"],
            micro_batch=counts["micro_batch"],
            micro_batches=micro_batches,
            schedule=schedule,
            waves=counts["waves"],
            recompute=recompute,
            sharded_optimizer=self.flag("sharded_optimizer"),
            cut=cut,
            stages=self.rising("stages") if "stages" in self.table else cut,
            devices=tuple(self.row(k, "devices", counts["dp"], str) for k in range(counts["pp"])),
            nodes=tuple(self.row(k, "nodes", counts["dp"], int) for k in range(counts["pp"])),
            seconds=self.positive("predicted_seconds"),
            error=self.positive("error"),
            parts={name: float(value) for name, value in parts.items()},
            rank_seconds=tuple(self.of_rank(k, "seconds") for k in range(counts["pp"])),
            memory_bytes=tuple(self.of_rank(k, "memory_bytes") for k in range(counts["pp"])),
            memory_share=tuple(self.of_rank(k, "memory_share") for k in range(counts["pp"])),
            slowest=(slowest[0], slowest[1]),
            simulated=self.flag("simulated"),
            costs=costs_from_dict(costs, self.path) if costs is not None else None,
            pipeline_seconds=self.positive("pipeline_seconds") if "pipeline_seconds" in self.table else None,
        )

    def sources(self) -> Sources:
        values: dict[str, Any] = {"model": self.text_of("model"), "cluster": self.text_of("cluster")}
        if "seq" in self.table:
            values["seq"] = self.count("seq")
        if "precision" in self.table:
            values["precision"] = self.text_of("precision")
        if "runtime" in self.table:
            values["runtime"] = self.text_of("runtime")
            if values["runtime"] not in ("wavetrain", "megatron"):
                raise self.error("runtime", f"runtime is {values['runtime']!r}; expected wavetrain or megatron")
        return Sources(**{f.name: values[f.name] for f in fields(Sources) if f.name in values})

    def error(self, key: str, problem: str) -> FormatError:
        found = re.search(rf"^[ \t]*{re.escape(key)}[ \t]*=", self.text, re.MULTILINE)
        return FormatError(self.path, self.text.count("\n", 0, found.start()) + 1 if found else None, problem)

    def count(self, key: str) -> int:
        value = self.table.get(key)
        if type(value) is not int or not 1 <= value <= 2**31:
            raise self.error(key, f"{key} is {value!r}; expected a whole number above 0")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        value = self.table.get(key)
        if not isinstance(value, list) or not value or not all(type(v) is int and v >= 1 for v in value):
            raise self.error(key, f"{key} is {value!r}; expected a list of whole numbers above 0")
        return tuple(value)

    def rising(self, key: str) -> tuple[int, ...]:
        value = self.table.get(key)
        right = isinstance(value, list) and len(value) >= 2 and all(type(v) is int for v in value)
        if not right or not isinstance(value, list) or value[0] != 0 or any(b <= a for a, b in pairwise(value)):
            raise self.error(key, f"{key} is {value!r}; expected rising whole numbers from 0")
        return tuple(value)

    def positive(self, key: str) -> float:
        value: Any = self.table.get(key)
        if not _number(value) or not value > 0:
            raise self.error(key, f"{key} is {value!r}; expected a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.table.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"{key} is {value!r}; expected true or false")
        return value

    def text_of(self, key: str) -> str:
        value = self.table.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"{key} is {value!r}; expected a text")
        return value

    def row(self, k: int, key: str, count: int, kind: type) -> tuple[Any, ...]:
        value = self.ranks[k].get(key)
        if not isinstance(value, list) or len(value) != count or not all(type(v) is kind for v in value):
            raise FormatError(self.path, None, f"ranks[{k}]: {key} is {value!r}; expected {count} of them, one a replica")
        return tuple(value)

    def of_rank(self, k: int, key: str) -> float:
        value = self.ranks[k].get(key)
        if not _number(value) or value < 0:
            raise FormatError(self.path, None, f"ranks[{k}]: {key} is {value!r}; expected a number, 0 or more")
        return float(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
