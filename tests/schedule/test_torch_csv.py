from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_schedule, randoms
from wavetrain.errors import FormatError, InputError, ProofError
from wavetrain.schedule.actions import Action
from wavetrain.schedule.placement import reverse, straight
from wavetrain.schedule.proof import Refusal, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.torch_csv import dump_csv, in_loss_order, parse_csv

COMPUTE = "0F0,0F1,3F0,3B0,0B0,3F1,3I1,0I1,3W1,0W1\n1F0,2F0,1F1,2B0,1B0,2F1,2B1,1B1\n"


def test_a_schedule_is_read_and_written_back() -> None:
    schedule = parse_csv(COMPUTE, name="by hand")
    assert schedule.name == "by hand"
    assert schedule.placements == ((0, 1, 1, 0),)
    assert schedule.num_micro_batches == 2
    assert schedule.actions[0][-1] == Action("W", 0, 1)
    assert dump_csv(schedule) == COMPUTE


def test_the_lowered_form_of_two_stages() -> None:
    assert dump_csv(parse_csv("0F0,0B0\n1F0,1I0,1W0\n"), comms=True) == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1UNSHARD,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD,1RESHARD\n"
    )


def test_neighbouring_stages_of_one_rank_exchange_nothing() -> None:
    lowered = dump_csv(parse_csv("0F0,1F0,1B0,0B0\n"), comms=True)
    assert "SEND" not in lowered
    assert "RECV" not in lowered


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + COMPUTE,
        COMPUTE.replace("\n", "\r\n"),
        COMPUTE.replace("\n", "\r"),
        COMPUTE.replace("\n", ",,\n") + "\n\n  \n",
        COMPUTE.rstrip(),
        COMPUTE.replace(",", " , "),
        COMPUTE.replace("0F1", '"0F1"').replace("1F0,", ',,"",1F0,'),
        COMPUTE.replace("3F0,3B0", "(3F0;3B0)OVERLAP_F_B"),
        COMPUTE.replace("0F0", "0UNSHARD,0F0").replace("1B1", "1B1,1REDUCE_GRAD,1RESHARD"),
    ],
)
def test_other_spellings_of_the_same(text: str) -> None:
    assert parse_csv(text) == parse_csv(COMPUTE)


def test_a_rank_without_actions_keeps_its_row() -> None:
    schedule = Schedule.single_route("csv", (1,), 1, [[], [Action("F", 0, 0), Action("B", 0, 0)], []])
    assert dump_csv(schedule) == '""\n0F0,0B0\n""\n'
    assert parse_csv(dump_csv(schedule)) == schedule
    assert parse_csv("\n0F0,0B0\n").num_ranks == 2


@settings(deadline=None)
@given(randoms())
def test_compute_only_and_lowered_come_back_as_they_were(random: Random) -> None:
    schedule = in_loss_order(random_schedule(random, every_rank=True)).renamed("csv")
    assert parse_csv(dump_csv(schedule)) == schedule
    assert parse_csv(dump_csv(schedule, comms=True)) == schedule


def runs_one_by_one(rows: list[list[str]], placement: tuple[int, ...]) -> bool:
    """Whether the rows reach their end if every send and receive blocks until the other side stands at the same message."""

    def message(cell: str) -> tuple[int, int, str] | None:
        for way, step in (("F", 1), ("B", -1)):
            if f"SEND_{way}" in cell:
                stage, mb = map(int, cell.split(f"SEND_{way}"))
                return placement[stage], placement[stage + step], f"{stage}{way}{mb}"
            if f"RECV_{way}" in cell:
                stage, mb = map(int, cell.split(f"RECV_{way}"))
                return placement[stage - step], placement[stage], f"{stage - step}{way}{mb}"
        return None

    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row) and message(row[at[r]]) is None:
                at[r] += 1
                moved = True
        for a, b in itertools.permutations(range(len(rows)), 2):
            if at[a] < len(rows[a]) and at[b] < len(rows[b]):
                mine, theirs = message(rows[a][at[a]]), message(rows[b][at[b]])
                if mine is not None and mine == theirs and mine[:2] == (a, b):
                    at[a] += 1
                    at[b] += 1
                    moved = True
    return all(i == len(row) for i, row in zip(at, rows, strict=True))


@settings(deadline=None, max_examples=150)
@given(randoms())
def test_the_lowered_form_hangs_nowhere_even_one_message_at_a_time(random: Random) -> None:
    schedule = in_loss_order(random_schedule(random, every_rank=True))
    rows = [line.split(",") for line in dump_csv(schedule, comms=True).splitlines()]
    assert runs_one_by_one(rows, schedule.placements[0])


