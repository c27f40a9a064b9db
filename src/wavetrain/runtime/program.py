"""A schedule as one rank runs it: every action with the receives to post, the message to wait for and the message to send.

All of it is known before the step begins, and every rank derives it from the same schedule. Messages from one rank to another
keep the order in which the sender computes them; a receiver posts them in that order, however it uses them. So no tags are
needed, and what holds for the proof (:mod:`wavetrain.schedule.proof`) holds for the run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from wavetrain.errors import InputError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.schedule import Schedule


class Parcel(NamedTuple):
    """A message: the result of stage ``stage`` for ``micro_batch``, on its way from rank ``source`` to rank ``target``."""

    kind: Literal["F", "B"]
    """F: activations for the next stage. B: gradients for the one before."""
    stage: int
    micro_batch: int
    source: int
    target: int

    def describe(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


class Instruction(NamedTuple):
    """One action of a rank, and the messages around it."""

    action: Action
    post: tuple[Parcel, ...]
    """Receives to post before the action is waited for, in this order."""
    receive: Parcel | None
    """The message that the action needs, if it comes from another rank."""
    send: Parcel | None
    """The message that the action's result makes, if it goes to another rank."""
    arrived: int
    """How many of this rank's messages to ``receive.source`` have surely arrived once ``receive`` has: their memory is free
    again."""
    last_of_stage: bool
    """Whether the gradients of the stage (and route) are complete after it."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank does in a step."""

    rank: int
    schedule: Schedule
    instructions: tuple[Instruction, ...]
    channels: tuple[tuple[int, int], ...]
    """(source, target) of every pair of ranks of the whole schedule between which messages pass, in one order on all ranks."""
    num_buffers: int
    """The most receives that are posted and not yet used."""


def compile_program(schedule: Schedule, rank: int, *, receive_ahead: int = 0, prefetch: int = 2) -> Program:
    """The program of ``rank``.

    Args:
        schedule: what to run; the proof is the caller's.
        rank: the pipeline rank.
        receive_ahead: post the receives of at least this many actions beyond the next one, as the certificate asks for.
        prefetch: post up to this many receives a neighbour ahead of their use.
    """
    if not 0 <= rank < schedule.num_ranks:
        raise InputError(f"rank {rank} of a schedule for {schedule.num_ranks} ranks")
    outgoing: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
    for source, actions in enumerate(schedule.actions):
        for action in actions:
            if (parcel := _sent(schedule, action, source)) is not None:
                outgoing[source, parcel.target].append(parcel)
    incoming = {source: parcels for (source, target), parcels in outgoing.items() if target == rank}
    actions = schedule.actions[rank]
    needs = [_needed(schedule, action, rank) for action in actions]
    arrived = _known_arrivals(schedule, rank, outgoing, needs)
    posts, num_buffers = _place_posts(incoming, needs, receive_ahead, prefetch)
    last: dict[tuple[int, int], int] = {}
    for i, (kind, stage, micro_batch) in enumerate(actions):
        if kind in "BW":
            last[schedule.routes[micro_batch], stage] = i
    closing = set(last.values())
    return Program(
        rank=rank,
        schedule=schedule,
        instructions=tuple(
            Instruction(action, tuple(posts[i]), needs[i], _sent(schedule, action, rank), arrived[i], i in closing)
            for i, action in enumerate(actions)
        ),
        channels=tuple(sorted(outgoing)),
        num_buffers=num_buffers,
    )


def forward_only(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The forward actions of every rank, in the order of the schedule: what evaluation runs."""
    return tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule.actions)


def _place_posts(
    incoming: dict[int, list[Parcel]], needs: list[Parcel | None], receive_ahead: int, prefetch: int
) -> tuple[list[list[Parcel]], int]:
    """For every action the receives to post before it, and the most that are open at once.

    A receive is posted when the action that needs it, or one after it in the sender's order, is at most ``receive_ahead`` + 1
    actions away, and otherwise while fewer than ``prefetch`` from that neighbour are open.
    """
    place = {parcel: i for parcels in incoming.values() for i, parcel in enumerate(parcels)}
    posted = dict.fromkeys(incoming, 0)
    open_now = dict.fromkeys(incoming, 0)
    posts: list[list[Parcel]] = []
    most = 0
    ahead = 0  # every need before this action is posted
    for i, need in enumerate(needs):
        now: list[Parcel] = []

        def post(source: int, count: int, now: list[Parcel] = now) -> None:
            now.extend(incoming[source][posted[source] : count])
            open_now[source] += max(0, count - posted[source])
            posted[source] = max(posted[source], count)

        while ahead < min(len(needs), i + 2 + receive_ahead):
            wanted = needs[ahead]
            if wanted is not None:
                post(wanted.source, place[wanted] + 1)
            ahead += 1
        for source, parcels in incoming.items():
            post(source, min(len(parcels), posted[source] + prefetch - open_now[source]))
        posts.append(now)
        most = max(most, sum(open_now.values()))
        if need is not None:
            open_now[need.source] -= 1
    return posts, most


def _known_arrivals(
    schedule: Schedule, rank: int, outgoing: dict[tuple[int, int], list[Parcel]], needs: list[Parcel | None]
) -> list[int]:
    """For every action of ``rank``: how many messages its needed one's sender must have used before it could send that one."""
    used: dict[Parcel, int] = {}  # by a message to `rank`: messages of `rank` that its sender had used by then
    for (source, target), parcels in outgoing.items():
        if target != rank:
            continue
        order = {parcel: i for i, parcel in enumerate(outgoing.get((rank, source), ()))}
        wanted, count, seen = set(parcels), 0, set[int]()
        for action in schedule.actions[source]:
            need = _needed(schedule, action, source)
            if need is not None and need.source == rank:
                seen.add(order[need])
                while count in seen:
                    count += 1
            parcel = _sent(schedule, action, source)
            if parcel is not None and parcel in wanted:
                used[parcel] = count
    return [used[need] if need is not None else 0 for need in needs]


def _sent(schedule: Schedule, action: Action, rank: int) -> Parcel | None:
    kind, stage, mb = action
    if kind == "F" and stage + 1 < schedule.num_stages:
        target = schedule.rank_of(stage + 1, mb)
        return Parcel("F", stage, mb, rank, target) if target != rank else None
    if kind in "BI" and stage > 0:
        target = schedule.rank_of(stage - 1, mb)
        return Parcel("B", stage, mb, rank, target) if target != rank else None
    return None


def _needed(schedule: Schedule, action: Action, rank: int) -> Parcel | None:
    kind, stage, mb = action
    if kind == "F" and stage > 0:
        source = schedule.rank_of(stage - 1, mb)
        return Parcel("F", stage - 1, mb, source, rank) if source != rank else None
    if kind in "BI" and stage + 1 < schedule.num_stages:
        source = schedule.rank_of(stage + 1, mb)
        return Parcel("B", stage + 1, mb, source, rank) if source != rank else None
    return None
