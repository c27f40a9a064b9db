"""Costs: what a stage takes in seconds and bytes, what a link takes, how much a rank may hold.

A message of n bytes from rank a to rank b waits until the link a→b is free, occupies it for n / bandwidth seconds and arrives
``latency`` seconds after that: messages of one link are serialised and keep their order, different links do not disturb each
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

from wavetrain.errors import InputError
from wavetrain.schedule.placement import Placement

MAX_VALUE: Final = 1e18
"""The largest cost that is taken, in seconds, bytes or bytes per second: beyond it sums lose what they are made of."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one pipeline: S stages in model order, P ranks.

    Stage times are seconds of one micro-batch on a rank of speed 1; a rank of speed 2 halves them.
    """

    forward: tuple[float, ...]
    """Seconds of F, (num_stages,)."""
    backward_input: tuple[float, ...]
    """Seconds of I, (num_stages,)."""
    backward_weight: tuple[float, ...]
    """Seconds of W, (num_stages,). B takes as long as I and W together."""
    activation_bytes: tuple[float, ...]
    """Bytes that F of a stage leaves behind, held until its W (or B) ends, (num_stages,)."""
    message_bytes: tuple[float, ...]
    """Bytes that a stage's output takes on a link, and its gradient on the way back, (num_stages,)."""
    speed: tuple[float, ...]
    """Relative speed of each rank, (num_ranks,)."""
    latency: tuple[tuple[float, ...], ...]
    """Seconds from the end of a transfer to its arrival, from row to column, (num_ranks, num_ranks)."""
    bandwidth: tuple[tuple[float, ...], ...]
    """Bytes per second, from row to column, (num_ranks, num_ranks); may be infinite."""
    memory_cap: tuple[float, ...]
    """Bytes of activations each rank may hold, (num_ranks,); may be infinite."""
    overhead: float = 0.0
    """Seconds that every action takes beside its work, on a rank of any speed: what it takes to launch it and hand it on."""
    input_release: float = 0.0
    """The fraction of a stage's activation bytes that I frees already; W frees the rest."""
    divisible: bool = False
    """Whether a stage may be divided evenly into several: true for costs that only say what a rank's share takes."""

    def __post_init__(self) -> None:
        if not self.forward:
            raise InputError("costs need at least one stage")
        if not self.speed:
            raise InputError("costs need at least one rank")
        for field in ("backward_input", "backward_weight", "activation_bytes", "message_bytes"):
            _check_length(field, getattr(self, field), self.num_stages, "stages")
        _check_length("memory_cap", self.memory_cap, self.num_ranks, "ranks")
        for field in ("forward", "backward_input", "backward_weight", "activation_bytes", "message_bytes"):
            _check_numbers(field, getattr(self, field), positive=False)
        _check_numbers("speed", self.speed, positive=True)
        _check_numbers("memory_cap", self.memory_cap, positive=True, infinite=True)
        for field, positive in (("latency", False), ("bandwidth", True)):
            matrix = getattr(self, field)
            _check_length(field, matrix, self.num_ranks, "ranks")
            for row in {id(row): row for row in matrix}.values():  # most matrices are one row many times over
                _check_length(f"a row of {field}", row, self.num_ranks, "ranks")
                _check_numbers(field, row, positive=positive, infinite=positive)
        _check_numbers("overhead", (self.overhead,), positive=False)
        _check_numbers("input_release", (self.input_release,), positive=False)
        if self.input_release > 1:
            raise InputError(f"input_release is {self.input_release}, but I cannot free more than all (1.0)")
        if self.divisible and any(len(set(v)) > 1 for v in (self.forward, self.backward_input, self.backward_weight)):
            raise InputError("divisible costs must be the same for every stage")
        if sum(self.forward) + sum(self.backward_input) + sum(self.backward_weight) == 0:
            raise InputError("all stage times are zero; give at least one of forward, backward_input, backward_weight")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def num_ranks(self) -> int:
        return len(self.speed)

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        hop_latency: float = 0.0,
        overhead: float = 0.0,
        memory_cap: float = math.inf,
        input_release: float = 0.0,
        message_bytes: float = 0.0,
    ) -> Costs:
        """Equal ranks with equal shares of the model.

        Args:
            num_ranks: P.
            forward: seconds of F of one micro-batch on one rank's whole share.
            backward_input: seconds of I, likewise.
            backward_weight: seconds of W, likewise.
            hop_latency: seconds for a message to cross to another rank.
            overhead: seconds of every action beside its work.
            memory_cap: micro-batches of a rank's share whose activations a rank may hold.
            input_release: fraction of the activations that I frees already.
            message_bytes: of the message between two stages; links are fast enough to make nothing of it.
        """
        if num_ranks < 1:
            raise InputError(f"{num_ranks} ranks: a pipeline needs at least 1")
        share = (1.0,) * num_ranks
        return cls(
            forward=(float(forward),) * num_ranks,
            backward_input=(float(backward_input),) * num_ranks,
            backward_weight=(float(backward_weight),) * num_ranks,
            activation_bytes=share,
            message_bytes=(float(message_bytes),) * num_ranks,
            speed=share,
            latency=square(num_ranks, float(hop_latency)),
            bandwidth=square(num_ranks, math.inf),
            memory_cap=(float(memory_cap),) * num_ranks,
            overhead=float(overhead),
            input_release=float(input_release),
            divisible=True,
        )

    def with_cap(self, shares: float) -> Costs:
        """The same costs with every rank capped at ``shares`` micro-batches of its even share of the activations."""
        share = sum(self.activation_bytes) / self.num_ranks
        return replace(self, memory_cap=(shares * share,) * self.num_ranks)

    def scaled(self, seconds: float, message_bytes: float = 1.0) -> Costs:
        """All seconds times a factor, and messages of so many times the bytes on links that are as much slower."""

        def times(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(seconds * value for value in values)

        return replace(
            self,
            forward=times(self.forward),
            backward_input=times(self.backward_input),
            backward_weight=times(self.backward_weight),
            message_bytes=tuple(message_bytes * size for size in self.message_bytes),
            latency=tuple(times(row) for row in self.latency),
            bandwidth=tuple(tuple(rate * message_bytes / seconds for rate in row) for row in self.bandwidth),
            overhead=seconds * self.overhead,
        )

    def seconds(self, kind: str, stage: int, rank: int) -> float:
        """Seconds of one action, with its overhead."""
        if kind == "B":
            work = self.backward_input[stage] + self.backward_weight[stage]
        else:
            work = {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}[kind][stage]
        return work / self.speed[rank] + self.overhead

    def cut(self, placements: Sequence[Placement], shares: Sequence[float] | None = None) -> Costs:
        """Costs for the number of stages that ``placements`` have.

        Neighbouring stages are joined such that the slowest joined stage, on the rank that the placement gives it, is as fast as
        can be. Divisible costs are divided. ``shares`` say how large the stages are to be, relative to each other; without
        them, all alike. Costs that have as many stages already are what they are.
        """
        num_stages = len(placements[0])
        if shares is not None and (len(shares) != num_stages or not all(0 < s < math.inf for s in shares)):
            raise InputError(f"{num_stages} stages need as many shares, each above 0")
        if num_stages == self.num_stages:
            return self
        if self.divisible:
            return self._divided(shares or (1.0,) * num_stages)
        if num_stages > self.num_stages:
            raise InputError(
                f"the schedule has {num_stages} stages, but the costs only name {self.num_stages}; "
                "use fewer waves or stages per rank, or give costs for more and smaller stages"
            )
        speeds = [self.speed[r] for r in placements[0]] if len(placements) == 1 else [1.0] * num_stages
        sizes = tuple(speed * share for speed, share in zip(speeds, shares or (1.0,) * num_stages, strict=True))
        return self._joined(cut_points(tuple(sum(t) for t in self._times()), sizes))

    def _times(self) -> list[tuple[float, float, float]]:
        return list(zip(self.forward, self.backward_input, self.backward_weight, strict=True))

    def _divided(self, shares: Sequence[float]) -> Costs:
        """Divisible costs are all alike: a stage takes its share of the whole."""
        whole = sum(shares)

        def divide(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(values[0] * self.num_stages * share / whole for share in shares)

        return replace(
            self,
            forward=divide(self.forward),
            backward_input=divide(self.backward_input),
            backward_weight=divide(self.backward_weight),
            activation_bytes=divide(self.activation_bytes),
            message_bytes=(self.message_bytes[0],) * len(shares),
            divisible=len(set(shares)) == 1,
        )

    def _joined(self, points: Sequence[int]) -> Costs:
        runs = list(pairwise(points))

        def total(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(values[a:b]) for a, b in runs)

        return replace(
            self,
            forward=total(self.forward),
            backward_input=total(self.backward_input),
            backward_weight=total(self.backward_weight),
            activation_bytes=total(self.activation_bytes),
            message_bytes=tuple(self.message_bytes[b - 1] for _, b in runs),
            divisible=False,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as :func:`wavetrain.schedule.costs_file.costs_from_dict` reads it."""
        return {
            "ranks": self.num_ranks,
            "forward": list(self.forward),
            "backward_input": list(self.backward_input),
            "backward_weight": list(self.backward_weight),
            "activation_bytes": list(self.activation_bytes),
            "message_bytes": list(self.message_bytes),
            "speed": list(self.speed),
            "memory_cap": list(self.memory_cap),
            "overhead": self.overhead,
            "input_release": self.input_release,
            "latency": [list(row) for row in self.latency],
            "bandwidth": [list(row) for row in self.bandwidth],
        }


def square(size: int, value: float) -> tuple[tuple[float, ...], ...]:
    """A (size, size) matrix of one value."""
    return ((value,) * size,) * size


@lru_cache(maxsize=256)
def cut_points(times: tuple[float, ...], speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Boundaries of len(speeds) non-empty runs of ``times``: the least maximum of run / speed, and of those the most even."""
    limit, _ = _best_cut(times, speeds, math.inf, max)
    _, points = _best_cut(times, speeds, limit * (1 + 1e-9), lambda total, run: total + run * run)
    return tuple(points)


def _best_cut(
    times: Sequence[float], speeds: Sequence[float], limit: float, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cut into runs of at most ``limit`` · speed with the least ``combine`` over them: a dynamic program over (runs, end)."""
    count, num_runs = len(times), len(speeds)
    sums = [0.0, *accumulate(times)]
    least = [0.0] + [math.inf] * count  # over cuts of the first `end` times into the runs so far
    choices: list[list[int]] = []
    for i, speed in enumerate(speeds):
        following, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(i + 1, count - (num_runs - 1 - i) + 1):
            for start in range(end - 1, i - 1, -1):
                run = (sums[end] - sums[start]) / speed
                if run > limit or combine(0.0, run) >= following[end]:
                    break  # an earlier start only makes the run longer
                value = combine(least[start], run)
                if value < following[end]:
                    following[end], chosen[end] = value, start
        choices.append(chosen)
        least = following
    points = [count]
    for chosen in reversed(choices):
        points.append(chosen[points[-1]])
    return least[count], points[::-1]


def _check_length(field: str, values: Sequence[object], wanted: int, of: str) -> None:
    if len(values) != wanted:
        raise InputError(f"{field} has {len(values)} entries, but there are {wanted} {of}")


def _check_numbers(field: str, values: Sequence[float], *, positive: bool, infinite: bool = False) -> None:
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{field}[{i}] is {value!r}, not a number")
        if math.isnan(value) or (value > MAX_VALUE and not (infinite and math.isinf(value))):
            raise InputError(f"{field}[{i}] is {value}; give a finite number, up to {MAX_VALUE:g}")
        if value < 0 or (positive and value == 0):
            raise InputError(f"{field}[{i}] is {value}; it must be {'above 0' if positive else '0 or more'}")
