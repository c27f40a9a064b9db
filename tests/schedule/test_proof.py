from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_costs, random_schedule, randoms
from wavetrain.errors import InputError, ProofError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.proof import Certificate, Reason, Refusal, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.torch_csv import read_token


def rows(*lines: str, placement: Placement, micro_batches: int) -> Schedule:
    """A schedule from words like ``0F0``."""
    actions = []
    for line in lines:
        row = []
        for word in line.split():
            stage, kind, mb = read_token(word)
            row.append(Action(kind, stage, mb))  # type: ignore[arg-type]
        actions.append(row)
    return Schedule.single_route("by hand", placement, micro_batches, actions)


def refused(schedule: Schedule, costs: Costs | None = None) -> Refusal:
    found = prove(schedule, costs)
    assert isinstance(found, Refusal)
    assert not found.proven
    with pytest.raises(ProofError, match=re.escape(found.message)):
        found.require()
    return found


def proven(schedule: Schedule, costs: Costs | None = None) -> Certificate:
    found = prove(schedule, costs)
    assert isinstance(found, Certificate), found
    return found.require()


TWO = (0, 1)


def test_one_rank_needs_no_message() -> None:
    certificate = proven(rows("0F0 0I0 0W0 0F1 0B1", placement=(0,), micro_batches=2))
    assert certificate.num_actions == 5
    assert certificate.num_messages == certificate.receive_ahead == 0
    assert certificate.peak_counts == (1,)
    assert certificate.receive_buffers == (0,)


@pytest.mark.parametrize(
    ("lines", "reason", "rank", "action", "words"),
    [
        (("0F0 0B0 0B1", "1F0 1F1 1B0 1B1"), "missing", 0, Action("F", 0, 1), "rank 0 never does F of stage 0, micro-batch 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0"), "missing", 1, Action("B", 1, 1), "nor I and W"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1I1"), "missing", 1, Action("W", 1, 1), "although it does I"),
        (("0F0 0F1 0B0 0W1", "1F0 1F1 1B0 1B1"), "missing", 0, Action("I", 0, 1), "although it does W"),
        (("0F0 0F1 0F0 0B0 0B1", "1F0 1F1 1B0 1B1"), "duplicate", 0, Action("F", 0, 0), "twice"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 1I1"), "duplicate", 1, Action("I", 1, 1), "does the whole backward"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 1W1"), "duplicate", 1, Action("W", 1, 1), "does the whole backward"),
        (("0F0 0F1 0B0 0B1 1F0", "1F1 1B0 1B1"), "wrong rank", 0, Action("F", 1, 0), "placed on rank 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 2F0"), "unknown action", 1, Action("F", 2, 0), "only stages 0..1"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1F2 1B0 1B1"), "unknown action", 1, Action("F", 1, 2), "micro-batches 0..1"),
        ((), "missing", 0, Action("F", 0, 0), "never does"),
    ],
)
def test_incomplete_actions_are_refused(lines: tuple[str, ...], reason: Reason, rank: int, action: Action, words: str) -> None:
    found = refused(rows(*(lines or ("", "")), placement=TWO, micro_batches=2))
    assert (found.reason, found.rank, found.action) == (reason, rank, action)
    assert words in found.message


def test_deadlock_within_a_rank() -> None:
    found = refused(rows("0F0 0B1 0B0 0F1", "1F0 1B0 1F1 1B1", placement=TWO, micro_batches=2))
    assert found.reason == "deadlock"
    assert found.message == (
        "deadlock: rank 0 does B of stage 0, micro-batch 1, before F of stage 0, micro-batch 1, which it needs"
    )


def test_weight_gradient_before_input_gradient() -> None:
    found = refused(rows("0F0 0W0 0I0", placement=(0,), micro_batches=1))
    assert found.reason == "deadlock"
    assert [(w.action, w.needs) for w in found.cycle] == [(Action("W", 0, 0), Action("I", 0, 0))]


def test_deadlock_between_two_ranks_names_the_cycle() -> None:
    found = refused(rows("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", placement=TWO, micro_batches=2))
    assert found.reason == "deadlock"
    assert [(w.rank, str(w.action), str(w.needs), w.needs_rank) for w in found.cycle] == [
        (0, "0B0", "1B0", 1),
        (1, "1F1", "0F1", 0),
    ]
    assert found.message == (
        "deadlock: rank 0 waits for B of stage 1, micro-batch 0, which rank 1 does only after F of stage 1, micro-batch 1, "
        "which needs F of stage 0, micro-batch 1, which rank 0 does only after B of stage 0, micro-batch 0"
    )


