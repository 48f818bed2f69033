"""Startup, liveness, readiness: verdicts from progress. Pure: observations and canary outcomes in,
verdicts out.

Progress is a token, a finished request or an engine step more than at the last read. Busy is not
hung: a full queue that moves is alive. Starved (requests wait, none runs) is not hung, but is said.
Blind (metrics cannot be read) is not dead: only a connection that is refused, three reads in a row,
says that nobody is there, and a canary that succeeds meanwhile says the opposite. Restarting an
engine that works costs as much as keeping
one that hangs, so liveness fails only after several reads in a row without progress while work is
there, and a canary completion that failed too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specserve.engine.http.metrics import EngineSnapshot
from specserve.units import duration

ScrapeResult = Literal["ok", "unreachable", "broken", "timeout", "status", "malformed"]
"""``unreachable``: the connection was refused. ``broken``: it was taken and then closed or reset,
or there was no way to make it."""
WORDS = {"progressing": "serving"}
"""Conditions that have another name in reasons."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One attempt to read the engine's metrics."""

    result: ScrapeResult
    detail: str = ""
    snapshot: EngineSnapshot | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CanaryOutcome:
    """One canary completion. ``refused`` (queue full, no such model, no key) says nothing about
    progress."""

    result: Literal["ok", "failed", "refused"]
    sent_seconds: float
    seconds: float
    detail: str = ""
    full: bool = False
    """Refused because the queue is full: as long as that lasts, the requests in execution are the
    canary."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the supervisor knows; nothing when the sidecar runs alone."""

    state: str | None = None
    """State of the supervisor; None when the engine is not ours to start."""
    draining: bool = False
    blocked: str | None = None
    """Why readiness is withheld, e.g. by the acceptance canary; None when it is not."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient the verdicts are."""

    observations: int = 3
    """Reads in a row without progress before an engine may be called stalled, or down."""
    settle: int = 2
    """Reads in a row that must agree before readiness changes."""
    canary_timeout_seconds: float = 120.0
    """Requests in execution that stand still for so long behind a full queue are as good as a
    canary that failed."""
    canary_interval_seconds: float = 60.0
    """Between two canaries of an idle, blind or stalled engine."""


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """Yes or no, and why."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """What one observation led to."""

    condition: str
    """One of `specserve.metric_families.CONDITIONS`."""
    started: ProbeVerdict
    live: ProbeVerdict
    ready: ProbeVerdict
    wants_canary: bool
    since_progress_seconds: float | None
    """None while idle and before the first read."""


@dataclass(slots=True)
class ProgressProbe:
    """The memory between observations."""

    policy: Policy = field(default_factory=Policy)
    _marker: tuple[float | None, ...] | None = None
    _process_start: float | None = None
    _progress_at: float | None = None
    _work: tuple[float, float] | None = None
    """Running and waiting requests at the last read; None when not reported."""
    _asleep: bool = False
    _still: int = 0
    """Reads in a row with work and without progress."""
    _quiet: int = 0
    """Reads in a row without progress, work or not."""
    _pending: int = 0
    """Reads without progress since the last canary was sent."""
    _unread: int = 0
    _unreachable: int = 0
    _unreachable_since: float = 0.0
    _state: str | None = None
    _lost: int = 0
    """How often the supervisor lost the engine since it last ran."""
    _scrape: Scrape = field(default_factory=lambda: Scrape("unreachable", "not tried yet"))
    _started: str | None = None
    """Evidence that a completion succeeded since the engine started."""
    _stalled: str | None = None
    _canary: CanaryOutcome | None = None
    _canary_sent: float | None = None
    _in_flight: bool = False
    _failures: int = 0
    """Canaries in a row that failed, without progress in between."""
    _full_since: float | None = None
    """When the first canary without progress since was refused by a full queue."""
    _ready: bool = False
    _was_ready: bool = False
    _disagreeing: int = 0

    def observe(self, now: float, scrape: Scrape, context: Context | None = None) -> Assessment:
        """Take one read in and judge."""
        context = context or Context()
        self._scrape = scrape
        if context.state == "running":
            self._lost = 0
        elif context.state != self._state:
            self._lost += context.state == "backoff"
            # What was found of the engine that ended is not true of the next one.
            self._stalled = self._full_since = None
            self._failures = 0
        self._state = context.state
        if scrape.snapshot is not None:
            self._read(now, scrape.snapshot)
        else:
            self._failed_read(now, scrape)
        if self._stalled is None:
            self._stalled = self._hang(now)
        condition = self._condition(context)
        since = None
        if condition != "idle" and self._progress_at is not None:
            since = now - self._progress_at
        started = self._started or f"no completion yet; {self._seen()}"
        return Assessment(
            condition=condition,
            started=ProbeVerdict(self._started is not None, started),
            live=self._live(now, condition, context),
            ready=self._settled(self._readiness(condition, context), condition, context),
            wants_canary=context.state in (None, "running") and self._wants_canary(now, condition),
            since_progress_seconds=since,
        )

    def canary_sent(self, now: float) -> None:
        """A canary is on its way; none is asked for until it is back."""
        self._in_flight, self._canary_sent, self._pending = True, now, 0

    def canary_done(self, now: float, outcome: CanaryOutcome) -> None:
        """The canary is back. A token is progress, whatever the counters say."""
        self._in_flight, self._canary = False, outcome
        if outcome.result == "ok":
            self._progress(now)
            if outcome.sent_seconds + outcome.seconds >= self._unreachable_since:
                self._unreachable = 0
            if self._started is None:
                self._started = f"the canary produced a token in {duration(outcome.seconds)}"
        elif self._progress_at is None or outcome.sent_seconds >= self._progress_at:
            self._failures += outcome.result == "failed"
            if outcome.full and self._full_since is None:
                self._full_since = outcome.sent_seconds

    def _progress(self, now: float) -> None:
        self._progress_at, self._stalled, self._full_since = now, None, None
        self._still = self._quiet = self._pending = self._failures = 0

    def _failed_read(self, now: float, scrape: Scrape) -> None:
        self._unread += 1
        if scrape.result != "unreachable":
            self._unreachable = 0
            return
        if not self._unreachable:
            self._unreachable_since = now
        self._unreachable += 1

    def _read(self, now: float, snapshot: EngineSnapshot) -> None:
        self._unread = self._unreachable = 0
        tokens = snapshot.total("generation_tokens")
        marker = (tokens, _succeeded(snapshot), snapshot.total("steps"))
        start = snapshot.process_start_seconds
        if self._is_restart(marker, start):
            self._started = self._stalled = None
            self._failures, self._was_ready = 0, False
        if tokens and self._started is None:
            self._started = "it has produced tokens since its restart"
            if self._marker is None:
                self._started = "already busy when the sidecar started"
        running, self._work = snapshot.total("running"), None
        if running is not None:
            self._work = (running, snapshot.total("waiting") or 0.0)
        self._asleep = snapshot.asleep
        self._quiet += 1
        self._pending += self._in_flight
        if self._has_work:
            self._still += 1
        else:
            self._still = 0
        if marker != self._marker or self._asleep:
            self._progress(now)
        self._marker, self._process_start = marker, start or self._process_start

    @property
    def _has_work(self) -> bool:
        return self._work is not None and any(self._work)

    def _is_restart(self, marker: tuple[float | None, ...], start: float | None) -> bool:
        if start is not None and self._process_start is not None and start != self._process_start:
            return True
        return any(
            before is not None and after is not None and after < before
            for after, before in zip(marker, self._marker or (), strict=False)
        )

    def _hang(self, now: float) -> str | None:
        """Why the engine counts as stalled; None when it does not."""
        enough = self.policy.observations
        blocked = (
            self._full_since is not None
            and now - self._full_since >= self.policy.canary_timeout_seconds
        )
        if self._started is None or self._canary is None or not (self._failures or blocked):
            return None
        canary = f"canary failed: {self._canary.detail}"
        if not self._failures:
            canary = f"canary refused: {self._canary.detail}"
        if self._unread:
            if self._unread < enough or self._failures < 2 or self._unreachable:
                return None
            return f"{self._unread} reads of the metrics failed ({self._scrape.detail}); {canary}"
        running, waiting = self._work or (0.0, 0.0)
        if running and self._still >= enough:
            return f"{self._seen()} in {self._still} reads in a row; {canary}"
        # Gauges stand still with the engine: it may have hung between two requests. Then the canary
        # is the work.
        certain = self._failures >= 2 or (self._failures and self._pending >= enough)
        if not running and not waiting and certain:
            return f"its metrics show no request, and yet it did not complete one; {canary}"
        return None

    def _seen(self) -> str:
        """What the last read said, for reasons."""
        if self._scrape.snapshot is None:
            return self._scrape.detail or self._scrape.result
        if self._work is None:
            return "the engine does not report its requests"
        running, waiting = self._work
        noun, still = "requests", ""
        if running == 1:
            noun = "request"
        if self._still:
            still = ", no token, step or finished request"
        return f"{running:.0f} {noun} running, {waiting:.0f} waiting{still}"

    def _condition(self, context: Context) -> str:
        """The first that holds."""
        running, waiting = self._work or (0.0, 0.0)
        coming = self._lost <= 1 and (
            self._started is None or context.state in ("starting", "backoff")
        )
        gone = context.state in ("backoff", "fatal")
        return next(
            name
            for name, holds in (
                ("draining", context.draining or context.state == "stopping"),
                ("stalled", self._stalled is not None),
                ("starting", (self._unreachable or gone) and coming),
                ("down", gone or self._unreachable >= self.policy.observations),
                ("blind", self._unread >= 2),
                ("starting", self._started is None),
                ("starved", waiting and not running and self._still >= self.policy.observations),
                ("suspect", self._still >= 2 or self._failures),
                ("progressing", running or waiting),
                ("idle", True),
            )
            if holds
        )

    def _live(self, now: float, condition: str, context: Context) -> ProbeVerdict:
        """Fails for what only a restart can cure, and while nothing else restarts it."""
        if context.state in ("fatal", "starting", "backoff"):
            reason = f"the supervisor is in state {context.state}"
            return ProbeVerdict(context.state != "fatal", reason)
        ok, detail = True, self._scrape.detail
        match condition:
            case "stalled":
                ok, reason = False, self._stalled or "stalled"
            case "down":
                lasted = duration(now - self._unreachable_since)
                ok, reason = (
                    False,
                    f"refused connections for {lasted} ({self._unreachable} reads): {detail}",
                )
            case "blind":
                reason = f"the metrics cannot be read ({detail}); not a hang by itself"
            case "starved":
                reason = f"{self._seen()}; not a hang by itself"
            case _:
                reason = f"{_word(condition)}: {self._seen()}"
        return ProbeVerdict(ok, reason)

    def _readiness(self, condition: str, context: Context) -> ProbeVerdict:
        """The first refusal that holds."""
        canary = ""
        if self._canary is not None:
            canary = self._canary.detail
        cannot = condition in ("stalled", "down", "starved", "starting")
        refusals = (
            (condition == "draining", "draining: running requests finish, new ones are refused"),
            (context.state not in (None, "running"), f"the supervisor is in state {context.state}"),
            (
                self._started is None,
                f"no completion has succeeded since the engine started; {self._seen()}",
            ),
            (context.blocked is not None, str(context.blocked)),
            (self._asleep, "the engine was put to sleep"),
            (cannot, f"{condition}: {self._stalled or self._seen()}"),
            (self._unreachable, f"it refuses connections: {self._seen()}"),
            (self._failures, f"{_word(condition)}, and the canary failed: {canary}"),
        )
        for holds, reason in refusals:
            if holds:
                return ProbeVerdict(False, reason)
        return ProbeVerdict(True, f"{_word(condition)}: {self._seen()} ({self._started})")

    def _settled(self, raw: ProbeVerdict, condition: str, context: Context) -> ProbeVerdict:
        """Damped: what is certain changes at once, the rest after `Policy.settle` reads that
        agree."""
        if raw.ok == self._ready:
            self._disagreeing = 0
            return raw
        self._disagreeing += 1
        if raw.ok:
            at_once = not self._was_ready
        else:
            at_once = (
                condition in ("draining", "stalled", "starved")
                or self._started is None
                or context.state not in (None, "running")
                or context.blocked is not None
                or self._asleep
            )
        if not at_once and self._disagreeing < self.policy.settle:
            return ProbeVerdict(self._ready, f"unchanged, as one read is not enough: {raw.reason}")
        self._ready, self._disagreeing = raw.ok, 0
        self._was_ready = self._was_ready or raw.ok
        return raw

    def _wants_canary(self, now: float, condition: str) -> bool:
        if self._in_flight or self._asleep or condition == "draining":
            return False
        if self._unreachable:
            # Its answer is back before the engine counts as down.
            sent = self._canary_sent
            return self._started is not None and (sent is None or sent < self._unreachable_since)
        rested, fresh = True, False
        if self._canary_sent is not None:
            rested = now - self._canary_sent >= self.policy.canary_interval_seconds
            fresh = self._canary_sent >= (self._progress_at or 0.0)
        match condition:
            case "starting":
                return rested or self._canary is None or self._canary.result != "refused"
            case "idle":
                return rested and self._quiet >= self.policy.settle
            case "blind" | "stalled" | "starved":
                return rested
            case "suspect":
                return not fresh or rested or not self._has_work
            case _:
                # At the first read without progress: its answer is back by the time that it counts.
                return bool(self._still) and not fresh


def _word(condition: str) -> str:
    return WORDS.get(condition, condition)


def _succeeded(snapshot: EngineSnapshot) -> float | None:
    """Requests that ended well. Aborts and errors are no progress: a hung engine collects those
    too."""
    counts = [
        count
        for sample in snapshot.engines
        for reason, count in (sample.finished or {}).items()
        if reason not in ("abort", "error")
    ]
    if not counts:
        return None
    return sum(counts)
