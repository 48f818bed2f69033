"""`specserve status --watch`: a live view of one server or several that outlives their restarts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.sidecar import presentation
from specserve.units import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specserve.sidecar.presentation import Numbers, StatusJson, StatusRow

KEPT = 60
"""Looks that a sparkline shows."""
BARS = "▁▂▃▄▅▆▇█"
DRAWN = ("acceptance rate", "output tokens/s", "TTFT P90", "TPOT P90", "waiting", "KV cache in use")
"""Rows with a sparkline."""
FIRST_WORDS = ("DOWN", "NO ANSWER", "NOT READY", "DEGRADED", "OK")
"""Verdicts, the worst first."""
_STYLES = {
    "DOWN": "bold red",
    "NO ANSWER": "bold red",
    "NOT READY": "bold red",
    "DEGRADED": "bold yellow",
    "OK": "bold green",
}


def sparkline(values: Sequence[float | None]) -> str:
    """A line of bars from the smallest value to the largest; a gap where there is none.

    >>> sparkline([1.0, 2.0, None, 8.0])
    '▁▂ █'
    >>> sparkline([3.0, 3.0])
    '▁▁'
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, width = min(known), max(known) - min(known)
    bars = []
    for value in values:
        if value is None:
            bars.append(" ")
        elif width == 0:
            bars.append(BARS[0])
        else:
            bars.append(BARS[round((value - low) / width * (len(BARS) - 1))])
    return "".join(bars)


