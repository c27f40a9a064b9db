"""A stage: some neighbouring layers on this rank, and what it holds of every micro-batch between its forward and its backward.

Two things make the numbers of a run independent of its schedule and of where the layers sit:

- every layer draws its random numbers from a seed of its own, made of the step, the layer and the micro-batch;
- gradients of micro-batches are added in the order of the micro-batches. One that a schedule computes early waits for its turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from wavetrain.errors import InputError
from wavetrain.runtime.saved import Saved
from wavetrain.runtime.split import Found, LateWeights, add_gradients, backward_input, backward_whole, edges_of, leaf_nodes
from wavetrain.runtime.structure import Leaf, Structure, flatten

LossFn = Callable[[Any, Any], Tensor]
"""(what the last layer gives, the targets of the micro-batch) to a scalar, the mean over the micro-batch."""

Result = tuple[list[Tensor], Structure]
"""What an action makes for the stage after or before: detached tensors, none in memory that was received, and their nesting."""


class Worker(Protocol):
    """What computes the actions of one stage. A :class:`Stage` computes; a rehearsal only waits."""

    def forward(self, micro_batch: int, received: Sequence[Tensor], structure: Structure | None) -> Result | None: ...

    def backward(self, micro_batch: int, flows: Sequence[Tensor]) -> Result | None: ...

    def backward_input(self, micro_batch: int, flows: Sequence[Tensor]) -> Result | None: ...

    def backward_weight(self, micro_batch: int) -> None: ...


@dataclass(kw_only=True)
class StepData:
    """What one step feeds to the stages of this rank."""

    inputs: Sequence[Any]
    """Of every micro-batch, for the first stage."""
    targets: Sequence[Any]
    """Of every micro-batch, for the last stage."""
    weights: Sequence[float]
    """The share of every micro-batch in the loss of the whole batch."""
    loss_scale: float = 1.0
    """Gradients are those of the loss times this."""
    seed: int
    training: bool
    first_micro_batch: int = 0
    """The number of this replica's first micro-batch among those of all replicas."""
    alone: bool = False
    """Loss and gradients are of this replica only."""
    on_loss: Callable[[], None] | None = None
    """Called whenever the loss of a further micro-batch is known."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Filled by the last stage, by micro-batch."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Filled by the last stage where there is no loss, by micro-batch."""


@dataclass
class _Held:
    """What is kept of one micro-batch from its forward to the end of its backward."""

    received: Sequence[Tensor]
    structure: Structure | None
    inputs: list[Tensor] = field(default_factory=list)
    """Those that take a gradient."""
    roots: list[GradientEdge] = field(default_factory=list)
    grad_outputs: list[int] = field(default_factory=list)
    """Which of the gradients that come back belong to ``roots``; all others are of no use."""
    saved: Saved | None = None
    """What autograd keeps, where the backward will be split."""
    buffers: list[Tensor] = field(default_factory=list)
    """What the layers' buffers held before the forward pass, where it will be run again."""
    late: LateWeights | None = None


