"""The trainer: a model, data and a plan to a trained model, with metrics, checkpoints and pictures beside it.

    run(config)          checks all that can be wrong with a config, then launches the ranks (or is one of them, under torchrun)
    train(config)        the loop, in every rank

A step is::

    learn from a batch ─► agree (stop? how long? how busy?) ─► metrics ─► validate, save

The learning rate is a function of the step and of the share of the run that is done, so there is nothing of it to save.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from wavetrain.errors import CheckpointError, DivergedError, InputError
from wavetrain.models.registry import build_model
from wavetrain.runtime import checkpoint
from wavetrain.runtime.blackbox import Phase, Recorder
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.launch import launch
from wavetrain.runtime.mesh import Mesh
from wavetrain.runtime.pipeline import Pipeline
from wavetrain.runtime.train.config import TrainConfig
from wavetrain.runtime.train.learning import Learned, make_learner
from wavetrain.runtime.train.metrics import METRICS_FILE, Sink, open_sinks
from wavetrain.runtime.train.progress import Display, open_display
from wavetrain.runtime.train.report import gather_timelines, loss_curves, step_figures
from wavetrain.runtime.train.setup import lr_factor, make_optimizer, open_batches, prepare, token_loss
from wavetrain.runtime.train.stopping import StopRequest, clear_stop, ctrl_c_stops
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.timeline import Timeline

_STEPS_LOOKED_AT: Final = 9
"""Of how many of the last steps the timeline is the median."""
Draw: TypeAlias = Callable[[Path, Sequence[Timeline], Mapping[str, Sequence[tuple[float, float]]], str], Mapping[str, str]]
"""Draws a run into its directory, on rank 0: (directory, the step as measured and as predicted, (step, loss) pairs by name, a
title) → what was written, by name."""
_DTYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCHED: Final = "WAVETRAIN_LAUNCHED"


def run(config: TrainConfig, *, draw: Draw | None = None) -> dict[str, Any]:
    """Check the config, then train in ``config.ranks`` processes of this machine (under torchrun: in this rank).

    Ctrl-C ends the run after its step, with a checkpoint; a second one at once.

    Args:
        config: of the run.
        draw: makes its pictures; a function at the top level of a file.

    Returns:
        What :func:`train` returned on rank 0.

    Raises:
        InputError: the config cannot be run.
        RuntimeFailure: a rank died, or the run diverged.
        CheckpointError: a checkpoint could not be written or loaded.
    """
    config, schedule = prepare(config)
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the directory {out}: {error.strerror}") from None
    clear_stop(out)
    assert config.ranks is not None
    with ctrl_c_stops(out) if "RANK" not in os.environ else contextlib.nullcontext() as on_poll:
        result: dict[str, Any] = launch(_rank, ranks=config.ranks, args=(config, schedule, draw), on_poll=on_poll)
    if "diverged" in result:
        raise DivergedError(result["diverged"], step=result["step"], ranks=tuple(result["ranks"]))
    if "checkpoint_error" in result:
        raise CheckpointError(result["checkpoint_error"])
    return result


def _rank(config: TrainConfig, schedule: Schedule, draw: Draw | None) -> dict[str, Any]:
    """A launched rank. What all ranks raise alike is handed back instead: it is told once, without tracebacks."""
    try:
        return train(config, schedule=schedule, draw=draw)
    except DivergedError as error:
        return {"diverged": str(error), "step": error.step, "ranks": list(error.ranks)}
    except CheckpointError as error:
        return {"checkpoint_error": str(error)}


def train(config: TrainConfig, *, schedule: Schedule | None = None, draw: Draw | None = None) -> dict[str, Any]:
    """Train, inside every rank; the world must have ``config.ranks`` of them.

    Args:
        config: of the run.
        schedule: its schedule, where it has been made already.
        draw: makes its pictures, on rank 0.

    Returns:
        Figures of the run, and the files that were written.

    Raises:
        DivergedError: on every rank: a loss or gradient is no number (unless ``config.stop_on_nan`` is off).
        CheckpointError: on every rank.
    """
    if schedule is None:
        config, schedule = prepare(config)
    stop = StopRequest(Path(config.out), signals=_LAUNCHED not in os.environ)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return _Trainer(config, schedule, stop).run(draw)
    finally:
        stop.close()


class _Shared(NamedTuple):
    """What all ranks know after a step."""

    stop: bool
    elapsed_seconds: float
    bubble: float


class _Trainer:
    """One run, on one rank."""

    def __init__(self, config: TrainConfig, schedule: Schedule, stop: StopRequest) -> None:
        self.config, self.out, self.stop = config, Path(config.out), stop
        with torch.device("meta"):
            model = build_model(config.model_config())
        self.pipe = Pipeline(
            model,
            schedule=schedule,
            loss_fn=token_loss,
            cut=config.cut or None,
            dp=config.dp,
            tp=config.tp,
            recompute=config.recompute,
            autocast=_DTYPES[config.precision],
            seed=config.seed,
            timeout_seconds=config.timeout_seconds,
        )
        mesh = self.pipe.mesh
        if mesh.world_size != config.ranks:
            raise InputError(f"the plan has {config.ranks} ranks, but {mesh.world_size} were launched")
        self.first = mesh.rank == 0
        batches, self.validation = open_batches(config, mesh.dp_rank)
        self.learner = make_learner(self.pipe, make_optimizer(self.pipe, config), batches, config)
        self.recent: deque[list[Moment]] = deque(maxlen=_STEPS_LOOKED_AT)
        self.seconds: list[float] = []
        self.validated: tuple[int, float] | None = None
        self.elapsed = 0.0
        self.saved: Path | None = None
        self.recorder = Recorder.from_environment()

    def run(self, draw: Draw | None) -> dict[str, Any]:
        """The whole run; the same result on all ranks but for what only rank 0 writes."""
        self._resume()
        first_step, loss = self.pipe.num_steps, math.nan
        with self._watched() as (display, sinks):
            stopped = False
            while self._done() < 1 and not stopped:
                loss, stopped, record = self._step()
                self._after_step(record, stopped, display, sinks)
            timelines = gather_timelines(list(self.recent), self.pipe.schedule, self.pipe.mesh)
            self._save()
        figures: dict[str, Any] = {
            "out": str(self.out),
            "stopped": "asked to stop" if stopped else "minutes" if self.config.minutes else "steps",
            "step": self.pipe.num_steps,
            "steps_done": self.pipe.num_steps - first_step,
            "loss": loss,
            "validation_loss": self.validated[1] if self.validated else None,
            "validation_step": self.validated[0] if self.validated else None,
            "step_seconds": statistics.median(self.seconds),
            "tokens_per_second": self._tokens() / statistics.median(self.seconds),
            "checkpoint": str(self.saved),
        }
        if self.first:
            metrics = self.out / METRICS_FILE
            of_step, pair = step_figures(self.pipe.schedule, timelines)
            figures |= {**of_step, "metrics": str(metrics)}
            if draw is not None:
                title = f"{self.config.model} on {self.config.ranks} ranks, {self.pipe.schedule.name}"
                figures |= draw(self.out, pair, loss_curves(metrics), title)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}

    def _resume(self) -> None:
        if not self.config.resume:
            return
        extra = checkpoint.load(self.config.checkpoints, self.pipe, self.learner.optimizer, fallback=True)
        self.saved = Path(extra["checkpoint"])
        self.elapsed = float(extra["elapsed_seconds"])
        self.learner.resume(extra)
        for group in self.learner.optimizer.param_groups:  # what was saved may be of other flags
            group["weight_decay"] = self.config.weight_decay if group["params"] and group["params"][0].dim() > 1 else 0.0

    @contextlib.contextmanager
    def _watched(self) -> Iterator[tuple[Display, list[Sink]]]:
        """What shows and keeps the numbers of steps: on rank 0."""
        if not self.first:
            yield open_display(quiet=True), []
            return
        self.out.mkdir(parents=True, exist_ok=True)
        sinks = open_sinks(self.out, self.config.log, self.config.to_dict(), self.pipe.num_steps)
        display = open_display(quiet=self.config.quiet)
        try:
            display.say(self._introduction())
            yield display, sinks
        finally:
            display.close()
            for sink in sinks:
                sink.close()

    def _introduction(self) -> str:
        config, schedule = self.config, self.pipe.schedule
        waves = f" in {schedule.waves} wave{'s' if schedule.waves > 1 else ''}" if schedule.waves else ""
        axes = "".join(f", {axis} {n}" for axis, n in (("dp", config.dp), ("tp", config.tp)) if n > 1)
        axes += f", OptEx of {config.optex} minibatches a step" if config.optex else ""
        since = f", from step {self.pipe.num_steps}" if self.pipe.num_steps else ""
        return (
            f"{config.model}, {len(schedule.actions)} pipeline ranks{axes}, {schedule.name}{waves}, "
            f"{schedule.num_micro_batches} micro-batches, {config.batch} x {config.seq} tokens a step{since}; {config.out}"
        )

    def _tokens(self) -> int:
        assert self.config.batch is not None
        return self.config.batch * self.config.seq

    def _done(self) -> float:
        """The share of the run that is done."""
        if self.config.minutes is not None:
            return self.elapsed / (60 * self.config.minutes)
        assert self.config.steps is not None
        return self.pipe.num_steps / self.config.steps

    def _step(self) -> tuple[float, bool, dict[str, Any]]:
        begin = time.monotonic()
        pipe, config = self.pipe, self.config
        lr = config.lr * lr_factor(pipe.num_steps, config.warmup, self._done())
        for group in self.learner.optimizer.param_groups:
            group["lr"] = lr
        learned = self.learner.learn()
        if not learned.good and config.stop_on_nan and not learned.expected:
            raise self._diverged(learned)
        self.learner.optimizer.zero_grad()
        self.recent.append(pipe.moments)
        shared = self._agree(time.monotonic() - begin)
        taken = shared.elapsed_seconds - self.elapsed
        self.elapsed = shared.elapsed_seconds
        self.seconds.append(taken)
        record = {
            "step": pipe.num_steps,
            "loss": learned.loss,
            "tokens_per_second": self._tokens() / taken,
            "step_seconds": taken,
            "bubble": shared.bubble,
            "lr": lr,
            "grad_norm": learned.norm,
            "tokens": pipe.num_steps * self._tokens(),
            "elapsed_seconds": self.elapsed,
            **learned.figures,
        }
        return learned.loss, shared.stop, record | ({} if learned.good else {"skipped": True})

    def _after_step(self, record: dict[str, Any], stopped: bool, display: Display, sinks: list[Sink]) -> None:
        step, config, ended = self.pipe.num_steps, self.config, self._done() >= 1
        if not stopped and (ended or (config.validate_every and step % config.validate_every == 0)):
            self._validate()
            if self.validated is not None:
                record["validation_loss"] = self.validated[1]
        for sink in sinks:
            sink.write(record)
        display.step(record, min(1.0, self._done()), self._left_seconds())
        if config.checkpoint_every and step % config.checkpoint_every == 0:
            self._save()

    def _left_seconds(self) -> float:
        if self.config.minutes is not None:
            return 60 * self.config.minutes - self.elapsed
        assert self.config.steps is not None
        return (self.config.steps - self.pipe.num_steps) * statistics.median(self.seconds[-20:])

    def _agree(self, taken_seconds: float) -> _Shared:
        """Tell all ranks what each of them knows. Rank 0's clock is the one that counts."""
        moments, mesh = self.pipe.moments, self.pipe.mesh
        busy = sum(m.end - m.start for m in moments)
        span = moments[-1].end - moments[0].waited_from if moments else 0.0
        stops, taken, busies, spans = _columns(mesh, [float(bool(self.stop)), taken_seconds, busy, span])
        # one sees the file, all stop; spans are compared and not clocks, which may differ between machines
        return _Shared(any(stops), self.elapsed + taken[0], 1.0 - statistics.mean(busies) / max(spans))

    def _validate(self) -> None:
        if self.validation is None:
            return
        windows = self.validation.num_windows // self.validation.batch
        number = max(1, min(self.config.validation_batches, windows))
        losses = [float(self.pipe.evaluate(*self.validation.at(i))) for i in range(number)]
        self.validated = (self.pipe.num_steps, statistics.mean(losses))

    def _save(self) -> None:
        if self.saved is not None and self.saved.name == f"step-{self.pipe.num_steps:08d}":
            return
        self.recorder.note(Phase.SAVING)
        extra = {
            "config": self.config.to_dict(),
            "model": self.config.model_config().to_dict(),
            "elapsed_seconds": self.elapsed,
            **self.learner.state(),
        }
        optimizer = self.learner.optimizer
        self.saved = checkpoint.save(self.config.checkpoints, self.pipe, optimizer, extra=extra, keep=self.config.keep)
        self.recorder.note(Phase.IDLE)

    def _diverged(self, learned: Learned) -> DivergedError:
        """What all ranks raise; each says whether what it holds is finite."""
        mesh = self.pipe.mesh
        weights: list[Tensor] = list(self.pipe.parameters())
        gradients = [p.grad for p in weights if p.grad is not None]
        columns = _columns(mesh, [float(not all(map(_is_finite, tensors))) for tensors in (weights, gradients)])
        bad = [[rank for rank, flag in enumerate(column) if flag] for column in columns]
        end = mesh.pipeline_ranks[self.pipe.schedule.placements[0][-1]]
        if bad[0]:
            where, ranks = f"weights of {_ranks(bad[0])} are not finite", bad[0]
        elif bad[1]:
            where, ranks = f"weights are finite, gradients of {_ranks(bad[1])} are not", bad[1]
        else:
            where, ranks = f"weights and gradients are finite; rank {end} computes the loss", [end]
        what = f"loss is {learned.loss}" if not math.isfinite(learned.loss) else f"norm of the gradients is {learned.norm}"
        last = f"the last good checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
        advice = "lower the learning rate (lr), or leave such steps out with --no-stop-on-nan"
        message = f"the {what} at step {self.pipe.num_steps}: {where}; {last}; {advice}"
        return DivergedError(message, step=self.pipe.num_steps, ranks=tuple(ranks))


def _columns(mesh: Mesh, numbers: list[float]) -> list[list[float]]:
    """The numbers of all ranks, on all ranks: of each number, a list by rank."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    rows = [mine]
    if mesh.world_size > 1:
        rows = [torch.empty_like(mine) for _ in range(mesh.world_size)]
        dist.all_gather(rows, mine)
    return torch.stack(rows, 1).tolist()


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
