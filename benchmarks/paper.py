"""Hanayo's experiment on paper: four clusters, two models, 8 to 32 ranks; throughput of every schedule with those links.

Simulated from documented numbers (:mod:`benchmarks.clusters`); the picture is ``benchmarks/plots/paper.svg``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import CLUSTERS, GRADIENT_BYTES, MODELS, REACHED, Cluster, Model, pipeline_costs
from benchmarks.report import Report, Row, main, percent

from wavetrain.errors import CapError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate
from wavetrain.schedule.timeline import Timeline
from wavetrain.view.chart import grouped_bars, stacked

PAPER = 0.304
"""The most that Hanayo gained over the best of GPipe, DAPPLE and Chimera."""
RIVALS = ("GPipe", "DAPPLE", "Chimera")
WAVES = (2, 4, 8)
ZB_WAVES = (1, 2, 4, 8)
MICRO_BATCHES = (8, 4, 2, 1)
PLOT = Path(__file__).resolve().parent / "plots" / "paper.svg"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cluster, model and number of ranks, with the schedules that are compared on it."""

    cluster: Cluster
    model: Model
    num_ranks: int
    num_micro_batches: int
    micro_batch: int
    """Sequences: the most for which all of the paper's schedules fit the devices at B = P."""
    costs: Costs
    """One stage a layer."""
    schedules: Mapping[str, tuple[str, Mapping[str, Any]]]
    """Label → name and options, as :func:`wavetrain.schedule.families.build` takes them."""

    @property
    def label(self) -> str:
        return f"{self.cluster.name}, {self.model.name}, P={self.num_ranks} B={self.num_micro_batches}"

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.micro_batch * self.num_micro_batches

    def costs_of(self, label: str) -> Costs:
        """Costs as a schedule sees them: Chimera's second copy of the weights leaves less room for activations."""
        if label != "Chimera":
            return self.costs
        return pipeline_costs(self.cluster, self.model, num_ranks=self.num_ranks, micro_batch=self.micro_batch, weight_copies=2)

    def build(self, label: str) -> Schedule:
        """Build one of :attr:`schedules`.

        Raises:
            CapError: its activations do not fit.
        """
        name, options = self.schedules[label]
        costs = self.costs_of(label)
        return build(name, num_ranks=self.num_ranks, num_micro_batches=self.num_micro_batches, costs=costs, **options)

    def step_seconds(self, label: str, timeline: Timeline) -> float:
        """The makespan, and for Chimera the rest of what its two copies of the weights take to agree."""
        return timeline.makespan if label != "Chimera" else chimera_seconds(self, timeline)


def cases(quick: bool = False) -> Iterator[Case]:
    """B = P for all; B = 2P at P = 8, where memory is the question."""
    for cluster in CLUSTERS[:1] if quick else CLUSTERS:
        for model in MODELS[:1] if quick else MODELS:
            micro_batch = next((m for m in MICRO_BATCHES if _fits(cluster, model, m)), MICRO_BATCHES[-1])
            for p, b in ((8, 8),) if quick else ((8, 8), (8, 16), (16, 16), (32, 32)):
                yield _case(cluster, model, p, b, micro_batch)


def _case(cluster: Cluster, model: Model, p: int, b: int, micro_batch: int) -> Case:
    most = model.num_layers // (2 * p)
    schedules: dict[str, tuple[str, dict[str, Any]]] = {
        "GPipe": ("gpipe", {}),
        "DAPPLE": ("1f1b", {}),
        "Chimera": ("chimera", {}),
    }
    for waves in [w for w in WAVES if w <= most] or [1]:
        schedules[f"Hanayo W={waves}"] = ("hanayo", {"waves": waves})
    for waves in [w for w in ZB_WAVES if w <= most]:
        schedules[f"zb-wave W={waves}"] = ("zb-wave", {"waves": waves})
    return Case(
        cluster=cluster,
        model=model,
        num_ranks=p,
        num_micro_batches=b,
        micro_batch=micro_batch,
        costs=pipeline_costs(cluster, model, num_ranks=p, micro_batch=micro_batch),
        schedules=schedules,
    )


def _fits(cluster: Cluster, model: Model, micro_batch: int) -> bool:
    """Whether all schedules but ours fit with B = P = 8, where weights take the most."""
    case = _case(cluster, model, 8, 8, micro_batch)
    try:
        for label in case.schedules:
            if not label.startswith("zb-wave"):
                case.build(label)
    except CapError:
        return False
    return True


