"""``auto`` is never worse than a named family, repeats itself, and reaches what the README says of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wavetrain.errors import CapError, InputError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import build
from wavetrain.schedule.families.auto import named_options
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate


def best_named(costs: Costs, num_micro_batches: int) -> tuple[float, str]:
    """Makespan and name of the fastest named family within the cap."""
    best = (math.inf, "none fits")
    for name, options in named_options(costs.num_ranks, costs):
        try:
            schedule = build(name, num_ranks=costs.num_ranks, num_micro_batches=num_micro_batches, costs=costs, **options)
        except CapError:
            continue
        except InputError:
            assert name == "chimera"
            continue
        best = min(best, (simulate(schedule, costs).makespan, f"{name} {options}"))
    return best


def auto(costs: Costs, num_micro_batches: int, **options: Any) -> Schedule:
    """The schedule that ``auto`` finds, proven within the cap."""
    schedule = build("auto", num_ranks=costs.num_ranks, num_micro_batches=num_micro_batches, costs=costs, **options)
    assert schedule.name == "auto"
    prove(schedule, costs).require()
    return schedule


def eight_stages(**changes: Any) -> Costs:
    """Stages of unequal size on two unequal ranks with a slow link."""
    fields: dict[str, Any] = {
        "forward": (1.0, 2.0, 1.0, 1.5, 0.5, 2.0, 1.0, 3.0),
        "backward_input": (0.0, 2.0, 1.0, 1.5, 0.5, 2.0, 1.0, 3.0),
        "backward_weight": (1.0, 1.0, 2.0, 1.0, 1.0, 0.5, 1.0, 2.0),
        "activation_bytes": (4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0),
        "message_bytes": (1.0,) * 8,
        "speed": (1.0, 1.5),
        "latency": ((0.0, 0.2), (0.1, 0.0)),
        "bandwidth": ((math.inf, 4.0), (2.0, math.inf)),
        "memory_cap": (20.0, 20.0),
    }
    return Costs(**fields | changes)


@pytest.mark.parametrize(
    ("costs", "num_micro_batches"),
    [
        (Costs.uniform(1), 3),
        (Costs.uniform(2), 1),
        (Costs.uniform(3), 7),
        (Costs.uniform(4), 8),
        (Costs.uniform(4, hop_latency=0.05, memory_cap=4), 4),
        (Costs.uniform(3, hop_latency=0.5), 6),
        (Costs.uniform(3, memory_cap=2), 6),
        (Costs.uniform(4, memory_cap=1.5, input_release=0.5), 4),
        (Costs.uniform(3, forward=1.0, backward_input=1.3, backward_weight=0.7), 6),
        (Costs.uniform(2, forward=0.0), 4),
        (eight_stages(), 4),
        (eight_stages(memory_cap=(math.inf, 12.0)), 5),
        (eight_stages(memory_cap=(math.inf, math.inf)), 4),
    ],
)
def test_auto_is_never_worse_than_a_named_family(costs: Costs, num_micro_batches: int) -> None:
    found = simulate(auto(costs, num_micro_batches, iterations=200), costs).makespan
    best, name = best_named(costs, num_micro_batches)
    assert found <= best * (1 + 1e-9), name


def test_the_same_seed_and_iterations_give_the_same_schedule() -> None:
    costs = eight_stages()
    again = [auto(costs, 4, iterations=300, seed=5) for _ in range(2)]
    assert again[0] == again[1]


def test_more_iterations_are_never_worse() -> None:
    costs = eight_stages(memory_cap=(14.0, 12.0))
    none, some = (simulate(auto(costs, 6, iterations=n), costs).makespan for n in (0, 1000))
    assert some <= none


def test_no_time_left_still_gives_a_schedule_as_good_as_the_named_ones() -> None:
    costs = Costs.uniform(3, memory_cap=2)
    assert simulate(auto(costs, 6, seconds=0.0), costs).makespan <= best_named(costs, 6)[0] * (1 + 1e-9)


def test_a_number_of_waves_to_consider() -> None:
    costs = Costs.uniform(2, memory_cap=1.5)
    six = build("zb-wave", num_ranks=2, num_micro_batches=4, waves=6, costs=costs)
    assert simulate(auto(costs, 4, waves=6, seconds=0.0), costs).makespan <= simulate(six, costs).makespan * (1 + 1e-9)


def test_what_is_being_done_is_told() -> None:
    told: list[str] = []
    auto(eight_stages(), 4, iterations=100, progress=told.append)
    assert any("named" in message for message in told)
    assert any("annealing" in message for message in told)


@pytest.mark.parametrize("options", [{"iterations": -1}, {"seconds": -1.0}, {"solver_seconds": -0.1}])
def test_budgets_below_zero(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="0 or more"):
        auto(Costs.uniform(2), 2, **options)


def test_more_ranks_than_stages() -> None:
    fields = ("forward", "backward_input", "backward_weight", "activation_bytes", "message_bytes")
    costs = eight_stages(**dict.fromkeys(fields, (1.0,)))
    with pytest.raises(InputError, match="2 ranks need at least as many stages, but the costs only name 1"):
        auto(costs, 2)


def test_hops_of_five_percent_leave_a_bubble_below_nine_percent() -> None:
    costs = Costs.uniform(8, hop_latency=0.05, memory_cap=8)
    assert simulate(auto(costs, 16, seconds=0.0), costs).bubble <= 0.09


ONE_F_ONE_B = 7 / 39  # P = 8, B = 32: 17.9 %


@pytest.mark.parametrize(("cap", "share"), [(5, 1 / 2), (4, 2 / 3)], ids=["V-Half", "V-Min"])
def test_lean_memory(cap: float, share: float) -> None:
    costs = Costs.uniform(8, memory_cap=cap)
    assert simulate(auto(costs, 32, seconds=0.0), costs).bubble <= share * ONE_F_ONE_B


@pytest.mark.parametrize("cap", [3, 2, 1.5, 1])
def test_down_to_the_least_cap(cap: float) -> None:
    costs = Costs.uniform(6, memory_cap=cap)
    certificate = prove(auto(costs, 4, iterations=0), costs).require()
    assert max(certificate.peak_activations) <= cap
