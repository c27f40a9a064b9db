"""wavetrain: from a model and a set of uneven machines to a trained, served model.

The public names, imported when first used:

    Schedule, Action, Costs, Timeline    frozen data
    build                                a schedule by name
    prove                                whether it can run, before it is launched
    simulate                             a schedule and costs to a timeline
    load, save, load_costs               schedules as torch CSV or JSON, costs as TOML
    SCHEDULE_NAMES                       what ``build`` takes

and those that need torch:

    Pipeline                             a model trained by a schedule, over ranks
    launch                               run a function in several ranks of this machine
    rehearse                             run a schedule for real, with emulated compute
    OptEx                                several steps of a torch optimizer at once
    LLM, SamplingParams                  text from a model, on one rank or several
    models, data                         packages: models that can be pipelined, batches of tokens
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavetrain import data, models
    from wavetrain.errors import WavetrainError
    from wavetrain.optim.optex import OptEx
    from wavetrain.runtime.launch import launch
    from wavetrain.runtime.pipeline import Pipeline
    from wavetrain.runtime.rehearsal import rehearse
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
    from wavetrain.serve.llm import LLM
    from wavetrain.serve.sampling import SamplingParams

__version__ = "0.1.0.dev0"

_HOMES = {
    "Action": "wavetrain.schedule.actions",
    "Costs": "wavetrain.schedule.costs",
    "LLM": "wavetrain.serve.llm",
    "OptEx": "wavetrain.optim.optex",
    "Pipeline": "wavetrain.runtime.pipeline",
    "SamplingParams": "wavetrain.serve.sampling",
    "Schedule": "wavetrain.schedule.schedule",
    "Timeline": "wavetrain.schedule.timeline",
    "WavetrainError": "wavetrain.errors",
    "build": "wavetrain.schedule.families",
    "launch": "wavetrain.runtime.launch",
    "load": "wavetrain.schedule.files",
    "load_costs": "wavetrain.schedule.costs_file",
    "prove": "wavetrain.schedule.proof",
    "rehearse": "wavetrain.runtime.rehearsal",
    "save": "wavetrain.schedule.files",
    "SCHEDULE_NAMES": "wavetrain.schedule.families",
    "simulate": "wavetrain.schedule.simulator",
}

__all__ = [
    "LLM",
    "SCHEDULE_NAMES",
    "Action",
    "Costs",
    "OptEx",
    "Pipeline",
    "SamplingParams",
    "Schedule",
    "Timeline",
    "WavetrainError",
    "build",
    "data",
    "launch",
    "load",
    "load_costs",
    "models",
    "prove",
    "rehearse",
    "save",
    "simulate",
]


_PACKAGES = ("data", "models")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"wavetrain.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'wavetrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), "NAMES" if name == "SCHEDULE_NAMES" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
