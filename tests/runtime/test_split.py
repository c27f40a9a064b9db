"""Split backward: I and then W give to the bit what one whole backward gives, for any graph that a layer can make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu
from torch.utils.checkpoint import checkpoint

from wavetrain.models.blocks import Block
from wavetrain.runtime.saved import Saved
from wavetrain.runtime.split import Found, LateWeights, add_gradients, backward_input, backward_whole, edges_of


class Case(NamedTuple):
    """A layer that takes tensors and returns a list of tensors, and what it is given."""

    layer: nn.Module
    inputs: Callable[[], list[Tensor]]
    splits: bool = True
    """Whether W is left with something to compute."""


class Apply(nn.Module):
    """A layer made of a function of (modules and parameters by name, inputs)."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        result = self.function(self, *inputs)
        return list(result) if isinstance(result, (tuple, list)) else [result]


class Product(torch.autograd.Function):
    """x @ w with a hand-written backward that computes both gradients, whoever asks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.t(), x.t() @ gradients[0]


def product(x: Tensor, w: Tensor) -> Any:
    return Product.apply(x, w)  # type: ignore[no-untyped-call]


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def ints(*shape: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randint(0, 7, shape)]


def floats(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape, requires_grad=True) for shape in shapes]


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


def one(layer: nn.Module) -> nn.Module:
    return Apply(lambda m, x: m.layer(x), layer=layer)


def checkpointed(layer: nn.Module, *, reentrant: bool) -> nn.Module:
    return Apply(lambda m, x: m.tail(checkpoint(m.layer, x, use_reentrant=reentrant)), layer=layer, tail=nn.Linear(8, 8))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(one(nn.Linear(8, 5)), floats((4, 8))),
    "linear of a sequence": lambda: Case(one(nn.Linear(8, 5)), floats((2, 3, 8))),
    "norms": lambda: Case(one(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))), floats((4, 8))),
    "mlp": lambda: Case(one(mlp()), floats((4, 8))),
    "convolutions": lambda: Case(
        one(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3, groups=2))),
        floats((2, 3, 8, 8)),
    ),
    "embedding": lambda: Case(one(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 3))), ints(2, 5)),
    "embedding alone": lambda: Case(one(nn.Embedding(7, 8)), ints(2, 5), splits=False),
    "transformer block": lambda: Case(one(Block(hidden=8, num_heads=2)), floats((2, 5, 8))),
    "block with dropout": lambda: Case(one(Block(hidden=8, num_heads=2, dropout=0.3)), floats((2, 5, 8))),
    "torch's attention": lambda: Case(
        Apply(lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=nn.MultiheadAttention(8, 2, batch_first=True)),
        floats((2, 5, 8)),
    ),
    "gru cell": lambda: Case(Apply(lambda m, x, h: m.cell(x, h), cell=nn.GRUCell(8, 6)), floats((4, 8), (4, 6))),
    "gru cell, unrolled": lambda: Case(  # every weight is used in every turn
        Apply(lambda m, x, h: m.cell(x, m.cell(x, m.cell(x, h))), cell=nn.GRUCell(8, 6)), floats((4, 8), (4, 6)), splits=False
    ),
    "gru": lambda: Case(Apply(lambda m, x: m.layer(x)[0], layer=nn.GRU(8, 6, batch_first=True)), floats((2, 5, 8)), splits=False),
    "a weight used twice": lambda: Case(
        Apply(lambda m, x: gelu(x @ m.w) @ m.w + m.b, w=par(8, 8), b=par(8)), floats((4, 8)), splits=False
    ),
    "a weight used twice in one node": lambda: Case(Apply(lambda m, x: x @ (m.w @ m.w), w=par(8, 8)), floats((4, 8))),
    "weights made of weights": lambda: Case(one(nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))), floats((4, 8))),
    "low rank": lambda: Case(Apply(lambda m, x: x @ (m.a @ m.b) + gelu(m.c), a=par(8, 2), b=par(2, 5), c=par(5)), floats((4, 8))),
    "no parameters": lambda: Case(one(nn.GELU()), floats((4, 8)), splits=False),
    "nothing at all": lambda: Case(one(nn.Identity()), floats((4, 8)), splits=False),
    "several inputs": lambda: Case(Apply(lambda m, x, y: m.a(x) * m.b(y), a=mlp(), b=mlp()), floats((4, 8), (4, 8))),
    "an input unused": lambda: Case(Apply(lambda m, x, y: m.a(x), a=mlp()), floats((4, 8), (4, 8))),
    "several outputs": lambda: Case(Apply(lambda m, x: (m.a(x), m.b(x), x), a=mlp(), b=mlp()), floats((4, 8))),
    "outputs of one node": lambda: Case(Apply(lambda m, x: m.a(x).chunk(2, -1), a=mlp()), floats((4, 8))),
    "an output on the way to another": lambda: Case(Apply(lambda m, x: (h := m.a(x), m.b(h)), a=mlp(), b=mlp()), floats((4, 8))),
    "an output of parameters only": lambda: Case(Apply(lambda m, x: (x @ m.w, gelu(m.p)), w=par(8, 8), p=par(5)), floats((4, 8))),
    "outputs of one node of parameters only": lambda: Case(
        Apply(lambda m, x: (x @ m.w, *gelu(m.p).chunk(2)), w=par(8, 8), p=par(6)), floats((4, 8))
    ),
    "an output of parameters, used as well": lambda: Case(
        Apply(lambda m, x: (s := gelu(m.p), x @ m.w * s), w=par(8, 8), p=par(8)), floats((4, 8)), splits=False
    ),
    "a parameter as it is": lambda: Case(Apply(lambda m, x: (x @ m.w, m.p), w=par(8, 8), p=par(5)), floats((4, 8))),
    "a parameter in front": lambda: Case(Apply(lambda m, x: torch.cat([m.p, x]), p=par(1, 8)), floats((4, 8))),
    "a parameter seen as another shape": lambda: Case(Apply(lambda m, x: x + m.p.view(4, 8), p=par(32)), floats((4, 8))),
    "an unused parameter": lambda: Case(Apply(lambda m, x: m.a(x), p=par(8), a=mlp()), floats((4, 8))),
    "an unused parameter, no input": lambda: Case(
        Apply(lambda m, x: m.a(m.e(x)), p=par(8), e=nn.Embedding(7, 8), a=mlp()), ints(2, 5)
    ),
    "a frozen weight": lambda: Case(one(frozen(mlp(), "1.weight", "3.bias")), floats((4, 8))),
    "all frozen": lambda: Case(one(frozen(nn.Linear(8, 5), "weight", "bias")), floats((4, 8)), splits=False),
    "frozen embedding": lambda: Case(one(frozen(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 3)), "0.weight")), ints(2, 5)),
    "custom function": lambda: Case(
        Apply(lambda m, x: product(gelu(product(x, m.a)), m.b), a=par(8, 6), b=par(6, 8)), floats((4, 8))
    ),
    "functional dropout": lambda: Case(Apply(lambda m, x: m.b(dropout(m.a(x), 0.4)), a=mlp(), b=mlp()), floats((4, 8))),
    "in place": lambda: Case(Apply(lambda m, x: m.b(m.a(x).mul_(2).relu_()), a=mlp(), b=mlp()), floats((4, 8))),
    "checkpointed": lambda: Case(checkpointed(mlp(), reentrant=False), floats((4, 8))),
    "checkpointed with dropout": lambda: Case(
        checkpointed(nn.Sequential(mlp(), nn.Dropout(0.4), mlp()), reentrant=False), floats((4, 8))
    ),
    "checkpointed, reentrant": lambda: Case(checkpointed(mlp(), reentrant=True), floats((4, 8)), splits=False),
    "checkpointed, reentrant, with dropout": lambda: Case(
        checkpointed(nn.Sequential(mlp(), nn.Dropout(0.4), mlp()), reentrant=True), floats((4, 8)), splits=False
    ),
    "checkpointed, reentrant, after an embedding": lambda: Case(
        Apply(lambda m, x: checkpoint(m.a, m.e(x), use_reentrant=True), e=nn.Embedding(7, 8), a=mlp()), ints(2, 5), splits=False
    ),
}


class Micro(NamedTuple):
    """A forward pass, ready for its backward."""

    roots: list[Any]
    flows: list[Tensor]
    inputs: list[Tensor]


def forward(case: Case, micro_batch: int, saved: Saved | None = None) -> Micro:
    torch.manual_seed(100 + micro_batch)
    inputs = case.inputs()
    with saved or contextlib.nullcontext():
        outputs = [t for t in case.layer(*inputs) if t.requires_grad]
    flows = [torch.randn_like(t) for t in outputs]
    return Micro(edges_of(outputs), flows, [x for x in inputs if x.requires_grad])


def parameters(case: Case) -> list[Tensor]:
    return [p for p in case.layer.parameters() if p.requires_grad]


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs)


def gradients(case: Case) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in parameters(case)]
    for p in parameters(case):
        p.grad = None
    return found


def by_torch(case: Case, num_micro_batches: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of the inputs, and of the parameters, as plain ``backward`` gives them."""
    of_inputs: list[Tensor | None] = []
    for m in range(num_micro_batches):
        roots, flows, inputs = forward(case, m)
        torch.autograd.backward(roots, flows)
        of_inputs += [x.grad for x in inputs]
    return of_inputs, gradients(case)


