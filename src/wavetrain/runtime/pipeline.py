"""The pipeline: a model trained in waves, as a user sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.models.tensor_parallel import parallelize_layer
from wavetrain.runtime.blackbox import Phase, Recorder
from wavetrain.runtime.executor import Executor, Moment
from wavetrain.runtime.local import open_transport
from wavetrain.runtime.mesh import Mesh
from wavetrain.runtime.micro_batches import count_targets, num_samples, shape_key, split_batch
from wavetrain.runtime.partition import cut_layers, layer_costs
from wavetrain.runtime.program import Program, compile_program, forward_only
from wavetrain.runtime.reduction import Reducer
from wavetrain.runtime.stage import LossFn, Stage, StepData
from wavetrain.runtime.trace import clock_offset, gather_moments, measured_timeline
from wavetrain.runtime.weights import take_over
from wavetrain.schedule.families import NAMES, build
from wavetrain.schedule.files import load
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.timeline import Timeline

LOSS_TAG = 1
"""Losses pass between the same ranks as messages of the pipeline, which have no tag, and at any time."""


class Pipeline:
    """A model split over the ranks of a pipeline, and trained by a schedule.

    Every rank makes the same model and the same ``Pipeline``, and calls :meth:`step` with the same batch (the same within a
    replica; replicas bring their own). Weights after a step do not depend on the schedule, to the bit, as long as it has one
    route.

    Args:
        model: an ``nn.Sequential``; its children are the layers. It is used up: each rank keeps its own layers only.
        schedule: a name (``wavetrain.SCHEDULE_NAMES``), a :class:`~wavetrain.Schedule`, or the path of a saved one.
        num_micro_batches: B; a batch given as one tensor is split into that many, along its first dim.
        loss_fn: ``loss_fn(output, target)`` → the mean loss over a micro-batch. Needed by :meth:`step`.
        waves: W of ``hanayo`` and ``zb-wave``.
        stages_per_rank: of ``interleaved``.
        growth: of ``zb-wave``: the work of a pass over the ranks over that of the pass before.
        dp: replicas of the pipeline.
        tp: ranks that share every stage.
        cut: layers of every stage; without it stages are made equally dear.
        recompute: keep only the input of a stage and compute the rest again in the backward pass; True, or the stages it holds
            for.
        autocast: run matrix products in ``torch.bfloat16`` or ``torch.float16``.
        count_fn: ``count_fn(target)`` → what a micro-batch counts in the loss of the batch. Without it, the number of targets (of
            whole numbers only those that are not −100), so that the loss is the mean over all targets of the batch.
        seed: of dropout, and of layers that are made on the meta device.
        timeout_seconds: how long a message may take before the run is ended.
    """

    def __init__(
        self,
        model: nn.Sequential,
        *,
        schedule: str | Schedule | Path = "1f1b",
        num_micro_batches: int | None = None,
        loss_fn: LossFn | None = None,
        waves: int | None = None,
        stages_per_rank: int | None = None,
        growth: float | None = None,
        dp: int = 1,
        tp: int = 1,
        cut: Sequence[int] | None = None,
        recompute: bool | Sequence[int] = False,
        autocast: torch.dtype | None = None,
        count_fn: Callable[[Any], float] | None = None,
        seed: int = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        if not isinstance(model, nn.Sequential):
            raise InputError(
                f"the model is a {type(model).__name__}; a pipeline needs an nn.Sequential, whose children are its layers "
                "(wavetrain.models has some, and reads Hugging Face checkpoints)"
            )
        if type(model).forward is not nn.Sequential.forward:
            raise InputError(
                f"{type(model).__name__} has a forward() of its own, but a pipeline only runs the children in order; "
                "put what forward() does into layers"
            )
        _require_types(schedule, num_micro_batches, loss_fn, cut, seed)
        if not timeout_seconds > 0:
            raise InputError(f"timeout_seconds is {timeout_seconds}; give a number above 0")
        self.mesh = Mesh.create(dp=dp, tp=tp, timeout_seconds=timeout_seconds)
        options = {"waves": waves, "stages_per_rank": stages_per_rank, "growth": growth}
        self.schedule = _resolve(schedule, list(model), self.mesh.pp, num_micro_batches, options)
        certificate = prove(self.schedule).require()
        self.stages = cut_layers(list(model), self.schedule, cut)
        """The layers of every stage."""
        beyond = [] if isinstance(recompute, bool) else [s for s in recompute if not 0 <= s < len(self.stages)]
        if beyond:
            raise InputError(f"recompute names stage {beyond[0]}, but the stages are 0 … {len(self.stages) - 1}")
        self.seed, self.num_steps = seed, 0
        _require_agreement(self.mesh, model, self.schedule, self.stages)
        rank = self.mesh.pp_rank
        axes = self.mesh.axes
        divide = (lambda layer: parallelize_layer(layer, axes["tp"])) if tp > 1 and axes is not None else None
        self._holding = take_over(model, self.stages, self.schedule, rank, self.mesh.device, seed, divide)
        self._reducer = Reducer(self.mesh, self._holding)
        self._reducer.copy_weights()
        self._loss_fn, self._count_fn = loss_fn, count_fn or count_targets
        self._workers = {
            (route, stage): Stage(
                index=stage,
                num_stages=self.schedule.num_stages,
                layers=[(i, self._holding.layers[route, i]) for i in self.stages[stage]],
                parameters=self._holding.parameters_of(route, self.stages[stage]),
                micro_batches=[m for m, r in enumerate(self.schedule.routes) if r == route],
                loss_fn=loss_fn,
                splits=self.schedule.splits_backward,
                recompute=recompute if isinstance(recompute, bool) else stage in recompute,
                autocast=autocast,
                device=self.mesh.device,
            )
            for route, placement in enumerate(self.schedule.placements)
            for stage, home in enumerate(placement)
            if home == rank
        }
        self._program = compile_program(self.schedule, rank, receive_ahead=certificate.receive_ahead)
        self._forward_schedule = replace(self.schedule, actions=forward_only(self.schedule))
        self._forward_program = compile_program(self._forward_schedule, rank)
        self._recorder = Recorder.from_environment()
        ranks, channels = self.mesh.pipeline_ranks, self._program.channels
        transport = open_transport(self.mesh.group("pp"), ranks, channels, rank, self.mesh.device, timeout_seconds)
        self._executor = Executor(self._workers, transport, self._recorder)
        self._last: tuple[Schedule, list[Moment]] | None = None
        self._clock_offset: float | None = None

    def step(self, inputs: Any, targets: Any, *, loss_scale: float = 1.0, replica: int | None = None) -> Tensor:
        """Forward and backward of all micro-batches: gradients are added to ``.grad``.

        Args:
            inputs: of this replica: a tensor (or nested tensors) whose first dim is split into micro-batches, or a list of
                micro-batches of any sizes.
            targets: likewise.
            loss_scale: gradients are those of the loss times this; for float16, see :class:`wavetrain.runtime.scaling.LossScale`.
            replica: compute as this one of several replicas would, and add nothing up over replicas: gradients and loss are
                those of the batch that is given here, random numbers those of the replica.

        Returns:
            the loss of the whole batch, over all replicas, on every rank; a scalar on the CPU.
        """
        self._recorder.step = self.num_steps
        data = self._data(inputs, targets, training=True, loss_scale=loss_scale, replica=replica)
        self._reducer.begin(alone=replica is not None)
        loss = self._run(self._program, data, "step")
        self._recorder.note(Phase.COLLECTIVE)
        self._reducer.finish()
        self._recorder.note(Phase.IDLE)
        self.num_steps += 1
        return loss

    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of a batch, in eval mode and without gradients; arguments as of :meth:`step`."""
        return self._run(self._forward_program, self._data(inputs, targets, training=False), "evaluate")

    def predict(self, inputs: Any) -> list[Any] | None:
        """What the last layer gives for every micro-batch, on the rank that holds it; None on the others. Eval mode."""
        data = self._data(inputs, None, training=False)
        last = [w for w in self._workers.values() if w.last]
        with _without_loss(last):
            self._execute(self._forward_program, data, "predict")
        return [data.outputs[m] for m in sorted(data.outputs)] if data.outputs else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, each once: what its optimizer is given."""
        return (w.parameter for w in self._holding.weights)

    def parameters_held_before(self) -> Iterator[nn.Parameter]:
        """Those of this rank that an earlier rank of the pipeline holds as well: tied weights, of Chimera all."""
        return (w.parameter for w in self._holding.weights if w.ranks[0] != self.mesh.pp_rank)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank with their names in the whole model."""
        return ((w.name, w.parameter) for w in self._holding.weights)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's layers with their names in the whole model."""
        return iter(self._holding.buffers.items())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of the whole model to a norm of at most ``max_norm``; the norm before that, a scalar."""
        return self._reducer.clip(max_norm)

    @property
    def moments(self) -> list[Moment]:
        """When the actions of this rank ran in the last step (or evaluation), in the order of its schedule."""
        return [] if self._last is None else self._last[1]

    def unscale_(self, loss_scale: float) -> bool:
        """Divide all gradients by ``loss_scale``; whether those of the whole model are finite, the same on every rank."""
        return self._reducer.unscale(loss_scale)

    def timeline(self) -> Timeline:
        """The last step (or evaluation) as it ran on this replica. All ranks must call it."""
        if self._last is None:
            raise InputError("there is no timeline before the first step")
        schedule, moments = self._last
        group = self.mesh.group("pp")
        if group is None:
            return measured_timeline(schedule, [moments])
        if self._clock_offset is None:
            self._clock_offset = clock_offset(group)
        return measured_timeline(schedule, gather_moments(moments, schedule, group, self._clock_offset))

    def _data(
        self, inputs: Any, targets: Any, *, training: bool, loss_scale: float = 1.0, replica: int | None = None
    ) -> StepData:
        number = self.schedule.num_micro_batches
        given = split_batch(inputs, number, "inputs")
        wanted = split_batch(targets, number, "targets") if targets is not None else [None] * number
        if targets is not None and not isinstance(inputs, list) and not isinstance(targets, list):
            samples, answers = num_samples(inputs), num_samples(targets)
            if samples != answers:
                raise InputError(f"inputs hold {samples} samples, targets {answers}; they are split alike and must be as many")
        counts = [float(self._count_fn(t)) if t is not None else 1.0 for t in wanted]
        total = torch.tensor([sum(counts)], dtype=torch.float64)
        replicas = self.mesh.group("dp")
        if replicas is not None and replica is None:
            dist.all_reduce(total, group=replicas)
        if not float(total) > 0:
            raise InputError("the batch has no targets that count; the loss would be 0 / 0")
        return StepData(
            inputs=given,
            targets=wanted,
            weights=[c / float(total) for c in counts],
            loss_scale=loss_scale,
            seed=self.seed * 1_000_003 + self.num_steps,
            training=training,
            first_micro_batch=(self.mesh.dp_rank if replica is None else replica) * number,
            alone=replica is not None,
        )

    def _run(self, program: Program, data: StepData, method: str) -> Tensor:
        if any(target is None for target in data.targets):
            raise InputError("a step or an evaluation needs targets; predict() takes inputs alone")
        if self._loss_fn is None:
            raise InputError("a step or an evaluation needs a loss: give Pipeline a loss_fn(output, target)")
        total = _TotalLoss(self.mesh, self.schedule, data)
        self._execute(program, data, method)
        return total.wait()

    def _execute(self, program: Program, data: StepData, method: str) -> None:
        """Run ``program``. Messages carry the ``method``, so that ranks which call different ones are told."""
        for worker in self._workers.values():
            worker.begin(data)
        keys: list[Hashable] = [(shape_key(x), method) for x in data.inputs]
        moments = self._executor.run(program, keys, self._stage_done if data.training else None)
        self._last = (program.schedule, moments)

    def _stage_done(self, route: int, stage: int) -> None:
        self._reducer.stage_done(self._workers[route, stage].parameters)


def _require_types(schedule: object, num_micro_batches: object, loss_fn: object, cut: object, seed: object) -> None:
    """Refuse what would only show its wrong type deep inside, or in some process."""
    numbers = isinstance(cut, Sequence) and not isinstance(cut, str) and all(type(n) is int for n in cut)
    for name, value, right, wanted in (
        ("schedule", schedule, isinstance(schedule, (str, Schedule, Path)), "a name, a Schedule or a path"),
        ("num_micro_batches", num_micro_batches, num_micro_batches is None or type(num_micro_batches) is int, "a whole number"),
        ("loss_fn", loss_fn, loss_fn is None or callable(loss_fn), "a function of (output, target)"),
        ("cut", cut, cut is None or numbers, "a list of whole numbers, the layers of every stage"),
        ("seed", seed, type(seed) is int, "a whole number"),
    ):
        if not right:
            raise InputError(f"{name} is {value!r}; give {wanted}")


def _require_agreement(mesh: Mesh, model: nn.Module, schedule: Schedule, stages: Sequence[range]) -> None:
    """Refuse ranks that were given different things: they would compute something, but nothing that makes sense."""
    if mesh.world_size == 1:
        return
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in chain(model.named_parameters(), model.named_buffers())]
    given = {"model": shapes, "schedule": (schedule.placements, schedule.actions), "cut": stages}
    mine = torch.tensor(
        [int.from_bytes(hashlib.sha256(repr(part).encode()).digest()[:7], "big") for part in given.values()], device=mesh.device
    )
    everyone = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for what, same in zip(given, (theirs == everyone[0]).tolist(), strict=True):
            if not same:
                raise InputError(f"rank {rank} was given another {what} than rank 0; all ranks must be given the same")


class _TotalLoss:
    """The loss of a step: those of all micro-batches of all replicas, weighted and added in their order.

    The ranks of the last stage (Chimera has two) send theirs to the others as soon as they have them, and these look at the end:
    so no rank waits for the end of another, and no limit of time runs all through a long step, as that of a collective would.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, data: StepData) -> None:
        self._mesh, self._data = mesh, data
        self._left = sum(schedule.placements[route][-1] == mesh.pp_rank for route in schedule.routes)
        sources = {schedule.placements[route][-1] for route in schedule.routes} - {mesh.pp_rank}
        shape = (1 + len(sources), schedule.num_micro_batches)
        self._parts = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        self._mine, *theirs = self._parts
        self._works = [
            dist.irecv(part, mesh.pipeline_ranks[source], tag=LOSS_TAG)
            for part, source in zip(theirs, sorted(sources), strict=True)
        ]
        data.on_loss = self._count

    def wait(self) -> Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        total = torch.zeros(self._mesh.dp, *self._mine.shape, dtype=torch.float64, device=self._mesh.device)
        total[self._mesh.dp_rank] = self._parts.sum(0)  # every entry comes from one rank: the sums are exact
        replicas = self._mesh.group("dp")
        if replicas is not None and not self._data.alone:
            dist.all_reduce(total, group=replicas)
        return total.sum().float().cpu()

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            for m, loss in self._data.losses.items():
                self._mine[m] = loss.double() * self._data.weights[m]
            others = (r for p, r in enumerate(self._mesh.pipeline_ranks) if p != self._mesh.pp_rank)
            self._works += [dist.isend(self._mine, r, tag=LOSS_TAG) for r in others]


