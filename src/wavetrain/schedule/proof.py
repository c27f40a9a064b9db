"""The proof: whether a schedule can run, before it is launched.

What is shown of a schedule that gets a certificate:

1. every action of every stage and micro-batch comes exactly once, on the rank of its stage;
2. nothing waits for what comes only later: the order has no deadlock;
3. that stays true when every send blocks until its receive is posted, and messages between two ranks keep their order. A rank is
   taken to post, together with the sends of the action it has just done, the receives of its next action and of
   ``receive_ahead`` more; the certificate holds the least such number;
4. the exact peak of activations on every rank, and that it is within the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from wavetrain.errors import InputError, ProofError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.graph import Graph, replay, schedule_graph
from wavetrain.schedule.schedule import Schedule

Reason: TypeAlias = Literal["unknown action", "wrong rank", "missing", "duplicate", "deadlock", "memory"]

CAP_TOLERANCE: Final = 1e-9
"""Relative slack when bytes held are compared with a cap: sums of floats."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Rank ``rank`` stands before ``action``, which needs ``needs`` first."""

    rank: int
    action: Action
    needs: Action
    needs_rank: int

    def __str__(self) -> str:
        if self.needs_rank == self.rank:
            return f"rank {self.rank} stands before {self.action.describe()}, and does {self.needs.describe()}, only later"
        need = f"for which rank {self.needs_rank} must first do {self.needs.describe()}"
        return f"rank {self.rank} stands before {self.action.describe()}, {need}"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a schedule cannot run."""

    reason: Reason
    message: str
    rank: int | None = None
    action: Action | None = None
    cycle: tuple[Wait, ...] = ()
    """For a deadlock: who waits for whom, the last for the first."""

    proven: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.message

    def require(self) -> Certificate:
        """Raise :class:`ProofError`: there is no certificate."""
        raise ProofError(self)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What is known of a schedule that can run."""

    num_actions: int
    num_messages: int
    """Messages that cross ranks in a step."""
    receive_ahead: int
    """Actions beyond the next one whose receives a rank must have posted so that no blocking send can deadlock."""
    receive_buffers: tuple[int, ...]
    """The most receives that are posted and not yet used at any moment under ``receive_ahead``, (num_ranks,)."""
    peak_counts: tuple[int, ...]
    """The most stage activations each rank holds at any moment, (num_ranks,)."""
    peak_bytes: tuple[float, ...]
    """The most bytes of activations each rank holds at any moment, (num_ranks,)."""
    peak_activations: tuple[float, ...]
    """``peak_bytes`` in micro-batches of a rank's share, (num_ranks,)."""
    weight_copies: int
    """Copies of every stage's weights over all ranks: one a route."""

    proven: ClassVar[bool] = True

    def require(self) -> Certificate:
        """Return the certificate itself."""
        return self


def prove(schedule: Schedule, costs: Costs | None = None) -> Certificate | Refusal:
    """A certificate that ``schedule`` can run, or the reason why it cannot.

    ``prove(...).require()`` raises :class:`wavetrain.errors.ProofError` where there is no certificate.
    """
    if costs is not None and costs.num_ranks != schedule.num_ranks:
        raise InputError(f"the schedule has {schedule.num_ranks} ranks, but the costs are for {costs.num_ranks}")
    refusal = check_actions(schedule)
    if refusal is not None:
        return refusal
    graph, orders = schedule_graph(schedule, costs or Costs.uniform(schedule.num_ranks))
    start, _, _ = replay(graph, orders)
    if any(order and start[order[-1]] < 0.0 for order in orders):
        return explain_deadlock(schedule)
    over, peak_counts, peak_bytes = _memory(schedule, graph, orders)
    if over is not None:
        return over
    inbox = _Inbox.of(graph, orders)
    ahead = _least_ahead(graph, orders, inbox)
    return Certificate(
        num_actions=schedule.num_actions,
        num_messages=sum(inbox.counts.values()),
        receive_ahead=ahead,
        receive_buffers=_receive_buffers(orders, inbox, ahead),
        peak_counts=peak_counts,
        peak_bytes=peak_bytes,
        peak_activations=tuple(
            round(p / share, 9) if share > 0 else 0.0 for p, share in zip(peak_bytes, graph.share, strict=True)
        ),
        weight_copies=schedule.num_routes,
    )


