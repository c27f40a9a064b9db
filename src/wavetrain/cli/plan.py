"""``wavetrain plan``: the best way to split a model over machines."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from wavetrain.cli.common import Count, Counts, File, Flag, Name, Names, Number, print_json
from wavetrain.cli.planning import Costing, console, draw_plan, plan_table, print_explanation, progress_line, rank_table
from wavetrain.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from wavetrain.plan.planner import Planned
    from wavetrain.plan.shapes import Limits
    from wavetrain.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PlanVerb(Costing):
    """Find the best way to split a model over a cluster: ranked, the winner explained and written to plan.toml.

    wavetrain plan --model gpt2-xl --cluster cluster.toml --global-batch 64

    wavetrain plan --model model.toml --cluster "3 x p3.8xlarge + 1 x g4dn.12xlarge" --global-batch 32

    wavetrain plan --model gpt2 --cluster detect --global-batch 16

    A ? beside a plan: the predictions cannot tell it from the best; run both for a minute. Exit code 2: nothing fits, or a file
    cannot be read; the message says what would help.
    """

    model: Name = None
    """A preset (gpt2-xl, gpt3-175b, llama-70b, bert-large, transgan, …), a .toml of shapes, or a Hugging Face config.json."""
    cluster: Name = None
    """A .toml of nodes, words ("2 x 8 x A100-80 + 1 x g4dn.12xlarge"), or detect for this machine."""
    global_batch: Count = None
    """Sequences of a step, over all replicas."""
    seq: Count = None
    """Tokens of a sequence. Default: the model's own."""
    precision: Name = None
    """fp16, bf16 or fp32. Default: what the model says, else bf16."""
    schedules: Names = None
    """Families to choose from: 1f1b, zb-wave, hanayo, interleaved, gpipe, zb-h1, zbv. Default: what the runtime does best."""
    waves: Counts = None
    """Of zb-wave and hanayo, and stages a rank of interleaved. Default: 1 and 2."""
    tp: Counts = None
    """Only these sizes of tensor parallelism."""
    dp: Counts = None
    """Only these numbers of replicas."""
    pp: Counts = None
    """Only these numbers of pipeline ranks."""
    micro_batch: Counts = None
    """Only these micro-batches, in sequences."""
    runtime: Literal["wavetrain", "megatron"] = "wavetrain"
    """Who is to run it: wavetrain hides messages behind computing and keeps optimizers whole; Megatron waits and can shard."""
    all_devices: Flag = False
    """Leave no node group out, even where the step is faster without it."""
    seconds: Number = None
    """Stop searching after about so long. Default: 12."""
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Plans to show."""
    what_if: Flag = False
    """Also plan for one more node, faster links, and without each type of device."""
    out: File = None
    """Where the plan goes. Default: plan.toml."""
    html: File = None
    """Write the simulated timeline of the best plan as a page."""
    devices: Flag = False
    """List the devices and instances that are known, and stop."""

    def run(self) -> int:
        """Plan, explain and write."""
        if self.devices:
            return self._list()
        if self.model is None or self.cluster is None or self.global_batch is None:
            missing = [f"--{n}" for n in ("model", "cluster", "global-batch") if getattr(self, n.replace("-", "_")) is None]
            raise InputError(
                f"{', '.join(missing)} missing: wavetrain plan --model gpt2-xl --cluster cluster.toml --global-batch 64"
            )
        from wavetrain.plan.explain import explain
        from wavetrain.plan.planner import make_plan
        from wavetrain.plan.sources import Sources, without_bfloat16

        if self.top < 1:
            raise InputError(f"--top is {self.top}; show at least 1 plan")
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"--seconds is {self.seconds}; it must be above 0")
        sources = Sources(model=self.model, cluster=self.cluster, seq=self.seq, precision=self.precision, runtime=self.runtime)
        limits = self._limits()
        with progress_line() as progress:
            cluster = sources.nodes()
            sources = sources.for_devices(cluster)
            model = self.cost_model(sources)
            planned = make_plan(model, cluster, self.global_batch, sources, limits, progress)
            told = explain(planned.best, model, cluster, limits, what_ifs=self.what_if, progress=progress)
        path = str(self.out) if self.out is not None else "plan.toml"
        note = self._write(planned, path, model.workload)
        if self.html is not None:
            draw_plan(self.html, planned.best, told)
        unknown = [n for n in planned.best.device_names if not model.calibration.known(n)]
        if self.json:
            print_json(
                {
                    "plans": [plan.to_dict() for plan in planned.plans[: self.top]],
                    "ties": len(planned.ties),
                    "bound_seconds": planned.found.bound,
                    "complete": planned.found.complete,
                    "search_seconds": planned.found.seconds,
                    "explanation": told.to_dict(),
                    "written": path,
                }
            )
            return 0
        out = console()
        shown = planned.plans[: self.top]
        out.print(plan_table(shown, f"{model.workload.name} on {cluster.describe()}, {self.global_batch} sequences a step"))
        out.print(rank_table(planned.best))
        print_explanation(planned.best, told)
        if planned.ties:
            print(f"{len(planned.ties)} cannot be told from the best by prediction; a trial of {_to_try(planned)} would decide")
        if old := without_bfloat16(cluster):
            asked = "in fp16" if sources.precision == "fp16" else "use --precision fp16" if sources.precision == "bf16" else ""
            if asked:
                print(f"{', '.join(old)}: no bf16 there, {asked}")
        for name in unknown:
            print(
                f"no trial of a {name} was part of the calibration: expect errors of about {model.calibration.of(name).error:.0%}"
            )
        gap = 1 - planned.found.bound / planned.best.seconds
        state = (
            "all shapes of whole node groups were searched"
            if planned.found.complete
            else f"at most {max(gap, 0):.0%} are left on the table"
        )
        print(f"{planned.found.num_shapes} shapes in {planned.found.seconds:.2f} s; {state}")
        print(f"written to {path}{'' if not note else f' ({note})'}")
        return 0

    def _limits(self) -> Limits:
        from wavetrain.plan.pipeline_time import SCHEDULES, SCHEDULES_WITH_WAVES
        from wavetrain.plan.shapes import limits_of

        given: dict[str, Any] = {}
        for name in ("tp", "dp", "pp", "micro_batch", "waves"):
            values = getattr(self, name)
            if values is not None and min(values) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {min(values)}; it must be at least 1")
            if values is not None and name != "waves":
                given[name] = values
        if self.global_batch is not None and self.global_batch < 1:
            raise InputError(f"--global-batch is {self.global_batch}; it must be at least 1")
        if self.seconds is not None:
            given["seconds"] = self.seconds
        waves = self.waves or (1, 2)
        names = self.schedules or (("1f1b", "zb-wave") if self.runtime == "wavetrain" else ("1f1b", "interleaved"))
        for name in names:
            if name not in (*SCHEDULES, *SCHEDULES_WITH_WAVES):
                raise UnknownNameError("schedule to plan with", name, (*SCHEDULES, *SCHEDULES_WITH_WAVES))
        given["schedules"] = tuple(
            (name, w)
            for name in names
            for w in ((1,) if name in SCHEDULES else tuple(w for w in waves if name != "interleaved" or w > 1))
        )
        if not given["schedules"]:
            raise InputError("interleaved needs --waves of at least 2: the stages a rank has")
        return replace(limits_of(self.runtime), leave_out=not self.all_devices, **given)

    def _write(self, planned: Planned, path: str, workload: Workload) -> str:
        from wavetrain.files import write_text
        from wavetrain.plan.plan import plan_text
        from wavetrain.plan.training import train_settings

        best = planned.best
        settings, why = train_settings(best, workload)
        best = replace(best, sources=best.sources.beside(os.path.dirname(path) or "."))
        notes = [best.describe(), *([f"No [train] table: {why}."] if why else [])]
        write_text(path, plan_text(best, settings, notes))
        return "" if not why else f"not for wavetrain train: {why}"

    def _list(self) -> int:
        from rich.table import Table

        from wavetrain.devices import DEVICES, GB, GBPS, INSTANCES, TERA

        if self.json:
            print_json(
                {"devices": {n: vars(d) for n, d in DEVICES.items()}, "instances": {n: vars(i) for n, i in INSTANCES.items()}}
            )
            return 0
        table = Table(title="devices", title_justify="left")
        for name in ("name", "fp16 TFLOPS", "fp32 TFLOPS", "GB", "GB/s", "link GB/s", "network Gbit/s"):
            table.add_column(name, justify="left" if name == "name" else "right")
        for d in DEVICES.values():
            values = (
                d.half_flops / TERA,
                d.single_flops / TERA,
                d.memory_bytes / GB,
                d.memory_bandwidth / GB,
                d.link_bandwidth / GB,
            )
            table.add_row(d.name, *(f"{v:g}" for v in values), f"{d.network_bandwidth / GBPS:g}")
        other = Table(title="instances", title_justify="left")
        for name in ("name", "devices", "network Gbit/s", "$ an hour"):
            other.add_column(name, justify="left" if name in ("name", "devices") else "right")
        for i in INSTANCES.values():
            other.add_row(i.name, f"{i.gpus} {i.device}", f"{i.network_gbps:g}", f"{i.price:.2f}")
        out = console()
        out.print(table)
        out.print(other)
        return 0


def _to_try(planned: Planned) -> str:
    """The best and the ties that differ from it most."""
    best = planned.best
    others = sorted(
        planned.ties, key=lambda p: -((p.pp != best.pp) + (p.dp != best.dp) + (p.tp != best.tp) + (p.schedule != best.schedule))
    )
    numbers = [1, *(planned.plans.index(p) + 1 for p in others[:2])]
    return " and ".join(f"#{n}" for n in sorted(numbers))
