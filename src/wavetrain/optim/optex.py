"""OptEx: up to N steps of any torch optimizer in one round of N gradients that can be computed at the same time.

Steps of an optimizer depend on each other, but the next gradients can be predicted from past ones (Shu et al., NeurIPS'24).
A round, from the point θ₀ where the last one ended:

    propose    θₛ₊₁ = step(θₛ, predicted gradient at θₛ)         s = 0 … N−2, on a fork of the optimizer's state
    evaluate   gₛ = true gradient at θₛ, minibatch s             s = 0 … N−1, independent of each other
    replay     from θ₀ and its state again: step with what the N true gradients, and those before, say of the gradient
               where the replay is (a Gaussian process, its noise averaged out), as far as evaluated points are near

Where predictions hold, that is N steps, each with less noise than one minibatch has. Where they do not, gradients are asked for
at fewer points, several minibatches each, down to one point: then a round is one step with a batch N times larger.

``mode="paper"`` is the published algorithm instead: a fixed process, the last of N single steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from wavetrain.errors import CheckpointError, DivergedError, InputError, UnknownNameError
from wavetrain.optim.estimators import Judge, weights
from wavetrain.optim.evaluation import Closure, evaluate, is_finite, takes_index
from wavetrain.optim.flat import Flat
from wavetrain.optim.fork import Fork
from wavetrain.optim.history import History
from wavetrain.optim.kernels import KERNELS
from wavetrain.optim.pace import Pace
from wavetrain.optim.process import Prior, Process
from wavetrain.optim.rounds import Round, Rounds
from wavetrain.optim.team import Alone, Group, Team

Floats = NDArray[np.float64]

NEAR: Final = 0.75
"""A replayed step is taken while an evaluated point is within this share of the way from the round's start."""
HISTORY: Final = {"auto": 20, "paper": 50}
PAPER: Final = Prior(0.1, 1e-3, "matern52")
"""Length scale (of points divided by the mean root of their norms) and noise of the published code."""
SELECT: Final = ("last", "loss", "gradient")