def check_actions(schedule: Schedule) -> Refusal | None:
    """Refuse actions that do not exist, sit on the wrong rank, come twice, or are missing."""
    num_stages, num_mb = schedule.num_stages, schedule.num_micro_batches
    plane = num_stages * num_mb
    seen = {kind: bytearray(plane) for kind in "FBIW"}
    placements, routes = schedule.placements, schedule.routes
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            kind, stage, mb = action
            if not (0 <= stage < num_stages and 0 <= mb < num_mb):
                return Refusal(
                    reason="unknown action",
                    rank=rank,
                    action=action,
                    message=f"rank {rank} is to do {action.describe()}, "
                    f"but there are only stages 0..{num_stages - 1} and micro-batches 0..{num_mb - 1}",
                )
            home = placements[routes[mb]][stage]
            if home != rank:
                return Refusal(
                    reason="wrong rank",
                    rank=rank,
                    action=action,
                    message=f"rank {rank} is to do {action.describe()}, but that stage is placed on rank {home}",
                )
            table, at = seen[kind], stage * num_mb + mb
            if table[at]:
                return Refusal(
                    reason="duplicate", rank=rank, action=action, message=f"rank {rank} is to do {action.describe()}, twice"
                )
            table[at] = 1
    f, b, i, w = (seen[kind] for kind in "FBIW")
    complete = b"\x01" * plane
    if f == complete and i == w and bytes(x ^ y for x, y in zip(b, i, strict=True)) == complete:
        return None
    return _first_missing(schedule, f, b, i, w)


def _first_missing(schedule: Schedule, f: bytearray, b: bytearray, i: bytearray, w: bytearray) -> Refusal:
    num_mb = schedule.num_micro_batches
    for at in range(schedule.num_stages * num_mb):
        stage, mb = divmod(at, num_mb)
        rank = schedule.rank_of(stage, mb)

        def missing(action: Action, why: str = "", rank: int = rank) -> Refusal:
            return Refusal(reason="missing", rank=rank, action=action, message=f"rank {rank} never does {action.describe()}{why}")

        if not f[at]:
            return missing(Action("F", stage, mb))
        if b[at] and (i[at] or w[at]):
            half = Action("I" if i[at] else "W", stage, mb)
            return Refusal(
                reason="duplicate",
                rank=rank,
                action=half,
                message=f"rank {rank} is to do {half.describe()}, although B of the same does the whole backward",
            )
        if not (b[at] or i[at] or w[at]):
            return missing(Action("B", stage, mb), " (nor I and W)")
        if not b[at] and not i[at]:
            return missing(Action("I", stage, mb), ", although it does W")
        if not b[at] and not w[at]:
            return missing(Action("W", stage, mb), ", although it does I")
    raise AssertionError("nothing is missing")


def explain_deadlock(schedule: Schedule) -> Refusal:
    """The refusal of a schedule whose actions are complete but cannot all run: who waits for whom."""
    graph, orders = schedule_graph(schedule, Costs.uniform(schedule.num_ranks))
    start, _, _ = replay(graph, orders)
    plane = graph.num_stages * graph.num_micro_batches
    whole = {graph.node(a) for actions in schedule.actions for a in actions if a.kind == "B"}
    stuck = {r: next(n for n in order if start[n] < 0) for r, order in enumerate(orders) if order and start[order[-1]] < 0}

    def need_of(node: int) -> int:
        if node >= plane and start[node - plane] < 0:
            return node - plane
        return node - graph.num_micro_batches if node < plane else node + graph.num_micro_batches

    waits: list[Wait] = []
    rank, seen = min(stuck), dict[int, int]()
    while rank not in seen:
        seen[rank] = len(waits)
        node = stuck[rank]
        need = need_of(node)
        waits.append(
            Wait(
                rank=rank,
                action=graph.action(node, node in whole),
                needs=graph.action(need, need in whole),
                needs_rank=graph.rank[need],
            )
        )
        rank = graph.rank[need]
    cycle = waits[seen[rank] :]
    turn = next(i for i, w in enumerate(cycle) if cycle[i - 1].needs != w.action)  # begin where a rank's own order is to blame
    cycle = [*cycle[turn:], *cycle[:turn]]
    first = cycle[0]
    if first.needs_rank == first.rank:
        text = f"rank {first.rank} does {first.action.describe()}, before {first.needs.describe()}, which it needs"
    else:
        text, wanted = f"rank {first.rank} waits for {first.needs.describe()}, ", first.needs
        for w in cycle[1:]:
            after = f"which rank {w.rank} does only after {w.action.describe()}, which"
            before = after if w.action != wanted else f"which on rank {w.rank}"
            text, wanted = f"{text}{before} needs {w.needs.describe()}, ", w.needs
        text += f"which rank {first.rank} does only after {first.action.describe()}"
    return Refusal(reason="deadlock", rank=first.rank, action=first.action, cycle=tuple(cycle), message=f"deadlock: {text}")


def _memory(
    schedule: Schedule, graph: Graph, orders: Sequence[Sequence[int]]
) -> tuple[Refusal | None, tuple[int, ...], tuple[float, ...]]:
    """Peaks per rank, and a refusal at the first action that passes a cap."""
    held, plane = graph.held, graph.num_stages * graph.num_micro_batches
    counts, peaks, refusal = [], [], None
    for r, order in enumerate(orders):
        now = peak = 0.0
        count = most = 0
        limit = graph.cap[r] * (1 + CAP_TOLERANCE)
        actions = schedule.actions[r]
        for at, n in enumerate(order):
            now += held[n]
            if n < plane:
                count += 1
                if count > most:
                    most = count
                if now > peak:
                    peak = now
                    if now > limit and refusal is None:
                        refusal = Refusal(
                            reason="memory",
                            rank=r,
                            action=actions[at],
                            message=f"rank {r} holds {_shares(now, graph.share[r])} at {actions[at].describe()}, "
                            f"above its cap of {_shares(graph.cap[r], graph.share[r])}",
                        )
            elif n >= 2 * plane or actions[at].kind == "B":
                count -= 1
        counts.append(most)
        peaks.append(peak)
    return refusal, tuple(counts), tuple(peaks)


