"""The fit: a few constants for every type of device, from measured trials.

The sum over trials of ρ(log predicted − log measured), where ρ is square near zero and linear beyond (a run that was disturbed
must not bend the rest), plus a pull towards the values the fit starts from: constants that the trials say nothing of stay where
they were. Minimised over the constants' logarithms by Levenberg–Marquardt. Trials count by the root of their experiment's size,
so that five hundred of one kind do not drown forty of another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import InputError
from wavetrain.plan.calibration import Calibration, Constants
from wavetrain.plan.replay import Replay
from wavetrain.plan.trials import Trial

Floats = NDArray[np.float64]

FITTED: Final = (
    *("compute", "half_width", "memory", "scores", "head", "backward_moved", "launch_forward", "launch_backward"),
    *(
        "launch_tensor",
        "reduce",
        "reduce_latency",
        "network",
        "message",
        "message_latency",
        "exposed",
        "optimizer",
        "step",
        "profile_overhead",
    ),
)
PULL: Final = 0.4
"""Weight of one unit of logarithm away from the start, beside residuals of trials."""
LINEAR_FROM: Final = 0.06
"""Residual (as a share of the step) from which ρ is linear."""
MAX_ROUNDS: Final = 40
MIN_PEAKS: Final = 4
"""Trials with a measured peak that it takes to fit a device's memory."""


def calibrate(trials: Sequence[Trial], replay: Replay, start: Calibration, only: frozenset[str] | None = None) -> Calibration:
    """Constants of the devices in ``trials``, starting from ``start``.

    Devices that ran together in a trial are fitted together. With ``only``, those are that have to do with these devices.

    Raises:
        InputError: no trial that ran.
    """
    ran = [trial for trial in trials if not trial.failed]
    if not ran:
        raise InputError("no trial that ran: there is nothing to fit")
    devices = dict(start.devices)
    for names, members in _components(ran):
        if only is not None and not only.intersection(names):
            continue
        fitted = _fit_memory(members, replay, _fit(members, replay, start, names), names)
        devices.update({name: fitted.devices[name] for name in names})
    return replace(start, devices=devices, source="fitted")


def _components(trials: Sequence[Trial]) -> list[tuple[tuple[str, ...], list[Trial]]]:
    """Devices that share trials, and those trials."""
    sets: list[set[str]] = []
    for trial in trials:
        mine = {slot.device.name for row in trial.slots for slot in row}
        touching = [s for s in sets if s & mine]
        sets = [s for s in sets if not s & mine] + [mine.union(*touching)]
    found = []
    for names in sets:
        found.append((tuple(sorted(names)), [t for t in trials if t.slots[0][0].device.name in names]))
    return found


def _fit(trials: Sequence[Trial], replay: Replay, start: Calibration, names: Sequence[str]) -> Calibration:
    keys = [(device, name) for device in names for name in FITTED if getattr(start.of(device), name) > 0]
    origin = np.log([getattr(start.of(device), name) for device, name in keys])
    measured = np.log([trial.seconds or math.nan for trial in trials])
    sizes = Counter(trial.experiment for trial in trials)
    weight = np.array([(100.0 / sizes[trial.experiment]) ** 0.25 for trial in trials])

    def at(point: Floats) -> Calibration:
        values: dict[str, dict[str, float]] = {device: {} for device in names}
        for (device, name), value in zip(keys, point, strict=True):
            values[device][name] = float(math.exp(value))
        made: dict[str, Constants] = {d: replace(start.of(d), **v) for d, v in values.items()}
        return replace(start, devices={**start.devices, **made})

    def residuals(point: Floats) -> Floats:
        predicted = np.log([e.seconds for e in replay.predict(trials, at(point), with_memory=False)])
        off = predicted - measured
        bent = np.sign(off) * LINEAR_FROM * np.sqrt(2 * (np.sqrt(1 + (off / LINEAR_FROM) ** 2) - 1))
        return np.concatenate((weight * bent, PULL * (point - origin)))

    return at(_minimise(residuals, origin))


def _fit_memory(trials: Sequence[Trial], replay: Replay, start: Calibration, names: Sequence[str]) -> Calibration:
    """What devices hold before anything is loaded, and beside what is accounted for, where peaks were measured.

    Least squares of (base + extra · accounted) / measured − 1, pulled towards the start like all else.
    """
    known = [trial for trial in trials if trial.peak_bytes is not None]
    for name in names:
        mine = [t for t in known if all(slot.device.name == name for row in t.slots for slot in row)]
        if len(mine) < MIN_PEAKS:
            continue
        constants = start.of(name)
        held = [max(e.memory, key=lambda h: h.total) for e in replay.predict(mine, start)]
        peaks = np.array([t.peak_bytes or math.nan for t in mine])
        accounted = np.array([h.total - h.base for h in held]) / constants.memory_extra / peaks
        pull = PULL * np.diag([1.0 / constants.memory_base, 1.0 / constants.memory_extra])
        rows = np.concatenate((np.stack((1.0 / peaks, accounted), axis=1), pull * 0.1))
        right = np.concatenate((np.ones(len(mine)), np.full(2, PULL * 0.1)))
        base, extra = np.linalg.lstsq(rows, right, rcond=None)[0]
        start = start.changed(name, memory_base=max(0.0, float(base)), memory_extra=max(0.5, float(extra)))
    return start


def _minimise(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """The point with the least sum of squares, near ``start`` (Levenberg–Marquardt)."""
    point, damping, step = start.copy(), 1e-2, 1e-4
    here = residuals(point)
    cost = float(here @ here)
    for _ in range(MAX_ROUNDS):
        slopes = np.stack([(residuals(point + step * unit) - here) / step for unit in np.eye(len(point))], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ here
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            move = np.clip(move, -0.7, 0.7)
            there = residuals(point + move)
            found = float(there @ there)
            if found < cost:
                break
            damping *= 4
        else:
            return point
        point, here, gained, cost = point + move, there, cost - found, found
        damping = max(damping / 3, 1e-7)
        if gained < 1e-6 * cost:
            break
    return point
