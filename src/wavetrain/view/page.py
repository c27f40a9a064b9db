"""Timelines as one self-contained HTML document: no network, no build step, nothing beside it.

The page is kept in ``static/`` as HTML, CSS and ES modules. :func:`render_page` joins them: the modules import each other only
by ``import { a, b } from "./x.js"`` and share no top-level name, so joining them is taking out the import lines and the word
``export``, and writing them one after the other. A Content-Security-Policy with their hashes then allows exactly this
script and this style, and no connection (but to its own server, when served).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from wavetrain.files import write_text
from wavetrain.schedule.timeline import Timeline
from wavetrain.view.payload import dump_payloads

_MAIN = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def render_page(
    timelines: Sequence[Timeline], *, live: Mapping[str, object] | None = None, notes: Sequence[tuple[str, str]] = ()
) -> str:
    """One HTML document that shows ``timelines``, stacked on one time axis.

    Args:
        timelines: the first is the one that the others are compared with. May be empty on a live page.
        live: what the control panel of a served page needs; see :class:`wavetrain.view.server.ViewServer`. None: no panel.
        notes: words and what is to be said of each, shown above the timelines.
    """
    title = " vs ".join(t.name for t in timelines) or "timelines"
    script, style = _joined_script(), _asset("page.css")
    slots = {
        "csp": content_security_policy(live=live is not None),
        "title": html.escape(f"{title} · wavetrain").encode("ascii", "xmlcharrefreplace").decode(),
        "style": style,
        "notes": _notes(notes),
        "data": _for_script(dump_payloads(timelines)),
        "live": _for_script(json.dumps(live, allow_nan=False)),
        "script": script,
    }
    return _SLOT.sub(lambda m: slots[m.group(1)], _asset("page.html"))


def write_page(path: str | os.PathLike[str], timelines: Sequence[Timeline], *, notes: Sequence[tuple[str, str]] = ()) -> None:
    """Write :func:`render_page` of ``timelines`` to ``path``."""
    write_text(path, render_page(timelines, notes=notes))


def _notes(notes: Sequence[tuple[str, str]]) -> str:
    if not notes:
        return ""
    text = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(said)}</dd>" for word, said in notes)
    return f'<details id="notes" open><summary>Why</summary><dl>{text}</dl></details>'


def content_security_policy(*, live: bool) -> str:
    """The policy that the document carries in itself; a server sends the same, and more, as a header."""
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {_hash(_joined_script())}; style-src {_hash(_asset('page.css'))}; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _for_script(text: str) -> str:
    """ASCII JSON that no HTML parser can mistake for the end, or a comment, of the script element it stands in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return (files("wavetrain.view") / "static" / name).read_text(encoding="utf-8")


@cache
def _joined_script() -> str:
    """All modules that ``main.js`` needs, each after those it imports."""
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        if name in joined:
            return
        joined[name] = ""  # a cycle of imports ends here
        source = _asset(name)
        for needed in _IMPORT.findall(source):
            add(needed)
        del joined[name]
        joined[name] = f"// {name}\n" + _EXPORT.sub("", _IMPORT.sub("", source))

    add(_MAIN)
    return '"use strict";\n' + "\n".join(joined.values())
