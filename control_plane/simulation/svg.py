"""Charts as SVG text: lines, steps and points on linear or logarithmic axes, in panels below one another.

Enough for what a simulation shows, without a plotting library (the lightest that draws SVG brings tens of megabytes).
Text is escaped, numbers are rounded to a tenth of a pixel, and the same data give the same bytes. Limits: no
interaction; axes begin at zero unless they are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

COLOURS: Final = ("#1f6fb2", "#d9662b", "#2f8f4e", "#8c4fa8", "#b8860b", "#c23b4f", "#4aa3a2", "#6b6b6b")
WIDTH: Final = 960
LEFT: Final = 78
RIGHT: Final = 190
TOP: Final = 46
PANEL_TOP: Final = 24
GAP: Final = 34
JOINED_GAP: Final = 8
BOTTOM: Final = 44
POINTS_MOST: Final = 1500
"""Of one line; more are thinned to the least and the most of each stretch, so that peaks stay."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    steps: bool = False
    points: bool = False
    labels: Sequence[str] = ()
    """Beside the points."""
    colour: int | None = None
    """None: by its place."""
    fill: bool = False
    """Down to the bottom of the panel."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    y_label: str
    series: Sequence[Series]
    height: int = 200
    log_x: bool = False
    log_y: bool = False
    y_most: float | None = None
    """So that panels compare; None: what the panel's own values need."""
    joined: bool = False
    """The panel below has the same x axis: it is drawn there."""

    @property
    def space(self) -> int:
        """Below it."""
        return JOINED_GAP if self.joined else GAP

    @property
    def above(self) -> int:
        return PANEL_TOP if self.title else JOINED_GAP


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_label: str
    panels: Sequence[Panel]
    notes: Sequence[str] = field(default_factory=tuple)

    def svg(self) -> str:
        height = (
            TOP + sum(panel.height + panel.above + panel.space for panel in self.panels) + BOTTOM + 15 * len(self.notes)
        )
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="26" font-size="17" font-weight="bold" fill="#222">{escape(self.title)}</text>',
        ]
        top = TOP
        for panel in self.panels:
            top += panel.above
            parts += _panel(panel, top)
            top += panel.height + panel.space
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{top + 4}" text-anchor="middle" fill="#333">{escape(self.x_label)}</text>'
        )
        for place, note in enumerate(self.notes):
            parts.append(
                f'<text x="{LEFT}" y="{top + 28 + 15 * place}" font-size="11" fill="#666">{escape(note)}</text>'
            )
        parts.append("</svg>")
        return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool
    begin: float
    end: float
    """In pixels."""
    steps: float = 5.0
    """Between ticks, about."""

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice((self.high - self.low) / self.steps)
            count = math.floor((self.high - self.low) / step + 1e-9)
            return [self.low + step * place for place in range(count + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        wide = self.high / self.low > 300
        found = [10.0**decade * unit for decade in decades for unit in ((1,) if wide else (1, 2, 5))]
        return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]


def _nice(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= least * (1 - 1e-9))


def _axis(
    values: Sequence[float], log: bool, begin: float, end: float, *, from_zero: bool, steps: float = 5.0
) -> _Axis:
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not known:
        return _Axis(1.0 if log else 0.0, 10.0 if log else 1.0, log, begin, end)
    low, high = min(known), max(known)
    if log:
        return _Axis(low / 1.25, max(high * 1.25, low * 1.6), True, begin, end)
    low = min(low, 0.0) if from_zero else low
    steps = min(max(steps, 1.0), 5.0)
    step = _nice((high - low) / steps if high > low else max(abs(high), 1.0) / steps)
    high = max(math.ceil(high / step - 1e-9) * step, low + step) if from_zero else high
    return _Axis(low, high, False, begin, end, steps)


def number(value: float) -> str:
    """12345 -> 12.3k; at most three digits."""
    for least, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= least * 0.9995:
            return f"{value / least:.3g}{unit}"
    return f"{value:.3g}"


def _panel(panel: Panel, top: float) -> list[str]:
    right, bottom = WIDTH - RIGHT, top + panel.height
    xs = [x for series in panel.series for x in series.xs]
    ys = [y for series in panel.series for y in series.ys]
    across = _axis(xs, panel.log_x, LEFT, right, from_zero=False)
    up = _axis([*ys, panel.y_most or 0.0], panel.log_y, bottom, top, from_zero=True, steps=panel.height / 40)
    parts = [
        f'<text x="{LEFT}" y="{top - 8:.0f}" font-weight="bold" fill="#333">{escape(panel.title)}</text>',
        f'<text transform="translate(18 {(top + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle" '
        f'fill="#333">{escape(panel.y_label)}</text>',
    ]
    for value in up.ticks():
        y = up.at(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{number(value)}</text>')
    for value in across.ticks():
        x = across.at(value)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#f0f0f0"/>')
        if not panel.joined:
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{number(value)}</text>')
    parts.append(
        f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{panel.height}" fill="none" stroke="#999"/>'
    )
    labelled: list[tuple[float, float]] = []
    for place, series in enumerate(panel.series):
        colour = COLOURS[(place if series.colour is None else series.colour) % len(COLOURS)]
        parts += _drawn(series, across, up, colour, labelled)
        y = top + 12 + 18 * place
        parts.append(
            f'<line x1="{right + 12}" y1="{y - 4:.0f}" x2="{right + 32}" y2="{y - 4:.0f}" stroke="{colour}" '
            'stroke-width="3"/>'
        )
        parts.append(f'<text x="{right + 38}" y="{y:.0f}" fill="#222">{escape(series.name)}</text>')
    return parts


def _drawn(series: Series, across: _Axis, up: _Axis, colour: str, labelled: list[tuple[float, float]]) -> list[str]:
    xs, ys = _thinned(series.xs, series.ys)
    places = [(across.at(x), up.at(y)) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    parts: list[str] = []
    if len(places) > 1:
        path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
        for x, y in places[1:]:
            path += f"H{x:.1f}V{y:.1f}" if series.steps else f"L{x:.1f} {y:.1f}"
        if series.fill:
            area = f"{path}L{places[-1][0]:.1f} {up.begin:.1f}L{places[0][0]:.1f} {up.begin:.1f}Z"
            parts.append(f'<path d="{area}" fill="{colour}" fill-opacity="0.25" stroke="none"/>')
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    if series.points:
        for place, (x, y) in enumerate(places):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
            if place < len(series.labels) and series.labels[place]:
                y -= 6
                while any(abs(x - other_x) < 26 and abs(y - other_y) < 11 for other_x, other_y in labelled):
                    y -= 11
                labelled.append((x, y))
                parts.append(
                    f'<text x="{x + 7:.1f}" y="{y:.1f}" font-size="11" fill="{colour}">'
                    f"{escape(series.labels[place])}</text>"
                )
    return parts


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    count = len(xs)
    if count <= POINTS_MOST:
        return list(xs), list(ys)
    stretch = math.ceil(2 * count / POINTS_MOST)
    kept: list[int] = []
    for begin in range(0, count, stretch):
        part = range(begin, min(begin + stretch, count))
        kept += sorted({min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)})
    return [xs[place] for place in kept], [ys[place] for place in kept]
