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
from wavetrain.optim.evaluation import Closure, evaluate, is_finite, with_index
from wavetrain.optim.flat import Flat
from wavetrain.optim.fork import Fork
from wavetrain.optim.history import History
from wavetrain.optim.kernels import KERNELS
from wavetrain.optim.pace import Pace
from wavetrain.optim.process import Prior, Process
from wavetrain.optim.rounds import Round, Rounds
from wavetrain.optim.team import Alone, Group, Shared, Team

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
        base: any optimizer of torch but LBFGS. Its groups and rates are shared; its own hooks are called for proposed steps too.
        parallel: N, the minibatches of a round. With ``process_group``, its size.
        mode: ``"auto"``, or ``"paper"`` for the algorithm as it was published.
        history: pairs of points and gradients that are kept, those of the round under way included.
        kernel: of the Gaussian process: rbf, matern12, matern32 or matern52.
        select: in paper mode, which of the N single steps to go on from: the ``"last"``, that of the least ``"loss"``, or of
            the least ``"gradient"``.
        process_group: every rank of it evaluates one minibatch of a round; all must start from the same weights.
        distance_coordinates: measure distances on so many coordinates, drawn at random, where there are more; None for all of
            them, at twice the memory.
        history_dtype: of the gradients that are kept, such as ``torch.bfloat16``; default: that of the parameters.
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
        if process_group is None and parallel is None:
            raise InputError(
                "give parallel=N, the minibatches of a round, or process_group=dist.group.WORLD after dist.init_process_group()"
            )
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InputError(f"process_group is {process_group!r}; expected a group of torch.distributed")
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise InputError(f"grad_scaler is {grad_scaler!r}; expected a torch.amp.GradScaler")
        if history_dtype is not None and not (isinstance(history_dtype, torch.dtype) and history_dtype.is_floating_point):
            raise InputError(f"history_dtype is {history_dtype!r}; expected a type of real numbers, such as torch.bfloat16")
        device = Flat(base.param_groups).device
        self._team: Team = Alone() if process_group is None else Group(process_group, device)
        size = self._team.size
        if parallel is not None and size is not None and parallel != size:
            raise InputError(
                f"parallel is {parallel}, but the process group has {size} ranks, one for each minibatch; leave it out"
            )
        self.parallel = _whole("parallel", size if parallel is None else parallel, 1)
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
        self.stats = Rounds()
        self._round = 0
        self._forget()

    # groups and state are the inner optimizer's own, also after it has loaded others

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the inner optimizer."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._ready:
            self.base.param_groups = value

    @property
    def state(self) -> Any:
        """Of the inner optimizer."""
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            self.base.state = value

    def __getstate__(self) -> dict[str, Any]:
        raise InputError("an OptEx cannot be copied or pickled: make a new one, and load state_dict() into it")

    def _forget(self) -> None:
        """Begin anew with what is trained now."""
        self._flat = flat = Flat(self.base.param_groups)
        count = self._distance_coordinates
        sampled = None
        if count is not None and count < flat.num_coordinates:
            chooser = torch.Generator().manual_seed(0)
            sampled = torch.randperm(flat.num_coordinates, generator=chooser)[:count].sort().values.to(flat.device)
        self._history = History(
            self._capacity, flat.num_coordinates, flat.device, flat.dtype, sampled, self._history_dtype or flat.dtype
        )
        self._judge = Judge(self._kernel)
        self._pace = Pace(self.parallel)
        self._fork = Fork(self.base)
        self._start, self._work, self._mean = flat.empty(), flat.empty(), flat.empty()
        self._proposed = None if sampled is None else self._start.new_empty(self.parallel, flat.num_coordinates)
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
            DivergedError: no loss or gradient at the round's first point is a number.
            RuntimeFailure: ranks that are not at the same point, or a rank whose closure failed.

        Whatever is raised, by the closure too, parameters and optimizer are as they were before the round.
        """
        if closure is None:
            raise InputError(
                "OptEx evaluates the loss at several points: call opt.step(lambda i: loss of minibatch i) and leave out "
                "loss.backward()"
            )
        call = with_index(closure)
        if not self._flat.same(self.base.param_groups):
            self._forget()  # parameters were added, frozen or unfrozen
        seed = int(torch.randint(2**48, (), dtype=torch.int64))
        seed = self._team.agree((*self._flat.checksum(), self._round, self._pace.num_points), seed)
        play = _Play(self, call, seed)
        try:
            found = play.paper() if self.mode == "paper" else play.auto()
        except BaseException:
            play.give_up()
            raise
        self._round += 1
        self.stats.add(found)
        return found.loss

    def held_bytes(self) -> int:
        """Bytes kept between rounds, beside the parameters and the inner optimizer's own state."""
        tensors = [self._history.gradients, self._history.points, self._start, self._work, self._mean]
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
        given = param_group.get("params", ())
        Flat([*self.base.param_groups, {"params": [given] if isinstance(given, Tensor) else list(given)}])  # or say why not
        param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        self.base.add_param_group(param_group)
        self._forget()

    def state_dict(self, *, history: bool = True) -> dict[str, Any]:
        """The inner optimizer's, and under ``optex`` what a round needs to go on to the bit.

        Args:
            history: with the points and gradients that are kept (2·T·d numbers); without, estimation begins anew.
        """
        if not self._flat.same(self.base.param_groups):
            self._forget()
        own: dict[str, Any] = {
            "mode": self.mode,
            "parallel": self.parallel,
            "round": self._round,
            "has": list(self._has),
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
            CheckpointError: it is damaged, or of another mode, parallelism, history or model; nothing has changed.
        """
        own = state_dict.get("optex")
        saved = None if own is None else own.get("history")
        if own is not None:
            self._check(own, saved)
        self.base.load_state_dict({k: v for k, v in state_dict.items() if k != "optex"})
        self._forget()
        if own is None:
            return
        self._round = own["round"]
        if own["parallel"] == self.parallel:
            self._pace.load_state_dict(own["pace"])
        if saved is not None:
            self._has = tuple(own["has"])
            self._judge.load_state_dict(own["judge"])
            self._num_newest = own["num_newest"]
            self._history.load_state_dict(saved)

    def _check(self, own: dict[str, Any], saved: dict[str, Any] | None) -> None:
        """Whether what was saved can be loaded here."""
        missing = {"mode", "parallel", "round", "has", "pace", "judge", "num_newest"} - set(own)
        if missing:
            raise CheckpointError(f"the saved state of OptEx lacks {', '.join(sorted(missing))}")
        if saved is None:
            return
        here = {
            "mode": self.mode,
            "parallel": self.parallel,
            "gradients": tuple(self._history.gradients.shape),
            "points": tuple(self._history.points.shape),
        }
        there = {
            "mode": own["mode"],
            "parallel": own["parallel"],
            "gradients": tuple(saved["gradients"].shape),
            "points": tuple(saved["points"].shape),
        }
        for name, value in here.items():
            if there[name] != value:
                raise CheckpointError(
                    f"the saved history is of another optimizer: {name} {there[name]}, here {value}; use the same parameters, "
                    "mode, parallel, history and distance_coordinates, or save with state_dict(history=False)"
                )


class _Play:
    """One round of an :class:`OptEx`."""

    def __init__(self, of: OptEx, closure: Callable[[int], Any], seed: int) -> None:
        self.of, self.closure, self.seed = of, closure, seed
        self._taken: list[int] = []
        self._moved = False
        self.flat, self.history = of._flat, of._history
        self.estimate_seconds = self.evaluate_seconds = self.step_seconds = 0.0
        self.has: tuple[bool, ...] = ()
        """Which parameters got a gradient; until one is evaluated, all do."""

    def auto(self) -> Round:
        of, history = self.of, self.history
        num_points = of._pace.num_points
        new = self._taken = history.take_rows(num_points)
        known, newest = list(history.rows), of._num_newest
        begin = time.perf_counter()
        process, name = of._judge.process(history), of._judge.best
        told = name if name != "gp" or process is None else str(of._judge.prior)
        self.estimate_seconds += time.perf_counter() - begin

        def predict(squares: Floats) -> Floats | None:
            return weights(name, process, history, known, newest, squares[known]) if known else None

        predicted = self._propose(new, predict)
        losses, good = self._evaluate(new)
        if not good:
            return self._skipped(losses, num_points)
        begin = time.perf_counter()
        history.close(good)
        cosines, errors = self._compare(predicted, known, good)
        of._judge.hear(history, known, process, newest, good)
        process = of._judge.process(history) if known else None
        of._num_newest = len(good)
        self.estimate_seconds += time.perf_counter() - begin
        accepted, drifts = self._replay(good, process)
        rising = any(group.get("maximize", False) for group in of.param_groups)
        of._pace.hear(accepted, [-loss if rising else loss for loss in losses if math.isfinite(loss)])
        return self._told(told, losses, num_points, accepted, cosines, errors, drifts)

    def paper(self) -> Round:
        of, history = self.of, self.history
        new = self._taken = history.take_rows(of.parallel)
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
        if not good:
            return self._skipped(losses, len(new))
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
        self._moved = True
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
        """The losses of all minibatches, and the rows whose gradients are numbers, up to the first that is not.

        A minibatch whose loss or gradient is no number is left out of the mean at its point.
        """
        of, flat, history = self.of, self.flat, self.history
        begin = time.perf_counter()
        shared: dict[int, Shared] = {}
        losses: list[float] = [math.nan] * of.parallel
        good: list[int] = []
        for at, row in enumerate(new):
            indices = range(at, of.parallel, len(new))
            if of._team.size is None:
                flat.write(history.points[row] if of._proposed is None else of._proposed[at])
            if of._team.size is not None and at == 0:  # ranks: all at once, each at the point of its own
                shared = self._shared(new)
            count = 0
            for i in indices:
                one = shared[i] if shared else of._team.share(self._one(i))[0]
                losses[i] = one.loss
                if not is_finite(one.loss, one.gradient):
                    continue
                self.has = tuple(a or b for a, b in zip(self.has or one.has, one.has, strict=True))
                count += 1
                if count == 1:
                    of._mean.copy_(one.gradient)
                else:
                    of._mean.add_(one.gradient)
            if not count:
                break
            history.gradients[row].copy_(of._mean.div_(count))
            good.append(row)
        of._has = self.has or of._has
        history.drop(new[len(good) :])
        self.evaluate_seconds += time.perf_counter() - begin
        if of._scaler is not None:
            _tell(of._scaler, overflowed=len(good) < len(new))
        overflowed = of._scaler is not None and math.isfinite(losses[0])
        if not good and not overflowed:
            raise DivergedError(
                f"round {of._round + 1}: no loss or gradient at its first point is a number (loss of minibatch 0: "
                f"{losses[0]:g}); the parameters and the optimizer are as they were before the round",
                step=of._round + 1,
                ranks=(),
            )
        return losses, good

    def _shared(self, new: list[int]) -> dict[int, Shared]:
        """Every rank's minibatch, each evaluated where it belongs."""
        of = self.of
        mine = next(i for i in range(of.parallel) if of._team.mine(i))
        at = mine % len(new)
        self.flat.write(self.history.points[new[at]] if of._proposed is None else of._proposed[at])
        return dict(enumerate(of._team.share(self._one(mine))))

    def _one(self, index: int) -> Shared:
        """One minibatch, where the parameters are; what goes wrong in the closure is kept, for the team to hear of it."""
        of = self.of
        scale = None if of._scaler is None else of._scaler.get_scale()
        try:
            done = evaluate(self.closure, index, self.seed + index, self.flat, of._work, scale)
        except Exception as error:
            return Shared(of._work, 0.0, (False,) * len(self.flat.parameters), error)
        return Shared(of._work, done.loss, done.has)

    def _skipped(self, losses: Sequence[float], num_points: int) -> Round:
        """A round that overflowed in fp16: nothing is done, the scaler has been told."""
        self.give_up()
        return self._told("zero", losses, num_points, 0, (), (), ())

    def give_up(self) -> None:
        """Everything as it was before the round, but for the oldest pairs of the history."""
        if self._moved:
            self._rewind()
        self.history.drop([row for row in self._taken if row not in self.history.rows])
        self.flat.forget_gradients()

    def _replay(self, good: list[int], process: Process | None) -> tuple[int, tuple[float, ...]]:
        """Steps from the start, as far as evaluated points are near: how many, and how near."""
        of, flat, history = self.of, self.flat, self.history
        self._rewind()
        drifts: list[float] = []
        accepted = 0
        if len(good) == 1:
            self._step_with(of._mean, math.sqrt(float(history.products[good[0], good[0]])))
            accepted = 1
        elif process is None:
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
        begin = time.perf_counter()
        inner = self.history.products[np.ix_(rows, rows)]
        norm = math.sqrt(max(0.0, float(found @ inner @ found)))
        gradient = self.history.combine(found, rows, self.of._work)
        self.estimate_seconds += time.perf_counter() - begin
        self._step_with(gradient, norm)

    def _step_with(self, gradient: Tensor, norm: float) -> None:
        """A step of the inner optimizer with a gradient (d,) of this norm, which may be scaled down in place."""
        of = self.of
        begin = time.perf_counter()
        if of._clip_norm is not None and norm > of._clip_norm:
            gradient.mul_(of._clip_norm / norm)
        self.flat.lend_gradients(gradient, self.has or of._has)
        of.base.step()
        self.step_seconds += time.perf_counter() - begin

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
