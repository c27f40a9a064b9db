"""Reduction: gradients that several ranks hold a part of, made whole.

- Replicas (data parallel): the gradients of a stage are summed over the replicas as soon as the stage has its last one, in the
  background, while the rank goes on with other stages: in the bubble, where there is one.
- Uses of one weight (tied layers, Chimera's two routes): exchanged after the step and added in the order of the model on every
  rank that holds the weight, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from wavetrain.runtime.mesh import Mesh
from wavetrain.runtime.weights import Holding, Use, Weight

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed over replicas in pieces of about this size."""


class _Bucket(NamedTuple):
    flat: Tensor
    """The gradients one after another, then for each whether it is there: a sum of none is none."""
    parameters: list[Tensor]
    work: dist.Work


class Reducer:
    """Sums gradients of one step for one rank."""

    def __init__(self, mesh: Mesh, holding: Holding) -> None:
        self._mesh, self._holding = mesh, holding
        self._replicas = mesh.group("dp")
        self._buckets: list[_Bucket] = []
        self._before: dict[Tensor, Tensor] = {}
        self._alone = False

    def begin(self, *, alone: bool = False) -> None:
        """Put aside the gradients of earlier steps, which were reduced already; ``alone``: add nothing up over replicas."""
        self._alone = alone
        self._before.clear()
        for weight in self._holding.weights:
            if weight.parameter.grad is not None:
                self._before[weight.parameter] = weight.parameter.grad
            for parameter in weight.local.values():
                parameter.grad = None

    def stage_done(self, parameters: Sequence[Tensor]) -> None:
        """Start to sum the gradients of a stage over the replicas."""
        if self._replicas is None or self._alone:
            return
        pending: list[Tensor] = []
        size = 0
        for parameter in parameters:
            pending.append(parameter)
            size += _local(parameter).numel() * parameter.element_size()
            if size >= BUCKET_BYTES:
                self._start(pending)
                pending, size = [], 0
        if pending:
            self._start(pending)

    def finish(self) -> None:
        """Wait for the sums over replicas, add up the uses of every weight, and add what earlier steps had left."""
        for flat, parameters, work in self._buckets:
            work.wait()
            *sums, present = torch.split(flat, [*(_local(p).numel() for p in parameters), len(parameters)])
            for parameter, summed, there in zip(parameters, sums, present.tolist(), strict=True):
                if there and parameter.grad is not None:
                    _local(parameter.grad).copy_(summed.view_as(_local(parameter.grad)))
                else:
                    parameter.grad = None
        self._buckets.clear()
        received = self._exchange()
        for weight in self._holding.weights:
            if len(weight.uses) > 1:
                _add_uses(weight, received)
            before = self._before.get(weight.parameter)
            if before is not None:
                gradient = weight.parameter.grad
                weight.parameter.grad = before if gradient is None else before.add_(gradient)
        self._before.clear()

    def copy_weights(self) -> None:
        """Give every rank that holds a weight the values of the first that does: of replica 0, and of the first use."""
        tensors = [w.parameter for w in self._holding.weights]
        if self._replicas is not None:
            for tensor in (*tensors, *self._holding.buffers.values()):
                dist.broadcast(_local(tensor.detach()), group=self._replicas, group_src=0)
        works = []
        for weight in self._shared():
            value = _local(weight.parameter.detach())
            source, *others = weight.ranks
            if self._mesh.pp_rank == source:
                works += [dist.isend(value, self._global(r)) for r in others]
            else:
                dist.recv(value, self._global(source))
        for work in works:
            if work is not None:
                work.wait()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients of the model such that their norm is at most ``max_norm``; the norm before that, a scalar."""
        squares = torch.zeros(self._holding.num_names, dtype=torch.float64)
        for weight in self._holding.weights:
            if weight.ranks[0] == self._mesh.pp_rank and weight.parameter.grad is not None:
                norm = torch.linalg.vector_norm(weight.parameter.grad.detach())
                full = norm.full_tensor() if isinstance(norm, DTensor) else norm
                squares[weight.index] = full.double().square()
        group = self._mesh.group("pp")
        if group is not None:  # every entry comes from one rank: the sum is exact, and the total does not depend on the placement
            squares = squares.to(self._mesh.device)
            dist.all_reduce(squares, group=group)
        total = squares.sum().sqrt()
        scale = float(max_norm / (total + 1e-6))
        if scale < 1.0:
            for weight in self._holding.weights:
                if weight.parameter.grad is not None:
                    weight.parameter.grad.mul_(scale)
        return total.float()

    def unscale(self, scale: float) -> bool:
        """Divide all gradients by ``scale``; whether all of them, on all ranks, are finite."""
        finite = torch.ones(1, device=self._mesh.device)
        for weight in self._holding.weights:
            if weight.parameter.grad is not None:
                gradient = _local(weight.parameter.grad.div_(scale))
                finite *= torch.isfinite(gradient).all()
        if self._mesh.world_size > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def _start(self, parameters: list[Tensor]) -> None:
        kind = parameters[0].dtype
        present = torch.tensor([p.grad is not None for p in parameters], dtype=kind, device=self._mesh.device)
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([*(_local(p.grad).reshape(-1) for p in parameters if p.grad is not None), present])
        work = dist.all_reduce(flat, group=self._replicas, async_op=True)
        assert work is not None  # async_op
        self._buckets.append(_Bucket(flat, parameters, work))

    def _shared(self) -> Iterable[Weight]:
        """Weights that several ranks of the pipeline hold, in one order on all of them."""
        return (w for w in self._holding.weights if len(w.ranks) > 1)

    def _global(self, pp_rank: int) -> int:
        return self._mesh.pipeline_ranks[pp_rank]

    def _exchange(self) -> dict[tuple[str, Use], Tensor]:
        """Gradients of uses on other ranks, by weight and use, where there is one."""
        mine = self._mesh.pp_rank
        received: dict[tuple[str, Use], tuple[Tensor, Tensor]] = {}
        works: list[dist.Work | None] = []
        kept: list[Tensor] = []
        for weight in self._shared():
            if not weight.parameter.requires_grad:
                continue
            like = _local(weight.parameter.detach())
            for use in weight.uses:
                if use.rank == mine:
                    gradient = weight.local[use].grad
                    present = torch.tensor([gradient is not None], device=like.device)
                    value = torch.zeros_like(like) if gradient is None else _local(gradient).contiguous()
                    kept += [present, value]
                    works += [dist.isend(t, self._global(r)) for r in weight.ranks if r != mine for t in (present, value)]
                else:
                    present, value = torch.zeros(1, dtype=torch.bool, device=like.device), torch.empty_like(like)
                    received[weight.name, use] = (present, value)
                    works += [dist.irecv(t, self._global(use.rank)) for t in (present, value)]
        for work in works:
            if work is not None:
                work.wait()
        return {key: value for key, (present, value) in received.items() if present}


def _add_uses(weight: Weight, received: dict[tuple[str, Use], Tensor]) -> None:
    """The gradient of ``weight`` is the sum over its uses, in their order."""
    total: Tensor | None = None
    for use in weight.uses:
        gradient = weight.local[use].grad if use in weight.local else received.get((weight.name, use))
        if gradient is None:
            continue
        value = _local(gradient)
        total = value.clone() if total is None else total.add_(value)
    for parameter in weight.local.values():
        parameter.grad = None
    if total is None:
        return
    first = weight.parameter
    if isinstance(first, DTensor):
        weight.parameter.grad = DTensor.from_local(total, first.device_mesh, first.placements)
    else:
        weight.parameter.grad = total


def _local(tensor: Tensor) -> Tensor:
    """The part of this rank of a tensor that tensor parallelism has divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
