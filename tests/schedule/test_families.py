"""The formulas that the families are known for, over a grid of P, B, W and v; and that any counts build what can run."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.errors import CapError, InputError, UnknownNameError
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.families import FAMILIES, NAMES, build
from wavetrain.schedule.proof import Certificate, prove
from wavetrain.schedule.schedule import Schedule
from wavetrain.schedule.simulator import simulate

FIXED = [name for name, family in FAMILIES.items() if not family.takes_costs]
RANKS = st.integers(1, 16)
MICRO_BATCHES = st.integers(1, 48)


def built(name: str, num_ranks: int, num_micro_batches: int, **options: Any) -> tuple[Schedule, float, Certificate]:
    """A schedule, its bubble for F = I = W on free links, and its certificate."""
    schedule = build(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, **options)
    assert (schedule.name, schedule.num_ranks, schedule.num_micro_batches) == (name, num_ranks, num_micro_batches)
    return schedule, simulate(schedule).bubble, prove(schedule).require()


def share(idle: float, work: float) -> Any:
    """A bubble: idle / (work + idle), to be compared with."""
    return pytest.approx(idle / (work + idle), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(P=RANKS, B=MICRO_BATCHES)
def test_gpipe(P: int, B: int) -> None:
    _, bubble, certificate = built("gpipe", P, B)
    assert bubble == share(P - 1, B)
    assert certificate.peak_activations == (B,) * P


@settings(deadline=None)
@given(P=RANKS, B=MICRO_BATCHES)
def test_1f1b(P: int, B: int) -> None:
    _, bubble, certificate = built("1f1b", P, B)
    assert bubble == share(P - 1, B)
    assert certificate.peak_activations == tuple(min(P - p, B) for p in range(P))


@settings(deadline=None)
@given(P=RANKS, groups=st.integers(1, 4), v=st.integers(1, 5))
def test_interleaved(P: int, groups: int, v: int) -> None:
    B = P * groups
    schedule, bubble, certificate = built("interleaved", P, B, stages_per_rank=v)
    assert schedule.num_stages == P * v
    assert bubble == share(P - 1, v * B)
    held = P * (1 + (P - 1) / (P * v))
    assert max(certificate.peak_activations) == certificate.peak_activations[0] == pytest.approx(min(held, B))


@pytest.mark.parametrize("P", range(2, 33, 2))
def test_chimera(P: int) -> None:
    schedule, bubble, certificate = built("chimera", P, P)
    assert bubble == share(P - 2, 1.5 * P)
    assert max(certificate.peak_activations) <= P
    assert sum(certificate.peak_activations) / P < P or P == 2
    assert certificate.weight_copies == schedule.num_routes == 2


@pytest.mark.parametrize("W", [1, 2, 3, 4])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_hanayo(P: int, W: int) -> None:
    schedule, bubble, certificate = built("hanayo", P, P, waves=W)
    assert schedule.waves == W
    assert bubble == share(2 * P - 2, 3 * P * W)
    assert max(certificate.peak_activations) == P
    assert certificate.weight_copies == 1


@settings(deadline=None, max_examples=50)
@given(P=st.integers(1, 8), B=st.integers(1, 40), W=st.integers(1, 4))
def test_hanayo_in_groups_holds_at_most_p(P: int, B: int, W: int) -> None:
    assert max(built("hanayo", P, B, waves=W)[2].peak_activations) <= P


@settings(deadline=None, max_examples=60)
@given(P=st.integers(1, 8), more=st.integers(0, 24), W=st.integers(1, 4))
def test_hanayo_breadth_first(P: int, more: int, W: int) -> None:
    B = P + more
    _, bubble, certificate = built("hanayo", P, B, waves=W, breadth_first=True)
    assert bubble <= (2 * P - 2) / (3 * B * W + 2 * P - 2) + 1e-12
    if B == P:
        assert bubble == share(2 * P - 2, 3 * B * W)
    elif B >= 2 * P:
        # better than the published formula: 3(P−1) stage units of idle, not 4(P−1)
        assert bubble == share(3 * (P - 1), 6 * W * B)
    assert max(certificate.peak_activations) == B


@pytest.mark.parametrize(
    ("P", "W"), [(P, 1) for P in range(1, 33)] + list(itertools.product((2, 3, 5, 8, 16, 32), (2,))) + [(2, 4), (8, 4), (16, 4)]
)
def test_zero_bubble_waves(P: int, W: int) -> None:
    schedule, bubble, certificate = built("zb-wave", P, P, waves=W)
    assert schedule.waves == W
    assert bubble == share(P - 1, 6 * W * P)
    assert max(certificate.peak_activations) <= P


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("P", [2, 3, 4, 5, 8])
def test_zero_bubble_waves_of_more_micro_batches(P: int, W: int, times: int) -> None:
    B = times * P
    _, bubble, certificate = built("zb-wave", P, B, waves=W, costs=Costs.uniform(P, memory_cap=P))
    assert bubble <= (P - 1) / (6 * W * B + P - 1) + 0.01
    assert max(certificate.peak_activations) <= P


@settings(deadline=None)
@given(P=RANKS, more=st.integers(0, 24))
def test_zb_h1(P: int, more: int) -> None:
    B = P + more
    _, bubble, certificate = built("zb-h1", P, B)
    assert bubble == share(P - 1, 3 * B)
    assert max(certificate.peak_activations) <= P


@settings(deadline=None)
@given(P=RANKS, more=st.integers(0, 24))
def test_zb_h2(P: int, more: int) -> None:
    B = 2 * P - 1 + more
    schedule, bubble, certificate = built("zb-h2", P, B)
    for spans in simulate(schedule).spans:
        assert all(a.end == b.start for a, b in itertools.pairwise(spans)), "a rank idles between its first and last action"
    assert bubble == share(P - 1, 3 * B)
    assert max(certificate.peak_activations) == 2 * P - 1


@settings(deadline=None)
@given(P=st.integers(1, 12), more=st.integers(0, 24))
def test_zbv(P: int, more: int) -> None:
    B = 2 * P - 1 + more
    _, bubble, certificate = built("zbv", P, B)
    assert bubble == share(P - 1, 6 * B)
    assert max(certificate.peak_activations) == P


@settings(deadline=None)
@given(P=st.integers(1, 12), more=st.integers(0, 24))
def test_dualpipev(P: int, more: int) -> None:
    B = 2 * P + more
    _, bubble, certificate = built("dualpipev", P, B)
    assert bubble == share(P - 1, 6 * B)
    assert max(certificate.peak_activations) == P + 0.5


@pytest.mark.parametrize(
    ("name", "waves", "percent"),
    [
        ("gpipe", None, 46.7),
        ("1f1b", None, 46.7),
        ("chimera", None, 33.3),
        ("hanayo", 1, 36.8),
        ("hanayo", 2, 22.6),
        ("hanayo", 4, 12.7),
        ("zb-wave", 1, 12.7),
        ("zb-wave", 2, 6.8),
        ("zb-wave", 4, 3.5),
    ],
)
def test_percentages_at_eight_ranks_and_eight_micro_batches(name: str, waves: int | None, percent: float) -> None:
    assert round(100 * built(name, 8, 8, waves=waves)[1], 1) == percent


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=40)
@given(P=st.integers(1, 9), B=st.integers(1, 20), count=st.integers(1, 3))
def test_any_counts_build_what_can_run(name: str, P: int, B: int, count: int) -> None:
    family = FAMILIES[name]
    options = {"waves": count} if family.takes_waves else {"stages_per_rank": count} if family.takes_stages_per_rank else {}
    if name == "chimera" and P % 2:
        with pytest.raises(InputError, match=rf"chimera needs an even number of ranks, {P} is odd: use {P + 1}"):
            build(name, num_ranks=P, num_micro_batches=B)
        return
    schedule, bubble, certificate = built(name, P, B, **options)
    assert 0 <= bubble < 1
    stages = count * (2 if family.takes_waves else 1) if options else family.stages_per_rank
    assert schedule.num_stages == P * (stages or 0)
    assert certificate.num_actions == schedule.num_actions


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("P", "B", "words"),
    [(0, 4, "0 ranks"), (-2, 4, "-2 ranks"), (4, 0, "0 micro-batches"), (4, -1, "-1 micro-batches")],
)
def test_counts_below_one(name: str, P: int, B: int, words: str) -> None:
    with pytest.raises(InputError, match=f"{words}: a .* needs at least 1"):
        build(name, num_ranks=P, num_micro_batches=B)


@pytest.mark.parametrize(("name", "near"), [("1f1", "1f1b"), ("hanayoo", "hanayo"), ("zb_wave", "zb-wave"), ("Auto", "auto")])
def test_an_unknown_name_gets_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown schedule '{name}'; did you mean '{near}'"):
        build(name, num_ranks=2, num_micro_batches=2)


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(UnknownNameError, match=r"known: gpipe, 1f1b, .*, auto"):
        build("?", num_ranks=2, num_micro_batches=2)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("1f1b", {"waves": 2}, "1f1b takes no waves"),
        ("zbv", {"waves": 2}, "zbv takes no waves"),
        ("interleaved", {"waves": 2}, "takes no waves: give stages per rank"),
        ("gpipe", {"stages_per_rank": 2}, "gpipe takes no stages per rank"),
        ("hanayo", {"stages_per_rank": 4}, "takes no stages per rank: give waves"),
        ("auto", {"stages_per_rank": 2}, "auto chooses the stages per rank itself"),
        ("1f1b", {"breadth_first": True}, "only hanayo has"),
        ("hanayo", {"waves": 0}, "0 waves"),
        ("zb-wave", {"waves": -1}, "-1 waves"),
        ("interleaved", {"stages_per_rank": 0}, "0 stages per rank"),
        ("1f1b", {"costs": Costs.uniform(3)}, "2 ranks asked for, but the costs are for 3"),
    ],
)
def test_options_that_a_family_does_not_have(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(name, num_ranks=2, num_micro_batches=2, **options)


def uneven(**changes: Any) -> Costs:
    """Twelve stages of unequal size on four ranks of unequal speed."""
    sizes = tuple(1.0 + 0.1 * (i * 5 % 7) for i in range(12))
    fields: dict[str, Any] = {
        "forward": sizes,
        "backward_input": sizes,
        "backward_weight": sizes,
        "activation_bytes": sizes[::-1],
        "message_bytes": (0.0,) * 12,
        "speed": (1.0, 2.0, 1.0, 1.5),
        "latency": ((0.0,) * 4,) * 4,
        "bandwidth": ((float("inf"),) * 4,) * 4,
        "memory_cap": (float("inf"),) * 4,
    }
    return Costs(**fields | changes)


@pytest.mark.parametrize("costs", [Costs.uniform(4), Costs.uniform(4, input_release=0.5), uneven(), uneven(input_release=1.0)])
@pytest.mark.parametrize("name", FIXED)
def test_a_cap_too_small_says_the_least_that_works(name: str, costs: Costs) -> None:
    options: dict[str, Any] = {"stages_per_rank": 3} if name == "interleaved" else {"waves": 1} if name == "hanayo" else {}

    def with_cap(cap: float) -> Certificate:
        capped = costs.with_cap(cap)
        schedule = build(name, num_ranks=4, num_micro_batches=8, costs=capped, **options)
        return prove(schedule, capped).require()

    with pytest.raises(CapError, match=rf"{name} with 8 micro-batches holds .* on rank .*, above its cap of 0\.5") as caught:
        with_cap(0.5)
    least = caught.value.least_cap
    with_cap(least)
    typed = re.search(r"least cap that works is ([\d.]+)", str(caught.value))
    assert typed
    with_cap(float(typed[1]))
    with pytest.raises(CapError):
        with_cap(least * 0.999)


@pytest.mark.parametrize("name", ["zb-wave", "auto"])
def test_the_least_cap_of_all(name: str) -> None:
    with pytest.raises(CapError, match="least cap that works is 1") as caught:
        build(name, num_ranks=3, num_micro_batches=4, costs=Costs.uniform(3, memory_cap=0.5))
    assert caught.value.least_cap == 1.0
    costs = Costs.uniform(3, memory_cap=1.0)
    certificate = prove(build(name, num_ranks=3, num_micro_batches=4, costs=costs), costs).require()
    assert max(certificate.peak_activations) == 1.0


@pytest.mark.parametrize("name", ["zb-wave", "auto"])
def test_the_least_cap_of_uneven_stages(name: str) -> None:
    with pytest.raises(CapError) as caught:
        build(name, num_ranks=4, num_micro_batches=4, costs=uneven().with_cap(0.5))
    costs = uneven().with_cap(caught.value.least_cap)
    prove(build(name, num_ranks=4, num_micro_batches=4, costs=costs), costs).require()
