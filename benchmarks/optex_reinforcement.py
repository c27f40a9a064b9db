"""OptEx in reinforcement learning: DQN on CartPole, Acrobot and MountainCar, four gradients a round.

Every round plays some steps and then learns once: vanilla a step with one minibatch, the others with four. All methods see
as many steps of the game. Every method at the best rate of the same grid.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium
import numpy as np
import torch
from benchmarks.kept import kept
from benchmarks.optimizers import Problem, code_of, rounds
from benchmarks.report import Report, Row, main
from torch import Tensor, nn

from wavetrain.files import write_text
from wavetrain.view.chart import line_chart

PARALLEL = 4
BATCH = 64
GAMES = {"CartPole-v1": (1500, 8), "Acrobot-v1": (1500, 8), "MountainCar-v0": (7500, 16)}
"""Rounds, and steps of the game in each: the car needs some hundred thousand of them before anyone reaches the top."""
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = 3
METHODS = ("vanilla", "large batch", "paper", "ours", "target")
PLOT = Path(__file__).resolve().parent / "plots" / "optex_reinforcement.svg"


@dataclass(frozen=True)
class Run:
    """One."""

    game: str
    method: str
    rate: float
    seed: int
    num_rounds: int
    played: int = 8
    """Steps of the game a round."""


class Replay:
    """What was played: the last 20,000 steps."""

    def __init__(self, width: int) -> None:
        self.size = 0
        self._next = 0
        self._rows = np.zeros((20_000, 2 * width + 3), np.float32)
        self._width = width

    def add(self, state: np.ndarray, action: int, reward: float, after: np.ndarray, ended: bool) -> None:
        """One step."""
        self._rows[self._next] = np.concatenate((state, [action, reward, float(ended)], after))
        self._next = (self._next + 1) % len(self._rows)
        self.size = min(self.size + 1, len(self._rows))

    def draw(self, make: np.random.Generator) -> Tensor:
        """A minibatch, (BATCH, 2 · width + 3)."""
        return torch.from_numpy(self._rows[make.integers(self.size, size=BATCH)])


def measure(run: Run) -> list[tuple[int, float]]:
    """(Round, reward) of every episode; see :mod:`benchmarks.kept`."""
    return kept(repr(run), ("optex_reinforcement.py", *code_of(run.method)), lambda: _measure(run))


def _measure(run: Run) -> list[tuple[int, float]]:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    make = np.random.default_rng(run.seed)
    game = gymnasium.make(run.game)
    width, num_actions = game.observation_space.shape[0], int(game.action_space.n)  # type: ignore[index, attr-defined]
    model, late = (
        nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_actions)) for _ in "12"
    )
    late.load_state_dict(model.state_dict())
    ends = (0, width, width + 1, width + 2, width + 3, 2 * width + 3)
    replay, chosen = Replay(width), [torch.empty(0)] * PARALLEL

    def loss(i: int) -> Tensor:
        rows = chosen[i]
        state, action, reward, ended, after = (rows[:, a:b] for a, b in pairwise(ends))
        with torch.no_grad():  # double DQN: chosen by the one, valued by the other
            best = model(after).argmax(1, keepdim=True)
            wanted = reward + 0.99 * (1 - ended) * late(after).gather(1, best)
        return nn.functional.smooth_l1_loss(model(state).gather(1, action.long()), wanted)

    problem = Problem(list(model.parameters()), loss, moving=True)
    go = rounds(run.method, problem, torch.optim.Adam(model.parameters(), lr=run.rate), PARALLEL)
    state, _ = game.reset(seed=run.seed)
    episodes: list[tuple[int, float]] = []
    total = 0.0
    for number in range(1, run.num_rounds + 1):
        greed = max(0.05, 1.0 - number / (0.3 * run.num_rounds))
        for _ in range(run.played):
            if make.random() < greed:
                action = int(make.integers(num_actions))
            else:
                with torch.no_grad():
                    action = int(model(torch.from_numpy(np.asarray(state, np.float32))).argmax())
            after, reward, ended, cut, _ = game.step(action)
            replay.add(state, action, float(reward), after, ended)
            total, state = total + float(reward), after
            if ended or cut:
                episodes.append((number, total))
                total, (state, _) = 0.0, game.reset()
        if replay.size >= 500 or number > 60:
            chosen[:] = [replay.draw(make) for _ in range(PARALLEL)]
            go()
        if number % 25 == 0:
            late.load_state_dict(model.state_dict())
    return episodes


def _last(episodes: list[tuple[int, float]], num_rounds: int) -> float:
    """Mean reward of the episodes that ended in the last fifth of the rounds."""
    late = [reward for number, reward in episodes if number > 0.8 * num_rounds]
    return statistics.fmean(late or [reward for _, reward in episodes[-1:]] or [0.0])


def _whole(episodes: list[tuple[int, float]]) -> float:
    """Mean reward of all episodes."""
    return statistics.fmean([reward for _, reward in episodes] or [0.0])


def run(quick: bool) -> Report:
    """Rewards."""
    games = {"CartPole-v1": (80, 8)} if quick else GAMES
    rates, seeds = ((1e-3,), 1) if quick else (RATES, SEEDS)
    rows: list[Row] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for game, (num_rounds, played) in games.items():
            runs = [Run(game, m, r, s, num_rounds, played) for m in METHODS for r in rates for s in range(seeds)]
            found = dict(zip(runs, pool.map(measure, runs), strict=True))
            best: dict[str, list[list[tuple[int, float]]]] = {}
            told = {}
            for method in METHODS:
                by_rate = {r: [v for k, v in found.items() if (k.method, k.rate) == (method, r)] for r in rates}
                rate = max(rates, key=lambda r: statistics.fmean(_last(e, num_rounds) for e in by_rate[r]))
                best[method] = by_rate[rate]
                ends = [_last(e, num_rounds) for e in best[method]]
                spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
                mean = statistics.fmean(_whole(e) for e in best[method])
                told[method] = f"{statistics.fmean(ends):.0f} ± {spread:.0f}, whole run {mean:.0f} at {rate:g}"
            ours, vanilla = (statistics.fmean(_last(e, num_rounds) for e in best[m]) for m in ("ours", "vanilla"))
            rows.append(
                Row(
                    case=f"{game}, {num_rounds:,} rounds of {played} steps",
                    target="≥ vanilla's reward",
                    measured=f"{told['ours']} ("
                    + "; ".join(f"{m} {told[m]}" for m in METHODS if m not in ("ours", "target"))
                    + ")",
                    limit=f"N true steps {told['target']}",
                    passed=ours > 0.3 * vanilla if quick else ours >= vanilla,
                )
            )
            if game == "CartPole-v1":
                curves = {m: _curve(best[m], num_rounds) for m in METHODS}
    if not quick:
        write_text(PLOT, line_chart(curves, title="CartPole: reward by round", x_label="round", y_label="reward"))
    return Report(
        name="optex_reinforcement",
        claim="DQN: mean reward of the episodes in the last fifth of the rounds, each method at its best rate.",
        rows=tuple(rows),
        notes=(
            f"Double DQN, two layers of 64, Adam, minibatches of {BATCH}; steps of the game and one round of learning by turns; "
            f"{seeds} seeds. In Acrobot and MountainCar every step costs 1: rewards are below 0.",
            *(() if quick else (f"[Reward by round](plots/{PLOT.name})",)),
        ),
    )


def _curve(episodes: list[list[tuple[int, float]]], num_rounds: int) -> list[tuple[float, float]]:
    """Mean reward by twentieths of the rounds."""
    width = num_rounds / 20
    found: deque[tuple[float, float]] = deque()
    for part in range(20):
        inside = [r for one in episodes for n, r in one if part * width < n <= (part + 1) * width]
        if inside:
            found.append(((part + 1) * width, statistics.fmean(inside)))
    return list(found)


if __name__ == "__main__":
    main(run)
