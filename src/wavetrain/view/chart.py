"""Small charts as self-contained SVG: lines over a number, and groups of bars.

The picture carries its own style, so that it reads on a light and on a dark page, and every mark has a tooltip with its value.
Values that are not finite (or not positive on a logarithmic axis) are gaps, and so is what lies beyond ±1e300.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from wavetrain.errors import InputError

Point = tuple[float, float]

_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6300", "#1c2128")
_DARK = ("#3d9be0", "#e8743b", "#27b98d", "#e194c0", "#f0b429", "#7cc7f2", "#d9c750", "#e8edf3")
_DASHES = ("", "7 4", "2 3", "9 3 2 3")  # a second round of colours is told apart by these
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_CHAR: Final = 6.6  # mean width of a character of 12 px, on the safe side
_NAME_CHAR: Final = 7.2  # the same where names with many capitals stand side by side
_LINE: Final = 18.0  # of the legend
_MARGIN: Final = 16.0
_SIZE = re.compile(r'^<svg [^>]*viewBox="0 0 ([0-9.]+) ([0-9.]+)"')
_HUGE: Final = 1e300
_TINY: Final = 1e-300  # what is closer to zero is zero
_MAX_MARKED = 40  # points of a series; above it, lines have no markers


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    y_from_zero: bool = True,
    width: int = 760,
    height: int = 420,
) -> str:
    """Lines through points, as one SVG document.

    Args:
        series: name → (x, y) pairs, drawn in the order given.
        title: above the chart; may be empty.
        x_label: below it.
        y_label: beside it.
        log_x: powers of ten (or of two, within two decades) are evenly spaced. Points with x ≤ 0 are left out.
        log_y: the same for y.
        y_from_zero: whether 0 is on a linear y axis.
        width: pixels.
        height: pixels.
    """
    frame = _Frame(title=title, x_label=x_label, y_label=y_label, names=tuple(enumerate(series)), width=width, height=height)
    shown = {name: [p if _drawable(p, log_x, log_y) else None for p in points] for name, points in series.items()}
    points = [p for values in shown.values() for p in values if p is not None]
    if not points:
        return frame.document([frame.nothing()])
    x_axis = _axis([x for x, _ in points], log=log_x, zero=False, most=max(2, width // 80), tight=True)
    y_axis = _axis([y for _, y in points], log=log_y, zero=y_from_zero, most=max(2, height // 55))
    frame = frame.with_y(y_axis)
    parts = [*frame.grid(y_axis), *frame.x_ticks(x_axis)]
    for i, (name, values) in enumerate(shown.items()):
        color, dash = f"c{i % len(_LIGHT)}", _DASHES[i // len(_LIGHT) % len(_DASHES)]
        marked = len(values) <= _MAX_MARKED
        run: list[str] = []
        marks: list[str] = []
        for p in [*values, None]:
            if p is not None:
                x, y = frame.x(x_axis.share(p[0])), frame.y(y_axis.share(p[1]))
                run.append(f"{x:.2f},{y:.2f}")
                if marked:
                    marks.append(_marker(i, x, y, color, f"{name}: {_short(p[0])}, {_short(p[1])}"))
                continue
            if len(run) > 1:
                dashes = f' stroke-dasharray="{dash}"' if dash else ""
                parts.append(f'<polyline class="line s-{color}"{dashes} points="{" ".join(run)}"/>')
            elif run and not marked:
                parts.append(_marker(i, x, y, color, name))
            run = []
        parts += marks
    return frame.document(parts)


def grouped_bars(
    groups: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    width: int = 760,
    height: int = 420,
) -> str:
    """Bars side by side in groups, from zero, as one SVG document.

    Args:
        groups: group → (name → value). A name has the same colour in all groups; the first to name it says its place. Values
            that are not finite are left out, but keep their place. A group's own name may have two lines.
        title: above the chart; may be empty.
        x_label: below it.
        y_label: beside it.
        width: pixels.
        height: pixels.
    """
    names = tuple(dict.fromkeys(name for group in groups.values() for name in group))
    drawn = [[(i, name) for i, name in enumerate(names) if _usable(group.get(name, math.nan))] for group in groups.values()]
    shown = tuple(sorted({entry for entries in drawn for entry in entries}))
    frame = _Frame(title=title, x_label=x_label, y_label=y_label, names=shown, width=width, height=height, bars=True)
    values = [v for group in groups.values() for v in group.values() if _usable(v)]
    if not values:
        return frame.document([frame.nothing()])
    axis = _axis(values, log=False, zero=True, most=max(2, height // 55))
    frame = frame.with_y(axis)
    slot = 1 / len(groups)
    bar = slot * min(0.82, 0.3 * len(shown)) / len(shown)
    room = slot * frame.plot_width
    # names that are too wide for their group stand on two levels, so that neighbours do not touch
    one_line = not any("\n" in name for name in groups)
    levels = 2 if one_line and len(groups) > 1 and any(len(name) * _CHAR > room for name in groups) else 1
    parts = frame.grid(axis)
    zero = frame.y(axis.share(0.0))
    for g, (group, entries) in enumerate(zip(groups, drawn, strict=True)):
        middle = (g + 0.5) * slot
        for k, line in enumerate(group.split("\n")[:2]):
            at = frame.bottom + 17 + 14 * (k + g % levels)
            label = _text(_cut(line, room * levels))
            parts.append(f'<text class="tick" x="{frame.x(middle):.2f}" y="{at:.2f}" text-anchor="middle">{label}</text>')
        for k, (i, name) in enumerate(entries):
            value = groups[group][name]
            left, right = (frame.x(middle + (k + side - len(entries) / 2) * bar) for side in (0, 1))
            end = frame.y(axis.share(value))
            gap = min(1.0, (right - left) / 5)
            parts.append(
                f'<rect class="f-c{i % len(_LIGHT)}" x="{left:.2f}" y="{min(zero, end):.2f}" width="{right - left - gap:.2f}" '
                f'height="{abs(zero - end):.2f}"><title>{_text(f"{group}, {name}: {_short(value)}")}</title></rect>'
            )
    parts.append(f'<line class="axis" x1="{frame.left:.2f}" x2="{frame.right:.2f}" y1="{zero:.2f}" y2="{zero:.2f}"/>')
    return frame.document(parts)


def stacked(charts: Sequence[str]) -> str:
    """Charts of this module below one another, as one SVG document."""
    sizes = [(float(m[1]), float(m[2])) for chart in charts if (m := _SIZE.search(chart))]
    if len(sizes) != len(charts):
        raise InputError("stacked takes charts as line_chart and grouped_bars make them")
    width, height = max((w for w, _ in sizes), default=0.0), sum(h for _, h in sizes)
    parts, top = [], 0.0
    for chart, (_, own) in zip(charts, sizes, strict=True):
        parts.append(chart.replace("<svg ", f'<svg y="{top:g}" ', 1).rstrip("\n"))
        top += own
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
    return "\n".join([head, *parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    """Where a value lies, as a share of the axis, and which values are named on it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    @property
    def labels(self) -> list[str]:
        return [_short(tick) for tick in self.ticks]


