"""How a run ended: from the last state and the engine's last lines to an exception, or none."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import EngineLost, EngineStartError, Interrupted, Problem
from specserve.supervise.child import exit_cause
from specserve.supervise.state import EngineState, Lifecycle, Limits

TAIL_LINES = 20
AT_ONCE_SECONDS = 0.2
"""No engine lets requests finish, frees its memory and ends in so short a time."""
LAST_LOOK_SECONDS = 0.5
"""A request that was seen so shortly before the engine's time was up, and the engine has ended:
it was cut off."""
_NOISE = re.compile(r"nanobind: |See https://nanobind| - leaked | - \.\.\. skipped")
"""Printed by an extension module of vLLM's while it exits, after the lines about the cause."""


@dataclass(frozen=True)
class Drained:
    """What was seen of an engine while it drained."""

    unfinished: int | None = None
    """Requests in it at the last look; None when no look succeeded."""
    is_core_dead: bool = False
    """/health returned an error: its API process lived on without the part that computes."""
    seconds: float = 0.0
    """From the stop signal to that look."""
    ended_seconds: float | None = None
    """From the stop signal to its end; None when that was not seen."""


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
    drained: Drained = Drained()
    served: bool = False
    """Whether this process had been ready; a restart begins again."""


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
    cut = _cut_off(seen.drained.unfinished)
    if machine.killed:
        raise EngineLost(
            f"did not end within {limits.drain_timeout_seconds:g} s after SIGTERM and was killed; "
            f"{cut}",
            where="engine",
            fix="raise engine.drain_timeout_seconds",
        )
    _require_drained(seen, limits, cut)


def _require_drained(seen: LastSeen, limits: Limits, cut: str) -> None:
    """An engine that dies, or gives up, while requests run has not drained.

    One that ends by itself in time, with status 0 or by the SIGTERM that it was sent, has let them
    finish: what the last look saw running has ended since.
    """
    drained, status = seen.drained, seen.status
    if status is None or drained.unfinished == 0:
        return
    is_killed = status < 0 and -status not in (signal.SIGTERM, signal.SIGINT)
    fix = f"read {seen.log}"
    if is_killed or drained.is_core_dead:
        what = f"{exit_cause(status)} while it drained"
        if drained.is_core_dead and not is_killed:
            what = "its engine core died while it drained (/health returned an error)"
    elif drained.unfinished is None:
        return
    elif drained.ended_seconds is not None and drained.ended_seconds < AT_ONCE_SECONDS:
        what = "ended at once, without draining"
    elif drained.seconds >= max(limits.engine_drain_seconds - LAST_LOOK_SECONDS, AT_ONCE_SECONDS):
        what = f"gave up after {limits.engine_drain_seconds:g} s of draining"
        fix = "raise engine.drain_timeout_seconds"
    elif status > 0:
        what = f"{exit_cause(status)} while it drained"
    else:
        return
    raise EngineLost(f"{what}; {cut}", where="engine", fix=fix)


def _cut_off(unfinished: int | None) -> str:
    match unfinished:
        case None:
            return "running requests were cut off, their number is not known"
        case 0:
            return "no request was running"
        case 1:
            return "1 running request was cut off"
        case _:
            return f"{unfinished} running requests were cut off"


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
    named = failures.diagnose(seen.lines, exit_status=seen.status, served=seen.served)
    if named is not None:
        what += f"; {named.message}"
        fix = named.fix
    elif seen.answer is not None:
        what += f"; the last check met: {seen.answer}"
    telling = [line for line in seen.lines if not _NOISE.match(line)]
    rows = [(line,) for line in telling[-TAIL_LINES:]]
    return Problem(what, "engine", (*rows, log), fix)
