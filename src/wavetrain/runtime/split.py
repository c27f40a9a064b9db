"""Split backward: I (gradient of the input) now, W (gradients of the weights) later, for any module, through autograd.

A backward pass is one walk over autograd's graph. Call a node *on the path* if an input of the stage lies behind it. A *joint*
is a node on the path with an edge that leaves the path towards a parameter: the product of a linear layer, the scale of a norm.
Then

    I   walks the path only: autograd computes no gradient that nobody asked for, so a joint skips its weights. What flows into
        each joint is kept.
    W   starts at every joint again with what was kept, and asks for its parameters only.

Together they run the kernels that one whole backward runs, each once, and give the same bits.

    output ── joint ── gelu ── joint ── norm(joint) ── input          I: this line
                │                │         │
                w2, b2           w1, b1    scale                      W: the strokes down

Some graphs cannot be split like that: a parameter behind two joints would be counted twice, and reentrant checkpointing refuses
to compute a part. There, I does the whole backward and keeps the gradients of the weights for W: right in any case, only not
early. Checkpointing of the other kind can be split, but every joint within would run the forward pass again: who is told that
by :attr:`LateWeights.recomputed` does the next ones whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook

from wavetrain.runtime.saved import Saved

Found = list[tuple[Tensor, Tensor]]
"""(parameter, gradient) pairs."""


class Joint(NamedTuple):
    """Where a walk from the outputs to the inputs passes parameters by."""

    node: Node
    parameters: tuple[Tensor, ...]


class Piece(NamedTuple):
    """A part of the backward pass that is left for W."""

    edges: list[GradientEdge]
    flows: list[Tensor]
    """What flows into ``edges``."""
    parameters: Sequence[Tensor]


@dataclass
class LateWeights:
    """What W needs once I is done. :meth:`finish` may be called once; it frees the graph as it goes."""

    pieces: list[Piece] = field(default_factory=list)
    ready: Found = field(default_factory=list)
    """Gradients that I has computed on its way."""
    recomputed: bool = False
    """Whether I has run modules forward again (checkpointing); W will, once a piece."""

    def finish(self, stash: Found | None = None) -> None:
        """Compute the gradients of the weights: added to ``.grad``, or put aside in ``stash`` if one is given."""
        if stash is None:
            add_gradients(self.ready)
        else:
            stash.extend(self.ready)
        self.ready = []
        while self.pieces:
            edges, flows, parameters = self.pieces.pop()
            _run(edges, flows, (), parameters, stash, only=parameters)


def backward_whole(
    outputs: Sequence[GradientEdge],
    flows: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    stash: Found | None = None,
) -> list[Tensor | None]:
    """Gradients of ``inputs`` given what flows into ``outputs``; those of ``parameters`` go to ``.grad``, or to ``stash`` if
    given.
    """
    if not outputs or not (inputs or parameters):
        return [None] * len(inputs)
    return _run(outputs, flows, inputs, parameters, stash, only=None)


def leaf_nodes(parameters: Iterable[Tensor]) -> dict[Node, Tensor]:
    """The nodes where walks end at ``parameters``. They stay the same as long as they are kept."""
    return {get_gradient_edge(p).node: p for p in parameters}


def backward_input(
    outputs: Sequence[GradientEdge],
    flows: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    leaves: Mapping[Node, Tensor] | None = None,
    saved: Saved | None = None,
    *,
    whole: bool = False,
) -> tuple[list[Tensor | None], LateWeights]:
    """Gradients of ``inputs``, and what W needs for those of ``parameters``.

    A stage without inputs that take a gradient (the first) is split all the same: its path leads to the first of
    ``parameters``, which are expected in the order of the forward pass. ``leaves`` are their :func:`leaf_nodes`, if kept;
    of what the forward pass has ``saved``, what W does not need is let go. ``whole``: leave nothing to W.
    """
    late = LateWeights()
    ends = list(inputs) or list(parameters[:1])
    if not outputs or not ends:
        return [None] * len(inputs), late
    if whole:
        return backward_whole(outputs, flows, inputs, parameters, late.ready), late
    walk = _Walk([o.node for o in outputs], ends, leaf_nodes(parameters) if leaves is None else leaves)
    if not walk.can_split:
        return backward_whole(outputs, flows, inputs, parameters, late.ready), late
    kept: list[tuple[Tensor | None, ...]] = [()] * len(walk.joints)
    handles = []
    for i, joint in enumerate(walk.joints):

        def keep(flow: tuple[Tensor | None, ...], i: int = i) -> None:
            kept[i] = flow

        handles.append(joint.node.register_prehook(keep))
    handles.append(register_module_forward_pre_hook(lambda *_: setattr(late, "recomputed", True)))
    reached = torch.autograd.grad(outputs, ends, flows, retain_graph=True, allow_unused=True)
    for handle in handles:
        handle.remove()
    if saved is not None and not late.recomputed:  # looking at what is checkpointed would compute it once more
        saved.keep_only([*(joint.node for joint in walk.joints), *(node for node, aside in walk.behind.items() if aside)])
    for joint, into in zip(walk.joints, kept, strict=True):
        edges = [GradientEdge(joint.node, n) for n, flow in enumerate(into) if flow is not None]
        if edges:
            late.pieces.append(Piece(edges, [flow for flow in into if flow is not None], joint.parameters))
    beside: dict[Node, Piece] = {}  # outputs that depend on parameters, but on no input
    for edge, flow in zip(outputs, flows, strict=True):
        if aside := walk.behind.get(edge.node):
            piece = beside.setdefault(edge.node, Piece([], [], tuple(aside)))
            piece.edges.append(edge)
            piece.flows.append(flow)
    late.pieces += beside.values()
    if inputs:
        return list(reached), late
    late.ready = [(p, g) for p, g in zip(ends, reached, strict=True) if g is not None]
    return [], late


def add_gradients(found: Found) -> None:
    """Add to ``.grad``. A gradient may share memory with others, so the first is copied."""
    for parameter, gradient in found:
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.add_(gradient)


def _run(
    edges: Sequence[GradientEdge],
    flows: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    stash: Found | None,
    *,
    only: Sequence[Tensor] | None,
) -> list[Tensor | None]:
    """Run autograd from ``edges``, to ``only`` those leaves. None: to all there are, as reentrant checkpointing asks for."""
    before = [p.grad for p in parameters]
    if stash is not None:
        for p in parameters:
            p.grad = None
    torch.autograd.backward(edges, flows, inputs=only)
    gradients: list[Tensor | None] = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    if stash is None:
        _own([p for p, earlier in zip(parameters, before, strict=True) if earlier is None], (*flows, *gradients))
        return gradients
    for p, earlier in zip(parameters, before, strict=True):
        if p.grad is not None:
            stash.append((p, p.grad))
        p.grad = earlier
    return gradients


def _own(parameters: Iterable[Tensor], messages: Iterable[Tensor | None]) -> None:
    """Give ``.grad`` memory of its own where autograd let it be a view of a message (of ``torch.cat``, or a reshape)."""
    taken = set(map(_memory, messages)) - {None}
    for p in parameters:
        if p.grad is not None and _memory(p.grad) in taken:
            p.grad = p.grad.clone()


def _memory(tensor: Tensor | None) -> int | None:
    """Where the memory of a tensor begins; None of those that have none of their own (DTensor, sparse)."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if tensor is not None and plain else None


