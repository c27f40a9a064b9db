"""``wavetrain view``: the timeline page with live controls."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from wavetrain.cli.common import Flag, Name, Output, Problem, is_file, print_json
from wavetrain.cli.simulate import checked
from wavetrain.errors import InputError
from wavetrain.schedule.families import FAMILIES, NAMES
from wavetrain.schedule.timeline import Timeline

_WHOLE = ("ranks", "micro_batches", "waves")
_SECONDS_FOR_AUTO = 10.0
_MAX_RANKS, _MAX_STAGES_PER_RANK = 1024, 64


@dataclass(frozen=True, kw_only=True)
class View(Output):
    """Serve the timeline page on this machine; its controls simulate anew as they change.

    wavetrain view --schedule zb-wave --ranks 8 --hop-latency 0.05

    Ctrl-C ends it. A schedule file is shown as it is, without controls.
    """

    problem: Annotated[Problem, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Problem)
    compare: Name = None
    """A second schedule, on the same axis."""
    host: str = "127.0.0.1"
    """Where to listen. Anyone who can reach it may run simulations."""
    port: int = 0
    """The port; 0 takes a free one."""
    open: Flag = False
    """Open the page in the default browser."""

    def run(self) -> int:
        """Serve until interrupted."""
        from wavetrain.view.server import serve

        if not self.host:
            raise InputError("--host is empty; give an address, such as 127.0.0.1")

        def announce(url: str) -> None:
            if self.json:
                print_json({"url": url})
            else:
                print(f"serving {url} (Ctrl-C ends it)")
            sys.stdout.flush()

        fixed = is_file(self.problem.schedule) or self.problem.costs is not None
        names = [self.problem.schedule, *([self.compare] if self.compare else [])]
        settings = {} if fixed else self._settings(dataclasses.asdict(self.problem) | {"compare": self.compare})
        # once before serving: what cannot be simulated is an error here and not in the page
        timelines = [checked(*self.problem.build(name)).timeline for name in names] if fixed else simulate_query(settings)
        serve(
            None if fixed else simulate_query,
            names=NAMES,
            settings=settings,
            timelines=timelines,
            host=self.host,
            port=self.port,
            open_browser=self.open,
            announce=announce,
        )
        return 0

    def _settings(self, fields: Mapping[str, Any]) -> dict[str, str]:
        from wavetrain.view.server import PARAMETERS

        defaults = {"ranks": 8, "micro_batches": fields["ranks"] or 8, "waves": 2, "forward": 1, "backward_input": 1}
        defaults |= {"backward_weight": 1, "hop_latency": 0}
        chosen = {key: fields.get(key) if fields.get(key) is not None else defaults.get(key) for key in PARAMETERS}
        return {
            key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in chosen.items() if value is not None
        }


def simulate_query(query: Mapping[str, str]) -> list[Timeline]:
    """The timelines that the page's controls ask for, within limits on what a request may cost."""
    from wavetrain.view.server import MAX_ACTIONS

    fields: dict[str, Any] = {}
    for key, text in query.items():
        if key in ("schedule", "compare"):
            continue
        try:
            fields[key] = int(text) if key in _WHOLE else float(text)
        except ValueError:
            raise InputError(f"{key.replace('_', ' ')}: {text!r} is not a {'whole ' if key in _WHOLE else ''}number") from None
    names = [query.get("schedule", "zb-wave"), *([query["compare"]] if query.get("compare") else [])]
    for name in names:
        if is_file(name):
            raise InputError(f"{name!r} is a file; start wavetrain view with it")
    ranks, waves = fields.get("ranks", 8), fields.get("waves", 2)
    if ranks > _MAX_RANKS or 2 * waves > _MAX_STAGES_PER_RANK:
        raise InputError(
            f"at most {_MAX_RANKS} ranks and {_MAX_STAGES_PER_RANK // 2} waves here; use wavetrain simulate for more"
        )
    num_actions = 3 * ranks * 2 * waves * fields.get("micro_batches", ranks)
    limit = MAX_ACTIONS // 40 if "auto" in names else MAX_ACTIONS // 8 if "zb-wave" in names else MAX_ACTIONS
    if num_actions > limit:
        raise InputError(f"{num_actions} actions, more than the {limit} a page may ask for; use wavetrain simulate --html")
    return [_timeline(name, fields) for name in names]


def _timeline(name: str, fields: Mapping[str, Any]) -> Timeline:
    takes_waves = name == "auto" or (name in FAMILIES and FAMILIES[name].takes_waves)
    problem = Problem(
        schedule=name, seconds=_SECONDS_FOR_AUTO, **{k: v for k, v in fields.items() if k != "waves" or takes_waves}
    )
    return checked(*problem.build()).timeline