def _axis(values: Sequence[float], *, log: bool, zero: bool, most: int, tight: bool = False) -> _Axis:
    """An axis that holds all ``values``, with at most about ``most`` ticks; it ends at ticks unless ``tight``."""
    low, high = min(values), max(values)
    if log:
        return _log_axis(low, high, most)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-12 * max(abs(low), abs(high)), _TINY):
        spread = abs(high) / 2 or 1.0
        low, high = (low - spread, high + spread) if not zero else (low, high + spread)
    step = _round_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if tight:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(k * step for k in range(first, last + 1))
    return _Axis(low, high, ticks) if tight else _Axis(ticks[0], ticks[-1], ticks)


def _log_axis(low: float, high: float, most: int) -> _Axis:
    if high / low < 1 + 1e-12:
        low, high = low / 2, high * 2
    base = 2 if high / low < 100 else 10
    first = math.floor(math.log(low, base) + 1e-9)
    last = math.ceil(math.log(high, base) - 1e-9)
    stride = max(1, math.ceil((last - first) / most))
    ticks = tuple(float(base) ** k for k in range(first, last + 1, stride) if low * (1 - 1e-9) <= base**k <= high * (1 + 1e-9))
    return _Axis(low, high, ticks, log=True)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least * (1 - 1e-9))