def edges_of(tensors: Iterable[Tensor]) -> list[GradientEdge]:
    """Where gradients flow into ``tensors``, without keeping their memory."""
    return [get_gradient_edge(t) for t in tensors]


class _Walk:
    """The graph behind ``roots``, seen from the path to ``ends``."""

    def __init__(self, roots: Sequence[Node], ends: Sequence[Tensor], leaves: Mapping[Node, Tensor]) -> None:
        end_nodes = {get_gradient_edge(t).node for t in ends}
        nothing: frozenset[Tensor] = frozenset()
        on_path: set[Node] = set()
        claimed: set[Tensor] = set()
        self.can_split = True
        self.joints: list[Joint] = []
        self.behind: dict[Node, frozenset[Tensor]] = {}
        """The parameters behind each node that is not on the path."""
        for node in _children_first(roots):
            if type(node).__name__ == "CheckpointFunctionBackward":
                self.can_split = False
            aside, passes = nothing, node in end_nodes
            for child, _ in node.next_functions:
                if child in on_path:
                    passes = True
                elif child is not None and (more := self.behind[child]):
                    aside = aside | more if aside else more
            if passes:
                on_path.add(node)
            elif node in leaves:
                self.behind[node] = aside | {leaves[node]}
                continue
            else:
                self.behind[node] = aside
                if node not in roots:
                    continue
            if aside:
                self.can_split = self.can_split and not claimed & aside
                claimed |= aside
                if node in on_path:
                    self.joints.append(Joint(node, tuple(aside)))


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Every node of the graph behind ``roots``, each after all that it leads to."""
    order: list[Node] = []
    state: dict[Node, bool] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in state:
            state[node] = False
            stack.extend(child for child, _ in node.next_functions if child is not None and child not in state)
        else:
            stack.pop()
            if not state[node]:
                state[node] = True
                order.append(node)
    return order
