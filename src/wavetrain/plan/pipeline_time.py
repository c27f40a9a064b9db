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

import numpy as np
from numpy.typing import NDArray

from wavetrain.errors import UnknownNameError

Floats = NDArray[np.float64]

_FILL = {"1f1b": 1.0, "dapple": 1.0, "gpipe": 1.0, "zb-h1": 1 / 3, "zbv": 1 / 3}
_FILL_BY_WAVES = {"interleaved": 1.0, "hanayo": 2 / 3, "zb-wave": 1 / 6}
SETTLED = 5
"""Times the number of ranks: micro-batches after which a pipeline runs at the pace of its slowest rank."""


def fill_share(schedule: str, waves: int) -> float:
    """The idle time of a schedule's fill and drain, as a share of 1F1B's, with F = I = W and free links."""
    if schedule in _FILL:
        return _FILL[schedule]
    if schedule in _FILL_BY_WAVES:
        return _FILL_BY_WAVES[schedule] / waves
    raise UnknownNameError("schedule to estimate", schedule, (*_FILL, *_FILL_BY_WAVES))


def passes(schedule: str, waves: int) -> int:
    """How often a micro-batch passes over the ranks, forward: so many messages cross between neighbours."""
    return (
        waves if schedule == "interleaved" else 2 * waves if schedule in ("hanayo", "zb-wave") else 2 if schedule == "zbv" else 1
    )


def pipeline_seconds(forward: Floats, backward: Floats, num_micro_batches: int, schedule: str = "1f1b", waves: int = 1) -> float:
    """Seconds of a step.

    Args:
        forward: of every rank for one micro-batch, its messages included, (num_ranks,).
        backward: likewise.
        num_micro_batches: B.
        schedule: its family.
        waves: waves, or stages a rank.
    """
    pace = float((forward + backward).max())
    share = fill_share(schedule, waves)
    busy = num_micro_batches * pace
    if schedule == "gpipe":
        return (num_micro_batches - 1) * float(forward.max() + backward.max()) + float((forward + backward).sum())
    return busy + share * (_one_forward_one_backward(forward, backward, num_micro_batches) - busy)


def _one_forward_one_backward(forward: Floats, backward: Floats, num_micro_batches: int) -> float:
    num_ranks = len(forward)
    if num_ranks == 1:
        return num_micro_batches * float(forward[0] + backward[0])
    settled = SETTLED * num_ranks
    if num_micro_batches > settled:
        pace = float((forward + backward).max())
        return _one_forward_one_backward(forward, backward, settled) + (num_micro_batches - settled) * pace
    ahead = np.arange(num_ranks - 1, -1, -1)
    free = np.zeros(num_ranks)  # when every rank ended what it last did
    arrived = np.zeros(num_ranks)  # when the input of every rank's next forward was there
    back = np.cumsum(backward[::-1])
    before = np.concatenate(([0.0], back[:-1]))
    for n in range(1 - num_ranks, num_micro_batches):
        here = (n + ahead >= 0) & (n + ahead < num_micro_batches)
        ends = np.where(here, np.maximum(free, arrived) + forward, free)
        arrived[1:] = ends[:-1]
        free = (back + np.maximum.accumulate(ends[::-1] - before))[::-1] if n >= 0 else ends
    return float(free[0])
