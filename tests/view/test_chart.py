"""Charts, read as a browser would: as XML, by where marks stand and what texts say."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.errors import InputError
from wavetrain.view.chart import grouped_bars, line_chart, stacked

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert('1')</script> & \"quoted\" \x00\x1f \ud800 波"
anything = st.floats(allow_nan=True, allow_infinity=True)


def parse(text: str) -> ET.Element:
    text.encode()  # no lone surrogates
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ET.Element, kind: str) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text") if element.get("class") == kind]


def lines(root: ET.Element) -> list[list[tuple[float, float]]]:
    """Points of every drawn line, in pixels."""
    found = []
    for element in root.iter(f"{SVG}polyline"):
        pairs = [pair.split(",") for pair in element.get("points", "").split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def ticks(root: ET.Element, anchor: str) -> dict[float, float]:
    """Value → pixel, of the y axis ("end") or the x axis ("middle")."""
    found = {}
    for element in root.iter(f"{SVG}text"):
        if element.get("class") == "tick" and element.get("text-anchor") == anchor:
            value = float((element.text or "").replace(",", ""))
            found[value] = float(element.get("y" if anchor == "end" else "x", ""))
    return found


def bars(root: ET.Element) -> dict[str, ET.Element]:
    """Tooltip → rectangle."""
    return {
        title.text or "": rect for rect in root.iter(f"{SVG}rect") for title in rect.findall(f"{SVG}title")
    }  # those of the legend have no tooltip


def value_at(pixel: float, axis: dict[float, float]) -> float:
    """The value at a pixel, from two ticks."""
    (a, pa), (b, pb) = sorted(axis.items())[0], sorted(axis.items())[-1]
    return a + (pixel - pa) * (b - a) / (pb - pa)


def test_points_lie_where_the_ticks_say() -> None:
    points = [(0.0, 3.0), (2.0, 7.5), (10.0, 1.0)]
    root = parse(line_chart({"a": points}, title="t", x_label="time", y_label="loss"))
    across, up = ticks(root, "middle"), ticks(root, "end")
    (drawn,) = lines(root)
    # ticks of the y axis stand 4 pixels below the line they name, so that they look centred
    assert [(value_at(x, across), value_at(y + 4, up)) for x, y in drawn] == [pytest.approx(p, abs=0.05) for p in points]
    assert texts(root, "label") == ["time", "loss"]
    assert texts(root, "title") == ["t"]
    assert texts(root, "name") == ["a"]


def test_a_logarithmic_axis_spaces_ratios_evenly() -> None:
    root = parse(line_chart({"a": [(8, 1), (16, 2), (32, 3)]}, title="", log_x=True))
    (drawn,) = lines(root)
    left, middle, right = (x for x, _ in drawn)
    assert middle - left == pytest.approx(right - middle, abs=0.02)
    assert sorted(ticks(root, "middle")) == [8, 16, 32]
    decades = parse(line_chart({"a": [(1, 1e-3), (2, 1e4)]}, title="", log_y=True))
    assert 1 in ticks(decades, "end")


@pytest.mark.parametrize("top", [0.0007, 0.03, 1, 9.7, 61, 480, 12_345, 3e9, 5e-9])
def test_ticks_are_round_and_few(top: float) -> None:
    root = parse(line_chart({"a": [(0, 0), (1, top)]}, title=""))
    found = sorted(ticks(root, "end"))
    assert 3 <= len(found) <= 12
    assert found[0] == 0
    assert found[-1] >= top * (1 - 1e-3)
    digits = f"{found[1] - found[0]:.3e}".split("e")[0]
    assert digits in {"1.000", "2.000", "2.500", "5.000"}


def test_what_is_not_finite_is_a_gap() -> None:
    root = parse(line_chart({"a": [(0, 1), (1, 2), (2, math.nan), (3, math.inf), (4, 5), (5, 6)]}, title=""))
    assert [len(run) for run in lines(root)] == [2, 2]
    assert lines(parse(line_chart({"a": [(0, 1), (-1, 2), (4, 5), (8, 6)]}, title="", log_x=True)))[0][0][0] > 0


@pytest.mark.parametrize(
    "svg",
    [
        line_chart({}, title="t"),
        line_chart({"a": []}, title="t"),
        line_chart({"a": [(math.nan, 1)]}, title="t"),
        line_chart({"a": [(0, 1)]}, title="t", log_x=True),
        grouped_bars({}, title="t"),
        grouped_bars({"g": {}}, title="t"),
        grouped_bars({"g": {"a": math.inf}}, title="t"),
    ],
)
def test_a_chart_without_a_value_says_so(svg: str) -> None:
    assert "no data" in texts(parse(svg), "tick")


def test_one_point_is_drawn() -> None:
    root = parse(line_chart({"a": [(3, 7)]}, title=""))
    assert "a: 3, 7" in [title.text for title in root.iter(f"{SVG}title")]


def test_bars_are_as_high_as_their_values() -> None:
    groups = {"P=8": {"gpipe": 10.0, "zb-wave": 20.0}, "P=16": {"gpipe": 15.0, "zb-wave": -5.0, "chimera": math.nan}}
    root = parse(grouped_bars(groups, title="t", y_label="sequences/s"))
    found = bars(root)
    heights = {tip: float(rect.get("height", "")) for tip, rect in found.items()}
    assert set(heights) == {"P=8, gpipe: 10", "P=8, zb-wave: 20", "P=16, gpipe: 15", "P=16, zb-wave: -5"}
    unit = heights["P=8, gpipe: 10"] / 10
    assert heights["P=8, zb-wave: 20"] == pytest.approx(20 * unit, abs=0.05)
    assert heights["P=16, zb-wave: -5"] == pytest.approx(5 * unit, abs=0.05)
    zero = ticks(root, "end")[0] - 4
    assert float(found["P=16, zb-wave: -5"].get("y", "")) == pytest.approx(zero, abs=0.05)
    assert texts(root, "name") == ["gpipe", "zb-wave"]  # chimera has no value
    same = {tip.split(", ")[1].split(":")[0]: rect.get("class") for tip, rect in found.items()}
    assert all(rect.get("class") == same[tip.split(", ")[1].split(":")[0]] for tip, rect in found.items())


def test_a_name_without_a_value_keeps_its_colour() -> None:
    both = bars(parse(grouped_bars({"g": {"a": 1, "b": 2, "c": 3}}, title="")))
    one = bars(parse(grouped_bars({"g": {"a": 1, "b": math.nan, "c": 3}}, title="")))
    assert set(one) == {"g, a: 1", "g, c: 3"}
    assert one["g, c: 3"].get("class") == both["g, c: 3"].get("class")


def test_bars_of_a_group_do_not_overlap() -> None:
    groups = {f"group {g}": {f"bar {i}": 1.0 + i for i in range(9)} for g in range(12)}
    spans = sorted(
        (float(rect.get("x", "")), float(rect.get("width", ""))) for rect in bars(parse(grouped_bars(groups, title=""))).values()
    )
    assert len(spans) == 12 * 9
    assert all(x + width <= after + 1e-6 for (x, width), (after, _) in pairwise(spans))


@pytest.mark.parametrize("make", [line_chart, grouped_bars])
def test_names_are_text_and_nothing_else(make: object) -> None:
    svg = (
        line_chart({HOSTILE: [(0, 1), (1, 2)]}, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE)
        if make is line_chart
        else grouped_bars({HOSTILE: {HOSTILE: 1}}, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE)
    )
    root = parse(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert any("<script>" in text for text in texts(root, "title"))
    allowed = {"svg", "style", "rect", "text", "line", "polyline", "circle", "polygon", "title"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed


def test_charts_are_stacked() -> None:
    one = line_chart({"a": [(0, 1), (1, 2)]}, title="first", width=400, height=200)
    two = grouped_bars({"g": {"a": 1}}, title="second", width=500, height=300)
    root = parse(stacked([one, two]))
    assert (root.get("width"), root.get("height")) == ("500", "500")
    assert [child.get("y") for child in root] == ["0", "200"]
    assert texts(root, "title") == ["first", "second"]
    with pytest.raises(InputError):
        stacked(["<p>no chart</p>"])


def test_both_colour_schemes_are_there_and_nothing_is_loaded() -> None:
    svg = line_chart({str(i): [(0, i), (1, i)] for i in range(12)}, title="t")
    assert "prefers-color-scheme:dark" in svg
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|href", svg)
    drawn = [(line.get("class"), line.get("stroke-dasharray")) for line in parse(svg).iter(f"{SVG}polyline")]
    assert len(set(drawn)) == 12  # a colour that comes again is dashed


def test_too_small_is_refused() -> None:
    with pytest.raises(InputError, match="200 × 150"):
        line_chart({"a": [(0, 1)]}, title="t", width=50)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.text(max_size=30), st.lists(st.tuples(anything, anything), max_size=12), max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_any_numbers_give_a_picture(series: dict[str, list[tuple[float, float]]], log_x: bool, log_y: bool) -> None:
    root = parse(line_chart(series, title="t", log_x=log_x, log_y=log_y))
    for run in lines(root):
        for x, y in run:
            assert -1 <= x <= 761
            assert -1 <= y <= 421


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=20), st.dictionaries(st.text(max_size=20), anything, max_size=4), max_size=4))
def test_any_values_give_bars(groups: dict[str, dict[str, float]]) -> None:
    root = parse(grouped_bars(groups, title="t"))
    for rect in bars(root).values():
        assert -1 <= float(rect.get("y", "")) <= 421
        assert 0 <= float(rect.get("height", "")) <= 421


def test_neither_torch_nor_matplotlib_is_imported() -> None:
    code = "import sys, wavetrain.view.chart; raise SystemExit(bool({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
