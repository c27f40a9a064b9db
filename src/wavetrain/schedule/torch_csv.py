"""torch.distributed.pipelining's CSV: one row a rank, one action a cell.

    0F0,0F1,3F0,3B0,0B0,...        rank 0
    1F0,2F0,1F1,2F1,2B0,...        rank 1

Read, and checked against what the compute actions imply, but never kept:

    (0F1;3B0)OVERLAP_F_B           several actions in one cell; taken one after the other
    0SEND_F1 1RECV_F1 ...          messages; they follow from the actions and their ranks
    0UNSHARD 0RESHARD 0REDUCE_GRAD torch's own book-keeping
    (nothing)                      a tick in which the rank idles

The *lowered* form (``comms=True``, torch's ``format="compute_comms"``) writes them all. Its messages come in one order for the
whole pipeline, the order in which unit-time actions would finish, and every rank's row is what that order leaves of it: the send
and the receive of a message stand at the same place of it. So each pair of ranks agrees on the order of all its messages, in both
directions, which NCCL asks for (a pair shares one stream), and nothing hangs even if sends and receives were done one by one,
each waiting for the other side: the first message that is not through is next in both rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from wavetrain.errors import FormatError, InputError, ProofError
from wavetrain.files import MAX_BYTES
from wavetrain.schedule.actions import Action
from wavetrain.schedule.costs import Costs, square
from wavetrain.schedule.graph import replay, schedule_graph
from wavetrain.schedule.proof import check_actions, explain_deadlock
from wavetrain.schedule.schedule import Schedule

MAX_NUMBER: Final = 1_000_000
"""The largest stage or micro-batch number that is read."""
MAX_ACTIONS: Final = 4_000_000
MAX_RANKS: Final = 65_536

_TOKEN = re.compile(r"([0-9]+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)([0-9]*)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_CELL = re.compile(r"[^,]+")
_WITHOUT_MICRO_BATCH: Final = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def dump_csv(schedule: Schedule, *, comms: bool = False) -> str:
    """``schedule`` in torch's CSV.

    Args:
        schedule: one route only: torch's grammar has one rank a stage.
        comms: lower it: with sends and receives, and with UNSHARD, REDUCE_GRAD and RESHARD, where torch's runtime gathers
            sharded weights and scales gradients. Every stage is gathered once, before its first action.

    Raises:
        InputError: two routes, or a last stage whose forwards are not in order of micro-batch (:func:`in_loss_order`).
        ProofError: ``comms`` is asked for, but the schedule cannot run.
    """
    if schedule.num_routes != 1:
        raise InputError(
            f"{schedule.name} has {schedule.num_routes} routes, but torch's CSV places every stage on one rank; save it as .json"
        )
    _check_loss_order(schedule)
    rows = _lowered(schedule) if comms else [[str(a) for a in actions] for actions in schedule.actions]
    return "".join((",".join(row) or '""') + "\n" for row in rows)


def in_loss_order(schedule: Schedule) -> Schedule:
    """``schedule`` with its micro-batches renumbered in the order in which the last stage computes them.

    torch's runtime keeps losses in the order in which they are computed and looks them up by micro-batch number: with any other
    order it would go backward from the wrong loss.
    """
    last = schedule.num_stages - 1
    order = [a.micro_batch for actions in schedule.actions for a in actions if a.kind == "F" and a.stage == last]
    known = range(schedule.num_micro_batches)
    number = {mb: i for i, mb in enumerate(dict.fromkeys([*(mb for mb in order if mb in known), *known]))}
    routes = [0] * schedule.num_micro_batches
    for mb, i in number.items():
        routes[i] = schedule.routes[mb]

    def renumbered(action: Action) -> Action:
        return action._replace(micro_batch=number.get(action.micro_batch, action.micro_batch))

    actions = tuple(tuple(map(renumbered, actions)) for actions in schedule.actions)
    return replace(schedule, routes=tuple(routes), actions=actions)


def _check_loss_order(schedule: Schedule) -> None:
    last, before = schedule.num_stages - 1, -1
    for a in schedule.actions[schedule.placements[0][last]]:
        if a.kind == "F" and a.stage == last:
            if a.micro_batch < before:
                raise InputError(
                    f"the last stage does micro-batch {before} before {a.micro_batch}, but torch's runtime takes losses in order "
                    "of micro-batch; renumber with wavetrain.schedule.torch_csv.in_loss_order, or save as .json"
                )
            before = a.micro_batch


def _lowered(schedule: Schedule) -> list[list[str]]:
    refusal = check_actions(schedule)
    if refusal is not None:
        raise ProofError(refusal)
    graph, orders = schedule_graph(schedule, _unit_costs(schedule))
    start, end, _ = replay(graph, orders)
    if any(order and start[order[-1]] < 0.0 for order in orders):
        raise ProofError(explain_deadlock(schedule))
    rows: list[list[str]] = [[] for _ in orders]
    left = [schedule.num_micro_batches] * schedule.num_stages  # backwards to come, by stage
    gathered = [False] * schedule.num_stages
    # every action takes time, so what it needs ends before it does, and the order of ends is an order of all dependencies
    for _, r, i in sorted((end[n], r, i) for r, order in enumerate(orders) for i, n in enumerate(order)):
        action, row = schedule.actions[r][i], rows[r]
        kind, stage, mb = action
        if not gathered[stage]:
            gathered[stage] = True
            row.append(f"{stage}UNSHARD")
        row.append(str(action))
        consumer = graph.consumer[orders[r][i]]
        if consumer >= 0 and graph.rank[consumer] != r:
            way = "F" if kind == "F" else "B"
            row.append(f"{stage}SEND_{way}{mb}")
            rows[graph.rank[consumer]].append(f"{graph.stage_of(consumer)}RECV_{way}{mb}")
        if kind in ("B", "W"):
            left[stage] -= 1
            if not left[stage]:
                row += [f"{stage}REDUCE_GRAD", f"{stage}RESHARD"]
    return rows


def _unit_costs(schedule: Schedule) -> Costs:
    """One second for everything, whatever the number of stages, and free links."""
    num_ranks, ones = schedule.num_ranks, (1.0,) * schedule.num_stages
    return Costs(
        forward=ones,
        backward_input=ones,
        backward_weight=ones,
        activation_bytes=ones,
        message_bytes=ones,
        speed=(1.0,) * num_ranks,
        latency=square(num_ranks, 0.0),
        bandwidth=square(num_ranks, math.inf),
        memory_cap=(math.inf,) * num_ranks,
    )


def parse_csv(text: str, *, name: str = "csv", path: object = "<csv>") -> Schedule:
    """The schedule in ``text``, compute-only or lowered.

    Stages are placed where their actions stand. Whether all actions are there, and in an order that can run, is for
    :func:`wavetrain.schedule.proof.prove` to say.

    Raises:
        FormatError: a cell, or the whole, that cannot be read as a schedule; names the line and the cell.
    """
    lines = _lines(text, path)
    sheet = _Sheet(path)
    for rank, line in enumerate(lines):
        sheet.read_row(rank, line)
    placement = sheet.placement()
    if sheet.transfers:
        _check_transfers(sheet, placement)
    num_micro_batches = 1 + max(a.micro_batch for actions in sheet.actions for a in actions)
    check_size(path, len(placement), num_micro_batches)
    return Schedule.single_route(name, placement, num_micro_batches, sheet.actions)


def read_token(token: str) -> tuple[int, str, int]:
    """Stage, kind and micro-batch (−1 where it has none) of ``2F1``, ``2SEND_F1``, ``2UNSHARD``...

    Raises:
        ValueError: it is none of these; the message says what was expected.
    """
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError("expected stage, kind and micro-batch, like 0F0, 1I2, 1W2 or 2B1")
    stage, kind, micro_batch = match.groups()
    if not micro_batch and kind not in _WITHOUT_MICRO_BATCH:
        raise ValueError(f"no micro-batch after {kind}")
    if len(stage) > 7 or len(micro_batch) > 7 or int(stage) > MAX_NUMBER or int(micro_batch or 0) > MAX_NUMBER:
        raise ValueError(f"stages and micro-batches are numbered up to {MAX_NUMBER}")
    return int(stage), kind, int(micro_batch) if micro_batch else -1


def check_size(path: object, num_stages: int, num_micro_batches: int) -> None:
    """Refuse a schedule that could only be complete with more than :data:`MAX_ACTIONS` actions."""
    if 2 * num_stages * num_micro_batches > MAX_ACTIONS:
        raise FormatError(
            path,
            None,
            f"{num_stages} stages of {num_micro_batches} micro-batches need at least {2 * num_stages * num_micro_batches} "
            f"actions; at most {MAX_ACTIONS} are read",
        )


def _lines(text: str, path: object) -> list[str]:
    if len(text) > MAX_BYTES:
        raise FormatError(path, None, f"larger than {MAX_BYTES >> 20} MiB")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").rstrip()
    if not text:
        raise FormatError(path, None, "empty; expected one row of actions a rank, like 0F0,0F1,0B0,0B1")
    if text.count("\n") >= MAX_RANKS:
        raise FormatError(path, None, f"{text.count(chr(10)) + 1} rows, one a rank; at most {MAX_RANKS} are read")
    return text.split("\n")


class _Transfer(NamedTuple):
    """A SEND or RECV cell. ``position`` is how many compute actions stand before it in its row."""

    rank: int
    cell: str
    kind: str
    stage: int
    micro_batch: int
    position: int

    @property
    def sends(self) -> bool:
        return self.kind.startswith("SEND")

    @property
    def peer(self) -> int:
        """The stage at the other end."""
        return self.stage + 1 if self.kind in ("SEND_F", "RECV_B") else self.stage - 1


@dataclass
class _Sheet:
    """What the rows hold, as they are read."""

    path: object
    actions: list[list[Action]] = field(default_factory=list)
    transfers: list[_Transfer] = field(default_factory=list)
    home: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Where a stage was first seen: its rank and the cell."""
    num_tokens: int = 0

    def read_row(self, rank: int, line: str) -> None:
        row: list[Action] = []
        self.actions.append(row)
        for match in _CELL.finditer(line):
            cell = match[0].strip()
            if len(cell) > 1 and cell[0] == cell[-1] == '"':
                cell = cell[1:-1].strip()
            if not cell:
                continue
            try:
                self._read_cell(rank, cell, row)
            except ValueError as error:
                column = line.count(",", 0, match.start()) + 1
                raise FormatError(self.path, rank + 1, f"cell {column}, {_clipped(cell)!r}: {error}") from None

    def _read_cell(self, rank: int, cell: str, row: list[Action]) -> None:
        overlap = _OVERLAP.fullmatch(cell) if cell[0] == "(" else None
        for token in [t.strip() for t in overlap[1].split(";")] if overlap else [cell]:
            stage, kind, micro_batch = read_token(token)
            self.num_tokens += 1
            if self.num_tokens > MAX_ACTIONS:
                raise ValueError(f"more than {MAX_ACTIONS} actions")
            if kind in ("F", "B", "I", "W"):
                row.append(Action(kind, stage, micro_batch))  # type: ignore[arg-type]  # narrowed by the line above
                home, first = self.home.setdefault(stage, (rank, token))
                if home != rank:
                    raise ValueError(
                        f"stage {stage} is on rank {rank} here, but on rank {home} at {first!r} in line {home + 1}; "
                        "a stage belongs to one rank"
                    )
            elif overlap:
                raise ValueError(f"{token!r} is not a compute action")
            elif kind not in _WITHOUT_MICRO_BATCH:
                self.transfers.append(_Transfer(rank, cell, kind, stage, micro_batch, len(row)))

    def placement(self) -> tuple[int, ...]:
        if not self.home:
            raise FormatError(self.path, None, "no actions; expected one row of actions a rank, like 0F0,0F1,0B0,0B1")
        highest = max(self.home)
        for stage in range(highest):
            if stage not in self.home:
                raise FormatError(
                    self.path,
                    self.home[highest][0] + 1,
                    f"stage {stage} has no actions, although stage {highest} has ({self.home[highest][1]!r}); "
                    "stages are numbered from 0 without gaps",
                )
        return tuple(self.home[stage][0] for stage in range(highest + 1))


