"""What the ranks of the tests share: small models, batches that anyone can make again, and training as a user would write it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wavetrain import Pipeline, build
from wavetrain.models import BERT, GPT, Kraken, Ladder, Uneven
from wavetrain.runtime import local

VOCAB = 29
NUM_MICRO_BATCHES = 4
Batch = tuple[Any, Any]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def numbers(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens(step: int, batch: int = 6, seq: int = 5) -> Batch:
    """A batch that 4 micro-batches do not divide: they are of 2, 2, 1 and 1 sequences."""
    drawn = torch.randint(0, VOCAB, (batch, seq + 1), generator=numbers(step))
    return drawn[:, :-1], drawn[:, 1:].clone()


def even(step: int) -> Batch:
    return tokens(step, batch=8)


def ragged(step: int) -> Batch:
    """Micro-batches of all sizes, one without a single target; shapes come and go from step to step."""
    sizes = [(2, 5), (1, 7), (3, 2), (2, 5)] if step % 2 else [(1, 3), (2, 5), (1, 7), (4, 1)]
    parts = [tokens(100 * step + i, batch, seq) for i, (batch, seq) in enumerate(sizes)]
    parts[1][1][:] = -100
    return [x for x, _ in parts], [y for _, y in parts]


def padded(step: int) -> Batch:
    """Masked tokens: targets only where they were hidden, and a mask that travels along."""
    x, y = tokens(step)
    mask = torch.arange(5) < torch.tensor([5, 4, 3, 5, 2, 1])[:, None]
    hidden = torch.rand(x.shape, generator=numbers(step)) < 0.5
    hidden[:, 0] = True
    return (x, mask), torch.where(hidden & mask, y, -100)


def points(step: int, batch: int = 6) -> Batch:
    return torch.randn(batch, 8, generator=numbers(step)), torch.randint(0, 3, (batch,), generator=numbers(-step))


def gpt(**options: Any) -> nn.Sequential:
    return GPT(**{"num_layers": 14, "hidden": 16, "num_heads": 2, "vocab": VOCAB, "max_length": 8, **options})


def frozen_gpt() -> nn.Sequential:
    """The embedding, a block in the middle and half of another take no gradient."""
    model = gpt(tied=False)
    for name, parameter in model.named_parameters():
        if name.startswith(("embed", "block6.", "block9.mlp")):
            parameter.requires_grad_(False)
    return model


def meta_gpt() -> nn.Sequential:
    with torch.device("meta"):
        return gpt()


class Twins(nn.Module):
    """Passes on more than it uses: a dict of a stream, a number that only the end needs, and a list."""

    def __init__(self, *, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, value: Any) -> Any:
        if self.first:
            value = {"x": value, "kept": [value.argmax(-1), value * 1.0, value.sum()], "scale": 0.5}
        x = value["x"] + value["scale"] * torch.tanh(self.a(value["x"]))
        if self.last:
            places, like_x, total = value["kept"]
            return self.b(x + like_x) + places[:, None] + total
        return {**value, "x": x + self.b(x).relu()}


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class Cargo(nn.Module):
    """Carries tensors of all types and many shapes, and looks whether they came as they went."""

    def __init__(self, *, loads: bool, empty: bool) -> None:
        super().__init__()
        self.loads, self.empty = loads, empty

    def forward(self, value: Any) -> Any:
        made = torch.randn(300, 1000, generator=numbers(0))  # more than a socket holds
        cargo: dict[str, Tensor] = {str(d): (made[0, :24] * 9).to(d).reshape(4, 3, 2) for d in DTYPES}
        cargo |= {
            "large": made,
            "turned": made[:3, :4].T,
            "expanded": torch.ones(1, 3).expand(2, 3),
            "strided": made[::7, ::9],
            "scalar": torch.tensor(2.5),
        }
        if self.empty:
            cargo |= {"empty": torch.zeros(0, 3), "empty inside": torch.zeros(3, 0, dtype=torch.int64)}
        if self.loads:
            return {"x": value, "cargo": (cargo, [], None, True, "text", 3)}
        found, *others = value["cargo"]
        assert others == [[], None, True, "text", 3]
        assert list(found) == list(cargo)
        for name, tensor in cargo.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
        return value["x"] if value["x"].sum() < 0 else value


def plain() -> nn.Sequential:
    """Layers of torch, one of them listed three times; a whole stage without parameters; and nested values on the way."""
    act = nn.GELU()
    shared = nn.Linear(8, 8)
    middle = [Twins() for _ in range(5)]
    layers = [nn.Linear(8, 8), act, nn.Dropout(0.3), shared, nn.Identity(), act, Twins(first=True), *middle, Twins(last=True)]
    return nn.Sequential(*layers, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), shared, act, nn.Linear(8, 3))


def llama() -> nn.Sequential:
    from wavetrain.models.hugging_face import _llama_layers

    transformers: Any = importlib.import_module("transformers")  # typed in some versions only
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=14,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config)
    return _llama_layers(model, model.model.rotary_emb)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model and what it is trained on."""

    make: Callable[[], nn.Sequential]
    batch: Callable[[int], Batch] = tokens
    same_as_torch: bool = True
    """Whether a plain loop gives the same bits: not with dropout (ours is seeded a layer), nor with tied weights (added late)."""


