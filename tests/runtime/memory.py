"""All ranks of a pipeline in one process: threads that take turns, and a transport that treats memory as badly as it may.

A message is read from the sender's memory when the receiver waits for it, no earlier; memory that is given back is filled with
NaN. What shares memory that it must not share is then wrong at once, not once in a thousand runs.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wavetrain.runtime.blackbox import Recorder
from wavetrain.runtime.executor import Executor
from wavetrain.runtime.partition import cut_layers
from wavetrain.runtime.program import Parcel, compile_program
from wavetrain.runtime.stage import LossFn, Stage, StepData
from wavetrain.runtime.structure import Structure
from wavetrain.runtime.transport import Arrived
from wavetrain.runtime.weights import Holding, Use, take_over
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule

LIMIT_SECONDS = 60.0
CPU = torch.device("cpu")


@dataclass
class Hub:
    """What the ranks share: the turn, and all messages."""

    turn: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[tuple[int, int], list[tuple[Parcel, Sequence[Tensor], Structure]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    received: dict[tuple[int, int], set[Parcel]] = field(default_factory=lambda: defaultdict(set))
    failed: bool = False


class MemoryTransport:
    """Messages of one rank; a call is made with the turn taken, which is passed on while it waits."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self.posted: dict[int, list[Parcel]] = defaultdict(list)

    def post(self, parcel: Parcel, key: Hashable) -> None:
        self.posted[parcel.source].append(parcel)

    def receive(self, parcel: Parcel) -> Arrived:
        channel = (parcel.source, self.rank)
        place = self.posted[parcel.source].index(parcel)
        self._until(lambda: len(self.hub.sent[channel]) > place)
        sent, tensors, structure = self.hub.sent[channel][place]
        assert sent == parcel, "messages keep their order"
        self.hub.received[channel].add(parcel)
        return Arrived([t.detach().clone() for t in tensors], structure)

    def send(self, parcel: Parcel, key: Hashable, tensors: Sequence[Tensor], structure: Structure) -> None:
        self.hub.sent[self.rank, parcel.target].append((parcel, tensors, structure))
        self.hub.turn.notify_all()

    def arrived(self, target: int, count: int) -> None:
        channel = (self.rank, target)
        assert all(parcel in self.hub.received[channel] for parcel, *_ in self.hub.sent[channel][:count])

    def release(self, message: Arrived) -> None:
        for tensor in message.tensors:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    def flush(self) -> None:
        self.hub.turn.notify_all()

    def finish(self) -> None:
        self.hub.turn.notify_all()
        self._until(
            lambda: all(len(self.hub.received[c]) == len(sent) for c, sent in list(self.hub.sent.items()) if c[0] == self.rank)
        )

    def _until(self, condition: Callable[[], bool]) -> None:
        self.hub.turn.notify_all()
        assert self.hub.turn.wait_for(lambda: self.hub.failed or condition(), LIMIT_SECONDS), f"rank {self.rank} is stuck"
        if self.hub.failed:
            raise ConnectionError("another rank has failed")


@dataclass
class Outcome:
    """What a step has left on all ranks."""

    losses: dict[int, Tensor]
    gradients: dict[str, Tensor]
    """By canonical name, added over the uses."""


def run_step(
    make_model: Callable[[], nn.Sequential],
    schedule: Schedule,
    data: Callable[[], StepData],
    loss_fn: LossFn,
    *,
    recompute: bool = False,
    cut: Sequence[int] | None = None,
) -> Outcome:
    """One step of a new model on all ranks of ``schedule``."""
    hub = Hub()
    ahead = prove(schedule).require().receive_ahead
    losses: dict[int, Tensor] = {}
    holdings: dict[int, Holding] = {}
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        with hub.turn:
            try:
                model = make_model()
                stages = cut_layers(list(model), schedule, cut)
                holding = holdings[rank] = take_over(model, stages, schedule, rank, CPU, 0)
                workers = {
                    (route, stage): Stage(
                        index=stage,
                        num_stages=schedule.num_stages,
                        layers=[(i, holding.layers[route, i]) for i in stages[stage]],
                        parameters=holding.parameters_of(route, stages[stage]),
                        micro_batches=[m for m, r in enumerate(schedule.routes) if r == route],
                        loss_fn=loss_fn,
                        splits=schedule.splits_backward,
                        recompute=recompute,
                        device=CPU,
                    )
                    for route, placement in enumerate(schedule.placements)
                    for stage, home in enumerate(placement)
                    if home == rank
                }
                step = data()
                for worker in workers.values():
                    worker.begin(step)
                executor = Executor(workers, MemoryTransport(hub, rank), Recorder(rank))
                executor.run(compile_program(schedule, rank, receive_ahead=ahead), [0] * schedule.num_micro_batches)
                losses.update(step.losses)
            except BaseException as error:
                errors.append(error)
                hub.failed = True
                hub.turn.notify_all()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(schedule.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    if errors:
        raise errors[0]
    return Outcome(losses, _sum_uses(holdings.values()))


def _sum_uses(holdings: Iterable[Holding]) -> dict[str, Tensor]:
    found: dict[str, list[tuple[Use, Tensor]]] = defaultdict(list)
    for holding in holdings:
        for weight in holding.weights:
            found[weight.name] += [(use, t.grad) for use, t in weight.local.items() if t.grad is not None]
    return {
        name: torch.stack([gradient for _, gradient in sorted(uses, key=lambda u: u[0])]).sum(0)
        for name, uses in found.items()
        if uses
    }
