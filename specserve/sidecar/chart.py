"""A line chart of the last minutes, an hour at most, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from specserve.sidecar.observer import HISTORY_STEP_SECONDS, Point

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 150, 58, 8, 10, 22
MINUTES = (5, 15, 60)
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn. Colors are CSS classes of the page: ``sa`` and ``sb`` for lines, ``ref`` for
    the reference."""

    title: str
    series: tuple[tuple[str, str, str], ...]
    """Legend, ``a`` or ``b``, field of `Point`."""
    text: Callable[[float], str]
    """How a value is written at the axis."""
    top: float | None = None
    """Upper end of the axis; None takes the next round number."""
    reference: float | None = None

    def html(self, points: Sequence[Point], now: float) -> str:
        """The chart with its heading. ``now`` is Unix time; where nothing was known, the line is
        interrupted."""
        known = now - points[0].at if points else 0.0
        minutes = next((m for m in MINUTES if known <= 60 * m), MINUTES[-1])
        lines = [(css, runs(points, name)) for _, css, name in self.series]
        high = self.top or nice(
            max((v for _, found in lines for run in found for _, v in run), default=0.0)
        )
        parts = [*self._axes(high, minutes), *self._reference(high)]
        for css, found in lines:
            parts += [
                f'<path class="s{css}" d="{_path(run, now, minutes, high)}"/>' for run in found
            ]
        keys = "".join(
            f'<span class="key k{css}"></span>{escape(legend)}' for legend, css, _ in self.series
        )
        keys += '<span class="key kr"></span>own baseline' if self.reference is not None else ""
        keys += " · nothing known yet" if not any(found for _, found in lines) else ""
        title = escape(self.title)
        return (
            f'<section class="card"><h2>{title} <span class="soft">{keys}</span></h2><svg viewBox="0 0 {WIDTH} '
            f'{HEIGHT}" role="img" aria-label="{title}, last {minutes} minutes">{"".join(parts)}</svg></section>'
        )

    def _axes(self, high: float, minutes: int) -> list[str]:
        rows = [
            f'<line class="grid-line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(v, high)}" y2="{_y(v, high)}"/>'
            f'<text x="{LEFT - 6}" y="{float(_y(v, high)) + 4:.1f}" text-anchor="end">{escape(self.text(v))}</text>'
            for v in (0.0, high / 2, high)
        ]
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


def runs(points: Sequence[Point], name: str) -> list[list[tuple[float, float]]]:
    """The stretches of one field without a hole: (Unix time, value)."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in points:
        value: float | None = getattr(point, name)
        if value is None or (found[-1] and point.at - found[-1][-1][0] > 4 * HISTORY_STEP_SECONDS):
            found.append([])
        if value is not None:
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
    return float(
        f"{next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9)):.6g}"
    )


def _path(run: Sequence[tuple[float, float]], now: float, minutes: int, high: float) -> str:
    dots = "L".join(f"{_x(at, now, minutes)} {_y(value, high)}" for at, value in run)
    return f"M{dots}" + ("h0.1" if len(run) == 1 else "")


def _x(at: float, now: float, minutes: int) -> str:
    return f"{LEFT + INNER_WIDTH * (1 - min(1.0, max(0.0, now - at) / (60 * minutes))):.1f}"


def _y(value: float, high: float) -> str:
    return f"{TOP + INNER_HEIGHT * (1 - min(1.0, value / high)):.1f}"
