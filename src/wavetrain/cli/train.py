"""``wavetrain train``: a model trained in waves on this machine."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeAlias, Union

import tyro

from wavetrain.cli.common import Count, Counts, Flag, Name, Names, Number, Output, print_json
from wavetrain.errors import CheckpointError, InputError
from wavetrain.models.config import DECODERS

if TYPE_CHECKING:
    from wavetrain.runtime.train.config import TrainConfig
    from wavetrain.schedule.timeline import Timeline

Folder: TypeAlias = Annotated[Optional[str], tyro.conf.arg(metavar="DIR", help_behavior_hint="")]  # noqa: UP045
Files: TypeAlias = Annotated[Union[None, tuple[str, ...]], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")]  # noqa: UP007, RUF036


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run can be told; a plan's [train] table has the same keys."""

    out: Folder = None
    """The run's directory: metrics, checkpoints, pictures. Default: runs/gpt-1, or the next number."""
    resume: Flag = False
    """Go on from the newest checkpoint in --out, with its settings; other --ranks, --dp, --schedule are fine."""
    steps: Count = None
    """Steps of the whole run. Default: 200."""
    minutes: Number = None
    """Minutes of the whole run, instead of steps."""
    ranks: Count = None
    """Processes. Default: 2 (times dp and tp); under torchrun, as many as it started."""
    dp: Count = None
    """Replicas of the pipeline. Default: 1."""
    tp: Count = None
    """Ranks that share every stage. Default: 1."""
    schedule: Name = None
    """A schedule (see wavetrain simulate --help), or a .csv or .json file. Default: zb-wave."""
    waves: Count = None
    """W, for hanayo and zb-wave. Default: 2, or 1 where the model has too few layers."""
    stages_per_rank: Count = None
    """v, for interleaved."""
    growth: Number = None
    """For zb-wave with more micro-batches than ranks: the work of a pass over the ranks over that of the pass before."""
    micro_batches: Count = None
    """Micro-batches a step and replica. Default: 2 a pipeline rank."""
    cut: Counts = None
    """Layers of every stage, in the order of the forward pass. Default: by the layers' estimated costs."""
    batch: Count = None
    """Sequences a step, over all replicas. Default: 2 a micro-batch."""
    seq: Count = None
    """Tokens a sequence. Default: 128."""
    model: Name = None
    """gpt, bert, uneven, kraken, parallel or ladder. Default: gpt."""
    layers: Count = None
    """Transformer blocks. Default: 8."""
    hidden: Count = None
    """Width. Default: 256."""
    heads: Count = None
    """Attention heads a block. Default: 8."""
    vocab: Count = None
    """Tokens that the model knows. Default: 256, the bytes."""
    dropout: Number = None
    """Default: 0."""
    wide_layers: Count = None
    """Uneven model: blocks after the widening. Default: 12."""
    wide_hidden: Count = None
    """Uneven model: their width. Default: twice --hidden."""
    wide_heads: Count = None
    """Uneven model: their heads. Default: twice --heads."""
    degree: Count = None
    """Kraken: sub-layers a block, the most ranks that can serve it. Default: 2."""
    kraken: Name = None
    """Kraken: modern or paper, as many parameters as the gpt of the same flags; exact: the flags as they are. Default: modern."""
    kv_heads: Count = None
    """gpt, kraken, parallel, ladder: heads of keys and values. Default: --heads."""
    head_dim: Count = None
    """Likewise: width of a head. Default: --hidden / --heads."""
    inner: Count = None
    """Likewise: inner width of the MLP. Default: 4 times --hidden."""
    positions: Name = None
    """Likewise: learned or rotary. Default: learned."""
    norm: Name = None
    """Likewise: layer or rms. Default: layer."""
    mlp: Name = None
    """Likewise: gelu or swiglu. Default: gelu."""
    no_bias: Flag = False
    """A gpt without biases; the other decoders have none."""
    data: Files = None
    """Text files, .bin or .npy token files, or directories. Default: the sources of Python's standard library, as bytes."""
    data_dtype: Name = None
    """Of the numbers in .bin files: uint8, uint16, uint32. Default: uint16."""
    optex: Count = None
    """OptEx of N: gradients at N points of the way ahead a step, by --dp N replicas at once or by one pipeline one after another;
    up to N steps of AdamW with them."""
    lr: Number = None
    """The highest learning rate. Default: 0.001."""
    warmup: Count = None
    """Steps until it is reached; a cosine to a tenth of it follows. Default: 20."""
    weight_decay: Number = None
    """Of matrices. Default: 0.1."""
    clip: Number = None
    """The largest norm of the gradients. Default: 1."""
    precision: Name = None
    """fp32, or bf16 or fp16 for matrix products. Default: fp32."""
    recompute: Flag = False
    """Keep only the inputs of stages, and compute the rest again in the backward pass."""
    seed: Count = None
    """Of weights, dropout and the order of the data. Default: 0."""
    validate_every: Count = None
    """Steps between validations; 0: only at the end. Default: 50."""
    validation_batches: Count = None
    """Batches of a validation. Default: 4."""
    checkpoint_every: Count = None
    """Steps between checkpoints; 0: only at the end. Default: 100."""
    keep: Count = None
    """Checkpoints that are kept. Default: 3."""
    stop_on_nan: Flag = False
    """End the run at a loss or gradient that is no number. This is the default."""
    no_stop_on_nan: Flag = False
    """Leave such a step out instead, and go on."""
    log: Names = None
    """tensorboard, wandb (pip install 'wavetrain[log]'), beside metrics.jsonl."""
    prompt: Name = None
    """What the text begins with that a byte-level model generates at the end."""
    timeout_seconds: Number = None
    """How long a message may take before the run is ended. Default: 600."""

    def given(self) -> dict[str, Any]:
        """What was said, by the fields of a config."""
        if self.stop_on_nan and self.no_stop_on_nan:
            raise InputError("--stop-on-nan and --no-stop-on-nan are both given")
        said = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v is not False}
        if said.pop("no_stop_on_nan", False):
            said["stop_on_nan"] = False
        return said