def take(order: Sequence[int], of_micro_batch: Callable[[int, Found], None]) -> None:
    """Run W (or B) in some order and add what comes out in the order of the micro-batches, as a stage does."""
    stashes: dict[int, Found] = {m: [] for m in order}
    for m in order:
        of_micro_batch(m, stashes[m])
    for m in sorted(order):
        add_gradients(stashes[m])


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@pytest.mark.parametrize("name", CASES)
def test_b_is_what_torch_gives(name: str) -> None:
    case = CASES[name]()
    of_inputs, of_parameters = by_torch(case, 2)
    found: list[Tensor | None] = []
    for m in range(2):
        roots, flows, inputs = forward(case, m)
        found += backward_whole(roots, flows, inputs, parameters(case))
    assert all(map(same, found, of_inputs))
    assert all(map(same, gradients(case), of_parameters))


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_i_then_w_is_b(name: str, frees: bool) -> None:
    case = CASES[name]()
    of_inputs, of_parameters = by_torch(case, 3)
    found: list[Tensor | None] = []
    late: list[LateWeights] = []
    for m in range(3):
        saved = Saved() if frees else None
        of_micro_batch, left = backward_input(*forward(case, m, saved), parameters(case), saved=saved)
        found += of_micro_batch
        late.append(left)
        assert bool(left.pieces) == case.splits
        assert not any(p.grad is not None for p in parameters(case)), "I leaves the weights alone"
    assert all(map(same, found, of_inputs))
    for left in late:
        left.finish()
        assert not left.pieces
        assert not left.ready
    assert all(map(same, gradients(case), of_parameters))


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@pytest.mark.parametrize("name", CASES)
def test_any_order_gives_the_same_bits(name: str) -> None:
    case = CASES[name]()
    _, of_parameters = by_torch(case, 3)
    late = {m: backward_input(*forward(case, m), parameters(case))[1] for m in (1, 2, 0)}
    take((2, 0, 1), lambda m, stash: late[m].finish(stash))
    assert all(map(same, gradients(case), of_parameters))

    def whole(m: int, stash: Found) -> None:
        backward_whole(*forward(case, m), parameters(case), stash)

    take((1, 2, 0), whole)
    assert all(map(same, gradients(case), of_parameters))


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_share_no_memory_with_messages(name: str, split: bool) -> None:
    """Both the flows (a received message) and the result (one to be sent) are used for other things while ``.grad`` lives on."""
    case = CASES[name]()
    roots, flows, inputs = forward(case, 0)
    if split:
        result, late = backward_input(roots, flows, inputs, parameters(case))
        late.finish()
    else:
        result = backward_whole(roots, flows, inputs, parameters(case))
    for tensor in (*flows, *(g for g in result if g is not None)):
        tensor.fill_(torch.nan)
    assert not any(p.grad.isnan().any() for p in parameters(case) if p.grad is not None)


