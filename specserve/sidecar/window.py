"""The engine's counters over the last minutes. Pure: snapshots in, differences out.

Weights are tokens, never samples: a rate is (sum of numerators) / (sum of denominators) over
engines and time. A counter that fell was reset, and its new value is what was added; an engine that
started anew empties the windows; a time without reads is bridged, since counters lose nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

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
BY_ENGINE = {
    "draft_tokens": "engine_draft_tokens",
    "accepted_tokens": "engine_accepted_tokens",
}
"""Counters that are also kept for each engine, and their names there."""
RESOLUTION = 180
"""Reads of age a are thinned to a / RESOLUTION apart: so exact is every window, whatever the
longest is, and memory grows with the longest's logarithm. Of reads 5 s apart the last half hour is
kept whole."""
FOREIGN_LIMIT = 3
"""Reads in a row of an older process that are taken for another API server before its start time is
believed."""


class EngineCounter(NamedTuple):
    """Which counter: a name, and what tells it from others of that name."""

    name: str
    """One of `COUNTERS`, of `BY_ENGINE`, ``position``, ``finished``, ``http``, ``own_requests``,
    ``own_tokens``, or a histogram, whose sum is a counter of its own (`_sum_of`)."""
    label: str = ""
    """The reason of ``finished``, the status class of ``http``, the engine of `BY_ENGINE`."""
    number: float = 0.0
    """The position, or the upper bound of a histogram's bucket."""


class _Row(NamedTuple):
    """Whose counters: an engine's for one model, or the API server's."""

    engine: str
    model_name: str = ""


_HTTP = _Row("http")


def _sum_of(histogram: str) -> EngineCounter:
    return EngineCounter(histogram + "_sum")


def _counters(sample: EngineSample) -> Iterator[tuple[EngineCounter, float]]:
    """The counters of one engine."""
    for name in COUNTERS:
        value = sample.values.get(name)
        if value is not None:
            yield EngineCounter(name), value
    for position, value in enumerate(sample.accepted_per_position or ()):
        yield EngineCounter("position", number=position), value
    for reason, value in (sample.finished or {}).items():
        yield EngineCounter("finished", reason), value
    for name, histogram in sample.histograms.items():
        yield _sum_of(name), histogram.sum
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
            yield EngineCounter(name, number=bound), count


@dataclass(frozen=True, slots=True)
class Span:
    """What was added between two reads."""

    seconds: float
    _at: Mapping[EngineCounter, int]
    _added: Sequence[float]

    def added(self, name: str, label: str = "") -> float | None:
        """What was added to a counter; None when it was never reported."""
        index = self._at.get(EngineCounter(name, label))
        if index is None:
            return None
        return self._added[index]

    def rate(self, name: str) -> float | None:
        """Added per second."""
        added = self.added(name)
        if added is None:
            return None
        return added / self.seconds

    @property
    def generated(self) -> float | None:
        """Output tokens, without those of our own canaries."""
        tokens = self.added("generation_tokens")
        if tokens is None:
            return None
        return max(0.0, tokens - (self.added("own_tokens") or 0.0))

    def by_label(self, name: str) -> dict[str, float]:
        """Label -> what was added, of the counters with this name."""
        return {
            counter.label: self._added[index]
            for counter, index in self._at.items()
            if counter.name == name
        }

    def by_number(self, name: str) -> list[tuple[float, float]]:
        """Position or bound, and what was added, in ascending order."""
        return sorted(
            (counter.number, self._added[index])
            for counter, index in self._at.items()
            if counter.name == name
        )

    def histogram(self, name: str) -> Histogram | None:
        """The observations that were added."""
        total = self._at.get(_sum_of(name))
        rows = self.by_number(name)
        if total is None or not rows:
            return None
        bounds, counts = zip(*rows, strict=True)
        return Histogram(bounds, counts, self._added[total])


