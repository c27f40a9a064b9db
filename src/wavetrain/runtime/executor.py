"""The executor: runs a rank's program, action by action.

The way of one action:

    wait for its input ─► compute ─► hand the result over, post the receives that come next ─► let memory go

Nothing in it depends on a family of schedules, and nothing in it computes: workers do (:mod:`wavetrain.runtime.stage`, or
:mod:`wavetrain.runtime.emulation` for a rehearsal).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from wavetrain.runtime.blackbox import Phase, Recorder, ready_note
from wavetrain.runtime.program import Instruction, Program
from wavetrain.runtime.stage import Worker
from wavetrain.runtime.structure import Structure
from wavetrain.runtime.transport import Arrived, Transport


class Moment(NamedTuple):
    """When one action of this rank ran, in seconds of :func:`time.monotonic`."""

    waited_from: float
    """When the rank was free for it."""
    start: float
    """When its input was there."""
    end: float


class _Bound(NamedTuple):
    """An instruction with all that can be looked up before the step."""

    instruction: Instruction
    route: int
    worker: Worker
    origin: tuple[str, int, int] | None
    """What the action needs, as a stage of the same rank gives it."""
    receiving: bytes
    computing: bytes
    """What is noted before the wait, and before the action."""


class Executor:
    """Runs programs.

    Args:
        workers: by (route, stage), those of this rank.
        transport: carries messages between ranks.
        recorder: is told what the rank does, for whoever looks when it stops.
    """

    def __init__(self, workers: Mapping[tuple[int, int], Worker], transport: Transport, recorder: Recorder) -> None:
        self._workers, self._transport, self._recorder = workers, transport, recorder
        self._bound: tuple[Program, list[_Bound]] | None = None

    def run(
        self,
        program: Program,
        keys: Sequence[Hashable],
        on_stage_done: Callable[[int, int], None] | None = None,
    ) -> list[Moment]:
        """Run one step, without garbage collection: a rank that stops for it stops its neighbours.

        Args:
            program: of this rank.
            keys: what stands for the shape of every micro-batch.
            on_stage_done: called with (route, stage) as soon as the gradients of a stage are complete.
        """
        if self._bound is None or self._bound[0] is not program:
            self._bound = program, [self._bind(program, instruction) for instruction in program.instructions]
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._run(self._bound[1], keys, on_stage_done)
        finally:
            if collects:
                gc.enable()

    def _run(
        self, bounds: Sequence[_Bound], keys: Sequence[Hashable], on_stage_done: Callable[[int, int], None] | None
    ) -> list[Moment]:
        transport, note, clock = self._transport, self._recorder.note_ready, time.monotonic
        here: dict[tuple[str, int, int], tuple[Sequence[Tensor], Structure]] = {}  # handed over within the rank
        tensors: Sequence[Tensor]
        structure: Structure | None
        borrowed: dict[tuple[int, int], list[Arrived]] = {}  # received messages in use, by (stage, micro-batch)
        times: list[tuple[float, float, float]] = []
        free = clock()
        first, *later = [*(bound.instruction.post for bound in bounds), ()]
        for parcel in first:
            transport.post(parcel, keys[parcel.micro_batch])
        transport.flush()
        for bound, post in zip(bounds, later, strict=True):
            (kind, stage, mb), _, receive, send, arrived, last_of_stage = bound.instruction
            tensors, structure = (), None
            if receive is not None:
                note(bound.receiving)
                message = transport.receive(receive)
                tensors, structure = message.tensors, message.structure
                borrowed.setdefault((stage, mb), []).append(message)
            elif bound.origin in here:
                tensors, structure = here.pop(bound.origin)
            start = clock()
            note(bound.computing)
            if kind == "F":
                result = bound.worker.forward(mb, tensors, structure)
            elif kind == "B":
                result = bound.worker.backward(mb, tensors)
            elif kind == "I":
                result = bound.worker.backward_input(mb, tensors)
            else:
                bound.worker.backward_weight(mb)
                result = None
            end = clock()
            if send is not None:
                assert result is not None, "only the ends of the model give nothing"
                transport.send(send, keys[mb], *result)
            elif result is not None:
                here["F" if kind == "F" else "B", stage, mb] = result
            for parcel in post:
                transport.post(parcel, keys[parcel.micro_batch])
            if receive is not None:
                transport.arrived(receive.source, arrived)
            if kind in "BW" and (stage, mb) in borrowed:
                for message in borrowed.pop((stage, mb)):
                    transport.release(message)
            transport.flush()
            del tensors, result
            if last_of_stage and on_stage_done is not None:
                on_stage_done(bound.route, stage)
            times.append((free, start, end))
            free = clock()
        self._recorder.note(Phase.SEND)
        transport.finish()
        self._recorder.note(Phase.IDLE)
        return [Moment(*t) for t in times]

    def _bind(self, program: Program, instruction: Instruction) -> _Bound:
        (kind, stage, mb), receive = instruction.action, instruction.receive
        route = program.schedule.routes[mb]
        return _Bound(
            instruction,
            route,
            self._workers[route, stage],
            {"F": ("F", stage - 1, mb), "B": ("B", stage + 1, mb), "I": ("B", stage + 1, mb), "W": None}[kind],
            b"" if receive is None else ready_note(Phase.RECEIVE, receive.kind, receive.stage, mb, receive.source),
            ready_note(Phase.COMPUTE, kind, stage, mb),
        )
