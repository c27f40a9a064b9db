"""OptEx: up to N steps of any torch optimizer in one round of N gradients that can be computed at the same time.

Steps of an optimizer depend on each other, but the next gradients can be predicted from past ones (Shu et al., NeurIPS'24).
A round, from the point θ₀ where the last one ended:

    propose    θₛ₊₁ = step(θₛ, predicted gradient at θₛ)         s = 0 … N−2, on a fork of the optimizer's state
    evaluate   gₛ = true gradient at θₛ, minibatch s             s = 0 … N−1, independent of each other
    replay     from θ₀ and its state again: step with what the N true gradients, and those before, say of the gradient
               where the replay is (a quadratic model of the loss, or a Gaussian process; either averages noise out)
    settle     towards where, by the quadratic model, the loss is least between the newest points: steps went back and forth
               across valleys, and these lie on either side

Where predictions hold, that is N steps, each with less noise than one minibatch has; where they are good, up to N more, past the
last point. Where they do not hold, gradients are asked for at fewer points, several minibatches each, down to one point: then a
round is one step with a batch N times larger. A round that led astray is taken back by the next one.

``mode="paper"`` is the published algorithm instead: a fixed process, the last of N single steps.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from wavetrain.errors import InputError
from wavetrain.optim.arguments import (
    HISTORY,
    check_choices,
    check_flags,
    check_kinds,
    check_who,
    check_wrapped,
    positive,
    whole_number,
)
from wavetrain.optim.auto import Auto
from wavetrain.optim.before import Before
from wavetrain.optim.estimators import Judge
from wavetrain.optim.evaluation import Closure, with_index
from wavetrain.optim.flat import Flat
from wavetrain.optim.fork import Fork
from wavetrain.optim.history import History
from wavetrain.optim.pace import Pace
from wavetrain.optim.paper import Paper
from wavetrain.optim.rounds import Rounds
from wavetrain.optim.saved import alike, check_base, check_history, check_names, check_owner, check_part, check_version, shape_of
from wavetrain.optim.settling import Settling
from wavetrain.optim.team import Alone, Dealt, Group, Shards, Team
from wavetrain.optim.threads import Threads, check_model

ROUNDS_KEPT: Final = 4
"""Rounds whose gradients are kept: with fewer, there is little to predict from."""
MOST_KEPT: Final = 64
"""But no more pairs than these, unless N is more: the time to tune grows with their third power."""
WATCHED: Final = 20
"""Rounds of which half have to be taken back for a warning."""
ROUNDS_BENT: Final = 3
"""Rounds from which the curvature is learnt, at least."""
LEAST_BENT: Final = 14
"""And no fewer pairs than these."""


class OptEx(Optimizer):
    """Takes up to N steps of ``base`` for every N gradients.

    Change ``base.step()`` after every minibatch to one ``step`` for N of them::

        opt = OptEx(torch.optim.AdamW(model.parameters(), lr=1e-3), parallel=4)
        for group in batched(loader, 4):  # of itertools
            loss = opt.step(lambda i: loss_fn(model(group[i].x), group[i].y))

    Args:
        base: any optimizer of torch but LBFGS. Its groups and rates are shared; its own hooks are called for proposed steps too.
        parallel: N, the minibatches of a round. With ``process_group``, its size.
        mode: ``"auto"``, or ``"paper"`` for the algorithm as it was published.
        history: pairs of points and gradients that are kept, those of the round under way included, and no fewer than N + 2;
            default: 4·N, but at least 32 and at most 64 (in paper mode 50, and N). Memory and the time of estimation go with it.
        kernel: of the Gaussian process: rbf, matern12, matern32 or matern52.
        select: in paper mode, which of the N single steps to go on from: the ``"last"``, that of the least ``"loss"``, or of
            the least ``"gradient"``.
        process_group: every rank of it evaluates one minibatch of a round; all must start from the same weights.
        shard_history: every rank of ``process_group`` keeps the history and the inner optimizer's state of 1/N of the parameters
            only, and does their share of the work of a round; each saves, and loads, a state of its own.
        model: evaluate minibatches at the same time, by threads that each have a copy of it; the closure is then called with an
            index and a model, ``lambda i, model: loss_fn(model(x[i]), y[i])``, and may not draw random numbers.
        threads: how many; default: as many as torch uses, N at most. 1: one after another, without copies.
        shard_group: every rank of it holds other parameters of the same model, as the ranks of a pipeline do; all call ``step``
            together, with closures of the same loss.
        held_elsewhere: parameters here that another rank of ``shard_group`` holds as well, as tied weights; they count there.
        distance_coordinates: measure distances on so many coordinates, drawn at random, where there are more; None for all of
            them, at twice the memory.
        history_dtype: of the gradients that are kept, such as ``torch.bfloat16``; default: that of the parameters.
        moving_losses: losses of different rounds cannot be compared, as in reinforcement learning, where what is learnt from
            changes: rounds are then never taken back, nor made larger batches, because losses rise.
        settle: end rounds towards the least loss between known points, which no step of ``base`` goes to. It never does where
            weights decay by more than a little or gradients are clipped; False, too, where hooks keep parameters within limits.
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
        shard_history: bool = False,
        model: nn.Module | None = None,
        threads: int | None = None,
        shard_group: dist.ProcessGroup | None = None,
        held_elsewhere: Iterable[Tensor] = (),
        distance_coordinates: int | None = 32_768,
        history_dtype: torch.dtype | None = None,
        moving_losses: bool = False,
        settle: bool = True,
        clip_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        check_wrapped(base, OptEx)
        check_choices(mode, kernel, select)
        check_flags(settle=settle, moving_losses=moving_losses, shard_history=shard_history)
        check_who(parallel, process_group, shard_group, model, shard_history=shard_history)
        check_kinds(model, threads, grad_scaler, history_dtype, held_elsewhere)
        device = Flat(base.param_groups).device
        self._shard_group = shard_group
        self._team: Team = Alone() if process_group is None else (Dealt if shard_history else Group)(process_group, device)
        self._shards, self._elsewhere = Shards(process_group if shard_history else shard_group, device), tuple(held_elsewhere)
        size = self._team.size
        if parallel is not None and size is not None and parallel != size:
            raise InputError(
                f"parallel is {parallel}, but the process group has {size} ranks, one for each minibatch; leave it out"
            )
        self.parallel = whole_number("parallel", size if parallel is None else parallel, 1)
        self.model = model
        self._num_threads = 1 if model is None else min(self.parallel, torch.get_num_threads())
        if threads is not None:
            self._num_threads = min(self.parallel, whole_number("threads", threads, 1))
        least = HISTORY[mode] if mode == "paper" else max(HISTORY[mode], min(ROUNDS_KEPT * self.parallel, MOST_KEPT))
        capacity = whole_number("history", least if history is None else history, 2)
        self.mode = mode
        self.base = base
        self._select = select
        self._kernel = kernel
        self._moving_losses = moving_losses
        self._settles = settle
        self._clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._capacity = capacity + self.parallel if mode == "paper" else max(capacity, self.parallel + 2)
        self._distance_coordinates = (
            None if distance_coordinates is None else whole_number("distance_coordinates", distance_coordinates, 1)
        )
        self._history_dtype = history_dtype
        self._ready = False
        super().__init__(base.param_groups, base.defaults)
        self._ready = True
        self.stats = Rounds()
        self._round = 0
        self._kept: list[Callable[[], Any]] = []
        self._left: float | None = None
        """:meth:`Flat.bits` of the parameters where the last round left them; None where there was none."""
        self._took_back: deque[bool] = deque(maxlen=WATCHED)
        """Lately, by round; nothing once it was warned of."""
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
        """Begin anew with what is trained now; where that fails, nothing has changed."""
        threads: Threads | None = None
        if isinstance(self._team, Dealt):
            flat, whole = self._team.deal(self.base.param_groups)
            for p in [p for p in self.base.state if not self._team.keeps(p)]:
                del self.base.state[p]
        else:
            flat = whole = Flat(self.base.param_groups, self._elsewhere)
        if self.model is not None:
            check_model(self.model, flat)
            threads = None if self._num_threads == 1 else Threads(self.model, flat, self._num_threads)
        count, sampled = self._distance_coordinates, None
        if count is not None and count < flat.num_counted:
            chooser = torch.Generator().manual_seed(0)
            sampled = torch.randperm(flat.num_counted, generator=chooser)[:count].sort().values.to(flat.device)
        history = History(
            self._capacity,
            flat.num_coordinates,
            flat.device,
            flat.dtype,
            sampled,
            self._history_dtype or flat.dtype,
            self._shards,
            flat.num_counted,
            self.parallel if self.mode == "paper" else self._num_bent,
        )
        start, work, mean, summed = (flat.empty() for _ in range(4))
        self._flat, self._threads, self._history = flat, threads, history
        self._whole = whole
        """All parameters that are trained; of those in ``_flat``, this rank keeps the history."""
        self._start, self._work, self._mean, self._sum = start, work, mean, summed
        self._gradient, self._whole_start = (work, start) if whole is flat else (whole.empty(), whole.empty())
        self._judge = Judge(self._kernel)
        self._pace = Pace(self.parallel, moving=self._moving_losses)
        self._settling = Settling()
        self._fork = Fork(self.base)
        self._before: Before | None = None
        self._has = (True,) * len(flat.parameters)
        self._num_newest = 0
        self._left = None
        self._resumed: tuple[float, float] | None = None
        """:meth:`Flat.checksum` of the parameters that a state was saved with, from when it is loaded until the next round."""

    @property
    def _num_bent(self) -> int:
        """Pairs from which the curvature is learnt, whose points are kept with all their coordinates: as many as leave room for
        all else in what 2·T pairs of vectors and a tenth take.
        """
        return max(LEAST_BENT, ROUNDS_BENT * self.parallel, self._capacity * 6 // 5 - 10)

    # what torch and its users call

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[..., Any]) -> float: ...
    def step(self, closure: Closure | None = None) -> float | None:
        """One round.

        Args:
            closure: given the index of a minibatch, 0 to N − 1 (or nothing), returns its loss; the backward pass is done here if
                the closure has not done it. It is called N times, or once on every rank of a process group. Without it, the N
                minibatches are those of :meth:`later`.

        Returns:
            The mean loss of the N minibatches, each at the point where it was evaluated; of those that are numbers, NaN if none.

        Raises:
            InputError: the closure is of the wrong kind.
            DivergedError: no loss or gradient at the round's first point is a number, and the last round cannot be taken back.
            RuntimeFailure: ranks that are not at the same point, or a rank whose closure failed.

        Whatever is raised, by the closure too, parameters and optimizer are as they were before the round.
        """
        call = self._collected() if closure is None else with_index(closure, self.model)
        self._notice()
        seed = int(torch.randint(2**48, (), dtype=torch.int64))
        seed = self._team.agree(self._agreed, seed)
        if self.model is not None and self._threads is None:
            call = partial(_with_model, call, self.model)
        kind = self._flat.device.type
        around = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        if not isinstance(around, nullcontext):
            call = partial(_in_autocast, call, kind, torch.get_autocast_dtype(kind))
        play = (Paper if self.mode == "paper" else Auto)(self, call, seed)
        try:
            with around:
                found = play.run()
        except BaseException:
            play.give_up()
            self._left = self._whole.bits()
            raise
        if isinstance(self._team, Group):
            self._team.finish(self._flat, self._whole)
        self._left = self._whole.bits()
        self._round += 1
        self.stats.add(found)
        self._warn(found.took_back)
        return found.loss

    def _notice(self) -> None:
        """What was done to parameters since the last round: where some were added, frozen or unfrozen, all begins anew; where
        some were written to, as by loading others, the last round is not taken back, nor are losses compared with earlier ones.
        """
        if not self._whole.same(self.base.param_groups):
            self._forget()
        if self._moved():
            self._before, self._settling.gone, self._left = None, None, None
            self._history.onward.fill(math.inf)
            self._pace.start_anew()
        elif self._resumed is not None:
            self._left = self._whole.bits()
        self._resumed = None

    def _moved(self) -> bool:
        """Whether parameters were written to since the last round, or are others than those that a state was saved with which was
        loaded since, on any rank that holds some.
        """
        here = self._written
        if self._resumed is not None:
            here = here or not alike(self._resumed, self._whole.checksum(self._gradient), self._whole.num_coordinates)
        return here if isinstance(self._team, Dealt) else not self._shards.all([not here])[0]

    @property
    def _written(self) -> bool:
        """Whether parameters here were written to since the last round."""
        return self._left is not None and self._whole.bits() != self._left

    def _warn(self, took_back: bool) -> None:
        """Once, where rounds are taken back over and over."""
        self._took_back.append(took_back)  # to nothing, once it was said
        if sum(self._took_back) >= WATCHED // 2:
            warnings.warn(
                f"OptEx took back {sum(self._took_back)} of the last {len(self._took_back)} rounds, because they ended at higher "
                "losses: lower the rate; or, if losses rise by themselves, as in reinforcement learning or under a penalty that "
                "grows, say moving_losses=True",
                stacklevel=4,  # of torch, which wraps step(), and of step() itself
            )
            self._took_back = deque(maxlen=0)

    def _agreed(self) -> tuple[float, ...]:
        """Numbers that are the same on all ranks of a process group, unless something is wrong."""
        groups = [{k: _number(v) for k, v in group.items() if k != "params"} for group in self.base.param_groups]
        ended = bool(math.isfinite(self._history.onward.min()))  # else it is measured, by a sum over ranks
        rounds = (self._round, self._num_newest, self._pace.num_points, self._pace.first)
        known = (groups, self._history.rows, self._whole.num_coordinates, rounds, ended)
        return (self._whole.bits(), float(zlib.crc32(repr(known).encode())))

    def later(self, closure: Callable[[], Any]) -> None:
        """Keep the loss of a minibatch for the next ``step()`` without arguments.

        For training loops that are not yours and call ``step()`` themselves, as the Trainer of Hugging Face does.

        Args:
            closure: returns the loss of one minibatch. N of them make a round; with a process group, one on every rank. Where
                fewer are left, as at the end of an epoch, they are used several times.
        """
        if self.model is not None:
            raise InputError("with model=, a loss is a function of (i, model): call step() with it, or leave out model=")
        if not callable(closure):
            raise InputError(f"later() takes a function that returns the loss of a minibatch; got {type(closure).__name__}")
        self._kept.append(closure)

    def _collected(self) -> Callable[[int], Any]:
        """What was kept for later, by the index of a minibatch."""
        if self.model is not None:
            raise InputError("step() needs a closure: opt.step(lambda i, model: loss of minibatch i, computed with that model)")
        kept, self._kept = self._kept, []
        number = self.parallel if self._team.size is None else 1
        if not kept:
            raise InputError(
                "OptEx evaluates the loss at several points: call opt.step(lambda i: loss of minibatch i) and leave out "
                "loss.backward(); or hand over N losses before with opt.later(lambda: loss)"
            )
        if len(kept) > number:
            raise InputError(f"a round has {number} minibatches, but {len(kept)} were kept with later()")
        return lambda i: kept[i % len(kept) if number > 1 else 0]()

    def held_bytes(self) -> int:
        """Bytes kept between rounds, beside the parameters and the inner optimizer's own state."""
        tensors = [self._history.gradients, self._history.points, self._start, self._work, self._mean, self._sum]
        if self._history.whole is not None:
            tensors.append(self._history.whole)
        if self._whole is not self._flat:
            tensors += [self._gradient, self._whole_start]
        copies = 0 if self._threads is None else self._threads.held_bytes()
        if self._settling.gone is not None:
            tensors.append(self._settling.gone.way)
        if self._before is not None:
            tensors.append(self._before.start)
            copies += self._before.fork.held_bytes()
        return sum(t.numel() * t.element_size() for t in tensors) + self._fork.held_bytes() + copies

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does; not needed: gradients are gone after every round."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimizer; what was known of gradients is forgotten."""
        if not self._ready:
            return
        given = param_group.get("params", ())
        param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        more = Flat([*self.base.param_groups, param_group])  # or say why not
        if self.model is not None:
            check_model(self.model, more)
        self.base.add_param_group(param_group)
        self._forget()

    def state_dict(self, *, history: bool = True) -> dict[str, Any]:
        """The inner optimizer's, and under ``optex`` what a round needs to go on to the bit.

        Args:
            history: with the points and gradients that are kept (2·T·d numbers); without, estimation begins anew.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._shard_group is None:  # of a part, one rank may save alone
            self._notice()
        elif not self._whole.same(self.base.param_groups):
            self._forget()
        own: dict[str, Any] = {
            "base": type(self.base).__name__,
            "mode": self.mode,
            "parallel": self.parallel,
            "dealt": self._dealt,
            "round": self._round,
            "has": list(self._has),
            "pace": self._pace.state_dict(),
            "judge": self._judge.state_dict(),
            "settling": self._settling.state_dict(gone=history),
            "num_newest": self._num_newest,
        }
        if history:
            own["history"] = self._history.state_dict()
            own["before"] = None if self._before is None else self._before.state_dict()
            own["checksum"] = (math.nan, math.nan) if self._written else self._whole.checksum(self._gradient)
        found = {**self.base.state_dict(), "optex": own}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, or the state of the inner optimizer alone.

        Raises:
            CheckpointError: it is damaged, or of another mode, parallelism, history or model; nothing has changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        own = state_dict.get("optex")
        saved = None if own is None else own.get("history")
        if not self._whole.same(self.base.param_groups):
            self._forget()
        if own is not None:
            self._check(own)
        elif isinstance(self._team, Dealt):
            kept = {
                i for i, p in enumerate(p for group in self.base.param_groups for p in group["params"]) if self._team.keeps(p)
            }
            check_part(state_dict, kept)
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
            self._settling.load_state_dict(own["settling"])
            self._num_newest = own["num_newest"]
            self._history.load_state_dict(saved)
            self._resumed = (own["checksum"][0], own["checksum"][1])
            if own["before"] is not None:
                self._before = Before(self._flat.empty(), Fork(self.base), 0, 0)
                self._before.load_state_dict(own["before"])

    def _check(self, own: dict[str, Any]) -> None:
        """Whether what was saved can be loaded here."""
        saved, history = own.get("history"), self._history
        check_names(own)
        check_base(own["base"], type(self.base).__name__)
        check_owner(own.get("dealt"), self._dealt)
        kept = {"judge": self._judge.state_dict(), "settling": self._settling.state_dict()}
        check_version(own, {"pace": self._pace.state_dict()} | ({} if saved is None else kept))
        if saved is not None:
            shapes = {name: shape_of(getattr(history, name)) for name in ("gradients", "points", "whole")}
            check_history(own, {"mode": self.mode, "parallel": self.parallel, **shapes})

    @property
    def _dealt(self) -> list[int] | None:
        """With ``shard_history``, whose state this is: a rank, and of how many."""
        return [self._team.rank, self.parallel] if isinstance(self._team, Dealt) else None


def _number(value: Any) -> Any:
    """A rate, or another setting of a group, if it is a number or several; None of anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list):
        return [_number(one) for one in value]
    return value if isinstance(value, bool | int | float) else None


def _in_autocast(closure: Callable[..., Any], kind: str, dtype: torch.dtype, *given: Any) -> Any:
    """As the caller of ``step()`` has it, but only around the closure."""
    with torch.autocast(kind, dtype=dtype):
        return closure(*given)


def _with_model(closure: Callable[..., Any], model: nn.Module, index: int) -> Any:
    return closure(index, model)
