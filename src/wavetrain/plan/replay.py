"""Replay: a trial as the cost model sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from wavetrain.cluster import INTER_LATENCY, INTRA_LATENCY, Link, NodeGroup
from wavetrain.devices import Device
from wavetrain.errors import InputError, UnknownNameError
from wavetrain.plan.calibration import Calibration
from wavetrain.plan.clock import RECOMPUTES, Recompute
from wavetrain.plan.estimate import CostModel, Estimate, Strategy
from wavetrain.plan.layout import Layout, even_cut
from wavetrain.plan.trials import Trial
from wavetrain.profile import Profiles
from wavetrain.workload import PRESETS, Layer, Shape, Workload, block

PEAK_BYTES: Final = 1.0
"""Messages from this size on are taken to reach the peak that a profile gives of a link."""
DEFAULT_NODE: Final = 8
"""Devices of a node, where neither the trial nor its profiles say."""


class Replay:
    """Predicts trials.

    Args:
        profiles: measured layers, memory and links of the trials' models and devices.
        trials: all that are to be predicted: runs of one experiment used one program, so what one of them needed (recompute)
            all of them had.
    """

    def __init__(self, profiles: Profiles, trials: Iterable[Trial]) -> None:
        self._profiles = profiles
        self._layouts: dict[int, tuple[Layout, tuple[int, ...], Workload]] = {}
        self._bases: dict[int, CostModel] = {}
        self._recompute: dict[str, Recompute] = {}
        found = list(trials)
        for experiment in dict.fromkeys(trial.experiment for trial in found):
            self._recompute[experiment] = self._needed([t for t in found if t.experiment == experiment])

    def predict(self, trials: Sequence[Trial], calibration: Calibration, *, with_memory: bool = True) -> list[Estimate]:
        """What the trials should have taken."""
        models: dict[int, CostModel] = {}
        found = []
        for trial in trials:
            layout, cut, workload = self._placed(trial)
            if id(workload) not in models:
                models[id(workload)] = self._base(workload).with_calibration(calibration)
            strategy = self._strategy(trial, self._recompute[trial.experiment])
            found.append(models[id(workload)].estimate(layout, cut, strategy, with_memory=with_memory))
        return found

    def ran(self, trial: Trial, estimate: Estimate) -> bool:
        """Whether the trial should have run: it fits, and no stage is without parameters (DeepSpeed optimizes none)."""
        _, cut, workload = self._placed(trial)
        a = self._base(workload).arrays
        counts = np.add.reduceat(a.parameters_split + a.parameters_whole, np.asarray(cut[:-1]))
        return estimate.fits and bool((counts > 0).all())

    def _base(self, workload: Workload) -> CostModel:
        if id(workload) not in self._bases:
            self._bases[id(workload)] = CostModel(workload=workload, calibration=Calibration(), profiles=self._profiles)
        return self._bases[id(workload)]

    def _placed(self, trial: Trial) -> tuple[Layout, tuple[int, ...], Workload]:
        if id(trial) not in self._layouts:
            workload = trial_workload(trial)
            layout = trial_layout(trial, self._profiles)
            cut = trial.cut if trial.cut is not None else even_cut(workload.num_layers, layout.num_ranks)
            if cut[-1] != workload.num_layers:
                raise InputError(
                    f"trial {trial.id}: its stages hold {cut[-1]} layers, but {workload.name} has {workload.num_layers}"
                )
            self._layouts[id(trial)] = layout, cut, workload
        return self._layouts[id(trial)]

    def _strategy(self, trial: Trial, recompute: Recompute) -> Strategy:
        return Strategy(
            micro_batch=trial.micro_batch,
            num_micro_batches=(trial.num_micro_batches,) * len(trial.slots[0]),
            schedule=trial.schedule,
            recompute=recompute,
            gradient_bytes=trial.gradient_bytes,
        )

    def _needed(self, trials: list[Trial]) -> Recompute:
        """What the runs of one experiment recomputed: what they say, else what one of them could not have run without."""
        for trial in trials:
            if trial.recompute is not None:
                return next(r for r in RECOMPUTES if r == trial.recompute)
        for trial in trials:
            if trial.failed:
                continue
            layout, cut, workload = self._placed(trial)
            found = self._base(workload).estimate(layout, cut, self._strategy(trial, "none"))
            most = max(g.device.memory_bytes for g in layout.groups)
            if found.peak_bytes > 2.2 * most:  # more than the largest card of the family
                return "full"
        return "none"


def trial_layout(trial: Trial, profiles: Profiles) -> Layout:
    """The slots of a trial. Where it does not say which nodes they were on, they fill nodes one after another."""
    shape = (len(trial.slots), len(trial.slots[0]))
    slots = [slot for row in trial.slots for slot in row]
    tp = np.array([slot.tp for slot in slots], dtype=np.int64).reshape(shape)
    if trial.groups:
        group = np.array([slot.group for slot in slots], dtype=np.int64).reshape(shape)
        node = np.array([slot.node for slot in slots], dtype=np.int64).reshape(shape)
        return Layout(groups=trial.groups, group=group, node=node, tp=tp)
    groups: list[NodeGroup] = []
    names: dict[tuple[str, int], int] = {}
    of, at = [], []
    free: dict[int, tuple[int, int]] = {}  # by group: the node that is being filled, and how many of its devices are left
    num_nodes = 0
    for slot in slots:
        key = (slot.device.name, slot.tp)
        if key not in names:
            names[key] = len(groups)
            groups.append(_measured_group(slot.device, slot.tp, profiles.links))
        group_index = names[key]
        node_index, left = free.get(group_index, (0, 0))
        if left < slot.tp:
            node_index, left, num_nodes = num_nodes, groups[group_index].gpus, num_nodes + 1
        free[group_index] = (node_index, left - slot.tp)
        of.append(group_index)
        at.append(node_index)
    return Layout(
        groups=tuple(groups),
        group=np.array(of, dtype=np.int64).reshape(shape),
        node=np.array(at, dtype=np.int64).reshape(shape),
        tp=tp,
    )


def _measured_group(device: Device, tp: int, links: Mapping[tuple[str, str], Mapping[int, float]]) -> NodeGroup:
    """A node of such devices, with the links that were measured of it."""
    intra = links.get((device.name, "intra"), {})
    inter = links.get((device.name, "inter"), {})
    gpus = max((*intra, *inter), default=DEFAULT_NODE)
    inside = intra.get(tp) or (intra[min(intra, key=lambda n: abs(n - tp))] if intra else device.link_bandwidth)
    return NodeGroup(
        count=1,
        gpus=max(gpus, tp),
        device=device,
        intra=_link(inside, INTRA_LATENCY, bool(intra)),
        inter=_link(inter[max(inter)] if inter else gpus * device.network_bandwidth, INTER_LATENCY, bool(inter)),
        flow_bandwidth=inter[min(inter)] if inter else math.inf,
    )


def _link(bandwidth: float, latency: float, measured: bool) -> Link:
    return Link(bandwidth=bandwidth, latency=latency, measured=((PEAK_BYTES, bandwidth),) if measured else ())


def trial_workload(trial: Trial) -> Workload:
    """The model of a trial.

    Raises:
        UnknownNameError: a name that is not known.
    """
    if isinstance(trial.model, str):
        return named_workload(trial.model, trial.precision)
    return _shaped(tuple(sorted(trial.model.items())), trial.precision)


@lru_cache(maxsize=256)
def _shaped(items: tuple[tuple[str, int], ...], precision: str) -> Workload:
    values = dict(items)
    shape = Shape(**{key: values[key] for key in ("layers", "hidden", "heads", "seq", "vocab")})  # type: ignore[arg-type]
    return shape.workload(f"{shape.layers}x{shape.hidden}", precision)


@lru_cache(maxsize=64)
def named_workload(name: str, precision: str) -> Workload:
    """A model that published trials call by its name, or a preset.

    Raises:
        UnknownNameError: neither.
    """
    if name == "gpt2-24x1024":
        return _gpt2_of_amp(precision)
    if name == "transgan-12-12":
        return _transgan_of_amp(precision)
    shapes = {
        **PRESETS,
        "OPT-350": Shape(layers=24, hidden=1024, heads=16, seq=2048, vocab=50272),
        "GPT-Neo-2.7": Shape(layers=32, hidden=2560, heads=32, seq=2048, vocab=128256),
    }
    if name not in shapes:
        raise UnknownNameError("model of a trial", name, (*shapes, "gpt2-24x1024", "transgan-12-12"))
    return shapes[name].workload(name, precision)


def _gpt2_of_amp(precision: str) -> Workload:
    """AMP's GPT-2 as its 30 layers: embedding, a reshaping, 24 blocks, two reshapings (with the last norm), logits, loss."""
    shape = Shape(layers=24, hidden=1024, heads=16, seq=1024, vocab=52256)
    whole = shape.workload("gpt2-24x1024", precision)
    first, *blocks, last = whole.layers
    size = whole.element_bytes
    nothing = Layer(name="reshape", output_bytes=first.output_bytes, kernels=0.02)
    logits = replace(
        last, name="logits", moved_logits=last.moved_logits * 0.3, activation_split=last.activation_split * size / (size + 4)
    )
    loss = Layer(
        name="loss",
        moved_logits=last.moved_logits * 0.7,
        activation_split=last.activation_split * 4 / (size + 4),
        output_bytes=4.0,
        kernels=0.1,
    )
    return replace(whole, layers=(first, nothing, *blocks, nothing, nothing, logits, loss))


