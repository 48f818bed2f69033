"""How fast weights come in, from the engine's own lines.

``Loading weights took 9.81 seconds`` (``default_loader.py``, vLLM 0.32), once for each model in
each worker: the first is the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOOK = re.compile(r"Loading weights took (\d+(?:\.\d+)?) seconds")
SLOW_BYTES = 1e9
"""Ours: a second that brings less than this from storage is worth a word,"""
LONG_SECONDS = 10.0
"""and only where there were as many as this."""


@dataclass(frozen=True)
class WeightsLoaded:
    """The target's weights, read."""

    weights_bytes: int
    seconds: float
    from_storage: int | None = None
    """What the engine's processes read from storage until then; None where /proc does not tell."""

    @property
    def rate(self) -> float:
        """Bytes in a second."""
        return self.weights_bytes / self.seconds

    @property
    def words(self) -> str:
        """The figure."""
        gigabytes = self.weights_bytes / 1e9
        return f"weights: {gigabytes:.1f} GB in {self.seconds:.1f} s, {self.rate / 1e9:.2f} GB/s"

    @property
    def warning(self) -> str | None:
        """Said where it was slow and most of it came from storage, not from the page cache."""
        read = self.from_storage
        slow = self.rate < SLOW_BYTES and self.seconds >= LONG_SECONDS
        if not slow or read is None or 2 * read < self.weights_bytes:
            return None
        return (
            f"{self.words}, of which {read / 1e9:.1f} GB came from storage: storage is the limit. "
            "Fix: copy the model to a local disk and set models.*.path to it"
        )


def seconds(line: str) -> float | None:
    """How long the line says that a model's weights took; None for any other line.

    >>> seconds("INFO [default_loader.py:501] Loading weights took 9.81 seconds"), seconds("took 3")
    (9.81, None)
    """
    match = _TOOK.search(line)
    if match is None:
        return None
    return float(match[1])