def test_deadlock_between_three_ranks_names_the_cycle() -> None:
    # rank 0 goes backward through stage 0 before stage 3; ranks 1 and 2 stand before the very action that is waited for
    found = refused(rows("0F0 3F0 0B0 3B0", "1F0 1B0", "2F0 2B0", placement=(0, 1, 2, 0), micro_batches=1))
    assert found.reason == "deadlock"
    assert [(w.rank, str(w.action), str(w.needs)) for w in found.cycle] == [
        (0, "0B0", "1B0"),
        (1, "1B0", "2B0"),
        (2, "2B0", "3B0"),
    ]
    for wait in found.cycle:
        assert f"rank {wait.rank}" in found.message
        assert wait.needs.describe() in found.message
    assert not re.search(r"([FBIW] of stage \d, micro-batch \d), which rank \d does only after \1", found.message)


def test_a_rank_outside_the_cycle_is_not_blamed() -> None:
    lines = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1")
    found = refused(rows(*lines, placement=(0, 1, 2), micro_batches=2))
    assert {w.rank for w in found.cycle} == {1, 2}


@settings(deadline=None)
@given(randoms())
def test_shuffled_orders_are_refused_only_where_nothing_can_run(random: Random) -> None:
    schedule = random_schedule(random)
    rank = random.randrange(schedule.num_ranks)
    row = list(schedule.actions[rank])
    random.shuffle(row)
    shuffled = replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))
    found = prove(shuffled, random_costs(random, shuffled))
    assert found.proven == runs_to_its_end(shuffled)
    if isinstance(found, Refusal):
        assert found.reason == "deadlock"
        assert found.cycle
        for wait, following in zip(found.cycle, (*found.cycle[1:], found.cycle[0]), strict=True):
            order = shuffled.actions[following.rank]
            assert wait.needs_rank == following.rank
            assert order.index(following.action) <= order.index(wait.needs)
        assert not re.search(r"([FBIW] of stage \d, micro-batch \d), which rank \d does only after \1", found.message)


def needs_of(schedule: Schedule, action: Action) -> list[Action]:
    """What must be done before ``action``, from the definition."""
    present = {a for row in schedule.actions for a in row}
    kind, stage, mb = action
    if kind == "F":
        wanted = [Action("F", stage - 1, mb)]
    elif kind == "W":
        wanted = [Action("I", stage, mb)]
    else:
        wanted = [Action("F", stage, mb), Action("B", stage + 1, mb), Action("I", stage + 1, mb)]
    return [a for a in wanted if a in present]


def runs_to_its_end(schedule: Schedule) -> bool:
    done: set[Action] = set()
    at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(schedule.actions):
            while at[r] < len(row) and all(a in done for a in needs_of(schedule, row[at[r]])):
                done.add(row[at[r]])
                at[r] += 1
                moved = True
    return len(done) == schedule.num_actions


def rendezvous_completes(schedule: Schedule, ahead: int) -> bool:
    """Whether all ranks reach their end if every send blocks: each rank a list of posts, sends and waits, run naively."""
    home = {a: r for r, row in enumerate(schedule.actions) for a in row}
    channel: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    source: dict[Action, Action] = {}
    outgoing: dict[Action, Action] = {}
    for r, row in enumerate(schedule.actions):
        for a in row:
            for target, sources in ((t, needs_of(schedule, t)) for t in home if a in needs_of(schedule, t)):
                if home[target] != r:
                    assert a in sources
                    channel.setdefault((r, home[target]), []).append((a, target))
                    source[target], outgoing[a] = a, target
    programs: list[list[tuple[str, Action]]] = []
    for row in schedule.actions:
        program: list[tuple[str, Action]] = []
        posted = 0
        for at in range(len(row) + 1):
            while posted < len(row) and posted <= at + ahead:
                program.append(("post", row[posted]))
                posted += 1
            if at > 0:
                program.append(("send", row[at - 1]))
            if at < len(row):
                program.append(("wait", row[at]))
        programs.append(program)
    posts: set[Action] = set()
    sent: set[Action] = set()
    at_step = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for r, program in enumerate(programs):
            while at_step[r] < len(program):
                what, action = program[at_step[r]]
                if what == "post" and action in source:
                    pair = channel[home[source[action]], r]
                    upto = [t for _, t in pair].index(action)
                    posts.update(t for _, t in pair[: upto + 1])  # messages keep their order, so earlier ones need a place too
                elif what == "send" and action in outgoing:
                    if outgoing[action] not in posts:
                        break
                    sent.add(action)
                elif what == "wait" and action in source and source[action] not in sent:
                    break
                at_step[r] += 1
                moved = True
    return all(at == len(program) for at, program in zip(at_step, programs, strict=True))


