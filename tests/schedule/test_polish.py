from __future__ import annotations

import math
import sys
from dataclasses import replace
from random import Random

import pytest

from tests.schedule.random_schedules import random_costs, random_schedule
from wavetrain.errors import InputError, ProofError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.families.zb_wave import schedule_of
from wavetrain.schedule.graph import build_graph
from wavetrain.schedule.optimizer import polish as module
from wavetrain.schedule.optimizer.construct import one_at_a_time
from wavetrain.schedule.optimizer.polish import polish
from wavetrain.schedule.placement import Placement, straight, wave
from wavetrain.schedule.proof import Certificate, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate


def poor(placement: Placement, num_micro_batches: int, costs: Costs) -> Schedule:
    """One micro-batch after another: as slow as it gets."""
    routes = (0,) * num_micro_batches
    graph = build_graph((placement,), routes, costs.num_ranks, costs)
    return schedule_of("poor", graph, one_at_a_time(graph))


@pytest.fixture
def solver() -> None:
    pytest.importorskip("ortools", reason="polishing needs the extra 'solve'")


@pytest.mark.usefixtures("solver")
class TestPolish:
    @pytest.mark.parametrize("placement", [straight(3), wave(3, 1)])
    @pytest.mark.parametrize("cap", [2.0, 3.0, math.inf])
    def test_shortens_a_poor_order_within_the_cap(self, placement: Placement, cap: float) -> None:
        costs = Costs.uniform(3, hop_latency=0.25, memory_cap=cap)
        start = poor(placement, 4, costs)
        better = polish(start, costs, seconds=5)
        assert simulate(better, costs).makespan < 0.8 * simulate(start, costs).makespan
        certificate = prove(better, costs).require()
        assert max(certificate.peak_activations) <= cap
        assert better.placements == start.placements
        assert better.name == "poor"

    def test_finds_the_shortest_step_of_a_small_instance(self) -> None:
        costs = Costs.uniform(2, memory_cap=2)
        better = polish(poor(wave(2, 1), 2, costs), costs, seconds=20)
        assert simulate(better, costs).bubble == pytest.approx(1 / 13)  # (P−1)/(6WB+P−1): none is shorter

    def test_what_i_frees_is_free_to_take(self) -> None:
        placement = straight(2)
        held, freed = (Costs.uniform(2, memory_cap=1, input_release=release) for release in (0.0, 1.0))
        start = poor(placement, 3, held)
        slow, fast = (polish(start, costs, seconds=10) for costs in (held, freed))
        assert simulate(fast, freed).makespan < simulate(slow, held).makespan
        assert prove(fast, freed).proven
        assert not prove(fast, held).proven

    @pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
    def test_whole_backwards_stay_whole(self, name: str) -> None:
        costs = Costs.uniform(2, hop_latency=0.3)
        start = build(name, num_ranks=2, num_micro_batches=4)
        better = polish(start, costs, seconds=2)
        assert sorted(a for row in better.actions for a in row) == sorted(a for row in start.actions for a in row)
        assert simulate(better, costs).makespan <= simulate(start, costs).makespan

    @pytest.mark.parametrize("seed", range(12))
    def test_is_never_worse_and_keeps_the_cap_on_links_that_queue(self, seed: int) -> None:
        random = Random(seed)
        start = random_schedule(random)
        costs = random_costs(random, start)
        free = prove(start, costs)
        assert isinstance(free, Certificate)
        costs = replace(costs, memory_cap=tuple(p if p > 0 else 1.0 for p in free.peak_bytes))
        better = polish(start, costs, seconds=0.5, seed=seed)
        assert prove(better, costs).proven
        assert simulate(better, costs).makespan <= simulate(start, costs).makespan

    def test_the_best_there_is_comes_back_as_it_is(self) -> None:
        costs = Costs.uniform(4, memory_cap=4)
        start = build("zb-wave", num_ranks=4, num_micro_batches=4, waves=1, costs=costs)
        assert polish(start, costs, seconds=60) is start

    def test_several_routes_come_back_as_they_are(self) -> None:
        start = build("chimera", num_ranks=4, num_micro_batches=4)
        assert polish(start, Costs.uniform(4), seconds=60) is start

    def test_large_schedules_come_back_as_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_ACTIONS", 10)
        start = build("1f1b", num_ranks=3, num_micro_batches=4)
        assert polish(start, Costs.uniform(3), seconds=60) is start

    def test_no_time_no_change(self) -> None:
        costs = Costs.uniform(3)
        start = poor(straight(3), 4, costs)
        assert polish(start, costs, seconds=0) is start

    @pytest.mark.parametrize(
        ("seconds", "workers", "says"), [(-1.0, 2, "0 or more"), (math.nan, 2, "0 or more"), (1.0, 0, "at least 1")]
    )
    def test_bad_limits_are_refused(self, seconds: float, workers: int, says: str) -> None:
        with pytest.raises(InputError, match=says):
            polish(build("1f1b", num_ranks=2, num_micro_batches=2), Costs.uniform(2), seconds=seconds, workers=workers)

    def test_a_schedule_above_the_cap_is_refused(self) -> None:
        with pytest.raises(ProofError, match="above its cap"):
            polish(build("gpipe", num_ranks=2, num_micro_batches=4), Costs.uniform(2, memory_cap=2), seconds=1)


def test_without_ortools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(InputError, match=r"pip install 'wavetrain\[solve\]'"):
        polish(build("1f1b", num_ranks=2, num_micro_batches=2), Costs.uniform(2), seconds=1)
