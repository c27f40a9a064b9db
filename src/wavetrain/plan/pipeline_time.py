"""How long a pipeline of uneven ranks takes, without building a schedule.

One forward, one backward (1F1B), exactly: rank k of P runs P − 1 − k forwards ahead, then a forward and a backward in turns.
Take the forwards F of micro-batch n + P − 1 − k on rank k, for all k, as one line (an anti-diagonal), and the backwards of
micro-batch n as one row:

    line n:   F[k]  starts when F[k−1] of line n − 1 ended, and when row n − 1 ended on rank k
    row n:    B[k]  starts when B[k+1] of row n ended, and when line n ended on rank k

A line is one vector operation, a row one scan, so a step takes B + P of each, whatever P. Beyond a few times P micro-batches the
slowest rank sets the pace, and every further one adds what it takes there.

Other families keep the ranks as busy, but fill and drain in a share of the time (see :func:`fill_share`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import UnknownNameError
from wavetrain.schedule.placement import Placement, loop, straight, wave

Floats = NDArray[np.float64]

SCHEDULES = {"1f1b": 1.0, "gpipe": 1.0, "zb-h1": 1 / 3, "zbv": 1 / 3}
SCHEDULES_WITH_WAVES = {"interleaved": 1.0, "hanayo": 2 / 3, "zb-wave": 1 / 6}
EFFORT = 0.2
"""Of building zero-bubble waves for a plan: several finalists are to be simulated within a second."""
SETTLED = 5
"""Times the number of ranks: micro-batches after which a pipeline runs at the pace of its slowest rank."""


def fill_share(schedule: str, waves: int) -> float:
    """The idle time of a schedule's fill and drain, as a share of 1F1B's, with F = I = W and free links."""
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    if schedule in SCHEDULES_WITH_WAVES:
        return SCHEDULES_WITH_WAVES[schedule] / waves
    raise UnknownNameError("schedule to estimate", schedule, (*SCHEDULES, *SCHEDULES_WITH_WAVES))


def passes(schedule: str, waves: int) -> int:
    """How often a micro-batch passes over the ranks, forward: so many messages cross between neighbours."""
    return (
        waves if schedule == "interleaved" else 2 * waves if schedule in ("hanayo", "zb-wave") else 2 if schedule == "zbv" else 1
    )


def placement_of(schedule: str, num_ranks: int, waves: int) -> Placement:
    """The rank of every stage."""
    if schedule in ("hanayo", "zb-wave"):
        return wave(num_ranks, waves)
    if schedule == "zbv":
        return wave(num_ranks, 1)
    if schedule == "interleaved":
        return loop(num_ranks, waves)
    return straight(num_ranks)


def build_options(schedule: str, waves: int) -> dict[str, Any]:
    """What :func:`wavetrain.schedule.families.build` is told of a plan's schedule."""
    if schedule == "zb-wave":
        return {"waves": waves, "effort": EFFORT}
    return {"waves": waves} if schedule == "hanayo" else {"stages_per_rank": waves} if schedule == "interleaved" else {}


def pipeline_seconds(
    forward: Floats,
    backward: Floats,
    num_micro_batches: int,
    schedule: str = "1f1b",
    waves: int = 1,
    delay: Floats | None = None,
) -> float:
    """Seconds of a step.

    Args:
        forward: of every rank for one micro-batch, with the messages that hold it up, (num_ranks,).
        backward: likewise.
        num_micro_batches: B.
        schedule: its family.
        waves: waves, or stages a rank.
        delay: of messages that hold no rank up, from every rank to the next, one way, (num_ranks − 1,).
    """
    both = forward + backward
    pace, whole = float(both.max()), float(both.sum())
    late = np.zeros(len(forward) - 1) if delay is None else delay
    busy = num_micro_batches * pace
    if schedule == "gpipe":
        return (num_micro_batches - 1) * float(forward.max() + backward.max()) + whole + 2 * float(late.sum())
    share = fill_share(schedule, waves)
    if share == 1.0:
        return _one_forward_one_backward(forward, backward, num_micro_batches, late)
    splits = schedule in ("zb-wave", "zb-h1", "zbv")
    path = float(forward.sum()) + (0.5 if splits else 1.0) * float(backward.sum())
    plain = _one_forward_one_backward(forward, backward, num_micro_batches, 0.0 * late)
    return max(busy + share * (plain - busy), path) + 2 * passes(schedule, waves) * float(late.sum())


def _one_forward_one_backward(forward: Floats, backward: Floats, num_micro_batches: int, delay: Floats) -> float:
    num_ranks = len(forward)
    if num_ranks == 1:
        return num_micro_batches * float(forward[0] + backward[0])
    settled = SETTLED * num_ranks
    if num_micro_batches > settled:
        whole = _one_forward_one_backward(forward, backward, settled, delay)
        pace = (whole - _one_forward_one_backward(forward, backward, settled - num_ranks, delay)) / num_ranks
        return whole + (num_micro_batches - settled) * pace
    ahead = np.arange(num_ranks - 1, -1, -1)
    free = np.zeros(num_ranks)  # when every rank ended what it last did
    arrived = np.zeros(num_ranks)  # when the input of every rank's next forward was there
    back = np.cumsum(backward[::-1])
    back[1:] += np.cumsum(delay[::-1])
    before = back - backward[::-1]
    for n in range(1 - num_ranks, num_micro_batches):
        here = (n + ahead >= 0) & (n + ahead < num_micro_batches)
        ends = np.where(here, np.maximum(free, arrived) + forward, free)
        arrived[1:] = ends[:-1] + delay
        free = (back + np.maximum.accumulate(ends[::-1] - before))[::-1] if n >= 0 else ends
    return float(free[0])