def _transgan_of_amp(precision: str) -> Workload:
    """AMP's TransGAN generator as its 56 layers: 12 narrow blocks (81 tokens of 1024), three shuffles of pixels, 12 wide blocks
    (the same 82,944 numbers as 5,184 tokens of 16), with what stands between them.

    A wide block is its scores: 4 heads of 5,184², which tensor parallelism does not divide, passed over 13 times (as measured).
    """
    size = 2 if precision != "fp32" else 4
    narrow = block(Shape(layers=12, hidden=1024, heads=4, seq=81, vocab=1), size)
    wide = block(Shape(layers=12, hidden=16, heads=4, seq=5184, vocab=1), size)
    wide = replace(
        wide,
        moved_whole=wide.moved_whole + 13 / 5 * wide.moved_scores,
        moved_scores=0.0,
        activation_split=wide.activation_split - wide.score_bytes,
        activation_whole=wide.activation_whole + wide.score_bytes,
        score_bytes=0.0,
    )
    between = Layer(name="between", parameters_whole=1.0, output_bytes=wide.output_bytes, kernels=0.02)
    layers = [between] * 3 + [narrow] * 12 + [between] * 26 + [wide] * 12 + [between] * 3
    return Workload(name="transgan-12-12", layers=tuple(layers), element_bytes=size, tensor_limit=4)
