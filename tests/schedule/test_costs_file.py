from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from tests.schedule.random_schedules import random_costs, random_schedule, randoms
from wavetrain.errors import FormatError, UnknownNameError
from wavetrain.schedule import costs_file
from wavetrain.schedule.costs import Costs
from wavetrain.schedule.costs_file import costs_from_dict, load_costs

TIMES = "forward = 1\nbackward_input = 1.5\nbackward_weight = 0\n"


def read(text: str, tmp_path: Path) -> Costs:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    return load_costs(path)


@settings(deadline=None)
@given(randoms())
def test_plain_data_comes_back_as_it_was(random: Random) -> None:
    costs = random_costs(random, random_schedule(random))
    assert costs_from_dict(costs.to_dict()) == costs


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    assert costs_file.__doc__ is not None
    example = [line[4:] for line in costs_file.__doc__.splitlines() if line.startswith("    ")]
    costs = read("\n".join(example), tmp_path)
    assert (costs.num_ranks, costs.num_stages) == (4, 8)
    assert costs.backward_weight[-1] == 2e-3
    assert costs.speed == (1.0, 1.0, 2.0, 2.0)
    assert costs.latency[1][2] == costs.latency[2][1] == 50e-6
    assert costs.bandwidth[1][2] == 1e8
    assert costs.latency[2][3] == 5e-6
    assert not costs.divisible


def test_numbers_are_for_all_and_the_rest_costs_nothing(tmp_path: Path) -> None:
    costs = read("ranks = 2\nstages = 4\n" + TIMES, tmp_path)
    assert costs.forward == (1.0,) * 4
    assert costs.message_bytes == (0.0,) * 4
    assert costs.memory_cap == (math.inf,) * 2
    assert costs.latency == ((0.0, 0.0), (0.0, 0.0))
    assert costs.bandwidth[0][1] == math.inf


def test_lists_say_how_many_there_are(tmp_path: Path) -> None:
    costs = read("speed = [1, 2, 3]\nforward = [1, 2]\nbackward_input = 1\nbackward_weight = 1\n", tmp_path)
    assert (costs.num_ranks, costs.num_stages) == (3, 2)


def test_a_cap_in_micro_batches_of_an_even_share(tmp_path: Path) -> None:
    costs = read("ranks = 2\nactivation_bytes = [1, 2, 3, 4]\nmemory_cap_micro_batches = 3\n" + TIMES, tmp_path)
    assert costs.memory_cap == (15.0, 15.0)