@dataclass(slots=True)
class Window:
    """Totals since the first read, and enough of their history for the longest window. Memory is
    bounded."""

    spans_seconds: tuple[float, ...] = WINDOWS
    restarts: int = 0
    _at: dict[EngineCounter, int] = field(default_factory=dict)
    _totals: array[float] = field(default_factory=lambda: array("d"))
    _floor: array[float] = field(default_factory=lambda: array("d"))
    """What a total was before its counter was first seen."""
    _raw: dict[_Row, dict[EngineCounter, float]] = field(default_factory=dict)
    _history: list[tuple[float, array[float]]] = field(default_factory=list)
    _start: float | None = None
    _foreign: int = 0

    def __post_init__(self) -> None:
        # Counters begin in `add` or here, so that the history has them all.
        self.exclude(requests=0, tokens=0)

    def add(self, snapshot: EngineSnapshot) -> bool:
        """Take one read in. False when it came from another, older process behind the same
        address."""
        if self._is_foreign(snapshot.process_start_seconds):
            return False
        for sample in snapshot.engines:
            self._take(_Row(sample.engine, sample.model_name or ""), dict(_counters(sample)))
        if snapshot.http:
            answers = {EngineCounter("http", status): n for status, n in snapshot.http.items()}
            self._take(_HTTP, answers)
        self._remember(snapshot.at_seconds)
        return True

    def exclude(self, *, requests: int, tokens: int) -> None:
        """Leave our own canaries out of the windows' request and token counts. In latencies they
        cannot be told apart."""
        self._count(EngineCounter("own_requests"), requests)
        self._count(EngineCounter("own_tokens"), tokens)

    def restart(self) -> None:
        """Forget the history, not the totals: what came before says nothing about what comes."""
        self._history.clear()

    def totals(self) -> dict[EngineCounter, float]:
        """Totals that never fall, whatever the engine's counters do."""
        return {counter: self._totals[index] for counter, index in self._at.items()}

    def span(self, seconds: float) -> Span | None:
        """What the last ``seconds`` added, or the part of them that is known; None before two reads
        in them.

        It begins at the newest read that is old enough; one that is twice as old comes from before
        a gap and would make the present look like an average of the past.
        """
        if len(self._history) < 2:
            return None
        end = self._history[-1][0]
        begin, before = self._history[0]
        for at, entry in self._history:
            if at > end - seconds and begin >= end - 2 * seconds:
                break
            begin, before = at, entry
        if begin >= end:
            return None
        return self._since(begin, before)

    def newest(self, counter: str, amount: float, *, at_least_seconds: float) -> Span | None:
        """The shortest time up to now in which ``amount`` was added to a counter, and not less than
        ``at_least_seconds``; None when all that is known has less.
        """
        index = self._at.get(EngineCounter(counter))
        if index is None or not self._history:
            return None
        end, totals = self._history[-1]
        for begin, before in reversed(self._history):
            earlier = self._floor[index]
            if index < len(before):
                earlier = before[index]
            if begin <= end - at_least_seconds and totals[index] - earlier >= amount:
                return self._since(begin, before)
        return None

    def _since(self, begin: float, before: array[float]) -> Span:
        """What was added since an entry of the history."""
        end, totals = self._history[-1]
        known = len(before)
        earlier = before + self._floor[known:]
        added = [max(0.0, total - past) for total, past in zip(totals, earlier, strict=False)]
        return Span(end - begin, self._at, added)

    def _is_foreign(self, start: float | None) -> bool:
        if start is None:
            self._foreign = 0
            return False
        known = self._start
        if known is not None and start < known and self._foreign < FOREIGN_LIMIT:
            self._foreign += 1
            return True
        self._foreign = 0
        self._start = start
        if known is not None and start != known:
            self._raw = {row: dict.fromkeys(raw, 0.0) for row, raw in self._raw.items()}
            self.restarts += 1
            self.restart()
        return False

    def _take(self, row: _Row, values: Mapping[EngineCounter, float]) -> None:
        """Add what one row (an engine, or the HTTP server) counted since its last read."""
        is_new = row not in self._raw
        last = self._raw.setdefault(row, {})
        fell = any(value < last.get(counter, 0.0) for counter, value in values.items())
        for counter, value in values.items():
            # An HTTP status is first reported when it first happens; everything else exists from
            # the start.
            base = counter not in last and (is_new or row != _HTTP)
            added = value
            if not fell:
                added -= last.get(counter, 0.0)
            self._count(counter, added, base=base)
            if counter.name in BY_ENGINE:
                self._count(EngineCounter(BY_ENGINE[counter.name], row.engine), added, base=base)
        last.update(values)

    def _count(self, counter: EngineCounter, added: float, *, base: bool = False) -> None:
        """Add to a total; as a base, to every earlier total too, so that no window sees it as an
        increase."""
        index = self._at.get(counter)
        if index is None:
            index = self._at[counter] = len(self._totals)
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
