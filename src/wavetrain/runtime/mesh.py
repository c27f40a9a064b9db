"""The mesh: which rank this process is, and who its neighbours are.

Ranks are counted with tensor parallelism innermost (the ranks that talk most are neighbours), then the pipeline, then data:
``rank = (dp_rank * pp + pp_rank) * tp + tp_rank``. One :class:`torch.distributed.device_mesh.DeviceMesh` holds all axes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wavetrain.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where a process stands among all."""

    rank: int
    world_size: int
    dp: int
    """Replicas of the pipeline, each with its part of the batch."""
    pp: int
    """Pipeline ranks."""
    tp: int
    """Ranks that share one stage."""
    device: torch.device
    axes: DeviceMesh | None
    """The axes longer than 1, named dp, pp and tp; None for a single process."""

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tp * self.pp)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Global rank of every rank of this pipeline."""
        return tuple((self.dp_rank * self.pp + p) * self.tp + self.tp_rank for p in range(self.pp))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along ``axis`` (dp, pp, tp); None where the axis has length 1."""
        if self.axes is None or axis not in (self.axes.mesh_dim_names or ()):
            return None
        return self.axes.get_group(axis)

    @classmethod
    def create(cls, *, dp: int = 1, tp: int = 1, pp: int | None = None, timeout_seconds: float = 600.0) -> Mesh:
        """Join the other ranks, as ``torchrun`` or :func:`wavetrain.launch` has set the environment; alone without it.

        Raises:
            InputError: the number of ranks is not dp · pp · tp.
        """
        device = _device()
        join(timeout_seconds=timeout_seconds)
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if min(dp, tp) < 1 or (pp is not None and pp < 1):
            raise InputError(f"dp={dp}, pp={pp}, tp={tp}: each must be at least 1")
        if world % (dp * tp) or (pp is not None and dp * pp * tp != world):
            wanted = f"{dp * tp * pp}" if pp is not None else f"a multiple of {dp * tp}"
            raise InputError(
                f"dp {dp} × pp {'any' if pp is None else pp} × tp {tp} needs {wanted} ranks, but {world} were launched; "
                f"use torchrun --nproc-per-node {dp * tp * (pp or 1)}, or launch(main, ranks={dp * tp * (pp or 1)})"
            )
        pp = world // (dp * tp)
        sizes = {name: size for name, size in (("dp", dp), ("pp", pp), ("tp", tp)) if size > 1}
        axes = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
        return cls(rank=rank, world_size=world, dp=dp, pp=pp, tp=tp, device=device, axes=axes)


def join(*, timeout_seconds: float = 600.0) -> None:
    """Initialise torch.distributed from the environment, unless that was done or there is nothing to join."""
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    device = _device()
    if device.type == "cuda":  # not run here
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _device() -> torch.device:
    if torch.cuda.is_available():  # not run here
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
