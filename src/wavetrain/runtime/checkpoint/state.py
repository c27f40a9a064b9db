"""Optimizer, scheduler and random numbers as tensors and plain data, by parameter name instead of by position.

``torch.optim`` numbers parameters by their place in the groups of one process. A checkpoint that fits any split cannot: each rank
has other parameters. So the state of a parameter, and the options of the group it was in, are kept under the parameter's name.
"""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from wavetrain.errors import CheckpointError
from wavetrain.runtime.checkpoint.files import Manifest, StoredTensor

# how a step is computed, not what: the optimizer that is loaded into keeps its own
_IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})
_PAIRS = "__pairs__"


class Scheduler(Protocol):
    """A learning rate scheduler of torch, or anything that saves and loads itself as plain data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def to_plain(value: Any, where: str) -> Any:
    """``value`` as JSON can hold it: tuples become lists, single numbers of numpy and torch become numbers.

    Raises:
        CheckpointError: it holds something else, such as a function; ``where`` begins its place in the message.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        return to_plain(value.item(), where)
    if isinstance(value, list | tuple):
        return [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        items = [(to_plain(k, f"a key of {where}"), to_plain(v, f"{where}[{k!r}]")) for k, v in value.items()]
        if all(isinstance(k, str) and k != _PAIRS for k, _ in items):
            return dict(items)
        return {_PAIRS: items}  # JSON would make a string of any other key
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint holds numbers, strings, lists and dicts of them, and never pickles"
    )


def from_plain(value: Any, like: Any = None) -> Any:
    """What :func:`to_plain` was given; ``like`` is a value of the right types where there is one."""
    if isinstance(value, dict):
        items = value[_PAIRS] if value.keys() == {_PAIRS} else value.items()
        types = like if isinstance(like, dict) else {}
        found = {k: from_plain(v, types.get(k)) for k, v in items}
        return Counter(found) if isinstance(like, Counter) else found
    if isinstance(value, list):
        kinds = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        made = [from_plain(v, kind) for v, kind in zip(value, kinds, strict=True)]
        return tuple(made) if isinstance(like, tuple) else made
    return torch.full_like(like, value) if isinstance(like, Tensor) else value