@dataclass(slots=True)
class Watched:
    """One address, and what is remembered of it."""

    url: str
    found: StatusJson | None = None
    """The last answer."""
    answered_at: float | None = None
    silent_since: float | None = None
    """Since when nothing answers; None while it does."""
    why: str = ""
    past: dict[str, deque[float | None]] = field(default_factory=dict)

    def take(self, answer: StatusJson | str, now: float) -> None:
        """An answer, or why there is none."""
        if isinstance(answer, str):
            self.why = answer
            if self.silent_since is None:
                self.silent_since = now
                if self.answered_at is not None:
                    self.silent_since = self.answered_at
            self._remember({})
            return
        self.found, self.answered_at, self.silent_since = answer, now, None
        if presentation.silence(answer) is None:
            self._remember(newest(answer))
        else:
            self._remember({})

    def _remember(self, numbers: Numbers) -> None:
        for row in presentation.ROWS:
            if row.title in DRAWN:
                kept = self.past.setdefault(row.title, deque(maxlen=KEPT))
                kept.append(row.value(numbers))

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.silent_since is not None or self.found is None:
            return "NO ANSWER"
        return presentation.overall(self.found)

    def reason(self, now: float) -> str:
        """The verdict's reason."""
        if self.silent_since is not None:
            silent = duration(max(1.0, round(now - self.silent_since)))
            return f"no answer for {silent} ({self.why}), trying again"
        if self.found is None:
            return "not asked yet"
        return self.found["ready"]["reason"]

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among several: the worst first, then by the number of alerts."""
        alerts = 0
        if self.found is not None:
            alerts = len(self.found["alerts"])
        return FIRST_WORDS.index(self.word), -alerts


def newest(found: StatusJson) -> Numbers:
    """The gauges of now, and of what needs a window the shortest."""
    now, windows = presentation.numbers(found)
    return {**windows.get("1m", {}), **now}


def ask_all(watched: Sequence[Watched], fetch: Callable[[str], StatusJson | str]) -> None:
    """Ask every address at once: one that hangs does not hold up the others."""
    with ThreadPoolExecutor(max_workers=len(watched)) as pool:
        answers = list(pool.map(fetch, [one.url for one in watched]))
    for one, answer in zip(watched, answers, strict=True):
        one.take(answer, time.monotonic())


def render(watched: Sequence[Watched], *, now: float, stamp: str) -> RenderableType:
    """The whole view: of one server everything, of several a few lines each, the worst first."""
    from rich.console import Group
    from rich.text import Text

    title = f"{len(watched)} servers"
    if len(watched) == 1:
        title = watched[0].url
    parts: list[RenderableType] = [
        Text.assemble((stamp, "bold"), f"  {title}  ", ("Ctrl-C ends", "dim")),
        Text(),
    ]
    for one in sorted(watched, key=lambda one: one.rank):
        parts += _verdict(one, now=now, with_url=len(watched) > 1)
        if one.found is not None:
            if len(watched) == 1:
                parts += _whole(one)
            else:
                parts.append(_line(one))
        parts.append(Text())
    return Group(*parts)


def _verdict(one: Watched, *, now: float, with_url: bool) -> list[RenderableType]:
    """Verdict and alerts: what comes first, whatever the height of the terminal."""
    from rich.text import Text

    name = ""
    if one.found is not None:
        name = one.found["model_name"] + "  "
    if with_url:
        name += f"{one.url}  "
    lines: list[RenderableType] = [
        Text.assemble((one.word, _STYLES[one.word]), f"  {name}", one.reason(now))
    ]
    if one.found is None:
        return lines
    for alert in one.found["alerts"]:
        style = "yellow"
        if alert["severity"] == "critical":
            style = "bold red"
        if one.silent_since is not None:
            style = "dim"
        words = ", ".join(presentation.alert_words(alert))
        lines.append(Text.assemble("  ", (alert["name"], style), f"  {words}: {alert['summary']}"))
    # The best supported alone: the others are a look without --watch away.
    for cause in one.found.get("causes", [])[:1]:
        lines.append(Text(f"  Likely: {cause['summary']} ({'; '.join(cause['supports'])})"))
    return lines


def _whole(one: Watched) -> list[RenderableType]:
    """Numbers beside their usual value, sparklines, engines."""
    from rich.table import Table
    from rich.text import Text

    found = one.found
    assert found is not None
    silence = presentation.silence(found)
    if one.silent_since is not None:
        silence = "the last numbers that are known:"
    style = ""
    if silence is not None:
        style = "dim"
    table = Table(box=None, padding=(0, 2), header_style="dim", style=style)
    for name in ("", "now", "usual", "30m", "last looks"):
        justify = "right"
        if name in ("", "last looks"):
            justify = "left"
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    now, half_hour = newest(found), presentation.numbers(found)[1].get("30m", {})
    for row in presentation.ROWS:
        if row.name == "window_seconds" or not (row.cell(now) or row.cell(half_hour)):
            continue
        drawn = sparkline(one.past.get(row.title, ()))
        usual = row.cell(found["baseline"])
        table.add_row(row.title, row.cell(now), usual, row.cell(half_hour), drawn)
    parts: list[RenderableType] = [Text()]
    if silence is not None:
        parts.append(Text(silence, style="bold"))
    parts.append(table)
    engines = _engines(found)
    if engines is not None:
        parts += [Text(), engines]
    about = (presentation.method(found), presentation.versions(found), found["engine_url"])
    return [*parts, Text(), Text("  ".join(about), style="dim")]


def _engines(found: StatusJson) -> RenderableType | None:
    """A row for each of several engines, the one that accepts least first."""
    from rich.table import Table

    from specserve.units import percent

    rates = found["windows"].get("1m", {}).get("engine_acceptance_rate")
    longer = found["windows"].get("5m", {}).get("engine_acceptance_rate")
    if not isinstance(rates, dict) or len(rates) < 2:
        return None
    if not isinstance(longer, dict):
        longer = {}
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("engine")
    table.add_column("acceptance 1m", justify="right")
    table.add_column("5m", justify="right")
    for engine in sorted(rates, key=lambda engine: rates[engine]):
        table.add_row(engine, percent(rates[engine]), percent(longer.get(engine)))
    return table


_SHORT = ("acceptance rate", "TPOT P90", "TTFT P90", "output tokens/s", "running", "waiting")


def _line(one: Watched) -> RenderableType:
    """The few numbers of one server among several."""
    from rich.text import Text

    assert one.found is not None
    numbers = newest(one.found)
    cells = [f"{row.title} {row.cell(numbers)}" for row in _rows(_SHORT) if row.cell(numbers)]
    style = ""
    if one.silent_since is not None:
        style = "dim"
    return Text("  " + "   ".join(cells), style=style)


def _rows(titles: Sequence[str]) -> list[StatusRow]:
    by_title = {row.title: row for row in presentation.ROWS}
    return [by_title[title] for title in titles]