@dataclass(frozen=True)
class _Frame:
    """The picture around the marks: title, legend, axes. Pixels from the upper left corner."""

    title: str
    x_label: str
    y_label: str
    names: tuple[tuple[int, str], ...]
    """Of the legend: place of the colour, name."""
    width: int
    height: int
    bars: bool = False
    y_text: float = 0.0
    """Width of the widest label of the y axis."""

    def __post_init__(self) -> None:
        if self.width < 200 or self.height < 150:
            raise InputError(f"a chart of {self.width} × {self.height} pixels has no room; give at least 200 × 150")

    def with_y(self, axis: _Axis) -> _Frame:
        widest = max((len(label) for label in axis.labels), default=0) * _CHAR  # a log axis over less than a step has no tick
        return _Frame(self.title, self.x_label, self.y_label, self.names, self.width, self.height, self.bars, widest)

    @property
    def left(self) -> float:
        return _MARGIN + self.y_text + 8 + (20 if self.y_label else 0)

    @property
    def right(self) -> float:
        return self.width - _MARGIN - 6

    @property
    def plot_width(self) -> float:
        return self.right - self.left

    @property
    def legend_top(self) -> float:
        return _MARGIN + (22 if self.title else 0)

    @property
    def top(self) -> float:
        return min(self.legend_top + (_LINE * len(self._legend_rows()) + 12 if self.names else 10), self.height / 2)

    @property
    def bottom(self) -> float:
        return self.height - 30 - (20 if self.x_label else 0) - (14 if self.bars else 0)

    def x(self, share: float) -> float:
        return self.left + share * self.plot_width

    def y(self, share: float) -> float:
        return self.bottom - share * (self.bottom - self.top)

    def grid(self, axis: _Axis) -> list[str]:
        parts = []
        for tick, label in zip(axis.ticks, axis.labels, strict=True):
            y = self.y(axis.share(tick))
            kind = "axis" if tick == 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{self.left:.2f}" x2="{self.right:.2f}" y1="{y:.2f}" y2="{y:.2f}"/>')
            parts.append(f'<text class="tick" x="{self.left - 8:.2f}" y="{y + 4:.2f}" text-anchor="end">{label}</text>')
        return parts

    def x_ticks(self, axis: _Axis) -> list[str]:
        parts = [f'<line class="axis" x1="{self.left:.2f}" x2="{self.right:.2f}" y1="{self.bottom:.2f}" y2="{self.bottom:.2f}"/>']
        for tick, label in zip(axis.ticks, axis.labels, strict=True):
            x = self.x(axis.share(tick))
            parts.append(f'<line class="axis" x1="{x:.2f}" x2="{x:.2f}" y1="{self.bottom:.2f}" y2="{self.bottom + 4:.2f}"/>')
            parts.append(f'<text class="tick" x="{x:.2f}" y="{self.bottom + 18:.2f}" text-anchor="middle">{label}</text>')
        return parts

    def nothing(self) -> str:
        """What stands in a chart without a value."""
        x, y = self.width / 2, (self.top + self.bottom) / 2
        return f'<text class="tick" x="{x:.2f}" y="{y:.2f}" text-anchor="middle">no data</text>'

    def _legend_rows(self) -> list[list[tuple[int, str, float]]]:
        """Rows of (index of the series, name as shown, pixels from the left)."""
        rows: list[list[tuple[int, str, float]]] = [[]]
        at = 0.0
        for i, name in self.names:
            shown = _cut(name, self.width - 2 * _MARGIN - 40)
            needed = 28 + len(shown) * _NAME_CHAR + 16
            if rows[-1] and at + needed > self.width - 2 * _MARGIN:
                rows.append([])
                at = 0.0
            rows[-1].append((i, shown, at))
            at += needed
        return rows if self.names else []

    def _legend(self) -> Iterable[str]:
        for r, row in enumerate(self._legend_rows()):
            y = self.legend_top + r * _LINE + 8
            for i, shown, at in row:
                x, color = _MARGIN + at, f"c{i % len(_LIGHT)}"
                if self.bars:
                    yield f'<rect class="f-{color}" x="{x:.2f}" y="{y - 6:.2f}" width="12" height="12" rx="2"/>'
                else:
                    dash = _DASHES[i // len(_LIGHT) % len(_DASHES)]
                    dashes = f' stroke-dasharray="{dash}"' if dash else ""
                    yield f'<line class="line s-{color}"{dashes} x1="{x:.2f}" x2="{x + 22:.2f}" y1="{y:.2f}" y2="{y:.2f}"/>'
                    yield _marker(i, x + 11, y, color, "")
                yield f'<text class="name" x="{x + (18 if self.bars else 28):.2f}" y="{y + 4:.2f}">{_text(shown)}</text>'

    def document(self, parts: Iterable[str]) -> str:
        middle = (self.left + self.right) / 2
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{_text(self.title or "chart")}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{self.width}" height="{self.height}" rx="6"/>',
        ]
        if self.title:
            shown = _cut(self.title, (self.width - 2 * _MARGIN) * _CHAR / 8)
            lines.append(f'<text class="title" x="{_MARGIN:.0f}" y="{_MARGIN + 10:.0f}">{_text(shown)}</text>')
        lines += self._legend()
        lines += parts
        if self.x_label:
            x_label = _cut(self.x_label, self.plot_width)
            lines.append(
                f'<text class="label" x="{middle:.2f}" y="{self.height - 12}" text-anchor="middle">{_text(x_label)}</text>'
            )
        if self.y_label:
            y, shown = (self.top + self.bottom) / 2, _cut(self.y_label, self.bottom - self.top)
            turned = f'transform="translate({_MARGIN + 6:.0f} {y:.2f}) rotate(-90)"'
            lines.append(f'<text class="label" {turned} text-anchor="middle">{_text(shown)}</text>')
        return "\n".join([*lines, "</svg>", ""])


