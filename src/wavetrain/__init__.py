"""wavetrain: from a model and a set of uneven machines to a trained, served model.

The public names, imported when first used:

    Schedule, Action, Costs, Timeline    frozen data
    build                                a schedule by name
    prove                                whether it can run, before it is launched
    simulate                             a schedule and costs to a timeline
    load, save, load_costs               schedules as torch CSV or JSON, costs as TOML
    SCHEDULE_NAMES                       what ``build`` takes
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavetrain.errors import WavetrainError
    from wavetrain.schedule.actions import Action
    from wavetrain.schedule.costs import Costs
    from wavetrain.schedule.costs_file import load_costs
    from wavetrain.schedule.families import NAMES as SCHEDULE_NAMES
    from wavetrain.schedule.families import build
    from wavetrain.schedule.files import load, save
    from wavetrain.schedule.proof import prove
    from wavetrain.schedule.schedule import Schedule
    from wavetrain.schedule.simulator import simulate
    from wavetrain.schedule.timeline import Timeline

__version__ = "0.1.0.dev0"

_HOMES = {
    "Action": "wavetrain.schedule.actions",
    "Costs": "wavetrain.schedule.costs",
    "Schedule": "wavetrain.schedule.schedule",
    "Timeline": "wavetrain.schedule.timeline",
    "WavetrainError": "wavetrain.errors",
    "build": "wavetrain.schedule.families",
    "load": "wavetrain.schedule.files",
    "load_costs": "wavetrain.schedule.costs_file",
    "prove": "wavetrain.schedule.proof",
    "save": "wavetrain.schedule.files",
    "SCHEDULE_NAMES": "wavetrain.schedule.families",
    "simulate": "wavetrain.schedule.simulator",
}

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Costs",
    "Schedule",
    "Timeline",
    "WavetrainError",
    "build",
    "load",
    "load_costs",
    "prove",
    "save",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wavetrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), "NAMES" if name == "SCHEDULE_NAMES" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