def _check_transfers(sheet: _Sheet, placement: tuple[int, ...]) -> None:
    """Refuse sends and receives other than those that follow from the actions."""
    done: dict[tuple[str, int, int], int] = {}
    for actions in sheet.actions:
        for i, a in enumerate(actions):
            if a.kind != "W":
                done.setdefault(("F" if a.kind == "F" else "B", a.stage, a.micro_batch), i)
    seen: set[tuple[str, int, int]] = set()
    for t in sheet.transfers:
        problem = _transfer_problem(t, done, placement, seen)
        if problem:
            raise FormatError(sheet.path, t.rank + 1, f"{t.cell!r}: {problem}")
        seen.add((t.kind, t.stage, t.micro_batch))
    for way, stage, mb in done:
        onward, back = (stage + 1, stage - 1) if way == "F" else (stage - 1, stage + 1)
        for kind, peer in ((f"SEND_{way}", onward), (f"RECV_{way}", back)):
            crosses = 0 <= peer < len(placement) and placement[peer] != placement[stage]
            if crosses and (kind, stage, mb) not in seen:
                problem = f"no '{stage}{kind}{mb}', although stage {peer} is on another rank, {placement[peer]}"
                raise FormatError(sheet.path, placement[stage] + 1, problem)


def _transfer_problem(
    t: _Transfer, done: dict[tuple[str, int, int], int], placement: tuple[int, ...], seen: set[tuple[str, int, int]]
) -> str | None:
    way = t.kind[-1]
    at = done.get((way, t.stage, t.micro_batch))
    what = f"{way} of stage {t.stage}, micro-batch {t.micro_batch}"
    if at is None or placement[t.stage] != t.rank:
        return f"rank {t.rank} never does {what}"
    if not 0 <= t.peer < len(placement):
        return f"there is no stage {t.peer} to {'send to' if t.sends else 'receive from'}"
    if placement[t.peer] == t.rank:
        return f"stage {t.peer} is on rank {t.rank} too, so there is nothing to {'send' if t.sends else 'receive'}"
    if (t.kind, t.stage, t.micro_batch) in seen:
        return "comes twice"
    if t.sends and t.position <= at:
        return f"stands before {what}, whose result it sends"
    if not t.sends and t.position > at:
        return f"stands after {what}, which needs it"
    return None


def _clipped(cell: str) -> str:
    return cell if len(cell) <= 60 else cell[:57] + "..."
