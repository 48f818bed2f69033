"""Recorded or made reads of /metrics through the sidecar's observer, in virtual time."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from specserve.engine.http.metrics import MetricsError, parse
from specserve.sidecar.observer import Observation, Observer
from specserve.sidecar.probe import Scrape

WALL = 1.8e9


def recorded(path: Path) -> Iterator[tuple[float, str]]:
    """Time and text of each read in a file of scripts/record_metrics.py."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            read = json.loads(line)
            yield read["at"], read["text"]


def observe(
    reads: Iterable[tuple[float, str]], observer: Observer | None = None
) -> list[Observation]:
    """What the sidecar made of each read."""
    observer = observer or Observer(speculation_configured=True)
    return [observer.observe(at, WALL + at, _scrape(at, text)) for at, text in reads]


def _scrape(at: float, text: str) -> Scrape:
    try:
        return Scrape("ok", snapshot=parse(text, at_seconds=at))
    except MetricsError as error:
        return Scrape("malformed", str(error))


def replay(path: Path) -> list[Observation]:
    """The observations of a recording."""
    return observe(recorded(path))
