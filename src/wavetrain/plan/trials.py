"""Trials: training runs that were measured, as JSON lines.

    {"id": "a", "experiment": "homogeneous", "model": "gpt2-24x1024",
     "nodes": [{"count": 4, "device": "T4-16", "gpus": 4, "intra_gbps": 50, "inter_gbps": 50}],
     "global_batch": 32, "micro_batch": 1, "tp": 1, "dp": 4, "pp": 4,
     "partition": [0, 9, 15, 21, 30], "schedule": "1f1b", "seconds": 1.2, "failed": false}

``model`` is a name, or {layers, hidden, heads, seq} (and vocab). Devices are counted over ``nodes`` as
rank = (stage · dp + replica) · tp + tensor. Where stages or replicas are not alike, ``stages`` takes the place of nodes, tp, dp
and partition:

    "stages": [{"layers": [0, 12], "replicas": [{"device": "GH-96", "tp": 4}, {"device": "GH-96", "tp": 4}]}, ...]

``seconds`` is of one step; null and ``"failed": true`` for a run that did not work. These may be left out: ``peak_bytes`` (of
the fullest device), ``precision`` (fp16, bf16, fp32), ``recompute`` (none, selective, full), ``gradient_bytes`` (of one gradient
between replicas), ``source``. Published sets of trials leave out what all of their runs have in common: see :data:`SOURCES`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from wavetrain.cluster import INTER_LATENCY, INTRA_LATENCY, Link, NodeGroup
from wavetrain.devices import GBPS, Device, find_device
from wavetrain.errors import FormatError, InputError
from wavetrain.files import read_text
from wavetrain.workload import PRECISIONS

MAX_TRIALS: Final = 100_000
MAX_DEVICES: Final = 1_000_000
DEFAULT_VOCAB: Final = 51200
"""Of models given by their shape."""


SOURCES: Final[dict[str, dict[str, object]]] = {
    "amp": {"precision": "fp16", "recompute": "none", "gradient_bytes": 4},
    "vtrain": {"precision": "fp16", "gradient_bytes": 2},
    "sailor": {"precision": "fp32", "recompute": "none", "gradient_bytes": 4},
}
"""What the runs of published sets have in common: AMP's (NeurIPS'22), vTrain's (MICRO'24), Sailor's (SOSP'25)."""


@dataclass(frozen=True, kw_only=True)
class TrialSlot:
    """The devices that compute one stage of one replica."""

    device: Device
    tp: int
    node: int
    """Of its first device; −1 where the trial does not say."""
    group: int
    """Of its node; −1 where the trial does not say."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    id: str
    experiment: str
    model: str | Mapping[str, int]
    groups: tuple[NodeGroup, ...]
    """The nodes, in order; none where the trial does not say."""
    slots: tuple[tuple[TrialSlot, ...], ...]
    """By stage and replica."""
    cut: tuple[int, ...] | None
    """Boundaries of the stages; None: as even as can be."""
    global_batch: int
    micro_batch: int
    schedule: str
    precision: str
    recompute: str | None
    """None where the trial does not say."""
    gradient_bytes: int
    seconds: float | None
    """None if it failed."""
    peak_bytes: float | None

    @property
    def failed(self) -> bool:
        return self.seconds is None

    @property
    def num_micro_batches(self) -> int:
        """Of one replica."""
        return max(1, self.global_batch // (len(self.slots[0]) * self.micro_batch))


def load_trials(path: str | os.PathLike[str]) -> list[Trial]:
    """The trials of a file.

    Raises:
        FormatError: with the line.
    """
    name = os.fspath(path)
    found: list[Trial] = []
    for number, text in enumerate(read_text(path).splitlines(), 1):
        if not text.strip():
            continue
        if len(found) == MAX_TRIALS:
            raise FormatError(name, number, f"more than {MAX_TRIALS} trials")
        found.append(_Reader(name, number, text).trial())
    if not found:
        raise FormatError(name, None, "no trials: expected one JSON object a line")
    return found


class _Reader:
    """One line."""

    def __init__(self, path: str, line: int, text: str) -> None:
        self.path, self.line = path, line
        try:
            self.data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"not JSON: {error}") from None
        if not isinstance(self.data, dict):
            raise self.error("expected a JSON object")

    def error(self, problem: str) -> FormatError:
        return FormatError(self.path, self.line, problem)

    def trial(self) -> Trial:
        data = self.data
        groups = () if "stages" in data else self._groups()
        slots, cut = self._grid(groups) if groups else self._stages()
        failed = data.get("failed", False)
        if not isinstance(failed, bool):
            raise self.error(f"failed is {failed!r}; expected true or false")
        if not failed and data.get("seconds") is None:
            raise self.error("no seconds: a trial that was not measured must say that it failed")
        common = SOURCES.get(self._text("source", ""), {})
        precision = data.get("precision", common.get("precision", "fp16"))
        if precision not in PRECISIONS:
            raise self.error(f"precision is {precision!r}; expected {', '.join(PRECISIONS)}")
        recompute = data.get("recompute", common.get("recompute"))
        if recompute not in (None, "none", "selective", "full"):
            raise self.error(f"recompute is {recompute!r}; expected none, selective or full")
        peak = data.get("peak_bytes")
        trial = Trial(
            id=self._text("id", "?"),
            experiment=self._text("experiment", "trials"),
            model=self._model(),
            groups=groups,
            slots=slots,
            cut=cut,
            global_batch=self._count("global_batch", data.get("global_batch")),
            micro_batch=self._count("micro_batch", data.get("micro_batch")),
            schedule=self._text("schedule", "1f1b"),
            precision=precision,
            recompute=recompute,
            gradient_bytes=self._count("gradient_bytes", data.get("gradient_bytes", common.get("gradient_bytes", 4))),
            seconds=None if failed else self._positive("seconds", data["seconds"]),
            peak_bytes=None if peak is None else self._positive("peak_bytes", peak),
        )
        if trial.global_batch < len(slots[0]):
            raise self.error(f"a global batch of {trial.global_batch} for {len(slots[0])} replicas")
        return trial

    def _model(self) -> str | Mapping[str, int]:
        model = self.data.get("model")
        if isinstance(model, str) and model:
            return model
        if isinstance(model, dict):
            shape = {key: self._count(f"model.{key}", model.get(key)) for key in ("layers", "hidden", "heads", "seq")}
            shape["vocab"] = self._count("model.vocab", model.get("vocab", DEFAULT_VOCAB))
            if shape["hidden"] % shape["heads"]:
                raise self.error(f"model: {shape['heads']} heads do not divide a width of {shape['hidden']}")
            return shape
        raise self.error(f"model is {model!r}; expected a name, or an object of layers, hidden, heads and seq")

    def _groups(self) -> tuple[NodeGroup, ...]:
        nodes = self.data.get("nodes")
        if not isinstance(nodes, list) or not nodes:
            raise self.error("no nodes (and no stages): say what the trial ran on")
        found = []
        for i, node in enumerate(nodes):
            if not isinstance(node, dict):
                raise self.error(f"nodes[{i}] is {node!r}; expected an object")
            device = self._device(f"nodes[{i}].device", node.get("device"))
            intra = node.get("intra_gbps")
            inter = node.get("inter_gbps")
            gpus = self._count(f"nodes[{i}].gpus", node.get("gpus", 1))
            found.append(
                NodeGroup(
                    count=self._count(f"nodes[{i}].count", node.get("count", 1)),
                    gpus=gpus,
                    device=device,
                    intra=Link(
                        bandwidth=device.link_bandwidth
                        if intra is None
                        else GBPS * self._positive(f"nodes[{i}].intra_gbps", intra),
                        latency=INTRA_LATENCY,
                    ),
                    inter=Link(
                        bandwidth=gpus * device.network_bandwidth
                        if inter is None
                        else GBPS * self._positive(f"nodes[{i}].inter_gbps", inter),
                        latency=INTER_LATENCY,
                    ),
                )
            )
        return tuple(found)

    def _grid(self, groups: tuple[NodeGroup, ...]) -> tuple[tuple[tuple[TrialSlot, ...], ...], tuple[int, ...] | None]:
        tp, dp, pp = (self._count(key, self.data.get(key, 1)) for key in ("tp", "dp", "pp"))
        total = sum(group.num_devices for group in groups)
        if tp * dp * pp > total:
            raise self.error(f"tp {tp} × dp {dp} × pp {pp} needs {tp * dp * pp} devices, but the nodes have {total}")
        if total > MAX_DEVICES:
            raise self.error(f"{total} devices; at most {MAX_DEVICES} are scored")
        homes: list[tuple[int, int]] = []
        for i, group in enumerate(groups):
            for _ in range(group.count):
                homes += [(homes[-1][0] + 1 if homes else 0, i)] * group.gpus
        slots = []
        for stage in range(pp):
            row = []
            for replica in range(dp):
                first = (stage * dp + replica) * tp
                shared = homes[first : first + tp]
                slowest = min((i for _, i in shared), key=lambda i: groups[i].device.half_flops)  # it sets the pace
                row.append(TrialSlot(device=groups[slowest].device, tp=tp, node=homes[first][0], group=slowest))
            slots.append(tuple(row))
        partition = self.data.get("partition")
        return tuple(slots), None if partition is None else self._cut("partition", partition, pp)

    def _stages(self) -> tuple[tuple[tuple[TrialSlot, ...], ...], tuple[int, ...]]:
        stages = self.data["stages"]
        if not isinstance(stages, list) or not stages:
            raise self.error("stages is no list of objects")
        slots, points = [], [0]
        for i, stage in enumerate(stages):
            if not isinstance(stage, dict) or not isinstance(stage.get("replicas"), list) or not stage["replicas"]:
                raise self.error(f"stages[{i}] has no replicas")
            layers = self._cut(f"stages[{i}].layers", stage.get("layers"), 1, first=points[-1])
            points.append(layers[-1])
            row = []
            for j, replica in enumerate(stage["replicas"]):
                where = f"stages[{i}].replicas[{j}]"
                if not isinstance(replica, dict):
                    raise self.error(f"{where} is {replica!r}; expected an object")
                device = self._device(f"{where}.device", replica.get("device"))
                row.append(TrialSlot(device=device, tp=self._count(f"{where}.tp", replica.get("tp", 1)), node=-1, group=-1))
            slots.append(tuple(row))
        if len({len(row) for row in slots}) != 1:
            raise self.error("stages must have the same number of replicas")
        return tuple(slots), tuple(points)

    def _cut(self, key: str, value: object, stages: int, first: int = 0) -> tuple[int, ...]:
        right = isinstance(value, list) and len(value) == stages + 1 and all(type(v) is int for v in value)
        if not right or not isinstance(value, list) or value[0] != first or any(b <= a for a, b in pairwise(value)):
            raise self.error(f"{key} is {value!r}; expected {stages + 1} rising whole numbers from {first}")
        return tuple(value)

    def _device(self, key: str, name: object) -> Device:
        if not isinstance(name, str):
            raise self.error(f"{key} is {name!r}; expected a name")
        try:
            return find_device(name, largest=True)  # it ran: a card that is named by its family had what it took
        except InputError as error:
            raise self.error(f"{key}: {error}") from None

    def _text(self, key: str, default: str) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}; expected a text")
        return value

    def _count(self, key: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= 2**31:
            raise self.error(f"{key} is {value!r}; expected a whole number above 0")
        return value

    def _positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} is {value!r}; expected a number above 0")
        return float(value)