def chimera_seconds(case: Case, timeline: Timeline) -> float:
    """Seconds of a step with the all-reduce of every stage's gradients between its two copies.

    It begins as soon as both copies have done their last backward (Chimera's eager synchronisation, Li & Hoefler 2021, section
    3.2), disturbs neither compute nor the pipeline's messages, and has the link between the two ranks to itself. A rank and its
    mirror share two stages, whose gradients follow one another. Two ranks exchange the bytes of one copy in each direction.
    """
    p = case.num_ranks
    num_bytes = GRADIENT_BYTES * case.model.layer_parameters * case.model.num_layers / p
    done = [
        max(s.end for spans in (timeline.spans[k], timeline.spans[p - 1 - k]) for s in spans if s.stage == k) for k in range(p)
    ]
    end = timeline.makespan
    for rank in range(p // 2):
        link = case.cluster.link(rank, p - 1 - rank)
        free = 0.0
        for ready in sorted((done[rank], done[p - 1 - rank])):
            free = max(ready, free) + 2 * link.latency_seconds + num_bytes / link.bytes_per_second
        end = max(end, free)
    return end


@dataclass(frozen=True, kw_only=True)
class Result:
    """Sequences a second on one case, by label; a schedule that does not fit has none."""

    case: Case
    throughput: Mapping[str, float]
    proven: bool

    def best(self, *starts: str) -> tuple[float, str]:
        """The highest throughput of labels that begin so, and the label."""
        return max((v, label) for label, v in self.throughput.items() if label.startswith(starts))

    def gain(self, start: str) -> float:
        return self.best(start)[0] / self.best(*RIVALS)[0] - 1

    @property
    def limit(self) -> float:
        """With no bubble."""
        costs = self.case.costs
        work = sum(costs.forward) + sum(costs.backward_input) + sum(costs.backward_weight)
        return self.case.micro_batch * self.case.num_ranks / work


def measure(case: Case) -> Result:
    """Simulate all schedules of a case."""
    throughput, proven = {}, True
    for label in case.schedules:
        costs = case.costs_of(label)
        try:
            schedule = case.build(label)
        except CapError:
            continue
        timeline = simulate(schedule, costs)
        throughput[label] = case.sequences / case.step_seconds(label, timeline)
        proven = proven and prove(schedule, costs).proven
    return Result(case=case, throughput=throughput, proven=proven)


def run(quick: bool) -> Report:
    """The paper's experiment."""
    results = [measure(case) for case in cases(quick)]
    if not quick:
        PLOT.parent.mkdir(exist_ok=True)
        PLOT.write_text(picture(results), encoding="utf-8")
    rows = [_row(result) for result in results]
    for start in ("Hanayo", "zb-wave"):
        best = max(results, key=lambda r, start=start: r.gain(start))  # type: ignore[misc]
        rows.append(
            Row(
                case=f"most of {start} over the best of {', '.join(RIVALS)}",
                target=f"≥ {percent(PAPER, 1)} (the paper's most)",
                measured=f"+{percent(best.gain(start), 1)}: {best.case.label}",
                passed=best.gain(start) >= PAPER,
            )
        )
    return Report(
        name="paper",
        claim="Hanayo's experiment, simulated: sequences a second, on four clusters with two models.",
        rows=tuple(rows),
        notes=_notes(results),
    )


def _row(result: Result) -> Row:
    case = result.case
    zb_wave, waves = result.best("zb-wave")
    shown = []
    for label in case.schedules:
        if not label.startswith("zb-wave"):
            shown.append(f"{label} {result.throughput[label]:.1f}" if label in result.throughput else f"{label} does not fit")
    shown.append(f"**{waves} {zb_wave:.1f}**")
    gains = f"Hanayo {100 * result.gain('Hanayo'):+.1f} %, zb-wave {100 * result.gain('zb-wave'):+.1f} %"
    return Row(
        case=f"{case.label}, micro-batches of {case.micro_batch}",
        target=f"zb-wave > {result.best(*RIVALS)[1]}",
        measured=f"{', '.join(shown)}: {gains}",
        limit=f"{result.limit:.1f}",
        distance=f"{100 * (zb_wave / result.limit - 1):.1f} %",
        passed=result.proven and result.gain("zb-wave") > 0,
    )


def _notes(results: list[Result]) -> tuple[str, ...]:
    sizes = dict.fromkeys((r.case.model, r.case.num_ranks, w) for r in results for w in WAVES)
    left_out = [
        f"{model.name} P={p} W={w} ({2 * p * w} stages, {model.num_layers} layers)"
        for model, p, w in sizes
        if 2 * p * w > model.num_layers
    ]
    notes = [
        "Nothing here ran on these devices: layer times are FLOPs over a stated share of the device's peak, backward is split "
        f"into I and W by FLOPs, links have NCCL's latencies and {percent(REACHED, 0)} of the documented bandwidth "
        "(`benchmarks/clusters.py` names the sources).",
        "Models: "
        + "; ".join(
            f"{m.name}, {m.num_layers} layers, hidden {m.hidden}, {m.num_heads} heads, sequences of {m.sequence}" for m in MODELS
        )
        + "; no embedding and head. Micro-batches are the largest power of two for which the paper's schedules fit at P = B = 8, "
        "without recomputation.",
        "Every schedule must fit: activations have what the device holds beside weights and optimizer (Chimera: two copies). "
        "zb-wave is built for that room and those links, with the best number of waves of those that the layers allow.",
        "Chimera's two copies agree by an all-reduce of fp16 gradients that begins when a stage's last backward is done, costs "
        "no compute and has its link to itself; what is left of it after the last backward is charged. The optimizer step and "
        "data parallelism are left out for all.",
        "DAPPLE is 1F1B. Limit: no bubble.",
    ]
    if left_out:
        notes.append(f"Left out, more stages than layers: {', '.join(left_out)}. Where no other W fits, Hanayo has W=1.")
    return tuple(notes)


def picture(results: list[Result]) -> str:
    """Throughput over that of the best rival, one chart a model."""
    charts = []
    for model in dict.fromkeys(r.case.model for r in results):
        groups = {}
        for result in (r for r in results if r.case.model == model and r.case.num_micro_batches == r.case.num_ranks):
            base = result.best(*RIVALS)[0]
            bars = {label: v / base for label, v in result.throughput.items() if not label.startswith("zb-wave")}
            bars["zb-wave, best W"] = result.best("zb-wave")[0] / base
            order = [*RIVALS, *(f"Hanayo W={w}" for w in (1, *WAVES)), "zb-wave, best W"]
            groups[f"P={result.case.num_ranks}\n{result.case.cluster.name}"] = {n: bars.get(n, math.nan) for n in order}
        charts.append(
            grouped_bars(
                groups,
                title=f"{model.name}: {model.num_layers} layers, hidden {model.hidden}, B = P (simulated)",
                y_label="throughput, best of the first three = 1",
                width=1360,
                height=400,
            )
        )
    return stacked(charts)


if __name__ == "__main__":
    main(run)
