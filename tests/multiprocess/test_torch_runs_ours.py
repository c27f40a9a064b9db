"""torch.distributed.pipelining runs what we save, and we read what it dumps.

Its CSV loader, runtime and dumps are private names (``_load_csv``, ``_PipelineScheduleRuntime``, ``_dump_csv``), but the only way
to hand torch a schedule. No other file uses them.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wavetrain.schedule.actions import Action, Kind
from wavetrain.schedule.families import build
from wavetrain.schedule.files import load, save
from wavetrain.schedule.placement import loop, wave
from wavetrain.schedule.proof import Certificate, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.torch_csv import in_loss_order

torch = pytest.importorskip("torch")

NUM_RANKS, WAVES, NUM_MICRO_BATCHES = 4, 2, 8
NUM_STAGES = 2 * NUM_RANKS * WAVES
WIDTH, BATCH = 6, 16
LIMIT_SECONDS = 300.0

BACKWARDS = ("whole", "split", "mixed")
FAMILIES = ("hanayo", "zb-wave")
CASES = [
    (name, form, sharded)
    for name in (*BACKWARDS, *FAMILIES)
    for form in ("compute_only", "compute_comms")
    for sharded in (False, True)
    if not sharded or name in ("whole", "hanayo")
]


def case_name(name: str, form: str, sharded: bool) -> str:
    return f"{name}, {form}, {'sharded' if sharded else 'plain'}"


def make_schedule(name: str) -> Schedule:
    """A family's schedule, or one written by hand with backwards of a kind."""
    if name in FAMILIES:
        return in_loss_order(build(name, num_ranks=NUM_RANKS, num_micro_batches=NUM_MICRO_BATCHES, waves=WAVES))
    return wave_schedule(name)


def wave_schedule(backward: str) -> Schedule:
    """Eight micro-batches over 16 stages, one diagonal after the other; W, where there is one, two backwards late."""
    placement = wave(NUM_RANKS, WAVES)
    todo: list[list[Action]] = [[] for _ in range(NUM_RANKS)]
    late: list[list[Action]] = [[] for _ in range(NUM_RANKS)]

    def put(kind: Kind, stage: int, mb: int) -> None:
        rank = placement[stage]
        whole = backward == "whole" or (backward == "mixed" and (stage + mb) % 2)
        if kind == "F" or whole:
            todo[rank].append(Action(kind, stage, mb))
            return
        todo[rank].append(Action("I", stage, mb))
        late[rank].append(Action("W", stage, mb))
        if len(late[rank]) > 2:
            todo[rank].append(late[rank].pop(0))

    # a diagonal order: micro-batch m enters after 2m ticks, and turns around at the last stage
    ticks = [(2 * mb + step, step, mb) for mb in range(NUM_MICRO_BATCHES) for step in range(2 * NUM_STAGES)]
    for _, step, mb in sorted(ticks):
        put(*(("F", step) if step < NUM_STAGES else ("B", 2 * NUM_STAGES - 1 - step)), mb)
    actions = [[*a, *w] for a, w in zip(todo, late, strict=True)]
    return Schedule.single_route(f"wave, {backward}", placement, NUM_MICRO_BATCHES, actions)


def make_stage(index: int) -> Any:
    torch.manual_seed(100 + index)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def make_batch() -> tuple[Any, Any]:
    torch.manual_seed(7)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def run_rank(rank: int, folder: str) -> None:
    """One rank of torch's runtime: every case, one after the other; gradients go to a file, and so does what goes wrong."""
    try:
        _run_cases(rank, Path(folder))
    except BaseException:
        (Path(folder) / f"error{rank}.txt").write_text(traceback.format_exc())
        raise