def test_a_link_one_way_and_the_last_word_wins(tmp_path: Path) -> None:
    links = "[[links]]\nfrom = 0\nto = 1\nlatency = 9\n[[links]]\nfrom = 1\nto = 0\nlatency = 5\nboth = false\n"
    costs = read("ranks = 2\nstages = 2\nlatency = 1\n" + TIMES + links, tmp_path)
    assert costs.latency == ((1.0, 9.0), (5.0, 1.0))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("ranks = \n", 1, "not TOML"),
        ("ranks = 1\nranks = 2\n", 2, "not TOML"),
        ("x = '", 1, "not TOML"),
        ("a = " + "[" * 100_000, None, "nested too deeply"),
        (TIMES + "stages = 2\n", None, "no 'ranks', and no list among speed"),
        (TIMES + "ranks = 2\n", None, "no 'stages', and no list among forward"),
        ("ranks = 1\nstages = 1\nforward = 1\nbackward_input = 1\n", None, "no 'backward_weight'"),
        (TIMES + "stages = 2\nranks = 0\n", 5, "0 of them; expected 1 to"),
        (TIMES + "stages = 2\nranks = true\n", 5, "ranks is True, not a whole number"),
        (TIMES + "stages = 2\nranks = 2.0\n", 5, "not a whole number"),
        (TIMES + "stages = 2\nranks = 1000000\n", 5, "expected 1 to 4096"),
        (TIMES + "stages = 99999999999\nranks = 2\n", 4, "expected 1 to 1000000"),
        (TIMES + "stages = 2\nranks = 2\nspeed = [1]\n", 6, "speed has 1 entries, but there are 2 ranks"),
        (TIMES + "stages = 2\nranks = 2\nspeed = 0\n", 6, "speed is 0; it must be above 0"),
        (TIMES + "stages = 2\nranks = 2\nspeed = [1, -1]\n", 6, "speed[1] is -1; it must be above 0"),
        (TIMES + "stages = 2\nranks = 2\nspeed = []\n", 6, "speed has 0 entries"),
        (TIMES + "stages = 2\nranks = 2\nlatency = nan\n", 6, "latency is nan; give a finite number"),
        (TIMES + "stages = 2\nranks = 2\nlatency = inf\n", 6, "give a finite number"),
        (TIMES + "stages = 2\nranks = 2\nlatency = '1'\n", 6, "latency is '1', not a number"),
        (TIMES + "stages = 2\nranks = 2\nlatency = true\n", 6, "latency is True, not a number"),
        (TIMES + "stages = 2\nranks = 2\nlatency = {}\n", 6, "latency is a table, not a number"),
        (TIMES + "stages = 2\nranks = 2\nlatency = [1, 2]\n", 6, "latency[0] is 1, not a list"),
        (TIMES + "stages = 2\nranks = 2\nlatency = [[1, 2], [1]]\n", 6, "latency[1] has 1 entries, but there are 2 ranks"),
        (TIMES + "stages = 2\nranks = 2\nlatency = [[1, 2], [1, []]]\n", 6, "latency[1][1] is a list, not a number"),
        (TIMES + f"stages = 2\nranks = 2\nlatency = 1{'0' * 400}\n", 6, "too large"),
        (TIMES + "stages = 2\nranks = 2\nlatency = 1e300\n", 6, "latency is 1e+300; that is too large to compute with"),
        (TIMES + "stages = 2\nranks = 2\nspeed = 5e-324\n", 6, "speed is 5e-324; that is too small to compute with"),
        (TIMES + "stages = 2\nranks = 2\ninput_release = 2\n", 6, "cannot free more than all"),
        (TIMES + "stages = 2\nranks = 2\nmemory_cap = 2\n", 6, "there is no activation_bytes"),
        (TIMES + "stages = 2\nranks = 2\nmemory_cap = 2\nmemory_cap_micro_batches = 1\n", 7, "not both"),
        (TIMES + "stages = 2\nranks = 2\nmemory_cap_micro_batches = 0\n", 6, "above 0"),
        (TIMES + "stages = 2\nranks = 2\nbandwidth = 2\n", 6, "no effect without message_bytes"),
        (TIMES + "stages = 2\nranks = 2\nlinks = 2\n", 6, "not [[links]] tables"),
        (TIMES + "stages = 2\nranks = 2\nlinks = [2]\n", 6, "links[0] is 2, not a table"),
        (TIMES + "stages = 2\nranks = 2\n[[links]]\nfrom = 0\n", 6, "links[0]: no 'to'; expected a rank, 0 to 1"),
        (TIMES + "stages = 2\nranks = 2\n[[links]]\nfrom = 0\nto = 2\n", 6, "links[0]: to is 2; expected a rank, 0 to 1"),
        (TIMES + "stages = 2\nranks = 2\n[[links]]\nfrom = 0\nto = 1\nboth = 1\n", 6, "both is 1, not true or false"),
        (TIMES + "stages = 2\nranks = 2\n[[links]]\nfrom = 0\nto = 1\nlatency = -1\n", 6, "links[0]: latency is -1"),
        ("stages = 1\nranks = 1\nforward = 0\nbackward_input = 0\nbackward_weight = 0\n", None, "all stage times are zero"),
    ],
)
def test_wrong_values_name_file_key_and_line(text: str, line: int | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        read(text, tmp_path)
    assert caught.value.line == line
    assert "costs.toml" in str(caught.value)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"fowward": 1}, "unknown key in <costs> 'fowward'; did you mean 'forward'"),
        ({"memory_cap_bytes": 1}, "did you mean 'memory_cap"),
        ({"links": [{"form": 1}]}, "'form'; did you mean 'from'"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(data: dict[str, Any], words: str) -> None:
    good = {"ranks": 2, "stages": 2, "forward": 1, "backward_input": 1, "backward_weight": 1}
    with pytest.raises(UnknownNameError, match=words):
        costs_from_dict(good | data)


def test_a_missing_file_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        load_costs(tmp_path / "none.toml")
