"""Tensor parallelism inside a layer, by torch's DTensor plans.

A block's heads and the inner width of its MLP are split over the ranks of a mesh:

    x ──► qkv (rows: heads/tp) ──► attention over own heads ──► out (columns) ──► all-reduce ──► + x
    x ──► up  (rows: inner/tp) ──► GELU                     ──► down (columns) ─► all-reduce ──► + x

x, LayerNorms, embedding, widening and head are the same on every rank: their compute and memory are not divided. Every rank of
the mesh must give the same x and draw the same random numbers for dropout; gradients of what is the same on every rank are then
the same too, and need no reduction.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from wavetrain.errors import InputError
from wavetrain.models.blocks import Block, LadderBlock, ParallelBlock
from wavetrain.models.layers import Head, TokenEmbedding
from wavetrain.models.uneven import Widen


def parallelize_layer(layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a layer of ours over ``mesh`` in place, and return it.

    Give it weights first (they are taken from the mesh's first rank): a layer on the meta device cannot be drawn alike after
    the split. Sharded parameters become DTensors under the same names; activations stay plain tensors.

    Args:
        layer: a block of GPT, BERT or Uneven, which is split, or another of their layers, which stays whole on every rank.
        mesh: one axis; its size must divide the block's heads.
    """
    if mesh.ndim != 1:
        raise InputError(f"the mesh for tensor parallelism has {mesh.ndim} axes; give one axis of it, e.g. mesh['tp']")
    if isinstance(layer, (TokenEmbedding, Head, Widen)):
        return layer
    if not isinstance(layer, Block) or isinstance(layer, ParallelBlock | LadderBlock):
        raise InputError(
            f"{type(layer).__name__} cannot be split over tp={mesh.size()} ranks: only the blocks of wavetrain's GPT, BERT and "
            "Uneven can (their embedding, widening and head stay whole on every rank); use tp=1"
        )
    num_heads, inner, size = layer.attention.kv_heads, layer.mlp.inner, mesh.size()
    if num_heads % size:
        raise InputError(f"{num_heads} heads cannot be split over tp={size} ranks; take a tp that divides {num_heads}")
    if inner % size:
        raise InputError(f"an MLP of inner width {inner} cannot be split over tp={size} ranks; take a tp that divides {inner}")
    if size > 1:
        plan: dict[str, ParallelStyle] = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        if layer.mlp.gate is not None:
            plan["mlp.gate"] = ColwiseParallel()
        parallelize_module(layer, mesh, plan)
    return layer
