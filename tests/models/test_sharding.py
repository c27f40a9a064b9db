"""Parts of a model on several ranks, here threads of one process, give the logits of the whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from wavetrain.errors import CheckpointError, InputError
from wavetrain.models import GPT, Kraken, Ladder, LayeredModel, Parallel
from wavetrain.models.context import Context, ordered_sum, whole_sequences
from wavetrain.models.sharding import build_part, share

SMALL: dict[str, Any] = {"num_layers": 3, "hidden": 16, "num_heads": 4, "vocab": 31, "max_length": 12}
MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(**SMALL),
    "gpt, untied, modern": lambda: GPT(
        **SMALL, tied=False, bias=False, positions="rotary", norm="rms", mlp="swiglu", kv_heads=2, head_dim=6
    ),
    "parallel": lambda: Parallel(**SMALL),
    "ladder": lambda: Ladder(**SMALL),
    "kraken": lambda: Kraken(**SMALL, degree=4),
    "kraken, modern": lambda: Kraken(**SMALL, degree=4, positions="rotary", norm="rms", mlp="swiglu", head_dim=6),
}


class Thread:
    """A rank that is a thread; the parts of all are added up when all have come."""

    def __init__(self, rank: int, size: int, desk: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._desk, self._barrier = rank, size, desk, barrier

    def start_sum(self, parts: Tensor, *, scratch: bool = False) -> Any:
        own, ranks = ordered_sum(parts).clone(), self

        class Later:
            value: Tensor | None = None

            def wait(self) -> Tensor:
                if self.value is None:
                    ranks._desk[ranks.rank] = own
                    ranks._barrier.wait(30)
                    self.value = sum(ranks._desk[1:], start=ranks._desk[0])
                    ranks._barrier.wait(30)
                return self.value

        return Later()


def logits_of_ranks(model: LayeredModel, size: int, counts: tuple[int, ...] | None, x: Tensor) -> Tensor:
    """(seq, vocab) of one sequence."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    sharing = share(model.config, size, counts)
    desk: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def rank(number: int) -> Tensor:
        with torch.no_grad():  # of each thread its own
            part: Any = build_part(
                model.config,
                sharing,
                number,
                lambda name: weights[name].detach(),
                device=torch.device("cpu"),
                dtype=torch.float32,
            )
            context: Context = whole_sequences(len(x), x.device)
            context.ranks = Thread(number, size, desk, barrier)
            inner = context.attend
            context.attend = lambda q, k, v: inner(*(t.unsqueeze(-4) for t in (q, k, v))).squeeze(-4)
            h = part.embed.run(x, context)
            for block in list(part)[1:-1]:
                h = block.run(h, context)
            found: Tensor = part.head.run(h, context, torch.arange(len(x)))
            return found

    with ThreadPoolExecutor(size) as pool:
        return torch.cat(list(pool.map(rank, range(size))), -1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_of_several_ranks(name: str, size: int) -> None:
    if name == "gpt, untied, modern" and size == 4:
        pytest.skip("two kv heads")
    torch.manual_seed(0)
    model = MODELS[name]()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x = torch.randint(0, 31, (9,))
    with torch.no_grad():
        expected = model(x[None])[0]
    torch.testing.assert_close(logits_of_ranks(model, size, None, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [(3, 1), (1, 2, 1), (1, 3)])
def test_an_uneven_number_of_sub_layers_each(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = MODELS["kraken"](), torch.randint(0, 31, (9,))
    with torch.no_grad():
        expected = model(x[None])[0]
    torch.testing.assert_close(logits_of_ranks(model, len(counts), counts, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "counts", "words"),
    [
        ("kraken", 3, None, r"take 1, 2, 4 ranks, or say how many each holds, e\.g\. shares 2 1 1"),
        ("kraken", 8, None, "take 1, 2, 4 ranks$"),
        ("kraken", 2, (2, 1), "add up to 4"),
        ("kraken", 2, (4, 0), "above 0"),
        ("gpt", 3, None, "3 ranks cannot share 4 kv heads; take 1, 2, 4 ranks"),
        ("gpt", 2, (1, 1), "only a Kraken"),
        ("gpt", 0, None, "at least 1"),
    ],
)
def test_shares_that_do_not_fit(name: str, size: int, counts: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        share(MODELS[name]().config, size, counts)


def test_weights_that_do_not_fit() -> None:
    model = MODELS["gpt"]()
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    with pytest.raises(CheckpointError, match=r"embed\.token\.weight has shape \(2, 2\) in the checkpoint"):
        build_part(model.config, share(model.config, 1), 0, lambda name: torch.zeros(2, 2), **options)
    with pytest.raises(CheckpointError, match=r"int64"):
        build_part(model.config, share(model.config, 1), 0, lambda name: torch.zeros(31, 16, dtype=torch.int64), **options)
