"""Saved: whether the state of an OptEx that was saved can be loaded, said before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from wavetrain.errors import CheckpointError
from wavetrain.optim.history import NAMES

ROUNDING: Final = 1e-9
"""Of a norm."""
OWN: Final = ("base", "mode", "parallel", "round", "has", "pace", "judge", "settling", "num_newest")
BEFORE: Final = ("start", "fork", "counts")


def check_names(own: Mapping[str, Any]) -> None:
    """Refuse what lacks a part."""
    missing = set(OWN) - set(own)
    if missing:
        raise CheckpointError(
            f"the saved state of OptEx lacks {', '.join(sorted(missing))}: it is damaged, or of another version; load it without "
            "its 'optex', as the state of the inner optimizer alone"
        )


def check_base(there: str, here: str) -> None:
    """Refuse the state of another kind of inner optimizer."""
    if there != here:
        raise CheckpointError(f"the saved state is of {there}, but the inner optimizer here is {here}")


def check_owner(there: Sequence[int] | None, here: Sequence[int] | None) -> None:
    """Refuse the state of another rank's part: (rank, of how many), or None of the whole."""
    if there != here:
        raise CheckpointError(
            f"the saved state of OptEx is {_whose(there)}, here it would be {_whose(here)}: with shard_history every rank saves "
            "and loads its own, among as many ranks"
        )


def check_part(state_dict: Mapping[str, Any], kept: Collection[int]) -> None:
    """Refuse an inner optimizer's state that has nothing of the parameters, by their numbers, that this rank keeps."""
    there = set(state_dict.get("state", ()))
    if there and kept and not there & set(kept):
        raise CheckpointError(
            "the state holds nothing of the parameters that this rank keeps: with shard_history every rank saves and loads its "
            "own"
        )


def check_version(own: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse what does not have the names and shapes of ``known``."""
    odd = _unlike(own, known)
    if odd:
        raise CheckpointError(
            f"the saved state of OptEx is of another version: {', '.join(odd)} lacking or of another size; load it without "
            "its 'optex', as the state of the inner optimizer alone"
        )


def check_history(own: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a history that lacks a part, or is of another mode, parallelism or shape than ``here``."""
    saved, before = own["history"], own.get("before")
    missing = (set(NAMES) - set(saved)) | ({"before", "checksum"} - set(own))
    if before is not None:
        missing |= {f"before.{name}" for name in BEFORE if name not in before}
    if missing:
        raise CheckpointError(
            f"the saved history of OptEx lacks {', '.join(sorted(missing))}: it is damaged, or of another version; take "
            "'history' out of the state's 'optex', and it begins anew"
        )
    ways, points = [shape_of(way) for way in own["settling"]["way"]], shape_of(saved["points"]) or ()
    if any(way != points[-1:] for way in ways):
        raise CheckpointError(f"the saved history of OptEx is damaged: a way of shape {ways[0]} between points of {points}")
    for name, value in here.items():
        there = own[name] if name in own else shape_of(saved[name])
        if there != value:
            raise CheckpointError(
                f"the saved history is of another optimizer: {name} {there}, here {value}; use the same parameters, mode, "
                "parallel, history and distance_coordinates, or save with state_dict(history=False)"
            )


def alike(one: tuple[float, float], other: tuple[float, float], size: int) -> bool:
    """Whether two checksums (sum, norm) of ``size`` numbers are the same but for the order in which they were summed."""
    slack = ROUNDING * one[1]
    return abs(one[1] - other[1]) <= slack and abs(one[0] - other[0]) <= slack * math.sqrt(size)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Of a tensor; None of what is not there."""
    return None if value is None else tuple(value.shape)


def _whose(dealt: Sequence[int] | None) -> str:
    return "the whole" if dealt is None else f"that of rank {dealt[0]} of {dealt[1]}"


def _unlike(saved: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Names in ``known`` that ``saved`` lacks, or whose tensors have other shapes there."""
    found: list[str] = []
    for name, value in known.items():
        other: Any = saved.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found += [f"{name}.{inner}" for inner in _unlike(other, value)]
        elif name not in saved or getattr(value, "shape", None) != getattr(other, "shape", None):
            found.append(name)
    return found
