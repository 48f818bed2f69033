"""What a launch tells while it runs, and whom.

Printing is the business of whoever gives the callables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specserve.findings import Finding
from specserve.supervise.state import State


@dataclass(frozen=True)
class Serving:
    """What is known once the server is ready. None where the engine did not say."""

    url: str
    model: str
    method: str | None
    num_speculative_tokens: int | None
    kv_cache_tokens: int | None
    ready_seconds: float
    sidecar_url: str | None
    log: Path


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Reporter:
    """Whom to tell. Each may be called from another thread than the main one."""

    note: Callable[[str], None] = _silent
    finding: Callable[[Finding], None] = _silent
    phase: Callable[[str, float], None] = _silent
    """Phase of loading and seconds since the start; again and again while it lasts."""
    engine_line: Callable[[str], None] = _silent
    """A warning or an error of the engine."""
    changed: Callable[[State, str], None] = _silent
    ready: Callable[[Serving], None] = _silent
