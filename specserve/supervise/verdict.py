"""How a run ended: the machine's last state and the engine's last words become nothing, or the
right exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import EngineLost, EngineStartError, Interrupted, Problem
from specserve.supervise.state import Lifecycle, Limits, State

TAIL_LINES = 20
_NOISE = re.compile(r"nanobind: |See https://nanobind| - leaked | - \.\.\. skipped")
"""Printed by an extension module of vLLM's while it exits, after whatever was the cause."""


@dataclass(frozen=True)
class End:
    """The last that was seen of an engine."""

    log: Path
    """Where all its output lies."""
    phase: str = "starting"
    lines: tuple[str, ...] = ()
    status: int | None = None
    answer: str | None = None
    """What the last readiness check met."""


def judge(machine: Lifecycle, end: End, limits: Limits) -> None:
    """Raise unless the engine was stopped cleanly."""
    if machine.state is State.FATAL or machine.stopped_from in (State.STOPPING, State.BACKOFF):
        if machine.was_ready:
            raise EngineLost([failure(machine, end)])
        raise EngineStartError([failure(machine, end)])
    if machine.stopped_from is State.STARTING and machine.was_ready:
        # The last lines are those of a restart.
        raise EngineLost(
            (
                f"{machine.cause}, after it had been ready; "
                f"{machine.stop_signal} came before it was ready again"
            ),
            where="engine",
            fix=f"read {end.log}",
        )
    if machine.stopped_from is not State.RUNNING:
        raise Interrupted(f"{machine.stop_signal} before the engine was ready", where="launch")
    if machine.cut_short:
        raise Interrupted(
            "ended without draining, as asked; running requests were cut off", where="launch"
        )
    if machine.killed:
        raise EngineLost(
            f"did not end within {limits.drain_timeout_seconds:g} s after SIGTERM and was killed; "
            "running requests were cut off",
            where="engine",
            fix="raise engine.drain_timeout_seconds",
        )


def failure(machine: Lifecycle, end: End) -> Problem:
    """What happened, the cause where the log names one, and the last lines."""
    from specserve.engine.output import failures

    log = (f"whole log: {end.log}",)
    cause = machine.cause or "is gone"
    if machine.fix is not None:  # our own verdict: the engine's lines have nothing to say about it
        return Problem(cause, "engine", (log,), machine.fix)
    named = failures.diagnose(end.lines, exit_status=end.status)
    what = (
        f"{cause}, {'after it had been ready' if machine.was_ready else f'in phase {end.phase!r}'}"
    )
    if named is not None:
        what += f"; {named.message}"
    elif end.answer is not None:
        what += f"; the last check met: {end.answer}"
    telling = [line for line in end.lines if not _NOISE.match(line)]
    rows = [(line,) for line in telling[-TAIL_LINES:]]
    return Problem(what, "engine", (*rows, log), named.fix if named else f"read {end.log}")