class _without_loss:  # noqa: N801
    """The last stage gives its output instead of a loss for a while."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = [(s, s.loss_fn) for s in stages]

    def __enter__(self) -> None:
        for stage, _ in self._stages:
            stage.loss_fn = None

    def __exit__(self, *_: object) -> None:
        for stage, loss_fn in self._stages:
            stage.loss_fn = loss_fn


def _resolve(
    schedule: str | Schedule | Path,
    layers: Sequence[nn.Module],
    num_ranks: int,
    num_micro_batches: int | None,
    options: Mapping[str, Any],
) -> Schedule:
    if isinstance(schedule, str) and schedule in NAMES:
        if num_micro_batches is None:
            num_micro_batches = 2 * num_ranks
        return build(
            schedule,
            num_ranks=num_ranks,
            num_micro_batches=num_micro_batches,
            **options,
            costs=layer_costs(layers, num_ranks) if schedule == "auto" else None,  # it must not take more stages than there are
        )
    if isinstance(schedule, str) and not Path(schedule).suffix:  # no file: a name with a typing error
        raise UnknownNameError("schedule", schedule, NAMES)
    found = schedule if isinstance(schedule, Schedule) else load(schedule)
    if found.num_ranks != num_ranks:
        raise InputError(
            f"the schedule is for {found.num_ranks} pipeline ranks, but {num_ranks} were launched; "
            f"launch(main, ranks={found.num_ranks}), or torchrun --nproc-per-node {found.num_ranks}"
        )
    if num_micro_batches not in (None, found.num_micro_batches):
        raise InputError(f"the schedule has {found.num_micro_batches} micro-batches, not num_micro_batches={num_micro_batches}")
    if any(value is not None for value in options.values()):
        raise InputError(f"{', '.join(options)} belong to a schedule given by name; this one has its placement already")
    return found
