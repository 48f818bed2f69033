"""How a run ended: from the last state and the engine's last lines to an exception, or none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import EngineLost, EngineStartError, Interrupted, Problem
from specserve.supervise.state import EngineState, Lifecycle, Limits

TAIL_LINES = 20
_NOISE = re.compile(r"nanobind: |See https://nanobind| - leaked | - \.\.\. skipped")
"""Printed by an extension module of vLLM's while it exits, after the lines about the cause."""


@dataclass(frozen=True)
class LastSeen:
    """What was known of an engine when it ended."""

    log: Path
    """The file with all its output."""
    phase: str = "starting"
    lines: tuple[str, ...] = ()
    status: int | None = None
    answer: str | None = None
    """What the last readiness check found wrong."""


def judge(machine: Lifecycle, seen: LastSeen, limits: Limits) -> None:
    """Raise unless the engine was stopped cleanly."""
    stopped_from = machine.stopped_from
    if machine.state is EngineState.FATAL or stopped_from in (
        EngineState.STOPPING,
        EngineState.BACKOFF,
    ):
        if machine.was_ready:
            raise EngineLost([failure(machine, seen)])
        raise EngineStartError([failure(machine, seen)])
    if stopped_from is EngineState.STARTING and machine.was_ready:
        # The last lines are those of a restart.
        raise EngineLost(
            f"{machine.cause}, after it had been ready; {machine.stop_signal} came before it was "
            "ready again",
            where="engine",
            fix=f"read {seen.log}",
        )
    if stopped_from is not EngineState.RUNNING:
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


def failure(machine: Lifecycle, seen: LastSeen) -> Problem:
    """What happened, the cause where the log names one, and the last lines."""
    from specserve.engine.output import failures

    log = (f"whole log: {seen.log}",)
    cause = machine.cause or "is gone"
    if machine.fix is not None:  # our own verdict: the engine's lines have nothing to say about it
        return Problem(cause, "engine", (log,), machine.fix)
    what = f"{cause}, in phase {seen.phase!r}"
    if machine.was_ready:
        what = f"{cause}, after it had been ready"
    fix = f"read {seen.log}"
    named = failures.diagnose(seen.lines, exit_status=seen.status)
    if named is not None:
        what += f"; {named.message}"
        fix = named.fix
    elif seen.answer is not None:
        what += f"; the last check met: {seen.answer}"
    telling = [line for line in seen.lines if not _NOISE.match(line)]
    rows = [(line,) for line in telling[-TAIL_LINES:]]
    return Problem(what, "engine", (*rows, log), fix)