def _run_cases(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as torch_schedules

    runtime_class: Any = torch_schedules._PipelineScheduleRuntime
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=LIMIT_SECONDS),
    )
    inputs, target = make_batch()
    mine = [s for s, r in enumerate(wave(NUM_RANKS, WAVES)) if r == rank]
    mesh = init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("pipeline", "data"))
    found: dict[str, dict[str, Any]] = {}
    for name, form, sharded in CASES:
        modules = {s: make_stage(s) for s in mine}
        if sharded:
            for module in modules.values():
                fully_shard(module, mesh=mesh["data"])
        stages = [PipelineStage(modules[s], s, NUM_STAGES, torch.device("cpu")) for s in mine]
        runtime: Any = runtime_class(stages, NUM_MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(str(folder / f"{name}-{form}.csv"), format=form)
        for _ in range(2):  # the second step must not remember the first
            for module in modules.values():
                module.zero_grad()
            losses: list[Any] = []
            runtime.step(*([inputs] if rank == 0 else []), target=target, losses=losses)
        grads = {f"{s}.{n}": p.grad for s, module in modules.items() for n, p in module.named_parameters()}
        found[case_name(name, form, sharded)] = {n: g.full_tensor() if sharded else g for n, g in grads.items()}
    torch.save(found, folder / f"grads{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _join(processes: Sequence[BaseProcess], folder: Path) -> None:
    """Wait for all, or for the first that fails; leave none behind."""
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while any(p.is_alive() for p in processes):
            failed = [p for p in processes if p.exitcode not in (None, 0)]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for p in processes:
            if p.is_alive():
                p.kill()
            p.join()
    errors = "\n".join(f.read_text() for f in sorted(folder.glob("error*.txt")))
    assert [p.exitcode for p in processes] == [0] * len(processes), errors or "a rank was killed: no end within the limit"


@pytest.fixture(scope="module")
def torch_grads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Gradients that torch's runtime computes from our files on four ranks, by case."""
    folder = tmp_path_factory.mktemp("torch")
    for name in (*BACKWARDS, *FAMILIES):
        schedule = make_schedule(name)
        assert isinstance(prove(schedule), Certificate)
        save(schedule, folder / f"{name}-compute_only.csv")
        save(schedule, folder / f"{name}-compute_comms.csv", comms=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(r, str(folder)), daemon=True) for r in range(NUM_RANKS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        for p in processes:
            p.start()
    _join(processes, folder)
    found: dict[str, dict[str, Any]] = {}
    for rank in range(NUM_RANKS):
        for case, grads in torch.load(folder / f"grads{rank}.pt").items():
            found.setdefault(case, {}).update(grads)
    return found


@pytest.fixture(scope="module")
def own_grads() -> dict[str, Any]:
    """Gradients of one process over the whole batch."""
    stages = [make_stage(s) for s in range(NUM_STAGES)]
    inputs, target = make_batch()
    torch.nn.functional.mse_loss(torch.nn.Sequential(*stages)(inputs), target).backward()
    return {f"{s}.{n}": p.grad for s, module in enumerate(stages) for n, p in module.named_parameters()}


@pytest.mark.multiprocess
@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_gradients_of_torchs_runtime_equal_one_process(torch_grads: dict[str, dict[str, Any]], own_grads: dict[str, Any]) -> None:
    # one test for all cases: they share one launch of the ranks, also where tests are spread over workers
    assert torch_grads.keys() == {case_name(*case) for case in CASES}
    for case, found in torch_grads.items():
        assert found.keys() == own_grads.keys()
        for name, grad in own_grads.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(
                found[name], grad, rtol=1e-5, atol=1e-8, msg=lambda m, case=case, name=name: f"{case}, {name}: {m}"
            )


def dumped(
    kind: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int, folder: Path, form: str = "compute_only"
) -> Schedule:
    """The schedule that a class of torch makes, as we read its dump."""
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, stage_index=i, submod=torch.nn.Identity()
        )
        for i in range(stages_per_rank)
    ]
    theirs = getattr(schedules, kind)(stages, num_micro_batches, loss_fn=torch.nn.functional.mse_loss)
    theirs._dump_csv(folder / "dump.csv", format=form)
    return load(folder / "dump.csv")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("kind", "name", "stages_per_rank", "counts"),
    [
        ("ScheduleZBVZeroBubble", "zbv", 2, lambda p: (1, 2, p, 2 * p - 1, 2 * p, 3 * p + 2)),
        ("ScheduleDualPipeV", "dualpipev", 2, lambda p: (2 * p, 2 * p + 1, 3 * p + 2)),  # torch takes no fewer
        ("ScheduleInterleaved1F1B", "interleaved", 2, lambda p: (p, 2 * p, 4 * p)),  # with other counts torch makes larger groups
        ("ScheduleInterleaved1F1B", "interleaved", 3, lambda p: (p, 3 * p)),
    ],
)
def test_ours_and_torchs_are_the_same_action_by_action(
    kind: str, name: str, stages_per_rank: int, counts: Callable[[int], tuple[int, ...]], num_ranks: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stages_per_rank": stages_per_rank} if name == "interleaved" else {}
    for num_micro_batches in counts(num_ranks):
        theirs = dumped(kind, num_ranks, stages_per_rank, num_micro_batches, tmp_path)
        ours = build(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, **options)
        assert ours.placements == theirs.placements
        assert ours.actions == theirs.actions


@pytest.mark.parametrize(
    ("kind", "style", "num_ranks", "stages_per_rank", "num_micro_batches"),
    [
        ("ScheduleInterleaved1F1B", "loop", 2, 2, 4),
        ("ScheduleInterleaved1F1B", "loop", 4, 3, 8),
        ("ScheduleLoopedBFS", "loop", 4, 2, 5),
        ("ScheduleInterleavedZeroBubble", "loop", 2, 2, 4),
        ("ScheduleInterleavedZeroBubble", "loop", 4, 2, 8),
        ("ScheduleZBVZeroBubble", "v", 2, 2, 4),
        ("ScheduleZBVZeroBubble", "v", 4, 2, 9),
        ("ScheduleDualPipeV", "v", 2, 2, 6),
        ("ScheduleDualPipeV", "v", 4, 2, 10),
    ],
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_dumps_is_read_and_proven(
    kind: str, style: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int, form: str, tmp_path: Path
) -> None:
    ours = dumped(kind, num_ranks, stages_per_rank, num_micro_batches, tmp_path, form)

    v = tuple(range(num_ranks)) + tuple(range(num_ranks))[::-1]
    assert ours.placements == ((v if style == "v" else loop(num_ranks, stages_per_rank)),)
    assert ours.num_micro_batches == num_micro_batches
    assert isinstance(prove(ours), Certificate)
    save(ours, tmp_path / "again.csv", comms=True)
    assert load(tmp_path / "again.csv").actions == ours.actions


@pytest.mark.parametrize("name", [*BACKWARDS, *FAMILIES])
def test_torchs_own_simulation_accepts_our_lowering(name: str, tmp_path: Path) -> None:
    """torch's check that no receive comes before its send, over all ranks."""
    from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute, _validate_schedule

    save(make_schedule(name), tmp_path / "lowered.csv", comms=True)
    rows = (tmp_path / "lowered.csv").read_text().splitlines()
    cells = {rank: [c for c in row.split(",") if "SHARD" not in c and "GRAD" not in c] for rank, row in enumerate(rows)}
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in cells.items()}
    placement = _validate_schedule(dict(actions), NUM_RANKS, NUM_STAGES, NUM_MICRO_BATCHES)
    assert tuple(placement[s] for s in range(NUM_STAGES)) == wave(NUM_RANKS, WAVES)
    _simulate_comms_compute(actions, lambda s: placement[s], NUM_STAGES)
