"""The engine's counters over the last minutes. Pure: snapshots in, differences out.

Weights are tokens, never samples: a rate is (sum of numerators) / (sum of denominators) over engines and time.
A counter that fell was reset, and its new value is what was added; an engine that started anew empties the
windows; a time without reads is bridged, since counters lose nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from specserve.engine.http.metrics import EngineSample, EngineSnapshot, Histogram
from specserve.metric_families import WINDOWS

COUNTERS = (
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "generation_tokens",
    "prompt_tokens",
    "steps",
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
RESOLUTION = 180
"""Reads of age a are thinned to a / RESOLUTION apart: so exact is every window, whatever the longest is, and memory
grows with the longest's logarithm. Of reads 5 s apart the last half hour is kept whole."""
FOREIGN_LIMIT = 3
"""Reads in a row of an older process that are taken for another API server before its start time is believed."""
_HTTP = ("http", "")
"""The row of the API server's answers, beside the rows of engines."""


def _flat(sample: EngineSample) -> Iterator[tuple[str, float]]:
    """The counters of one engine under one-word names."""
    for name in COUNTERS:
        if (value := sample.values.get(name)) is not None:
            yield name, value
    for position, value in enumerate(sample.accepted_per_position or ()):
        yield f"position/{position}", value
    for reason, value in (sample.finished or {}).items():
        yield f"finished/{reason}", value
    for name, histogram in sample.histograms.items():
        yield f"{name}/sum", histogram.sum
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
            yield f"{name}/{bound!r}", count


@dataclass(frozen=True, slots=True)
class Span:
    """What was added between two reads."""

    seconds: float
    _at: Mapping[str, int]
    _added: Sequence[float]

    def __getitem__(self, name: str) -> float | None:
        """What was added to a counter; None when it was never reported."""
        index = self._at.get(name)
        return None if index is None else max(0.0, self._added[index])

    def rate(self, name: str) -> float | None:
        """Added per second."""
        added = self[name]
        return None if added is None or self.seconds <= 0 else added / self.seconds

    @property
    def generated(self) -> float | None:
        """Output tokens, without those of own canaries."""
        tokens = self["generation_tokens"]
        return None if tokens is None else max(0.0, tokens - (self["own/tokens"] or 0.0))

    def starting(self, prefix: str) -> dict[str, float]:
        """Name after the prefix -> what was added, of all counters that begin so."""
        return {n.removeprefix(prefix): self[n] or 0.0 for n in self._at if n.startswith(prefix)}

    def histogram(self, name: str) -> Histogram | None:
        """The observations that were added."""
        parts = self.starting(f"{name}/")
        total = parts.pop("sum", None)
        if total is None or not parts:
            return None
        rows = sorted((float(bound), count) for bound, count in parts.items())
        return Histogram(tuple(b for b, _ in rows), tuple(c for _, c in rows), total)


@dataclass(slots=True)
class Window:
    """Totals since the first read, and enough of their history for the longest window. Memory is bounded."""

    spans_seconds: tuple[float, ...] = WINDOWS
    restarts: int = 0
    _at: dict[str, int] = field(default_factory=dict)
    _totals: array[float] = field(default_factory=lambda: array("d"))
    _floor: array[float] = field(default_factory=lambda: array("d"))
    """What a total was before its counter was first seen."""
    _raw: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    _history: list[tuple[float, array[float]]] = field(default_factory=list)
    _start: float | None = None
    _foreign: int = 0

    def __post_init__(self) -> None:
        self.exclude(
            requests=0, tokens=0
        )  # counters begin in `add` or here, so that the history has them all

    def add(self, snapshot: EngineSnapshot) -> bool:
        """Take one read in. False when it came from another, older process behind the same address."""
        if self._is_foreign(snapshot.process_start_seconds):
            return False
        for sample in snapshot.engines:
            self._take((sample.engine, sample.model_name or ""), dict(_flat(sample)))
        if snapshot.http:
            self._take(_HTTP, {f"http/{status}": count for status, count in snapshot.http.items()})
        self._remember(snapshot.at_seconds)
        return True

    def exclude(self, *, requests: int, tokens: int) -> None:
        """Leave own canaries out of the windows' request and token counts. Latencies cannot be told apart."""
        self._count("own/requests", requests)
        self._count("own/tokens", tokens)

    def restart(self) -> None:
        """Forget the history, not the totals: what came before says nothing about what comes."""
        self._history.clear()

    def totals(self) -> dict[str, float]:
        """Counter -> total. They never fall, whatever the engine's do."""
        return {name: self._totals[index] for name, index in self._at.items()}

    def span(self, seconds: float) -> Span | None:
        """What the last ``seconds`` added, or the part of them that is known; None before two reads in them.

        It begins at the newest read that is old enough; one that is twice as old comes from before a gap and
        would make the present look like an average of the past.
        """
        if len(self._history) < 2:
            return None
        end, totals = self._history[-1]
        begin, before = self._history[0]
        for at, entry in self._history:
            if at > end - seconds and begin >= end - 2 * seconds:
                break
            begin, before = at, entry
        if begin >= end:
            return None
        known = len(before)
        added = [t - (before[i] if i < known else self._floor[i]) for i, t in enumerate(totals)]
        return Span(end - begin, self._at, added)

    def _is_foreign(self, start: float | None) -> bool:
        if (
            start is not None
            and self._start is not None
            and start < self._start
            and self._foreign < FOREIGN_LIMIT
        ):
            self._foreign += 1
            return True
        self._foreign = 0
        if start is not None:
            if self._start is not None and start != self._start:
                self._raw = {row: dict.fromkeys(raw, 0.0) for row, raw in self._raw.items()}
                self.restarts += 1
                self.restart()
            self._start = start
        return False

    def _take(self, row: tuple[str, str], values: Mapping[str, float]) -> None:
        """Add what one row (an engine, or the HTTP server) counted since its last read."""
        is_http, is_new = row == _HTTP, row not in self._raw
        last = self._raw.setdefault(row, {})
        fell = any(value < last.get(name, 0.0) for name, value in values.items())
        for name, value in values.items():
            # An HTTP status is first reported when it first happens; everything else exists from the start.
            base = name not in last and (is_new or not is_http)
            added = value if fell else value - last.get(name, 0.0)
            self._count(name, added, base=base)
            if name in ("draft_tokens", "accepted_tokens"):
                self._count(f"engine/{row[0]}/{name}", added, base=base)
        last.update(values)

    def _count(self, name: str, added: float, *, base: bool = False) -> None:
        """Add to a total; as a base, to every earlier total too, so that no window sees it as an increase."""
        index = self._at.get(name)
        if index is None:
            index = self._at[name] = len(self._totals)
            self._totals.append(0.0)
            self._floor.append(0.0)
        self._totals[index] += added
        if base:
            self._floor[index] += added
            for _, entry in self._history:
                if index < len(entry):
                    entry[index] += added

    def _remember(self, now: float) -> None:
        """Keep this read, and of the others what the longest window and `RESOLUTION` need."""
        past, kept = self._history, self._history[:1]
        past.append((now, array("d", self._totals)))
        for entry, (after, _) in pairwise(past[1:]):
            if entry[0] <= now - max(self.spans_seconds):
                kept = [entry]
            elif after - kept[-1][0] > (now - after) / RESOLUTION:
                kept.append(entry)
        self._history = [*kept, past[-1]]
