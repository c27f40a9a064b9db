"""Calibration: what no datasheet says, a few numbers for every type of device, fitted on trials.

As a file, with a table for every device and one for all the others:

    [default]
    compute = 0.82                   # share of the datasheet's peak that large matrix products reach
    ...

    [devices.A100-40]
    compute = 0.8
    error = 0.08                     # mean error of predictions, on trials that the fit had not seen

The calibration that comes with wavetrain was fitted on published trials (see docs/planning.md). ``wavetrain score`` fits another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from wavetrain.errors import FormatError, require_keys
from wavetrain.files import parse_toml, read_text


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of one type of device, with the software that drives it."""

    compute: float = 0.82
    """Share of the datasheet's peak that wide matrix products reach."""
    half_width: float = 550.0
    """Width of a model (elements of a token's vector) at which products reach half of that."""
    memory: float = 0.95
    """Share of the memory's bandwidth that everything else reaches."""
    scores: float = 1.2
    """How much dearer attention's scores are than their bytes say."""
    head: float = 1.7
    """The same of logits and loss."""
    backward_moved: float = 1.8
    """Bytes that the backward pass moves, for every byte of the forward pass."""
    launch_forward: float = 2e-3
    """Seconds that a transformer block takes at least, forward: the host launches its kernels one by one."""
    launch_backward: float = 1e-3
    launch_tensor: float = 1.5e-4
    """Seconds more with tensor parallelism."""
    reduce: float = 0.85
    """Share of a link's bandwidth that all-reduces within a node reach."""
    reduce_latency: float = 6e-5
    """Seconds of an all-reduce within a node beside its bytes."""
    network: float = 0.6
    """Share of a node's network that is reached."""
    message: float = 0.3
    """Share of a link's bandwidth that messages between stages reach within a node."""
    message_latency: float = 3e-4
    """Seconds of a message between stages beside its bytes: the waits around it."""
    exposed: float = 0.5
    """Share of the reduction of gradients that nothing hides."""
    optimizer: float = 1.5
    """Seconds of the optimizer, for every second that its bytes take in memory."""
    step: float = 1e-3
    """Seconds of a step beside all others."""
    profile_overhead: float = 2.5e-4
    """Seconds of every layer and direction that a profile measures too much, for it waits for the device."""
    memory_base: float = 1.0e9
    """Bytes that a device holds before anything is loaded."""
    memory_extra: float = 1.03
    """Bytes held at the peak for every byte that is accounted for."""
    error: float = 0.25
    """Mean error of predicted step times, of trials that the fit had not seen."""


NAMES: Final = tuple(f.name for f in fields(Constants))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants by device."""

    default: Constants = field(default_factory=Constants)
    devices: Mapping[str, Constants] = field(default_factory=dict)
    source: str = "defaults"

    def of(self, device: str) -> Constants:
        """For a device by its name; of the same card with another size of memory, or the default, where it has none."""
        if device in self.devices:
            return self.devices[device]
        family = device.rpartition("-")[0]
        for name, constants in self.devices.items():
            if family and name.rpartition("-")[0] == family:
                return constants
        return self.default

    def known(self, device: str) -> bool:
        """Whether trials of the device took part in the fit."""
        return self.of(device) is not self.default

    def changed(self, device: str, **values: float) -> Calibration:
        """With other values for one device."""
        return replace(self, devices={**self.devices, device: replace(self.of(device), **values)})

    def text(self) -> str:
        """As a TOML file."""
        lines = ["[default]", *_lines(self.default)]
        for name, constants in sorted(self.devices.items()):
            lines += ["", f'[devices."{name}"]', *_lines(constants)]
        return "\n".join(lines) + "\n"


def _lines(constants: Constants) -> list[str]:
    return [f"{name} = {getattr(constants, name):.6g}" for name in NAMES]


@lru_cache(maxsize=1)
def shipped() -> Calibration:
    """The calibration that comes with wavetrain."""
    text = (resources.files("wavetrain.plan") / "calibration.toml").read_text(encoding="utf-8")
    return calibration_from_text(text, "calibration.toml")


def load_calibration(path: str) -> Calibration:
    """From a TOML file.

    Raises:
        FormatError: with the file.
        UnknownNameError: a key that is not known.
    """
    return calibration_from_text(read_text(path), path)


def calibration_from_text(text: str, path: object = "<calibration>") -> Calibration:
    """From the text of a TOML file; ``path`` is what errors name."""
    data = parse_toml(text, path)
    require_keys(path, data, ("default", "devices"))
    default = _constants(path, "default", data.get("default", {}), Constants())
    tables = data.get("devices", {})
    if not isinstance(tables, dict):
        raise FormatError(path, None, "devices is no table; write [devices.NAME] above the numbers of a device")
    devices = {name: _constants(path, f"devices.{name}", table, default) for name, table in tables.items()}
    return Calibration(default=default, devices=devices, source=str(path))


def _constants(path: object, where: str, table: Any, default: Constants) -> Constants:
    if not isinstance(table, dict):
        raise FormatError(path, None, f"{where} is {table!r}, not a table")
    require_keys(f"{path}, [{where}]", table, NAMES)
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise FormatError(path, None, f"[{where}]: {key} is {value!r}; expected a number, 0 or more")
        if value == 0 and key in ("compute", "memory", "reduce", "network", "message"):
            raise FormatError(path, None, f"[{where}]: {key} is 0; a share must be above 0")
    return replace(default, **table)