KINDS: dict[str, Kind] = {
    "gpt, tied": Kind(make=gpt, same_as_torch=False),
    "gpt, untied": Kind(make=lambda: gpt(tied=False)),
    "gpt, dropout": Kind(make=lambda: gpt(tied=False, dropout=0.2), same_as_torch=False),
    "gpt, dropout, even": Kind(make=lambda: gpt(dropout=0.2), batch=even, same_as_torch=False),
    "gpt, frozen": Kind(make=frozen_gpt),
    "gpt, ragged": Kind(make=lambda: gpt(tied=False), batch=ragged),
    "gpt, from meta": Kind(make=meta_gpt, same_as_torch=False),
    "bert": Kind(make=lambda: BERT(num_layers=14, hidden=16, num_heads=2, vocab=VOCAB, max_length=8, tied=False), batch=padded),
    "uneven": Kind(make=lambda: Uneven(num_layers=8, hidden=8, num_heads=2, vocab=VOCAB, wide_layers=6, max_length=8)),
    "kraken": Kind(
        make=lambda: Kraken(num_layers=14, hidden=8, num_heads=2, vocab=VOCAB, max_length=8, degree=2, dropout=0.1),
        same_as_torch=False,
    ),
    "ladder": Kind(make=lambda: Ladder(num_layers=14, hidden=16, num_heads=2, vocab=VOCAB, max_length=8, tied=False)),
    "plain": Kind(make=plain, batch=points, same_as_torch=False),
    "plain, even": Kind(make=plain, batch=lambda step: points(step, 8), same_as_torch=False),
    "llama": Kind(make=llama),
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "stages_per_rank": 3},
    "hanayo W=1": {"schedule": "hanayo", "waves": 1},
    "hanayo W=2": {"schedule": "hanayo", "waves": 2},
    "hanayo W=2 breadth first": {"schedule": "hanayo", "waves": 2, "breadth_first": True},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h2": {"schedule": "zb-h2"},
    "zbv": {"schedule": "zbv"},
    "dualpipev": {"schedule": "dualpipev"},
    "zb-wave W=1": {"schedule": "zb-wave", "waves": 1},
    "zb-wave W=2": {"schedule": "zb-wave", "waves": 2},
    "auto": {"schedule": "auto"},
    "chimera": {"schedule": "chimera"},
}
SINGLE_ROUTE = [name for name in SCHEDULES if name != "chimera"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    kind: str = "gpt, tied"
    schedule: str | Path = "1f1b"
    """A key of :data:`SCHEDULES`, or the file of a saved one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the pipeline."""
    micro_batches: int = NUM_MICRO_BATCHES
    steps: int = 3
    gloo: bool = False
    """Send messages by torch.distributed, as between machines, and not by the sockets of one."""
    accumulate: int = 1
    """Calls of ``step`` before each update."""
    optimizer: str = "AdamW"
    """AdamW for bits; SGD for distances, which AdamW would make of any size where a gradient is all but zero."""


@dataclass
class Trained:
    """What a run has left, the same on every rank."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    weights: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """Equal for equal bits."""
        found = hashlib.sha256()
        for name in sorted(self.weights):
            found.update(name.encode() + self.weights[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def summary(self) -> dict[str, Any]:
        return {"digest": self.digest, "losses": self.losses, "norms": self.norms, "evaluated": self.evaluated}

    def distance(self, other: dict[str, Tensor]) -> float:
        assert set(self.weights) == set(other)
        return max(float((self.weights[name] - other[name]).abs().max()) for name in other)


def pipeline_of(job: Job, model: nn.Sequential) -> Pipeline:
    options: dict[str, Any] = {"num_micro_batches": job.micro_batches}
    if isinstance(job.schedule, Path):
        options["schedule"] = job.schedule
    else:
        options |= SCHEDULES[job.schedule]
        if options.pop("breadth_first", False):
            ranks = (dist.get_world_size() if dist.is_initialized() else 1) // (
                job.options.get("dp", 1) * job.options.get("tp", 1)
            )
            options["schedule"] = build(
                "hanayo", num_ranks=ranks, num_micro_batches=job.micro_batches, waves=options.pop("waves"), breadth_first=True
            )
    return Pipeline(model, loss_fn=loss_fn, **options, **job.options)


def optimizer_of(job: Job, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    if job.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def by_gloo() -> contextlib.AbstractContextManager[object]:
    """Pipelines made meanwhile take their ranks for ranks of several machines."""
    return mock.patch.object(local, "on_one_machine", return_value=False)


def train(job: Job) -> Trained:
    """Train on this rank, with all others; then gather the weights."""
    with by_gloo() if job.gloo else contextlib.nullcontext():
        return _train(job)


def _train(job: Job) -> Trained:
    kind = KINDS[job.kind]
    torch.manual_seed(0)
    model = kind.make()
    pipe = pipeline_of(job, model)
    optimizer = optimizer_of(job, pipe.parameters())
    losses, norms = [], []
    for step in range(job.steps):
        for part in range(job.accumulate):
            losses.append(float(pipe.step(*_own_part(kind.batch(10 * step + part), pipe))))
        norms.append(float(pipe.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    evaluated = [float(pipe.evaluate(*_own_part(kind.batch(step), pipe))) for step in (7, 8)]
    return Trained(losses, norms, evaluated, gather(pipe))


def _own_part(batch: Batch, pipe: Pipeline) -> Batch:
    """The replica's part of a batch (of tensors)."""
    inputs, targets = batch
    if pipe.mesh.dp == 1:
        return batch
    return inputs.chunk(pipe.mesh.dp)[pipe.mesh.dp_rank], targets.chunk(pipe.mesh.dp)[pipe.mesh.dp_rank]


def gather(pipe: Pipeline) -> dict[str, Tensor]:
    """All weights of all ranks by name; ranks that hold the same weight must hold the same bits."""
    mine = {name: full(p.detach()) for name, p in pipe.named_parameters()}
    if not dist.is_initialized():
        return mine
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in found or torch.equal(found[name], tensor), f"{name} is not the same on all ranks that hold it"
            found[name] = tensor
    return found


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def train_plainly(job: Job) -> Trained:
    """The same training in plain torch: no pipeline, the micro-batches one after another."""
    kind = KINDS[job.kind]
    torch.manual_seed(0)
    model = kind.make()
    parameters = list(model.parameters())
    optimizer = optimizer_of(job, parameters)
    losses, norms = [], []
    for step in range(job.steps):
        for part in range(job.accumulate):
            losses.append(_plain_step(model, kind.batch(10 * step + part), job.micro_batches, backward=True))
        found = torch.zeros(len(parameters), dtype=torch.float64)
        for i, p in enumerate(parameters):
            if p.grad is not None:
                found[i] = torch.linalg.vector_norm(p.grad).double().square()
        norm = found.sum().sqrt()
        norms.append(float(norm.float()))
        scale = float(0.5 / (norm + 1e-6))
        if scale < 1.0:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        evaluated = [_plain_step(model, kind.batch(step), job.micro_batches, backward=False) for step in (7, 8)]
    return Trained(losses, norms, evaluated, {n: p.detach() for n, p in model.named_parameters()})


def _plain_step(model: nn.Module, batch: Batch, micro_batches: int, *, backward: bool) -> float:
    pairs = list(zip(_parts(batch[0], micro_batches), _parts(batch[1], micro_batches), strict=True))
    counts = [int((y != -100).sum()) for _, y in pairs]
    total = 0.0
    for (x, y), count in zip(pairs, counts, strict=True):
        if count:
            loss = loss_fn(model(x), y) * (count / sum(counts))
            total += float(loss.detach())
            if backward:
                torch.autograd.backward(loss)
    return total


def _parts(value: Any, number: int) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(zip(*(v.tensor_split(number) for v in value), strict=True))
    return value.tensor_split(number)  # type: ignore[no-any-return]


def close(a: float, b: float, tolerance: float = 1e-5) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
