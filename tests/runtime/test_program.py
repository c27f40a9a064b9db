"""Programs: what every rank is told fits together, whatever the schedule and however the ranks are interleaved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.random_schedules import random_schedule, randoms
from wavetrain.errors import InputError
from wavetrain.runtime.program import Parcel, Program, compile_program, forward_only
from wavetrain.schedule.families import build
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule

FAMILIES = ["gpipe", "1f1b", "interleaved", "chimera", "hanayo", "zb-h1", "zb-h2", "zbv", "dualpipev", "zb-wave"]


def make(name: str, num_ranks: int, num_micro_batches: int, waves: int) -> Schedule:
    """A schedule of any family; counts that it cannot take are made such as it can."""
    if name == "chimera":
        num_ranks, num_micro_batches = 2 * (num_ranks // 2) or 2, 2 * (num_micro_batches // 2) or 2
    if name == "dualpipev":
        num_micro_batches = max(num_micro_batches, 2 * num_ranks)
    options = (
        {"waves": waves} if name in ("hanayo", "zb-wave") else {"stages_per_rank": 1 + waves} if name == "interleaved" else {}
    )
    return build(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, **options)  # type: ignore[arg-type]


def programs_of(schedule: Schedule, *, receive_ahead: int | None = None) -> list[Program]:
    ahead = prove(schedule).require().receive_ahead if receive_ahead is None else receive_ahead
    return [compile_program(schedule, rank, receive_ahead=ahead) for rank in range(schedule.num_ranks)]


class Run:
    """A step of all ranks in some interleaving, with channels that keep their order.

    Args:
        programs: of all ranks.
        blocking: whether every send waits until its receive is posted. Ours do not, but the proof holds for such as well.
        learning: whether shapes are new, every one: then a message is only taken when its receiver waits for it.
    """

    def __init__(self, programs: Sequence[Program], *, blocking: bool = False, learning: bool = False) -> None:
        self.programs, self.blocking, self.learning = programs, blocking, learning
        self.sent: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self.waiting: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self.posted: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self.used: dict[tuple[int, int], set[Parcel]] = defaultdict(set)
        self.place = [0] * len(programs)
        self.phase = ["post"] * len(programs)
        self.most_open = 0

    def taken(self, channel: tuple[int, int]) -> int:
        return min(len(self.sent[channel]), len(self.posted[channel]))

    def advance(self, rank: int) -> bool:
        """Take ``rank`` one phase further, if nothing holds it."""
        instructions = self.programs[rank].instructions
        if self.place[rank] == len(instructions):
            if self.phase[rank] != "end" and all(
                self.taken(c) == len(parcels) for c, parcels in self.sent.items() if c[0] == rank
            ):
                self.phase[rank] = "end"
                return True
            return False
        instruction = instructions[self.place[rank]]
        need, made = instruction.receive, instruction.send
        if self.phase[rank] == "post":
            for parcel in instruction.post:
                assert parcel.target == rank
                channel = (parcel.source, rank)
                self.waiting[channel].append(parcel)
                if not self.learning:
                    self.posted[channel].append(parcel)
            opened = sum(len(posted) - len(self.used[c]) for c, posted in self.waiting.items() if c[1] == rank)
            self.most_open = max(self.most_open, opened)
            self.phase[rank] = "receive"
            return True
        if self.phase[rank] == "receive":
            if need is not None:
                channel = (need.source, rank)
                assert need in self.waiting[channel], "posted before it is waited for"
                moved = False
                while need not in self.posted[channel]:  # learn what comes first
                    if len(self.sent[channel]) <= len(self.posted[channel]):
                        return moved
                    self.posted[channel].append(self.waiting[channel][len(self.posted[channel])])
                    moved = True
                if len(self.sent[channel]) <= self.posted[channel].index(need):
                    return moved
                self.used[channel].add(need)
                back = (rank, need.source)
                told = self.sent[back][: instruction.arrived]
                assert len(told) == instruction.arrived
                assert self.used[back].issuperset(told), "told to be there before it is"
            self.phase[rank] = "send"
            return True
        if self.phase[rank] == "send":
            if made is not None:
                self.sent[rank, made.target].append(made)
            self.phase[rank] = "sent"
            return True
        if self.blocking and made is not None and len(self.sent[rank, made.target]) > self.taken((rank, made.target)):
            return False
        self.place[rank] += 1
        self.phase[rank] = "post"
        return True

    def to_the_end(self, random: Random) -> None:
        ranks = list(range(len(self.programs)))
        while True:
            random.shuffle(ranks)
            favourite = ranks[0]  # runs as far as it can before others get a turn
            moved = False
            while self.advance(favourite):
                moved = True
            for rank in ranks[1:]:
                moved = self.advance(rank) or moved
            if not moved:
                break
        stuck = [
            f"rank {r} before {p.instructions[i].action}"
            for r, (p, i) in enumerate(zip(self.programs, self.place, strict=True))
            if i < len(p.instructions)
        ]
        assert not stuck, f"deadlock: {', '.join(stuck)}"
        assert self.phase == ["end"] * len(self.programs), "deadlock at the end"
        for channel, parcels in self.sent.items():
            assert parcels == self.posted[channel], "received in the order in which they are sent"
            assert set(parcels) == self.used[channel]


def check(schedule: Schedule, programs: Sequence[Program], random: Random, *, blocking: bool) -> None:
    for rank, program in enumerate(programs):
        assert tuple(i.action for i in program.instructions) == schedule.actions[rank]
        for instruction in program.instructions:
            kind, stage, mb = instruction.action
            if instruction.send is not None:
                assert instruction.send == ("F" if kind == "F" else "B", stage, mb, rank, instruction.send.target)
                assert schedule.rank_of(stage + (1 if kind == "F" else -1), mb) == instruction.send.target != rank
            if instruction.receive is not None:
                before = stage - 1 if kind == "F" else stage + 1
                assert instruction.receive == ("F" if kind == "F" else "B", before, mb, instruction.receive.source, rank)
                assert schedule.rank_of(before, mb) == instruction.receive.source != rank
    sends = [i.send for p in programs for i in p.instructions if i.send is not None]
    receives = [i.receive for p in programs for i in p.instructions if i.receive is not None]
    posts = [parcel for p in programs for i in p.instructions for parcel in i.post]
    assert len(set(sends)) == len(sends), "every message is sent once"
    assert sorted(sends) == sorted(receives) == sorted(posts)
    assert {p.channels for p in programs} == {tuple(sorted({(s.source, s.target) for s in sends}))}
    for run in (Run(programs), Run(programs, learning=True), *([Run(programs, blocking=True)] if blocking else [])):
        run.to_the_end(random)
        assert run.most_open <= max(p.num_buffers for p in programs)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), randoms())
def test_programs_of_all_families(name: str, num_ranks: int, num_micro_batches: int, waves: int, random: Random) -> None:
    schedule = make(name, num_ranks, num_micro_batches, waves)
    check(schedule, programs_of(schedule), random, blocking=True)


@settings(max_examples=100, deadline=None)
@given(randoms(), st.integers(1, 2))
def test_programs_of_random_schedules(random: Random, num_routes: int) -> None:
    schedule = random_schedule(random, num_routes=num_routes)
    check(schedule, programs_of(schedule), random, blocking=True)
    forward = replace(schedule, actions=forward_only(schedule))
    check(forward, programs_of(forward, receive_ahead=0), random, blocking=False)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), randoms())
def test_evaluation_has_no_deadlock(name: str, num_ranks: int, num_micro_batches: int, waves: int, random: Random) -> None:
    schedule = make(name, num_ranks, num_micro_batches, waves)
    forward = replace(schedule, actions=forward_only(schedule))
    assert all(action.kind == "F" for actions in forward.actions for action in actions)
    assert forward.num_actions == schedule.num_stages * schedule.num_micro_batches
    programs = programs_of(forward, receive_ahead=0)
    assert not any(i.last_of_stage for p in programs for i in p.instructions)
    check(forward, programs, random, blocking=False)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 8), st.integers(1, 16), st.integers(1, 3))
def test_few_buffers(name: str, num_ranks: int, num_micro_batches: int, waves: int) -> None:
    """Two messages a neighbour and direction, and what the certificate asks for beyond that."""
    schedule = make(name, num_ranks, num_micro_batches, waves)
    ahead = prove(schedule).require().receive_ahead
    for program in programs_of(schedule):
        neighbours = sum(target == program.rank for _, target in program.channels)
        out_of_order = max(
            (_overtaken(program, source) for source, target in program.channels if target == program.rank), default=0
        )
        assert program.num_buffers <= neighbours * (2 + out_of_order) + ahead + 1


def _overtaken(program: Program, source: int) -> int:
    """The most messages of ``source`` that wait while one sent after them is used."""
    used = [i.receive for i in program.instructions if i.receive is not None and i.receive.source == source]
    order = [p for i in program.instructions for p in i.post if p.source == source]
    return max((sum(later in order[: order.index(p)] for later in used[n:]) for n, p in enumerate(used)), default=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_complete_after_the_last_of_a_stage(name: str) -> None:
    schedule = make(name, 4, 8, 2)
    for program in programs_of(schedule):
        left: dict[tuple[int, int], int] = defaultdict(int)
        for (kind, stage, mb), *_ in program.instructions:
            left[schedule.routes[mb], stage] += kind in "BW"
        for instruction in program.instructions:
            kind, stage, mb = instruction.action
            key = (schedule.routes[mb], stage)
            left[key] -= kind in "BW"
            assert instruction.last_of_stage == (kind in "BW" and left[key] == 0)


def test_what_1f1b_does_on_the_second_of_two_ranks() -> None:
    """The receives of the next two micro-batches are posted before the first is computed; its memory is free again soon."""
    first, second = programs_of(build("1f1b", num_ranks=2, num_micro_batches=3))
    told = [(str(i.action), [str(p.micro_batch) for p in i.post], i.arrived) for i in second.instructions]
    assert told == [
        ("1F0", ["0", "1"], 0),
        ("1B0", ["2"], 0),
        ("1F1", [], 0),
        ("1B1", [], 0),
        ("1F2", [], 1),
        ("1B2", [], 0),
    ]
    assert [i.arrived for i in first.instructions if i.receive is not None] == [1, 2, 3]
    assert second.num_buffers == 2


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(InputError, match="rank 2 of a schedule for 2 ranks"):
        compile_program(build("1f1b", num_ranks=2, num_micro_batches=2), 2)
