"""The life of one supervised engine, as a pure function: machine + event + time -> machine, action,
reason.

stopped -> starting -> running -> stopping -> stopped, with two side roads: backoff (a restart is
due) and fatal. Time is monotonic seconds and always an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum

BACKOFF_MAX_SECONDS = 60.0
STABLE_SECONDS = 600.0
"""After this long a run the restarts before it no longer count."""
KILL_SECONDS = 20.0
"""From KILL to giving up: a process that hangs in a driver call cannot be ended."""


class EngineState(StrEnum):
    """The supervisor's words, see docs/supervision.md."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    FATAL = "fatal"


class Action(Enum):
    """What the supervisor is to do now."""

    NONE = "none"
    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"


@dataclass(frozen=True)
class Start:
    """Begin."""


@dataclass(frozen=True)
class Ready:
    """A completion made progress."""


@dataclass(frozen=True)
class Failed:
    """The process lives but cannot serve: refused by the canary, or dead inside.

    ``retry`` False is final.
    """

    cause: str
    retry: bool = True
    fix: str | None = None
    """What the user can do about it; None where that is not known."""


@dataclass(frozen=True)
class Exited:
    """The process is gone, with its whole group."""

    cause: str


@dataclass(frozen=True)
class Stop:
    """A signal asks for the end. ``at_once`` skips the drain."""

    signal: str
    at_once: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Start | Ready | Failed | Exited | Stop | Tick


@dataclass(frozen=True)
class Limits:
    """How long and how often."""

    start_timeout_seconds: float
    drain_timeout_seconds: float
    """From the stop signal to KILL; longer than the engine's own drain time."""
    max_restarts: int = 0
    backoff_seconds: float = 2.0
    grace_seconds: float = 5.0
    """From TERM to KILL for an engine that serves nobody."""
    engine_drain_seconds: float = float("inf")
    """After which the engine itself gives up on running requests."""

    def backoff(self, restarts: int) -> float:
        """Pause before restart number ``restarts`` (from 0): doubles each time.

        >>> [Limits(1, 1, backoff_seconds=2).backoff(n) for n in (0, 1, 4, 9)]
        [2.0, 4.0, 32.0, 60.0]
        """
        return min(BACKOFF_MAX_SECONDS, self.backoff_seconds * 2.0**restarts)


@dataclass(frozen=True)
class Lifecycle:
    """Where the engine is in its life."""

    state: EngineState = EngineState.STOPPED
    deadline: float | None = None
    """When the present state must have ended."""
    since: float = 0.0
    restarts: int = 0
    was_ready: bool = False
    """Ready at least once, in this start or an earlier one: decides between exit codes 4 and 5."""
    cause: str | None = None
    """Why it failed; None while nothing is wrong."""
    retry: bool = True
    fix: str | None = None
    stop_signal: str | None = None
    stopped_from: EngineState | None = None
    """The state in which the first stop signal arrived."""
    killed: bool = False
    """KILL was needed to end it."""
    cut_short: bool = False
    """A signal asked not to wait for running requests."""

    @property
    def over(self) -> bool:
        """Nothing more will happen."""
        return self.state is EngineState.FATAL or (
            self.state is EngineState.STOPPED and self.stop_signal is not None
        )

    def enter(self, state: EngineState, now: float, seconds: float | None = None) -> Lifecycle:
        """The same life in another state, which must have ended after ``seconds``."""
        deadline = None
        if seconds is not None:
            deadline = now + seconds
        return replace(self, state=state, since=now, deadline=deadline)


@dataclass(frozen=True)
class Transition:
    """One step: the machine after it, what to do, and why."""

    machine: Lifecycle
    action: Action = Action.NONE
    reason: str | None = None
    """None when nothing changed."""