class Counter(torch.autograd.Function):
    """Identity that counts how often it is run backward."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Counter.runs += 1
        return gradients[0]


def test_no_part_of_the_path_is_walked_twice() -> None:
    """I walks the path; W walks no more than the joints: what lies between two layers with weights is computed once."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    y = second(Counter.apply(first(x)))  # type: ignore[no-untyped-call]
    Counter.runs = 0
    _, late = backward_input(edges_of([y]), [torch.ones_like(y)], [x], [*first.parameters(), *second.parameters()])
    assert Counter.runs == 1
    late.finish()
    assert Counter.runs == 1


def test_what_is_checkpointed_is_computed_again_once_and_no_more() -> None:
    """I tells that it ran modules forward again; done whole, the next one does so once, and leaves W nothing."""
    inner, runs = mlp(), list[Tensor]()
    inner.register_forward_pre_hook(lambda _, given: runs.extend(given))
    case = Case(checkpointed(inner, reentrant=False), floats((4, 8)))
    saved = Saved()
    _, late = backward_input(*forward(case, 0, saved), parameters(case), saved=saved)
    assert late.recomputed
    assert len(runs) == 2
    late.finish()
    runs.clear()
    _, late = backward_input(*forward(case, 1), parameters(case), whole=True)
    late.finish()
    assert len(runs) == 2
    assert not backward_input(*forward(CASES["mlp"](), 0), [])[1].recomputed


