from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from wavetrain.view.page import render_page, write_page

from .conftest import MakeTimeline

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>",
    "{{script}} {{data}}",
    "a\u2028b\u2029c & \"quoted\" 'single' \\u003c \x00\x1f",
    "ümläut 波 \ud800",
    "</title><b>bold</b>",
]


class Document(HTMLParser):
    """What a browser would make elements of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []  # of script, style and title elements, in order
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag in ("script", "style", "title")
        if self._inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data

    def element(self, name: str, **attributes: str) -> dict[str, str | None]:
        (found,) = [a for tag, a in self.tags if tag == name and attributes.items() <= a.items()]
        return found

    def json(self, element_id: str) -> object:
        holders = [a for tag, a in self.tags if tag in ("script", "style", "title")]
        return json.loads(self.texts[[a.get("id") for a in holders].index(element_id)])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_text(make_timeline: MakeTimeline, name: str) -> None:
    plain = Document(render_page([make_timeline(), make_timeline()]))
    hostile = Document(render_page([make_timeline(name=name), make_timeline()]))
    assert hostile.tags == plain.tags
    data = hostile.json("data")
    assert isinstance(data, dict)
    assert data["timelines"][0]["name"] == name


def test_the_document_needs_nothing_else(make_timeline: MakeTimeline) -> None:
    text = render_page([make_timeline()])
    document = Document(text)
    loaders = [(tag, a) for tag, a in document.tags if a.get("src") or (a.get("href") or "data:,") != "data:,"]
    assert loaders == []
    assert not re.search(r"https?://|@import|url\(|importScripts|\beval\(|innerHTML|document\.write", text)
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE), "a module was not joined"
    assert document.json("live") is None


def test_its_policy_allows_its_own_script_and_style_only(make_timeline: MakeTimeline) -> None:
    document = Document(render_page([make_timeline()]))
    policy = document.element("meta", **{"http-equiv": "Content-Security-Policy"})["content"] or ""
    style, script = document.texts[1], document.texts[-1]
    for directive, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert not any(name == "style" or name.startswith("on") for _, a in document.tags for name in a)


def test_modules_share_no_name_and_are_all_used() -> None:
    names: dict[str, str] = {}
    joined = render_page([])
    for module in sorted(files("wavetrain.view").joinpath("static").iterdir(), key=lambda f: f.name):
        if not module.name.endswith(".js"):
            continue
        source = module.read_text(encoding="utf-8")
        for name in re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", source, re.MULTILINE):
            assert names.setdefault(name, module.name) == module.name, f"{name} is in {names[name]} and {module.name}"
        for imported, origin in re.findall(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";', source, re.MULTILINE):
            for name in re.findall(r"\w+", imported):
                exported = files("wavetrain.view").joinpath("static", origin).read_text(encoding="utf-8")
                assert re.search(rf"^export (?:async )?(?:function|class|const) {name}\b", exported, re.MULTILINE)
                assert len(re.findall(rf"\b{name}\b", source)) > 1, f"{module.name} imports {name} without use"
        assert f"// {module.name}\n" in joined


def test_labelled_controls(make_timeline: MakeTimeline) -> None:
    document = Document(render_page([make_timeline()]))
    for button in ("zoom-in", "zoom-out", "show-help"):
        assert document.element("button", id=button)["aria-label"]
    for toggle in ("critical", "messages", "memory"):
        assert document.element("button", id=f"toggle-{toggle}")["aria-pressed"] in ("true", "false")


def test_written_page_is_the_rendered_one(make_timeline: MakeTimeline, tmp_path: Path) -> None:
    timelines = [make_timeline(name="été"), make_timeline(waves=1)]
    write_page(tmp_path / "out.html", timelines)
    assert (tmp_path / "out.html").read_bytes() == render_page(timelines).encode()


def test_notes_are_shown_as_they_are_written(make_timeline: MakeTimeline) -> None:
    text = render_page([make_timeline()], notes=[("a <b>", "x & y < z")])
    assert "<dt>a &lt;b&gt;</dt><dd>x &amp; y &lt; z</dd>" in text
    assert 'id="notes"' not in render_page([make_timeline()])