@dataclass(frozen=True, kw_only=True)
class Train(Output):
    """Train a model in a pipeline of processes on this machine; without --data on text that comes with Python.

    wavetrain train --minutes 1 --layers 6 --hidden 128 --heads 4 --out runs/first

    wavetrain train --out runs/first --resume --minutes 2 --ranks 1 --schedule 1f1b

    torchrun --nproc-per-node 2 -m wavetrain train plan.toml --out runs/second

    Ctrl-C ends the run after its step, with a checkpoint. A plan is a TOML file whose [train] table has the flags as keys;
    flags override it. Exit code 1: the run failed. 2: it was not begun, and why. 130: it was interrupted.
    """

    plan: Annotated[Optional[Path], tyro.conf.Positional, tyro.conf.arg(metavar="[PLAN]", help_behavior_hint="")] = None  # noqa: UP045
    """A TOML file."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Settings)

    def run(self) -> int:
        """Train, and print what came of it."""
        config = self._config()
        from wavetrain.runtime.train.trainer import run

        try:
            result = run(config, draw=draw_run)
        except KeyboardInterrupt:
            print(_how_to_resume(config), file=sys.stderr)
            raise
        if os.environ.get("RANK", "0") != "0":
            return 0
        if result["stopped"] != "asked to stop" and config.model in DECODERS and config.vocab in (None, 256):
            result["sample"] = _sample(config)
        if self.json:
            print_json(result)
        else:
            _print_result(result)
        if result["stopped"] != "asked to stop":
            return 0
        print(_how_to_resume(config), file=sys.stderr)
        return 130

    def _config(self) -> TrainConfig:
        from wavetrain.runtime.train.config import merge_settings, read_plan, saved_settings

        said = self.settings.given()
        wanted = {**(read_plan(self.plan) if self.plan is not None else {}), **said}
        world = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
        if "out" not in wanted:
            if wanted.get("resume"):
                raise InputError("--resume needs --out: the directory of the run that is to go on")
            if world:
                raise InputError("under torchrun --out must be given: all ranks write into one directory")
            wanted["out"] = _next_directory(wanted.get("model", "gpt"))
        if world.isdecimal():
            wanted.setdefault("ranks", int(world))
        sources: list[Mapping[str, Any]] = [wanted]
        if wanted.get("resume"):
            sources.insert(0, saved_settings(_saved(Path(wanted["out"]) / "checkpoints"), wanted))
        return merge_settings(*sources, {"quiet": True} if self.json else {})


def draw_run(
    out: Path, timelines: Sequence[Timeline], losses: Mapping[str, Sequence[tuple[float, float]]], title: str
) -> dict[str, str]:
    """The pictures of a run: its losses, its step as measured and as predicted, on one axis, and the rounds of OptEx."""
    from wavetrain.files import write_text
    from wavetrain.runtime.train.metrics import METRICS_FILE
    from wavetrain.runtime.train.report import round_curves
    from wavetrain.view.chart import line_chart
    from wavetrain.view.page import write_page

    curve, page = out / "loss.svg", out / "timeline.html"
    write_text(curve, line_chart(losses, title=title, x_label="step", y_label="loss, nats a token", y_from_zero=False))
    write_page(page, timelines)
    written = {"loss_curve": str(curve), "timeline": str(page)}
    rounds = round_curves(out / METRICS_FILE)
    if rounds:
        written["rounds"] = str(out / "rounds.svg")
        write_text(out / "rounds.svg", line_chart(rounds, title=title, x_label="round", y_label="a round"))
    return written


def _sample(config: TrainConfig) -> str:
    """A line of text by the model that was just trained."""
    from wavetrain.serve.llm import LLM
    from wavetrain.serve.sampling import SamplingParams

    prompt = config.prompt[: max(1, config.seq // 2)]
    params = SamplingParams(max_tokens=120, temperature=0.8, seed=config.seed)
    with LLM(config.checkpoints, tensor_parallel_size=1, max_num_seqs=1) as llm:
        return prompt + llm.generate(prompt, params)[0].outputs[0].text


def _saved(directory: Path) -> Mapping[str, Any]:
    """The settings of the newest checkpoint that can be read."""
    from wavetrain.runtime.checkpoint import read_extra
    from wavetrain.runtime.checkpoint.folders import checkpoints

    found = checkpoints(directory)
    problem: CheckpointError | None = None
    for folder in found:
        try:
            saved = read_extra(folder).get("config")
        except CheckpointError as error:
            problem = problem or error
            continue
        if isinstance(saved, dict):
            return saved
        raise InputError(f"{folder} was not saved by wavetrain train; it cannot be resumed by it")
    if problem is not None:
        raise problem
    raise InputError(f"there is no checkpoint in {directory} to resume from; leave --resume out, or name another --out")


def _next_directory(name: str) -> str:
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return str(path)


def _how_to_resume(config: TrainConfig) -> str:
    if not any(config.checkpoints.glob("step-*")):
        return f"nothing was saved in {config.out}: no checkpoint had been reached"
    return f"go on with: wavetrain train --resume --out {config.out}"


def _print_result(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def number(key: str, form: str) -> str:
        return "-" if result.get(key) is None else format(result[key], form)

    table = Table(show_header=False)
    table.add_row("steps", f"{result['step']} ({result['steps_done']} now)")
    before = "" if result["validation_step"] in (None, result["step"]) else f" at step {result['validation_step']}"
    table.add_row("loss", f"{number('loss', '.4f')}, validation {number('validation_loss', '.4f')}{before}")
    table.add_row("speed", f"{number('tokens_per_second', ',.0f')} tokens/s, {number('step_seconds', '.4f')} s a step (median)")
    table.add_row(
        "pipeline",
        f"{number('pipeline_seconds', '.4f')} s measured, {number('predicted_pipeline_seconds', '.4f')} s predicted",
    )
    table.add_row("bubble", f"{number('bubble', '.1%')} measured, {number('predicted_bubble', '.1%')} predicted")
    for name in ("checkpoint", "metrics", "loss_curve", "timeline"):
        table.add_row(name.replace("_", " "), escape(str(result[name])))
    console = Console()
    (console if console.is_terminal else Console(width=max(console.width, 120))).print(table)
    if result.get("sample"):
        print(f"generated: {result['sample']!r}")