@settings(deadline=None)
@given(randoms())
def test_in_loss_order_only_renumbers(random: Random) -> None:
    schedule = random_schedule(random, num_routes=random.randint(1, 2))
    ordered = in_loss_order(schedule)
    assert [[a[:2] for a in row] for row in ordered.actions] == [[a[:2] for a in row] for row in schedule.actions]
    assert prove(ordered).proven
    if schedule.num_routes == 1:
        last = schedule.num_stages - 1
        losses = [a.micro_batch for row in ordered.actions for a in row if a.kind == "F" and a.stage == last]
        assert losses == list(range(schedule.num_micro_batches))


def test_losses_out_of_order_would_go_wrong_in_torch() -> None:
    schedule = parse_csv("0F1,0F0,0B1,0B0\n")
    with pytest.raises(InputError, match=r"micro-batch 1 before 0.*in_loss_order"):
        dump_csv(schedule)
    assert dump_csv(in_loss_order(schedule)) == "0F0,0F1,0B0,0B1\n"


def test_two_routes_are_for_json() -> None:
    rows = [[Action("F", 0, 0), Action("F", 1, 1)], [Action("F", 1, 0), Action("F", 0, 1)]]
    schedule = Schedule(
        name="chimera",
        num_micro_batches=2,
        placements=(straight(2), reverse(2)),
        routes=(0, 1),
        actions=tuple(tuple(r) for r in rows),
    )
    with pytest.raises(InputError, match=r"chimera has 2 routes.*\.json"):
        dump_csv(schedule)


@pytest.mark.parametrize("text", ["0F0,0B0\n1F0\n", "0B0,0F0\n1F0,1B0\n", "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "0F0,0F2,0B0"])
def test_what_cannot_run_is_read_but_refused_by_the_proof_and_not_lowered(text: str) -> None:
    schedule = parse_csv(text)
    assert isinstance(prove(schedule), Refusal)
    with pytest.raises((ProofError, InputError)):
        dump_csv(schedule, comms=True)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "empty"),
        (" \n\n", None, "empty"),
        (",,\n,", None, "no actions"),
        ("0UNSHARD\n", None, "no actions"),
        ("0F0\n1X0\n", 2, "cell 1, '1X0': expected stage, kind and micro-batch"),
        ("0F0,0F\n", 1, "cell 2, '0F': no micro-batch after F"),
        ("0F0,,,F1\n", 1, "cell 4, 'F1'"),
        ("0F0;0B0\n", 1, "cell 1, '0F0;0B0'"),
        ("0F-1\n", 1, "'0F-1'"),
        ("0F0x\n", 1, "'0F0x'"),
        ("٣F٣\n", 1, "expected stage"),
        ("(0F0;0B0\n", 1, "'(0F0;0B0'"),
        ("(0F0;(0B0)OVERLAP_F_B)OVERLAP_F_B\n", 1, "expected"),
        ("(0F0;0SEND_F0)OVERLAP_F_B\n", 1, "'0SEND_F0' is not a compute action"),
        ("()OVERLAP_F_B\n", 1, "expected"),
        ("0F0,1F0\n1B0\n", 2, "stage 1 is on rank 1 here, but on rank 0 at '1F0' in line 1"),
        ("0F0\n2F0\n", 2, "stage 1 has no actions, although stage 2 has"),
        ("1000001F0\n", 1, "numbered up to 1000000"),
        ("0F99999999999999999999\n", 1, "numbered up to"),
        ("0F" + "9" * 5000 + "\n", 1, "numbered up to"),
        ("0F0,2B0\n1F999999\n", None, "3 stages of 1000000 micro-batches need at least 6000000 actions; at most 4000000"),
        ("\n" * 70_000 + "0F0", None, "70001 rows"),
        ("0F0,0SEND_F0,0B0\n", 1, "'0SEND_F0': there is no stage 1 to send to"),
        ("0RECV_F0,0F0,0B0\n", 1, "there is no stage -1 to receive from"),
        ("0F0,0SEND_F0,1F0,1B0,0B0\n", 1, "stage 1 is on rank 0 too"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", 2, "no '1RECV_F0'"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", 1, "no '0SEND_F0'"),
        ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", 1, "'0SEND_F0': comes twice"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", 1, "stands before F of stage 0"),
        ("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", 1, "stands after B of stage 0"),
        ("0F0,0SEND_F0,1RECV_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", 1, "rank 0 never does F of stage 1"),
        ("0F0,0SEND_F0,0RECV_B0,0B0,7SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n", 1, "never does F of stage 7"),
    ],
)
def test_what_cannot_be_read_names_its_place(text: str, line: int | None, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_csv(text, path="bad.csv")
    assert caught.value.line == line
    assert str(caught.value).startswith("bad.csv:")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