def _shares(held: float, share: float) -> str:
    """In micro-batches where activations are counted in them (a share of about 1), else in bytes; the same for held and cap."""
    return f"{held / share:.6g} micro-batches" if 0 < share < 1e3 else f"{held:.6g} bytes"


@dataclass(frozen=True)
class _Inbox:
    """Which message each node waits for: the index-th of a pair of ranks (source · P + target)."""

    pair: list[int]
    """By node; −1 where it waits for none."""
    index: list[int]
    counts: dict[int, int]
    """Messages, by pair that has any."""

    @classmethod
    def of(cls, graph: Graph, orders: Sequence[Sequence[int]]) -> _Inbox:
        rank, consumer, num_ranks = graph.rank, graph.consumer, graph.num_ranks
        pair, index, counts = [-1] * graph.size, [0] * graph.size, dict[int, int]()
        for r, order in enumerate(orders):
            first = r * num_ranks
            for n in order:
                c = consumer[n]
                if c >= 0 and rank[c] != r:
                    p = first + rank[c]
                    count = counts.get(p, 0)
                    pair[c], index[c], counts[p] = p, count, count + 1
        return cls(pair, index, counts)


def _least_ahead(graph: Graph, orders: Sequence[Sequence[int]], inbox: _Inbox) -> int:
    """The least number of actions to post receives ahead; the orders are known to have no cycle.

    All ranks go as far as they can when sends block until the receive is posted. Where all stand, receives are posted one
    action further ahead and they go on from there: with more posted no rank gets less far, so that nothing has to be done again.
    """
    num_ranks, consumer = graph.num_ranks, graph.consumer
    pair_of, index_of = inbox.pair, inbox.index
    posted, sent = dict.fromkeys(inbox.counts, 0), dict.fromkeys(inbox.counts, 0)
    position, window = [0] * num_ranks, [0] * num_ranks
    sends_on, receives_on = [-1] * num_ranks, [-1] * num_ranks  # the pair for which a rank waits
    ahead, unfinished = 0, set(range(num_ranks))
    while True:
        queue = list(unfinished)
        for r in queue:
            sends_on[r] = receives_on[r] = -1
        while queue:
            r = queue.pop()
            order, at, edge = orders[r], position[r], window[r]
            count = len(order)
            while True:
                # at stands between the action before `at` and the one at `at`: post receives, then finish the send
                last = at + ahead + 1
                if last > count:
                    last = count
                while edge < last:
                    n = order[edge]
                    edge += 1
                    p = pair_of[n]
                    if p >= 0 and posted[p] <= index_of[n]:
                        posted[p] = index_of[n] + 1
                        source = p // num_ranks
                        if sends_on[source] == p:
                            sends_on[source] = -1
                            queue.append(source)
                if at > 0:
                    c = consumer[order[at - 1]]
                    p = pair_of[c] if c >= 0 else -1
                    if p >= 0:  # the one that waits for this message waits for no other
                        index = index_of[c]
                        if posted[p] <= index:
                            sends_on[r] = p
                            break
                        if sent[p] <= index:
                            sent[p] = index + 1
                            target = p % num_ranks
                            if receives_on[target] == p:
                                receives_on[target] = -1
                                queue.append(target)
                if at == count:
                    unfinished.discard(r)
                    break
                n = order[at]
                p = pair_of[n]
                if p >= 0 and sent[p] <= index_of[n]:
                    receives_on[r] = p
                    break
                at += 1
            position[r], window[r] = at, edge
        if not unfinished:
            return ahead
        ahead += 1
        assert ahead <= max(len(order) for order in orders), "with every receive posted, orders without a cycle complete"


def _receive_buffers(orders: Sequence[Sequence[int]], inbox: _Inbox, ahead: int) -> tuple[int, ...]:
    """Receives posted and not yet used, at their most, by rank. A receive implies those before it on the same pair."""
    pair_of, index_of = inbox.pair, inbox.index
    posted = dict.fromkeys(inbox.counts, 0)
    found = []
    for order in orders:
        held = most = edge = 0
        count = len(order)
        for at, n in enumerate(order):
            last = at + ahead + 1
            if last > count:
                last = count
            while edge < last:
                p = pair_of[order[edge]]
                if p >= 0:
                    new = index_of[order[edge]] + 1 - posted[p]
                    if new > 0:
                        held += new
                        posted[p] += new
                edge += 1
            if held > most:
                most = held
            if pair_of[n] >= 0:
                held -= 1
        found.append(most)
    return tuple(found)