class Stage:
    """Neighbouring layers that one rank computes as one action.

    Args:
        index: the stage's number, 0 … num_stages − 1.
        num_stages: of the whole model.
        layers: (number of the layer in the model, layer).
        parameters: those that take a gradient, in the order of the forward pass.
        micro_batches: those that pass here, in the order in which their gradients are added.
        loss_fn: for the last stage.
        splits: whether the schedule splits its backward.
        recompute: keep only the stage's input and compute the rest again in the backward pass.
        autocast: the type that matrix products run in, or None.
    """

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        layers: Sequence[tuple[int, nn.Module]],
        parameters: Sequence[Tensor],
        micro_batches: Sequence[int],
        loss_fn: LossFn | None,
        splits: bool = False,
        recompute: bool = False,
        autocast: torch.dtype | None = None,
        device: torch.device,
    ) -> None:
        self.index, self.layers, self.parameters = index, layers, parameters
        self.first, self.last = index == 0, index == num_stages - 1
        self.splits, self.recompute = splits, recompute
        self.loss_fn, self._autocast, self._device = loss_fn, autocast, device
        self._order = list(micro_batches)
        self._leaves = leaf_nodes(parameters)
        self._data: StepData | None = None
        self._held: dict[int, _Held] = {}
        self._turn = 0
        self._early: dict[int, Found] = {}
        self._checkpoints = False  # whether layers run forward again in the backward pass, as was seen

    def begin(self, data: StepData) -> None:
        """Start a step."""
        self._data, self._turn = data, 0
        self._held.clear()
        self._early.clear()
        for _, layer in self.layers:
            layer.train(data.training)

    def forward(self, micro_batch: int, received: Sequence[Tensor], structure: Structure | None) -> Result | None:
        """F: the outputs for the next stage; None from the last."""
        data = self._step
        held = _Held(received, structure)
        if data.training:
            self._held[micro_batch] = held
        if not data.training or self.recompute:
            if data.training:
                held.buffers = [b.clone() for b in self._buffers()]
            with torch.no_grad():
                value, _ = self._compute(micro_batch, held)
            if self.last:
                self._take_loss(micro_batch, value)
                return None
            tensors, found = flatten(value, self._what())
            return _apart(tensors, received), self._as_if_tracked(found) if data.training else found
        value, held.inputs = self._compute(micro_batch, held)
        if self.last:
            held.roots, held.grad_outputs = edges_of(self._take_loss(micro_batch, value)), [0]
            return None
        tensors, found = flatten(value, self._what())
        self._keep_roots(held, tensors, found)
        return _apart(tensors, received), found

    def backward(self, micro_batch: int, flows: Sequence[Tensor]) -> Result | None:
        """B: the gradients for the stage before; None from the first."""
        held, flows = self._ready(micro_batch, flows)
        stash = None if self._is_turn(micro_batch) else list[tuple[Tensor, Tensor]]()
        gradients = backward_whole(held.roots, flows, held.inputs, self.parameters, stash)
        del self._held[micro_batch]
        self._count(micro_batch, stash)
        return self._result(held, gradients, flows)

    def backward_input(self, micro_batch: int, flows: Sequence[Tensor]) -> Result | None:
        """I: the gradients for the stage before; None from the first."""
        held, flows = self._ready(micro_batch, flows)
        gradients, held.late = backward_input(
            held.roots, flows, held.inputs, self.parameters, self._leaves, held.saved, whole=self._checkpoints
        )
        self._checkpoints = self._checkpoints or held.late.recomputed
        held.saved = None
        held.roots = []
        return self._result(held, gradients, flows)

    def backward_weight(self, micro_batch: int) -> None:
        """W: the gradients of the stage's own weights."""
        held = self._held.pop(micro_batch)
        assert held.late is not None, "I comes before W in every proven schedule"
        stash = None if self._is_turn(micro_batch) else list[tuple[Tensor, Tensor]]()
        held.late.finish(stash)
        self._count(micro_batch, stash)

    @property
    def _step(self) -> StepData:
        assert self._data is not None, "begin() comes before the first action"
        return self._data

    def _what(self) -> str:
        return f"what layer {self.layers[-1][0]} ({type(self.layers[-1][1]).__name__}) returns"

    def _compute(self, micro_batch: int, held: _Held) -> tuple[Any, list[Tensor]]:
        """Run the layers: what the last of them gives, and the inputs that take a gradient."""
        data = self._step
        again = self.recompute and not torch.is_grad_enabled()  # the input is needed once more: layers may work in place
        if self.first:
            value, inputs = _to(data.inputs[micro_batch], self._device, copy=again), list[Tensor]()
        else:
            assert held.structure is not None
            leaves = [
                (t.clone() if again else t.detach()).requires_grad_(leaf.requires_grad)
                for t, leaf in zip(held.received, held.structure.leaves, strict=True)
            ]
            inputs = [t for t in leaves if t.requires_grad]
            value = held.structure.unflatten(leaves)
        if self.splits and torch.is_grad_enabled():
            held.saved = Saved()
        with self._casting(), _random_numbers_kept(self._device), held.saved or contextlib.nullcontext():
            for number, layer in self.layers:
                _seed(self._device, data.seed, number, data.first_micro_batch + micro_batch)
                value = self._call(number, layer, value)
        return value, inputs

    def _call(self, number: int, layer: nn.Module, value: Any) -> Any:
        try:
            return layer(value)
        except Exception as error:
            error.add_note(
                f"in layer {number} ({type(layer).__name__}) of stage {self.index}, which was given {_described(value)}"
            )
            if "leaf Variable that requires grad" in str(error) and number == self.layers[0][0]:
                error.add_note("the first layer of a stage cannot work in place on its input: use inplace=False, or another cut")
            raise

    def _take_loss(self, micro_batch: int, value: Any) -> list[Tensor]:
        """The loss, if there is one that counts."""
        data = self._step
        if self.loss_fn is None:
            if data.training:
                raise InputError("a step needs a loss: give Pipeline a loss_fn(output, target)")
            data.outputs[micro_batch] = value
            return []
        with self._casting():
            loss = self.loss_fn(value, _to(data.targets[micro_batch], self._device))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn must return one number, the mean over the micro-batch; it returned {shape}")
        counts = data.weights[micro_batch] > 0  # without targets it does not: its mean is 0 / 0
        known = micro_batch in data.losses
        data.losses[micro_batch] = loss.detach() if counts else torch.zeros_like(loss.detach())
        if not known and data.on_loss is not None:
            data.on_loss()
        return [loss] if counts else []

    def _buffers(self) -> list[Tensor]:
        return [buffer for _, layer in self.layers for buffer in layer.buffers()]

    def _set_buffers(self, values: Sequence[Tensor]) -> None:
        """Layers that count or average (BatchNorm) do so in every forward pass, but one that is run again is still the same."""
        for buffer, value in zip(self._buffers(), values, strict=True):
            buffer.data.copy_(value)  # not seen by autograd, which may have saved the buffer

    def _keep_roots(self, held: _Held, tensors: Sequence[Tensor], structure: Structure) -> None:
        """Keep where gradients of the outputs will flow in, but not the outputs themselves."""
        flowing = [t for t, leaf in zip(tensors, structure.leaves, strict=True) if leaf.requires_grad]
        held.grad_outputs = [i for i, t in enumerate(flowing) if t.requires_grad]
        held.roots = edges_of(flowing[i] for i in held.grad_outputs)

    def _ready(self, micro_batch: int, flows: Sequence[Tensor]) -> tuple[_Held, list[Tensor]]:
        """What the backward pass starts from; with recompute, after the forward pass was run again."""
        held = self._held[micro_batch]
        if self.recompute:
            now = [b.clone() for b in self._buffers()]
            self._set_buffers(held.buffers)
            value, held.inputs = self._compute(micro_batch, held)
            self._set_buffers(now)
            if self.last:
                held.roots, held.grad_outputs = edges_of(self._take_loss(micro_batch, value)), [0]
            else:
                tensors, found = flatten(value, self._what())
                self._keep_roots(held, tensors, self._as_if_tracked(found))
        if self.last:
            weight = self._step.weights[micro_batch] * self._step.loss_scale
            loss = self._step.losses[micro_batch]
            return held, [torch.full_like(loss, weight)]
        return held, [flows[i] for i in held.grad_outputs]

    def _result(self, held: _Held, gradients: Sequence[Tensor | None], flows: Sequence[Tensor]) -> Result | None:
        if self.first:
            return None
        tensors = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, held.inputs, strict=True)]
        structure = Structure({"list": list(range(len(tensors)))}, tuple(map(Leaf.of, tensors)))
        return _apart(tensors, [*held.received, *flows]), structure

    def _as_if_tracked(self, structure: Structure) -> Structure:
        """With recompute the forward pass is not tracked; what takes a gradient is then known from types alone."""
        leaves = tuple(
            leaf._replace(requires_grad=leaf.dtype.is_floating_point or leaf.dtype.is_complex) for leaf in structure.leaves
        )
        return Structure(structure.nesting, leaves)

    def _is_turn(self, micro_batch: int) -> bool:
        return self._order[self._turn] == micro_batch

    def _count(self, micro_batch: int, stash: Found | None) -> None:
        """Add what was put aside until its turn came."""
        if stash is not None:
            self._early[micro_batch] = [(p, g.clone()) for p, g in stash]  # it may share the memory of a received message
            return
        self._turn += 1
        while self._turn < len(self._order) and self._order[self._turn] in self._early:
            add_gradients(self._early.pop(self._order[self._turn]))
            self._turn += 1

    @contextlib.contextmanager
    def _casting(self) -> Iterator[None]:
        if self._autocast is None:
            yield
        else:
            with torch.autocast(self._device.type, self._autocast):
                yield


def _to(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    tensors, structure = flatten(value, "the input of the model")
    return structure.unflatten([t.to(device, copy=copy) for t in tensors])


def _apart(tensors: Sequence[Tensor], received: Sequence[Tensor]) -> list[Tensor]:
    """Detached, and copied where they share the memory of a received message (a layer that passes it on): that is soon used for
    another.
    """
    taken = {t.untyped_storage().data_ptr() for t in received}
    return [t.detach().clone() if t.untyped_storage().data_ptr() in taken else t.detach() for t in tensors]


def _described(value: Any) -> str:
    try:
        return flatten(value, "")[1].describe()
    except InputError:
        return f"a {type(value).__name__}"


def _seed(device: torch.device, *numbers: int) -> None:
    """Seed the device's generator from ``numbers`` (a splitmix64 round for each)."""
    state = 0
    for n in numbers:
        state = (state + n + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    seed = state >> 1
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":  # not run here
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Leave the program's own stream of random numbers as it was."""
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None  # not run here
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
