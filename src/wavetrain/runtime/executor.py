"""The executor: runs a rank's program, action by action.

The way of one action:

    wait for its input ─► compute ─► hand the result over, post the receives that come next ─► let memory go

Nothing in it depends on a family of schedules, and nothing in it computes: workers do (:mod:`wavetrain.runtime.stage`, or
:mod:`wavetrain.runtime.emulation` for a rehearsal).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from wavetrain.runtime.blackbox import Phase, Recorder
from wavetrain.runtime.program import Program
from wavetrain.runtime.stage import Worker
from wavetrain.runtime.structure import Structure
from wavetrain.runtime.transport import Transport


class Moment(NamedTuple):
    """When one action of this rank ran, in seconds of :func:`time.monotonic`."""

    waited_from: float
    """When the rank was free for it."""
    start: float
    """When its input was there."""
    end: float


class Executor:
    """Runs programs.

    Args:
        workers: by (route, stage), those of this rank.
        transport: carries messages between ranks.
        recorder: is told what the rank does, for whoever looks when it stops.
    """

    def __init__(self, workers: Mapping[tuple[int, int], Worker], transport: Transport, recorder: Recorder) -> None:
        self._workers, self._transport, self._recorder = workers, transport, recorder

    def run(
        self,
        program: Program,
        keys: Sequence[Hashable],
        on_stage_done: Callable[[int, int], None] | None = None,
    ) -> list[Moment]:
        """Run one step.

        Args:
            program: of this rank.
            keys: what stands for the shape of every micro-batch.
            on_stage_done: called with (route, stage) as soon as the gradients of a stage are complete.
        """
        transport, note, clock = self._transport, self._recorder.note, time.monotonic
        routes = program.schedule.routes
        here: dict[tuple[str, int, int], tuple[Sequence[Tensor], Structure]] = {}  # handed over within the rank
        tensors: Sequence[Tensor]
        structure: Structure | None
        borrowed: dict[tuple[int, int], list[Tensor]] = {}  # memory of received messages, by (stage, micro-batch)
        moments: list[Moment] = []
        free = clock()
        first, *later = [*(instruction.post for instruction in program.instructions), ()]
        for parcel in first:
            transport.post(parcel, keys[parcel.micro_batch])
        transport.flush()
        for ((kind, stage, mb), _, receive, send, arrived, last_of_stage), post in zip(program.instructions, later, strict=True):
            if receive is not None:
                note(Phase.RECEIVE, receive.kind, receive.stage, mb, receive.source)
                tensors, structure = transport.receive(receive)
                borrowed.setdefault((stage, mb), []).extend(tensors)
            else:
                origin = ("F", stage - 1, mb) if kind == "F" else ("B", stage + 1, mb)
                tensors, structure = here.pop(origin) if origin in here and kind != "W" else ((), None)
            start = clock()
            note(Phase.COMPUTE, kind, stage, mb)
            worker = self._workers[routes[mb], stage]
            if kind == "F":
                result = worker.forward(mb, tensors, structure)
            elif kind == "B":
                result = worker.backward(mb, tensors)
            elif kind == "I":
                result = worker.backward_input(mb, tensors)
            else:
                worker.backward_weight(mb)
                result = None
            end = clock()
            if result is not None:
                if kind != "F" or send is None:  # whoever gets an F sent has it before this stage lets its memory go
                    result = _apart(result, borrowed.get((stage, mb), ()))
                if send is not None:
                    transport.send(send, keys[mb], *result)
                else:
                    here["F" if kind == "F" else "B", stage, mb] = result
            for parcel in post:
                transport.post(parcel, keys[parcel.micro_batch])
            if receive is not None:
                transport.arrived(receive.source, arrived)
            if kind in "BW" and (stage, mb) in borrowed:
                transport.release(borrowed.pop((stage, mb)))
            transport.flush()
            del tensors, result
            if last_of_stage and on_stage_done is not None:
                on_stage_done(routes[mb], stage)
            moments.append(Moment(free, start, end))
            free = clock()
        note(Phase.SEND)
        transport.finish()
        note(Phase.IDLE)
        return moments


def _apart(result: tuple[list[Tensor], Structure], borrowed: Sequence[Tensor]) -> tuple[list[Tensor], Structure]:
    """Copies of what shares the memory of the message it came in (a layer that passes it on): it is soon used for another."""
    tensors, structure = result
    taken = {t.untyped_storage().data_ptr() for t in borrowed}
    return [t.clone() if t.untyped_storage().data_ptr() in taken else t for t in tensors], structure
