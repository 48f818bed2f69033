"""What a launch reports while it runs. Printing is left to the callables that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specserve.findings import Finding
from specserve.supervise.state import EngineState


@dataclass(frozen=True)
class Serving:
    """What is known once the server is ready; None where the engine did not say."""

    url: str
    model: str
    method: str | None
    num_speculative_tokens: int | None
    kv_cache_tokens: int | None
    ready_seconds: float
    sidecar_url: str | None
    log: Path
    as_asked: str | None = None
    """What the engine states as it was asked for, and what of it was not seen in its log."""
    differences: tuple[str, ...] = ()
    """Where the engine states something else than it was asked for."""


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Reporter:
    """What to call, possibly from another thread than the main one."""

    note: Callable[[str], None] = _silent
    finding: Callable[[Finding], None] = _silent
    phase: Callable[[str, float], None] = _silent
    """The phase of loading and the seconds since the start; called again while a phase lasts."""
    engine_line: Callable[[str], None] = _silent
    """A warning or an error of the engine."""
    engine_output: Callable[[str], None] = _silent
    """Every line of the engine's output, without secrets."""
    changed: Callable[[EngineState, str], None] = _silent
    ready: Callable[[Serving], None] = _silent