def advance(m: Lifecycle, event: Event, now: float, limits: Limits) -> Transition:
    """The one transition function."""
    match m.state, event:
        case EngineState.STOPPED, Start() if not m.over:
            return _start(m, now, limits, "start")
        case EngineState.STARTING, Ready():
            running = replace(m.enter(EngineState.RUNNING, now), was_ready=True, cause=None)
            return Transition(running, reason="a completion made progress")
        case (
            (EngineState.STARTING | EngineState.RUNNING),
            Failed(cause=cause, retry=retry, fix=fix),
        ):
            failed = replace(_without_old_restarts(m, now), cause=cause, retry=retry, fix=fix)
            return _stopping(failed, now, limits.grace_seconds, f"stopped because {cause}")
        case ((EngineState.STARTING | EngineState.RUNNING), Exited(cause=cause)):
            return _lost(replace(_without_old_restarts(m, now), cause=cause), now, limits)
        case EngineState.STARTING, Tick() if _due(m, now):
            cause = f"not ready within {limits.start_timeout_seconds:g} s"
            return _stopping(replace(m, cause=cause), now, limits.grace_seconds, cause)
        case ((EngineState.STARTING | EngineState.RUNNING), Stop()):
            return _stop(m, event, now, limits)
        case EngineState.BACKOFF, Tick() if _due(m, now):
            return _start(
                replace(m, restarts=m.restarts + 1), now, limits, f"restart {m.restarts + 1}"
            )
        case EngineState.BACKOFF, Stop(signal=signal):
            asked = replace(m, stop_signal=signal, stopped_from=m.state)
            stopped = asked.enter(EngineState.STOPPED, now)
            return Transition(stopped, reason=f"{signal} while waiting to restart")
        case EngineState.STOPPING, Stop():
            return _stop_again(m, event, now)
        case EngineState.STOPPING, Tick() if _due(m, now) and not m.killed:
            return _kill(m, now, "still there after the time to stop")
        case EngineState.STOPPING, Tick() if _due(m, now):
            stuck = f"still there {KILL_SECONDS:g} s after SIGKILL"
            return _fatal(replace(m, cause=stuck), now)
        case EngineState.STOPPING, Exited():
            if m.cause is not None and m.stop_signal is None:
                return _lost(m, now, limits)
            return Transition(m.enter(EngineState.STOPPED, now), reason="the engine has ended")
        case _:
            return Transition(m)


def _due(m: Lifecycle, now: float) -> bool:
    return m.deadline is not None and now >= m.deadline


def _start(m: Lifecycle, now: float, limits: Limits, reason: str) -> Transition:
    started = m.enter(EngineState.STARTING, now, limits.start_timeout_seconds)
    return Transition(replace(started, killed=False, fix=None), Action.START, reason)


def _stopping(m: Lifecycle, now: float, seconds: float, reason: str) -> Transition:
    return Transition(m.enter(EngineState.STOPPING, now, seconds), Action.TERMINATE, reason)


def _kill(m: Lifecycle, now: float, reason: str) -> Transition:
    return Transition(replace(m, killed=True, deadline=now + KILL_SECONDS), Action.KILL, reason)


def _stop(m: Lifecycle, event: Stop, now: float, limits: Limits) -> Transition:
    """The first stop signal: drain when somebody may be served, else just end."""
    asked = replace(m, stop_signal=event.signal, stopped_from=m.state)
    if event.at_once:
        stopping = replace(asked, cut_short=True).enter(EngineState.STOPPING, now)
        return _kill(stopping, now, f"{event.signal}: ending at once")
    if m.state is EngineState.RUNNING:
        wait = limits.drain_timeout_seconds
        verb = "draining"
    else:
        wait = limits.grace_seconds
        verb = "stopping"
    return _stopping(asked, now, wait, f"{event.signal}: {verb}, {wait:g} s at most")


def _stop_again(m: Lifecycle, event: Stop, now: float) -> Transition:
    """A stop signal while stopping. After a failure it is the first one: unless it says at once, it
    only cancels the restart."""
    again = m.stop_signal is not None
    if again and m.killed:
        return Transition(m)
    if again:
        asked = m
    else:
        asked = replace(m, stop_signal=event.signal, stopped_from=m.state)
    if m.killed or not (again or event.at_once):
        return Transition(asked, reason=f"{event.signal}: no restart")
    return _kill(replace(asked, cut_short=True), now, f"{event.signal}: ending at once")


def _without_old_restarts(m: Lifecycle, now: float) -> Lifecycle:
    """The restarts before a long stable run no longer count."""
    if m.state is EngineState.RUNNING and now - m.since >= STABLE_SECONDS:
        return replace(m, restarts=0)
    return m


def _fatal(m: Lifecycle, now: float) -> Transition:
    return Transition(m.enter(EngineState.FATAL, now), reason=m.cause)


def _lost(m: Lifecycle, now: float, limits: Limits) -> Transition:
    """Gone without having been asked: wait and restart, or give up."""
    if not m.retry or m.restarts >= limits.max_restarts:
        return _fatal(m, now)
    pause = limits.backoff(m.restarts)
    return Transition(
        m.enter(EngineState.BACKOFF, now, pause),
        reason=f"{m.cause}; restart {m.restarts + 1} of {limits.max_restarts} in {pause:g} s",
    )