def _marker(i: int, x: float, y: float, color: str, tip: str) -> str:
    """A dot, square, diamond or triangle: shapes differ where colours may not."""
    title = f"<title>{_text(tip)}</title>" if tip else ""
    shape = i % 4
    if shape == 0:
        return f'<circle class="f-{color} mark" cx="{x:.2f}" cy="{y:.2f}" r="3.5">{title}</circle>'
    corners = (((-3, -3), (3, -3), (3, 3), (-3, 3)), ((0, -4.5), (4.5, 0), (0, 4.5), (-4.5, 0)), ((0, -4.2), (4, 3), (-4, 3)))
    points = " ".join(f"{x + dx:.2f},{y + dy:.2f}" for dx, dy in corners[shape - 1])
    return f'<polygon class="f-{color} mark" points="{points}">{title}</polygon>'


def _drawable(point: Point, log_x: bool, log_y: bool) -> bool:
    return all(_usable(value) and not (log and value < _TINY) for value, log in zip(point, (log_x, log_y), strict=True))


def _usable(value: float) -> bool:
    return abs(value) <= _HUGE  # false for NaN, too


def _short(value: float) -> str:
    """Few digits, no exponent where it can be helped."""
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.4g}"
    text = f"{value:.6f}" if abs(value) < 1 else f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.1f}"
    return text.rstrip("0").rstrip(".") if value else "0"


def _cut(text: str, pixels: float) -> str:
    most = max(1, int(pixels / _CHAR))
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _text(text: str) -> str:
    """Escaped, without what XML cannot hold."""
    allowed = (c for c in text if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff")
    return escape("".join(allowed), quote=True)


def _scheme(colors: Sequence[str], page: str, ink: str, muted: str, grid: str, axis: str) -> str:
    rules = [
        f".page{{fill:{page}}}.title,.name{{fill:{ink}}}.label,.tick{{fill:{muted}}}",
        f".grid{{stroke:{grid}}}.axis{{stroke:{axis}}}.mark{{stroke:{page}}}",
        *(f".s-c{i}{{stroke:{c}}}.f-c{i}{{fill:{c}}}" for i, c in enumerate(colors)),
    ]
    return "".join(rules)


_STYLE = (
    f"text{{font:12px {_FONT}}}.title{{font-size:15px;font-weight:600}}.tick{{font-variant-numeric:tabular-nums}}"
    ".grid,.axis{stroke-width:1;shape-rendering:crispEdges}.line{fill:none;stroke-width:2;stroke-linejoin:round}.mark{stroke-width:1}"
    + _scheme(_LIGHT, "#ffffff", "#1c2128", "#5b6572", "#e3e7ec", "#98a2af")
    + "@media (prefers-color-scheme:dark){"
    + _scheme(_DARK, "#171c24", "#e8edf3", "#9aa5b3", "#2c3440", "#5b6a80")
    + "}"
)
