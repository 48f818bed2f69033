"""A line chart of the last minutes, an hour at most, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from specserve.metric_families import MetricKey
from specserve.sidecar.observer import HISTORY_STEP_SECONDS, Point

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 150, 58, 8, 10, 22
MINUTES = (5, 15, 60)
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    legend: str
    color: Literal["a", "b"]
    """A CSS class of the page: ``sa`` and ``sb`` for lines, ``ka`` and ``kb`` for their keys."""
    reading: MetricKey


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn."""

    title: str
    lines: tuple[Line, ...]
    text: Callable[[float], str]
    """How a value is written at the axis."""
    top: float | None = None
    """Upper end of the axis; None takes the next round number."""
    reference: float | None = None
    """A dashed line across."""

    def html(self, points: Sequence[Point], now: float) -> str:
        """The chart with its heading. ``now`` is Unix time; where nothing was known, the line is
        interrupted."""
        minutes = MINUTES[0]
        for longer in MINUTES[1:]:
            if points and now - points[0].at > 60 * minutes:
                minutes = longer
        found = [(line, runs(points, line.reading)) for line in self.lines]
        values = [value for _, stretches in found for run in stretches for _, value in run]
        high = self.top or nice(max(values, default=0.0))
        parts = [*self._axes(high, minutes), *self._reference(high)]
        keys = ""
        for line, stretches in found:
            for run in stretches:
                path = _path(run, now, minutes, high)
                parts.append(f'<path class="s{line.color}" d="{path}"/>')
            keys += f'<span class="key k{line.color}"></span>{escape(line.legend)}'
        if self.reference is not None:
            keys += '<span class="key kr"></span>own baseline'
        if not values:
            keys += " · nothing known yet"
        title = escape(self.title)
        return (
            f'<section class="card"><h2>{title} <span class="soft">{keys}</span></h2>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{title}, last {minutes} minutes">{"".join(parts)}</svg></section>'
        )

    def _axes(self, high: float, minutes: int) -> list[str]:
        rows = []
        for value in (0.0, high / 2, high):
            y = _y(value, high)
            rows.append(
                f'<line class="grid-line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
                f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">'
                f"{escape(self.text(value))}</text>"
            )
        middle = (LEFT + INNER_WIDTH / 2, f"-{minutes / 2:g}", "middle")
        times = ((LEFT, f"-{minutes} min", "start"), middle, (WIDTH - RIGHT, "now", "end"))
        return rows + [
            f'<text x="{x:.0f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{label}</text>'
            for x, label, anchor in times
        ]

    def _reference(self, high: float) -> list[str]:
        if self.reference is None:
            return []
        y = _y(self.reference, high)
        return [f'<line class="ref" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>']


def runs(points: Sequence[Point], reading: MetricKey) -> list[list[tuple[float, float]]]:
    """The stretches of one reading without a hole: (Unix time, value)."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in points:
        value = point.readings.get(reading)
        if value is None:
            found.append([])
            continue
        if found[-1] and point.at - found[-1][-1][0] > 4 * HISTORY_STEP_SECONDS:
            found.append([])
        found[-1].append((point.at, value))
    return [run for run in found if run]


def nice(value: float) -> float:
    """The next of 1, 2, 5 x 10^n; 1 for nothing.

    >>> nice(0.013), nice(3), nice(1000), nice(0)
    (0.02, 5.0, 1000.0, 1.0)
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    high = next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
    return float(f"{high:.6g}")


def _path(run: Sequence[tuple[float, float]], now: float, minutes: int, high: float) -> str:
    dots = "L".join(f"{_x(at, now, minutes)} {_y(value, high)}" for at, value in run)
    if len(run) == 1:
        return f"M{dots}h0.1"
    return f"M{dots}"


def _x(at: float, now: float, minutes: int) -> str:
    age = min(1.0, max(0.0, now - at) / (60 * minutes))
    return f"{LEFT + INNER_WIDTH * (1 - age):.1f}"


def _y(value: float, high: float) -> str:
    return f"{TOP + INNER_HEIGHT * (1 - min(1.0, value / high)):.1f}"