def parameter_names(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Canonical names by the identity of the parameter."""
    return {id(parameter): name for name, parameter in named}


def _named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter group {index} of {type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} "
                    "that is not a parameter of the pipeline on this rank; make the optimizer from pipe.parameters()"
                )
        groups.append((group, [(names[id(p)], p) for p in group["params"]]))
    return groups


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state of this rank: tensors by ``"optimizer.<parameter>.<key>"``, and the rest as plain data."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups = []
    for group, members in _named_groups(optimizer, names):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names") and k not in _IMPLEMENTATION}
        where = f"an option of {type(optimizer).__name__}"
        groups.append({"options": to_plain(options, where), "parameters": list(dict.fromkeys(name for name, _ in members))})
        for name, parameter in members:
            for key, value in optimizer.state.get(parameter, {}).items():
                if "." in key:
                    raise CheckpointError(f"the state {key!r} of {type(optimizer).__name__} has a dot in its name; rename it")
                if isinstance(value, Tensor):
                    tensors.setdefault(f"optimizer.{name}.{key}", value)
                else:
                    numbers.setdefault(name, {})[key] = to_plain(value, f"the state {key!r} of {name!r}")
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def merge_optimizers(of_ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The plain part of all ranks' optimizers as one. Groups of equal options are one group, wherever they were."""
    present = [(rank, state) for rank, state in enumerate(of_ranks) if state is not None]
    if not present:
        return None
    parameters: dict[str, dict[str, None]] = {}
    options_of: dict[str, str] = {}
    numbers: dict[str, Any] = {}
    for rank, state in present:
        if state["class"] != present[0][1]["class"]:
            raise CheckpointError(
                f"the optimizer is {present[0][1]['class']} on rank {present[0][0]}, {state['class']} on rank {rank}"
            )
        numbers = {**state["numbers"], **numbers}
        for group in state["groups"]:
            options = json.dumps(group["options"], sort_keys=True)
            for name in group["parameters"]:
                if options_of.setdefault(name, options) != options:
                    raise CheckpointError(
                        f"{name!r} has other optimizer options on rank {rank} than before it: {options}, {options_of[name]}"
                    )
                parameters.setdefault(options, {})[name] = None
    groups = [{"options": json.loads(options), "parameters": list(members)} for options, members in parameters.items()]
    return {"class": present[0][1]["class"], "groups": groups, "numbers": numbers}


class OptimizerLoad:
    """An optimizer about to be loaded: what to read into :attr:`tensors`, then :meth:`apply`.

    Until then the optimizer is as it was.

    Args:
        optimizer: of this rank.
        names: canonical names of its parameters.
        manifest: of the checkpoint.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], manifest: Manifest) -> None:
        saved = manifest.optimizer
        kind = type(optimizer).__name__
        if saved is None:
            raise CheckpointError("it holds no optimizer; leave the optimizer out to load the model alone")
        if saved["class"] != kind:
            raise CheckpointError(
                f"it holds the state of {saved['class']}, not of {kind}; leave the optimizer out for the model alone"
            )
        self.tensors: dict[str, list[Tensor]] = {}
        self._optimizer = optimizer
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        group_of = {name: index for index, group in enumerate(saved["groups"]) for name in group["parameters"]}
        stored: dict[str, dict[str, StoredTensor]] = {}
        for full_name, tensor in manifest.of_kind("optimizer").items():
            name, _, key = full_name.rpartition(".")
            stored.setdefault(name, {})[key] = tensor
        for index, (group, members) in enumerate(_named_groups(optimizer, names)):
            options = _options_for(index, [name for name, _ in members], group_of, saved["groups"])
            if options is not None:
                self._options.append((group, options))
            for name, parameter in members:
                self._take(name, parameter, group, stored.get(name, {}), saved["numbers"].get(name, {}))

    def _take(
        self,
        name: str,
        parameter: Tensor,
        group: Mapping[str, Any],
        stored: Mapping[str, StoredTensor],
        numbers: Mapping[str, Any],
    ) -> None:
        state = from_plain(dict(numbers))
        for key, tensor in stored.items():
            on_device = key != "step" or group.get("capturable") or group.get("fused")  # torch keeps `step` on the host otherwise
            if key != "step" and tensor.shape == tuple(parameter.shape):
                state[key] = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)  # sharded as the parameter is
            else:
                state[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=parameter.device if on_device else "cpu")
            self.tensors.setdefault(f"optimizer.{name}.{key}", []).append(state[key])
        self._states.append((parameter, state))

    def apply(self) -> None:
        """Hand the state that was read, and the options of the groups, to the optimizer."""
        for parameter, state in self._states:
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state
        for group, options in self._options:
            for key, value in options.items():
                group[key] = from_plain(value, group.get(key))


def _options_for(
    index: int, members: Sequence[str], group_of: Mapping[str, int], groups: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    unknown = [name for name in members if name not in group_of]
    if unknown:
        raise CheckpointError(f"parameter group {index}: its optimizer did not have {some(unknown)}")
    first = next(iter(members), None)
    if first is None:
        return None
    options: Mapping[str, Any] = groups[group_of[first]]["options"]
    for name in members:
        other = groups[group_of[name]]["options"]
        if other != options:
            key = next(k for k in {**options, **other} if options.get(k) != other.get(k))
            raise CheckpointError(
                f"parameter group {index} holds {first!r} and {name!r}, which were in groups of different options "
                f"({key} = {options.get(key)} and {other.get(key)}); group the parameters as they were when it was saved"
            )
    return options


def scheduler_state(scheduler: Scheduler) -> dict[str, Any]:
    """A scheduler as plain data."""
    kind = type(scheduler).__name__
    return {"class": kind, "state": to_plain(scheduler.state_dict(), kind)}


def scheduler_load(scheduler: Scheduler, manifest: Manifest) -> Callable[[], None]:
    """Check that the saved scheduler fits this one; the result loads it."""
    saved, kind = manifest.scheduler, type(scheduler).__name__
    if saved is None:
        raise CheckpointError("it holds no scheduler; leave the scheduler out to load the rest")
    if saved["class"] != kind:
        raise CheckpointError(f"it holds the state of {saved['class']}, not of {kind}; leave the scheduler out to load the rest")
    now = scheduler.state_dict()
    state = from_plain(saved["state"], now)
    for key, value in state.items():
        if isinstance(value, list) and isinstance(now.get(key), list) and len(value) != len(now[key]):
            raise CheckpointError(
                f"{key!r} of {kind} has {len(value)} entries in it, {len(now[key])} here: the optimizer has another number of "
                "parameter groups; give every rank the same groups (one without parameters is fine)"
            )
    return lambda: scheduler.load_state_dict(state)


def random_state() -> dict[str, Tensor]:
    """The generators of torch, Python and numpy as tensors; CUDA's current device too, where it is in use."""
    words = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": torch.tensor([*words[1], *_optional_bits(words[2])])}
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] == "MT19937":
        last = numpy_state["gauss"] if numpy_state["has_gauss"] else None
        twister = numpy_state["state"]
        states["numpy"] = torch.tensor([*twister["key"].tolist(), twister["pos"], *_optional_bits(last)])
    if torch.cuda.is_available():  # not run here: no CUDA device
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators back to what :func:`random_state` gave; those that are missing stay as they are."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        *words, has, bits = states["python"].tolist()
        random.setstate((3, tuple(words), _from_bits(has, bits)))
    if "numpy" in states:
        *key, pos, has, bits = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), pos, has, _from_bits(has, bits) or 0.0))
    if "cuda" in states and torch.cuda.is_available():  # not run here: no CUDA device
        torch.cuda.set_rng_state(states["cuda"])


def _optional_bits(value: float | None) -> tuple[int, int]:
    """A float that may be missing, as whether it is there and its 64 bits."""
    return (0, 0) if value is None else (1, struct.unpack("<q", struct.pack("<d", value))[0])


def _from_bits(has: int, bits: int) -> float | None:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0]) if has else None


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(repr(name) for name in ordered[:most]) + more