class OptEx(Optimizer):
    """Takes up to N steps of ``base`` for every N gradients.

    Change ``base.step()`` after every minibatch to one ``step`` for N of them::

        opt = OptEx(torch.optim.AdamW(model.parameters(), lr=1e-3), parallel=4)
        for group in batched(loader, 4):
            loss = opt.step(lambda i: loss_fn(model(group[i].x), group[i].y))

    Args:
        base: any optimizer of torch but LBFGS. Its groups, rates and hooks stay its own, and are shared.
        parallel: N, the minibatches of a round. With ``process_group``, its size.
        mode: ``"auto"``, or ``"paper"`` for the algorithm as it was published.
        history: pairs of points and gradients that are kept, those of the round under way included.
        kernel: of the Gaussian process: rbf, matern12, matern32 or matern52.
        select: in paper mode, which of the N single steps to go on from: the ``"last"``, that of the least ``"loss"``, or of
            the least ``"gradient"``.
        process_group: every rank of it evaluates one minibatch of a round; all must start from the same weights.
        distance_coordinates: measure distances on so many coordinates, drawn at random, where there are more; None for all of
            them, at twice the memory.
        history_dtype: of what is kept, such as ``torch.bfloat16``; default: that of the parameters.
        clip_norm: gradients that ``base`` steps with are scaled down to this norm.
        grad_scaler: of fp16 training: scales losses, and is told of gradients that are no numbers.

    Raises:
        InputError: a number out of range, parameters of several types or devices.
        UnknownNameError: a mode, kernel or selection that is not known.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        parallel: int | None = None,
        mode: Literal["auto", "paper"] = "auto",
        history: int | None = None,
        kernel: str = "matern52",
        select: str = "last",
        process_group: dist.ProcessGroup | None = None,
        distance_coordinates: int | None = 65_536,
        history_dtype: torch.dtype | None = None,
        clip_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(base, Optimizer):
            raise InputError(
                f"OptEx wraps a torch optimizer, such as torch.optim.AdamW(model.parameters()); got {type(base).__name__}"
            )
        if isinstance(base, LBFGS | OptEx):
            raise InputError(f"OptEx cannot wrap {type(base).__name__}: it needs an optimizer whose step takes one gradient")
        for what, name, known in (("mode", mode, HISTORY), ("kernel", kernel, KERNELS), ("select", select, SELECT)):
            if name not in known:
                raise UnknownNameError(what, name, known)
        self._team: Team = Alone() if process_group is None else Group(process_group)
        size = self._team.size
        if parallel is not None and size is not None and parallel != size:
            raise InputError(
                f"parallel is {parallel}, but the process group has {size} ranks, one for each minibatch; leave it out"
            )
        self.parallel = _whole("parallel", parallel or size or 4 if parallel != 0 else 0, 1)
        capacity = _whole("history", HISTORY[mode] if history is None else history, 2)
        self.mode = mode
        self.base = base
        self._select = select
        self._kernel = kernel
        self._clip_norm = None if clip_norm is None else _positive("clip_norm", clip_norm)
        self._scaler = grad_scaler
        self._capacity = capacity + self.parallel if mode == "paper" else max(capacity, self.parallel + 2)
        self._distance_coordinates = (
            None if distance_coordinates is None else _whole("distance_coordinates", distance_coordinates, 1)
        )
        self._history_dtype = history_dtype
        self._ready = False
        super().__init__(base.param_groups, base.defaults)
        self._ready = True
        self._link()
        self.stats = Rounds()
        self._round = 0
        self._forget()

    def _link(self) -> None:
        """Groups and state are the inner optimizer's own."""
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def _forget(self) -> None:
        """Begin anew with what is trained now."""
        self._flat = flat = Flat(self.base.param_groups)
        count = self._distance_coordinates
        sampled = None
        if count is not None and count < flat.num_coordinates:
            chooser = torch.Generator().manual_seed(0)
            sampled = torch.randperm(flat.num_coordinates, generator=chooser)[:count].sort().values.to(flat.device)
        dtype = self._history_dtype or flat.dtype
        self._history = History(self._capacity, flat.num_coordinates, flat.device, dtype, sampled)
        self._judge = Judge(self._kernel)
        self._pace = Pace(self.parallel)
        self._fork = Fork(self.base)
        self._start, self._work = flat.empty(), flat.empty()
        exact = sampled is None and dtype == flat.dtype
        self._proposed = None if exact else torch.empty(self.parallel, flat.num_coordinates, device=flat.device, dtype=flat.dtype)
        self._has = (True,) * len(flat.parameters)
        self._num_newest = 0

    # what torch and its users call

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[..., Any]) -> float: ...
    def step(self, closure: Closure | None = None) -> float | None:
        """One round.

        Args:
            closure: given the index of a minibatch, 0 to N − 1 (or nothing), returns its loss; the backward pass is done here if
                the closure has not done it. It is called N times, or once on every rank of a process group.

        Returns:
            The mean loss of the N minibatches, each at the point where it was evaluated.

        Raises:
            InputError: the closure is of the wrong kind.
            DivergedError: the first loss or gradient of the round is no number; nothing has changed.
            RuntimeFailure: ranks that are not at the same point.
        """
        if closure is None:
            raise InputError(
                "OptEx evaluates the loss at several points: call opt.step(lambda i: loss of minibatch i) and leave out "
                "loss.backward()"
            )
        indexed = takes_index(closure)
        if not self._flat.same(self.base.param_groups):
            self._forget()  # parameters were added, frozen or unfrozen
        seed = int(torch.randint(2**48, (), dtype=torch.int64))
        seed = self._team.agree((*self._flat.checksum(), self._round, self._pace.num_points), seed)
        play = _Play(self, closure, indexed, seed)
        found = play.paper() if self.mode == "paper" else play.auto()
        self._round += 1
        self.stats.add(found)
        return found.loss

    def held_bytes(self) -> int:
        """Bytes kept between rounds, beside the parameters and the inner optimizer's own state."""
        tensors = [self._history.gradients, self._history.points, self._start, self._work]
        if self._proposed is not None:
            tensors.append(self._proposed)
        return sum(t.numel() * t.element_size() for t in tensors) + self._fork.held_bytes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does; not needed: gradients are gone after every round."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimizer; what was known of gradients is forgotten."""
        if not self._ready:
            return
        self.base.add_param_group(param_group)
        self._link()
        self._forget()

    def state_dict(self, *, history: bool = True) -> dict[str, Any]:
        """The inner optimizer's, and under ``optex`` what a round needs to go on to the bit.

        Args:
            history: with the points and gradients that are kept (2·T·d numbers); without, estimation begins anew.
        """
        own: dict[str, Any] = {
            "round": self._round,
            "pace": self._pace.state_dict(),
            "judge": self._judge.state_dict(),
            "num_newest": self._num_newest,
        }
        if history:
            own["history"] = self._history.state_dict()
        return {**self.base.state_dict(), "optex": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, or the state of the inner optimizer alone.

        Raises:
            CheckpointError: it is of another number of coordinates, history or parallelism.
        """
        own = state_dict.get("optex")
        saved = None if own is None else own.get("history")
        if saved is not None and saved["gradients"].shape != self._history.gradients.shape:
            raise CheckpointError(
                f"the saved history holds {tuple(saved['gradients'].shape)} numbers, this optimizer's "
                f"{tuple(self._history.gradients.shape)} (pairs, coordinates): use the same parameters, parallel and history, or "
                "save with state_dict(history=False)"
            )
        self.base.load_state_dict({k: v for k, v in state_dict.items() if k != "optex"})
        self._link()
        self._forget()
        if own is None:
            return
        self._round = own["round"]
        if own["pace"]["num_points"] <= self.parallel:
            self._pace.load_state_dict(own["pace"])
        if saved is not None:
            self._judge.load_state_dict(own["judge"])
            self._num_newest = own["num_newest"]
            self._history.load_state_dict(saved)


class _Play:
    """One round of an :class:`OptEx`."""

    def __init__(self, of: OptEx, closure: Closure, indexed: bool, seed: int) -> None:
        self.of, self.closure, self.indexed, self.seed = of, closure, indexed, seed
        self.flat, self.history = of._flat, of._history
        self.estimate_seconds = self.evaluate_seconds = self.step_seconds = 0.0
        self.has: tuple[bool, ...] = ()
        """Which parameters got a gradient; until one is evaluated, all do."""

    def auto(self) -> Round:
        of, history = self.of, self.history
        num_points = of._pace.num_points
        new = history.take_rows(num_points)
        known, newest = list(history.rows), of._num_newest
        begin = time.perf_counter()
        process, name = of._judge.process(history), of._judge.best
        told = name if name != "gp" or process is None else str(of._judge.prior)
        self.estimate_seconds += time.perf_counter() - begin

        def predict(squares: Floats) -> Floats | None:
            return weights(name, process, history, known, newest, squares[known]) if known else None

        predicted = self._propose(new, predict)
        losses, good = self._evaluate(new)
        begin = time.perf_counter()
        history.close(good)
        cosines, errors = self._compare(predicted, known, good)
        of._judge.hear(history, known, process, newest, good)
        process = of._judge.process(history) if known else None
        of._num_newest = len(good)
        self.estimate_seconds += time.perf_counter() - begin
        accepted, drifts = self._replay(good, process)
        of._pace.hear(accepted, losses)
        return self._told(told, losses, num_points, accepted, cosines, errors, drifts)

    def paper(self) -> Round:
        of, history = self.of, self.history
        new = history.take_rows(of.parallel)
        known = list(history.rows)
        begin = time.perf_counter()
        process = None
        if len(known) >= 2:
            unit = float(np.sqrt(history.sizes[known]).mean()) or 1.0
            process = Process(PAPER, history.between(known), unit, mean=False)
        self.estimate_seconds += time.perf_counter() - begin

        def predict(squares: Floats) -> Floats:
            return np.zeros(len(known)) if process is None else process.weights(squares[known])

        predicted = self._propose(new, predict)
        losses, good = self._evaluate(new)
        begin = time.perf_counter()
        history.close(good)
        cosines, errors = self._compare(predicted, known, good)
        self.estimate_seconds += time.perf_counter() - begin
        chosen = len(good) - 1
        if of._select == "loss":
            chosen = int(np.argmin(losses[: len(good)]))
        elif of._select == "gradient":
            chosen = int(np.argmin(history.products[good, good]))
        self._rewind()
        for at in range(chosen):  # the same way again, up to the point that was chosen
            self._step(predicted[at], known)
        self._step(np.ones(1), [good[chosen]])
        self.flat.forget_gradients()
        return self._told("gp" if process is not None else "zero", losses, len(new), chosen + 1, cosines, errors, ())

    def _propose(self, new: list[int], predict: Callable[[Floats], Floats | None]) -> list[Floats | None]:
        """Points to evaluate, each a step from the one before with what is predicted there; the predictions, as weights."""
        of, flat, history = self.of, self.flat, self.history
        known = list(history.rows)
        begin = time.perf_counter()
        of._fork.save()
        flat.read(of._start)
        self.step_seconds += time.perf_counter() - begin
        predicted: list[Floats | None] = []
        for at, row in enumerate(new):
            begin = time.perf_counter()
            point = flat.read(of._work)
            squares = history.squares_to(point)
            history.put(row, point, squares)
            if of._proposed is not None:
                of._proposed[at].copy_(point)
            last = at + 1 == len(new)
            if not last:
                predicted.append(predict(squares))
            self.estimate_seconds += time.perf_counter() - begin
            if not last and predicted[-1] is not None:
                self._step(predicted[-1], known)
        return predicted

    def _evaluate(self, new: list[int]) -> tuple[list[float], list[int]]:
        """The losses of all minibatches, and the rows whose gradients are numbers, up to the first that is not."""
        of, flat, history = self.of, self.flat, self.history
        begin = time.perf_counter()
        scale = 1.0 if of._scaler is None else of._scaler.get_scale()
        losses = [0.0] * of.parallel
        finite = [True] * len(new)
        turns = [[i for i in range(at, of.parallel, len(new)) if of._team.mine(i)] for at in range(len(new))]
        for at, (row, mine) in enumerate(zip(new, turns, strict=True)):
            if not mine:
                continue
            flat.write(history.points[row] if of._proposed is None else of._proposed[at])
            for i in mine:
                done = evaluate(self.closure, i if self.indexed else None, self.seed + i, flat, of._work, scale)
                self.has = tuple(a or b for a, b in zip(self.has or done.has, done.has, strict=True))
                shared, found = of._team.share(of._work, done.loss)
                for j, (gradient, loss) in enumerate(zip(shared, found, strict=True)):
                    index = i if len(shared) == 1 else j
                    self._take(new, index, gradient, first=index < len(new))
                    losses[index] = loss
                    finite[index % len(new)] &= is_finite(loss, gradient)
        for at, row in enumerate(new):
            history.gradients[row].div_(len(range(at, of.parallel, len(new))))
        good = new[: finite.index(False)] if False in finite else new
        for row in new[len(good) :]:
            history.gradients[row].zero_()
        self.evaluate_seconds += time.perf_counter() - begin
        if of._scaler is not None:
            _tell(of._scaler, overflowed=len(good) < len(new))
        if not good:
            self._rewind()
            flat.forget_gradients()
            raise DivergedError(
                f"round {of._round + 1}: the loss or gradient of its first minibatch is no number (loss {losses[0]:g}); the "
                "parameters and the optimizer are as they were before the round",
                step=of._round + 1,
                ranks=(),
            )
        of._has = self.has or of._has
        return losses, list(good)

    def _take(self, new: list[int], index: int, gradient: Tensor, *, first: bool) -> None:
        """Add the gradient of a minibatch to those of its point."""
        row = self.history.gradients[new[index % len(new)]]
        if first:
            row.copy_(gradient)
        else:
            row.add_(gradient)

    def _replay(self, good: list[int], process: Process | None) -> tuple[int, tuple[float, ...]]:
        """Steps from the start, as far as evaluated points are near: how many, and how near."""
        of, flat, history = self.of, self.flat, self.history
        self._rewind()
        drifts: list[float] = []
        accepted = 0
        if process is None or len(good) == 1:
            self._step(np.full(len(good), 1 / len(good)), good)
            accepted = 1
        else:
            for _ in good:
                begin = time.perf_counter()
                squares = history.squares_to(flat.read(of._work))
                if accepted:
                    moved = float(squares[good[0]])
                    drifts.append(math.sqrt(float(squares[history.rows].min()) / moved) if moved > 0 else 0.0)
                    if not drifts[-1] <= NEAR:
                        break
                found = process.weights(squares[history.rows])
                self.estimate_seconds += time.perf_counter() - begin
                self._step(found, history.rows)
                accepted += 1
        flat.forget_gradients()
        return accepted, tuple(drifts)

    def _rewind(self) -> None:
        """Parameters and optimizer as they were when the round began."""
        begin = time.perf_counter()
        self.flat.write(self.of._start)
        self.of._fork.restore()
        self.step_seconds += time.perf_counter() - begin

    def _step(self, found: Floats | None, rows: Sequence[int]) -> None:
        """A step of the inner optimizer with a sum of kept gradients."""
        assert found is not None
        of = self.of
        begin = time.perf_counter()
        if of._clip_norm is not None:
            inner = self.history.products[np.ix_(rows, rows)]
            norm = math.sqrt(max(0.0, float(found @ inner @ found)))
            found = found * min(1.0, of._clip_norm / (norm + 1e-6))
        self.history.combine(found, rows, of._work)
        middle = time.perf_counter()
        self.flat.lend_gradients(of._work, self.has or of._has)
        of.base.step()
        self.estimate_seconds += middle - begin
        self.step_seconds += time.perf_counter() - middle

    def _compare(
        self, predicted: Sequence[Floats | None], known: Sequence[int], good: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Cosines and relative errors of what was predicted, from inner products."""
        products = self.history.products
        cosines, errors = [], []
        for w, row in zip(predicted, good, strict=False):
            if w is None:
                continue
            own, cross = float(products[row, row]), float(w @ products[row, known])
            size = float(w @ products[np.ix_(known, known)] @ w)
            cosines.append(cross / math.sqrt(own * size) if own > 0 and size > 0 else 0.0)
            errors.append(math.sqrt(max(0.0, size - 2 * cross + own) / own) if own > 0 else 0.0)
        return tuple(cosines), tuple(errors)

    def _told(
        self,
        estimator: str,
        losses: Sequence[float],
        num_points: int,
        accepted: int,
        cosines: tuple[float, ...],
        errors: tuple[float, ...],
        drifts: tuple[float, ...],
    ) -> Round:
        return Round(
            number=self.of._round + 1,
            losses=tuple(losses),
            estimator=estimator,
            num_points=num_points,
            num_accepted=accepted,
            cosines=cosines,
            relative_errors=errors,
            drifts=drifts,
            estimate_seconds=self.estimate_seconds,
            evaluate_seconds=self.evaluate_seconds,
            step_seconds=self.step_seconds,
        )


def _tell(scaler: torch.amp.GradScaler, *, overflowed: bool) -> None:
    """A scaler how the round went: down at once where a gradient was no number, up after as many good rounds as it says."""
    tracked = scaler.state_dict()
    if not tracked:
        return
    good = 0 if overflowed else tracked["_growth_tracker"] + 1
    grown = good >= tracked["growth_interval"]
    factor = tracked["backoff_factor"] if overflowed else tracked["growth_factor"] if grown else 1.0
    scaler.load_state_dict({**tracked, "scale": tracked["scale"] * factor, "_growth_tracker": 0 if grown else good})


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}; expected a whole number, {least} or more")
    return value


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{name} is {value!r}; expected a number above 0")
    return float(value)
