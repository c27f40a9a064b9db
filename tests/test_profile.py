"""Profiles: read, interpolated, refused with their line."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.errors import FormatError, InputError
from wavetrain.profile import LayerTable, load_profiles, write_profiles

TIMES = """model,device,tp,micro_batch,layer,forward_s,backward_s,update_s
m,T4-16,1,1,0,0.001,0.002,0.0001
m,T4-16,1,1,1,0.003,0.004,0.0001
m,T4-16,1,4,0,0.002,0.006,0.0001
m,T4-16,1,4,1,0.009,0.012,0.0001
"""
MEMORY = """model,tp,layer,params_bytes,output_bytes,activation_bytes_per_sample
m,1,0,100,10,20
m,1,1,200,10,40
"""
LINKS = """device,scope,gpus_in_group,peak_bytes_per_s
T4-16,intra,2,1e10
T4-16,inter,1,1e9
"""


def folder(path: Path, times: str = TIMES, memory: str = MEMORY, links: str = LINKS) -> Path:
    (path / "layer_profiles.csv").write_text(times)
    (path / "layer_memory.csv").write_text(memory)
    (path / "links.csv").write_text(links)
    return path


def test_a_folder_is_read(tmp_path: Path) -> None:
    found = load_profiles(folder(tmp_path))
    table = found.times["m", "T4-16", 1]
    assert table.micro_batches == (1, 4)
    assert table.at(1).forward.tolist() == [0.001, 0.003]
    np.testing.assert_allclose(table.at(2.5).forward, [0.0015, 0.006])
    assert not table.at(4).outside
    assert table.at(8).outside
    assert found.memory["m", 1].activation.tolist() == [20, 40]
    assert found.links["T4-16", "inter"] == {1: 1e9}
    assert found.num_layers("m") == 2
    assert found.num_layers("other") is None


def test_what_is_not_there_says_nothing(tmp_path: Path) -> None:
    found = load_profiles(tmp_path)
    assert not found.times
    assert not found.memory
    assert not found.links


@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0.5, 40.0))
@settings(deadline=None)
def test_more_work_never_takes_less_time(rows: list[list[float]], size: float) -> None:
    table = LayerTable(micro_batches=tuple(2**i for i in range(len(rows))), forward=np.array(rows), backward=None, update=None)
    assert (table.at(size).forward <= table.at(size * 1.5).forward + 1e-12).all()


def test_layers_that_are_alike_get_their_mean(tmp_path: Path) -> None:
    table = load_profiles(folder(tmp_path)).times["m", "T4-16", 1].averaged(np.array([0, 0]))
    assert table.at(1).forward.tolist() == [0.002, 0.002]
    assert table.backward is not None
    assert table.backward[0].tolist() == [0.003, 0.003]


@pytest.mark.parametrize(
    ("file", "text", "line", "word"),
    [
        ("layer_profiles.csv", TIMES.replace("0.003", "-1"), 3, "forward_s"),
        ("layer_profiles.csv", TIMES.replace("0.003", "nan"), 3, "forward_s"),
        ("layer_profiles.csv", TIMES.replace("m,T4-16,1,1,1", "m,T4-16,1,1,0"), 3, "twice"),
        ("layer_profiles.csv", TIMES.replace("m,T4-16,1,4,1", "m,T4-16,1,4,2"), None, "numbered"),
        ("layer_profiles.csv", TIMES.replace("forward_s", "forwards"), 1, "forward_s"),
        ("layer_profiles.csv", TIMES + "m,T4-16\n", 6, "columns"),
        ("layer_memory.csv", MEMORY.replace("200", "x"), 3, "params_bytes"),
        ("layer_memory.csv", MEMORY.replace("m,1,1", "m,1,5"), None, "numbered"),
        ("links.csv", LINKS.replace("inter", "outer"), 3, "scope"),
        ("links.csv", LINKS.replace("1e9", "0"), 3, "above 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line(tmp_path: Path, file: str, text: str, line: int | None, word: str) -> None:
    (folder(tmp_path) / file).write_text(text)
    with pytest.raises(FormatError, match=word) as raised:
        load_profiles(tmp_path)
    assert raised.value.line == line
    assert raised.value.path.endswith(file)


@pytest.mark.parametrize("seed", range(150))
def test_damaged_files_give_our_errors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    texts = [TIMES, MEMORY, LINKS]
    which = rng.randrange(3)
    characters = list(texts[which])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(characters))
        characters[at : at + rng.randint(0, 3)] = rng.choice(["", ",", "\n", '"', "-", "9" * 30, "\x00", "é", "nan", "1e999"])
    texts[which] = "".join(characters)
    with contextlib.suppress(FormatError):
        load_profiles(folder(tmp_path, *texts))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    def layer(factor: float) -> SimpleNamespace:
        return SimpleNamespace(
            forward_seconds=0.001 * factor,
            backward_seconds=0.002 * factor,
            parameter_bytes=100.0,
            output_bytes=10.0 * factor,
            activation_bytes=40.0 * factor,
        )

    write_profiles(tmp_path / "new", "m", "CPU-core", {2: [layer(2), layer(4)], 4: [layer(4), layer(8)]}, 5e9)
    found = load_profiles(tmp_path / "new")
    assert found.times["m", "CPU-core", 1].at(2).forward.tolist() == [0.002, 0.004]
    assert found.memory["m", 1].activation.tolist() == [40, 80]
    assert found.links["CPU-core", "intra"] == {2: 5e9}
    with pytest.raises(InputError, match="comma"):
        write_profiles(tmp_path, "a,b", "CPU-core", {1: [layer(1)]})