@settings(deadline=None, max_examples=150)
@given(randoms())
def test_receive_ahead_is_the_least_that_never_deadlocks(random: Random) -> None:
    schedule = random_schedule(random, max_ranks=3)
    ahead = proven(schedule, random_costs(random, schedule)).receive_ahead
    assert rendezvous_completes(schedule, ahead)
    if ahead:
        assert not rendezvous_completes(schedule, ahead - 1)


def test_crossing_sends_need_receives_ahead() -> None:
    # both ranks send, and receive only after one more action
    lines = ("0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    schedule = rows(*lines, placement=(0, 1, 1, 0), micro_batches=2)
    ahead = proven(schedule).receive_ahead
    assert [rendezvous_completes(schedule, a) for a in range(ahead + 2)] == [False] * ahead + [True] * 2


@settings(deadline=None)
@given(randoms())
def test_peaks_and_messages_equal_a_count_of_their_own(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    costs = random_costs(random, schedule)
    certificate = proven(schedule, costs)
    for r, row in enumerate(schedule.actions):
        held: dict[tuple[int, int], float] = {}
        most, most_count = 0.0, 0
        for kind, stage, mb in row:
            size = costs.activation_bytes[stage]
            if kind == "F":
                held[stage, mb] = size
                most, most_count = max(most, sum(held.values())), max(most_count, len(held))
            elif kind == "I":
                held[stage, mb] = size * (1 - costs.input_release)
            else:
                del held[stage, mb]
        assert certificate.peak_bytes[r] == pytest.approx(most)
        assert certificate.peak_counts[r] == most_count
    hops = sum(p[s] != p[s + 1] for mb in range(schedule.num_micro_batches) for p in [schedule.placements[schedule.routes[mb]]]
               for s in range(schedule.num_stages - 1))  # fmt: skip
    assert certificate.num_messages == 2 * hops
    assert certificate.weight_copies == schedule.num_routes


@settings(deadline=None)
@given(randoms())
def test_the_exact_peak_is_the_least_cap_that_is_proven(random: Random) -> None:
    schedule = random_schedule(random)
    costs = random_costs(random, schedule)
    peaks = proven(schedule, costs).peak_bytes
    caps = tuple(p if p > 0 else math.inf for p in peaks)
    assert proven(schedule, replace(costs, memory_cap=caps)).peak_bytes == peaks
    rank = max(range(schedule.num_ranks), key=lambda r: peaks[r])
    if peaks[rank] > 0:
        short = replace(costs, memory_cap=tuple(c * 0.999 if r == rank else c for r, c in enumerate(caps)))
        found = refused(schedule, short)
        assert (found.reason, found.rank) == ("memory", rank)
        assert found.action is not None
        assert found.action.kind == "F"
        assert f"rank {rank} holds" in found.message


def test_memory_above_the_cap_is_said_in_micro_batches() -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", placement=TWO, micro_batches=2)
    found = refused(schedule, Costs.uniform(2, memory_cap=1.5))
    assert found.message == "rank 0 holds 2 micro-batches at F of stage 0, micro-batch 1, above its cap of 1.5 micro-batches"
    assert proven(schedule, Costs.uniform(2, memory_cap=2)).peak_activations == (2.0, 1.0)


def test_held_and_cap_are_said_in_one_unit() -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", placement=TWO, micro_batches=2)
    costs = replace(Costs.uniform(2), activation_bytes=(6000.0, 6000.0), memory_cap=(9000.0, 9000.0))
    message = refused(schedule, costs).message
    assert message.count("bytes") in (0, 2)


def test_costs_of_another_pipeline_are_an_input_error() -> None:
    with pytest.raises(InputError, match="2 ranks, but the costs are for 3"):
        prove(rows("0F0 0B0", "1F0 1B0", placement=TWO, micro_batches=1), Costs.uniform(3))


def test_any_number_of_stages_is_proven_without_costs() -> None:
    """Three stages on two ranks: a loaded file may hold any number."""
    lines = ("0F0 2F0 2B0 0B0", "1F0 1B0")
    assert proven(rows(*lines, placement=(0, 1, 0), micro_batches=1)).num_messages == 4