def test_w_frees_the_graph() -> None:
    layer = mlp()
    x = torch.randn(4, 8, requires_grad=True)
    y = layer(x)
    roots = edges_of([y])
    _, late = backward_input(roots, [torch.ones_like(y)], [x], list(layer.parameters()))
    late.finish()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward([y], [torch.ones_like(y)])


# ---- random layers


@st.composite
def random_layer(draw: st.DrawFn) -> Case:
    """A random graph of products, sums, norms, cuts and shared weights over (4, 6) tensors."""
    num_steps = draw(st.integers(1, 8))
    weights = [par(6, 6) for _ in range(draw(st.integers(1, 4)))]
    vectors = [par(6) for _ in range(draw(st.integers(1, 3)))]
    for p in (*weights, *vectors):
        p.requires_grad_(draw(st.integers(0, 4)) > 0)
    num_inputs = draw(st.integers(1, 2))
    steps = [
        (
            draw(st.sampled_from(["product", "sum", "norm", "gelu", "scale", "mix", "cut", "detach"])),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
        )
        for _ in range(num_steps)
    ]
    num_outputs = draw(st.integers(1, 3))
    picks = [draw(st.integers(0, 20)) for _ in range(num_outputs)]

    def run(m: Any, *inputs: Tensor) -> list[Tensor]:
        values = [x * 1.0 for x in inputs]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            w, v = weights[i % len(weights)], vectors[j % len(vectors)]
            if kind == "product":
                values.append(a @ w)
            elif kind == "sum":
                values.append(a + b)
            elif kind == "norm":
                values.append(nn.functional.layer_norm(a, (6,), weight=v))
            elif kind == "gelu":
                values.append(gelu(a))
            elif kind == "scale":
                values.append(a * gelu(v))
            elif kind == "mix":
                values.append(a * b)
            elif kind == "cut":
                halves = a.chunk(2, -1)
                values.append(torch.cat([halves[1], halves[0] * 2], -1))
            else:
                values.append(a.detach() + gelu(w[:4]))
        return [values[-1 - p % len(values)] for p in picks]

    parts = {f"w{i}": w for i, w in enumerate(weights)} | {f"v{i}": v for i, v in enumerate(vectors)}
    return Case(Apply(run, **parts), floats(*[(4, 6)] * num_inputs))


@settings(max_examples=150, deadline=None)
@given(random_layer())
def test_random_layers(case: Case) -> None:
    """The same but for the order in which a graph of several outputs adds up what meets: 1e-5 where there is a choice."""
    of_inputs, of_parameters = by_torch(case, 2)
    found: list[Tensor | None] = []
    for m in range(2):
        saved = Saved()
        roots, flows, inputs = forward(case, m, saved)
        if not roots:
            return
        of_micro_batch, late = backward_input(roots, flows, inputs, parameters(case), saved=saved)
        found += of_micro_batch
        late.finish()
    for ours, theirs in [*zip(found, of_inputs, strict=True), *zip(gradients(case), of_parameters, strict=True)]:
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_changed_in_place_is_refused_as_autograd_does() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            y.mul_(2)  # exp's gradient needs its output as it was
            return y

    x = torch.ones(2, 3, requires_grad=True)
    saved = Saved()
    with saved:
        y = Bad()(x)
    with pytest.raises(RuntimeError, match="changed by an operation in place"):
        torch.autograd.grad(y.sum(), x)
