"""What a sub-layer computes does not depend, to the bit, on how many others are computed beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.models import Kraken
from wavetrain.models.context import Alone, Context
from wavetrain.models.stacked import make_exact
from wavetrain.serve.cache import KVCache
from wavetrain.serve.steps import Row, Step

DEGREE = 4
STYLES: list[dict[str, Any]] = [
    {},
    {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "kv_heads": 4, "head_dim": 6, "inner": 43},
]


def ran(model: Any, counts: list[int]) -> torch.Tensor:
    """The first block after a step of the prompts, then one of a token each: (sub-layers, tokens of both, hidden)."""
    block = model.block0
    kv_heads = block.num_here * block.attention.kv_heads
    cache = KVCache(
        num_blocks=1,
        num_rows=len(counts),
        kv_heads=kv_heads,
        head_dim=block.attention.head_dim,
        max_length=37,
        dtype=torch.float32,
        device=torch.device("cpu"),
        one_by_one=True,
    )
    found = []
    for starts, new in (([0] * len(counts), counts), (counts, [1] * len(counts))):
        rows = tuple(Row(i, start, count) for i, (start, count) in enumerate(zip(starts, new, strict=True)))
        attention = cache.prepare(Step(rows, (0,) * sum(new)))
        x = torch.randn(sum(new), model.config.hidden, generator=torch.Generator().manual_seed(7))
        found.append(block.run(x, Context(positions=attention.positions, attend=attention, ranks=Alone())))
    return torch.cat(found, 1)


@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=12)
@given(hidden=st.sampled_from([10, 44, 52]), counts=st.lists(st.integers(1, 30), min_size=1, max_size=3))
@torch.inference_mode()
def test_four_sublayers_are_each_of_them_alone(style: dict[str, Any], hidden: int, counts: list[int]) -> None:
    if "head_dim" not in style:
        hidden = 4 * (hidden // 4)
    torch.manual_seed(hidden)
    shape: dict[str, Any] = {"num_layers": 1, "hidden": hidden, "vocab": 31, "max_length": 37, **style}
    together: Any = Kraken(num_heads=8, degree=DEGREE, **shape)
    make_exact(together)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        every = ran(together, counts)
        for i in range(DEGREE):
            kv = {"kv_heads": 1} if style else {}
            alone: Any = Kraken(num_heads=2, degree=1, **{**shape, "head_dim": together.block0.attention.head_dim, **kv})
            make_exact(alone)
            for own, whole in zip(alone.block0.parameters(), together.block0.parameters(), strict=True):
                own.copy_(whole.chunk(DEGREE)[i])
            assert torch.equal(ran(alone, counts)[0], every[i])
    finally:
        torch.set_num_threads(threads)
