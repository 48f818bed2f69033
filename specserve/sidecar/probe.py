"""Startup, liveness, readiness: verdicts from progress. Pure: observations and canary outcomes in, verdicts out.

Progress is a token, a finished request or an engine step more than at the last read. Busy is not hung: a full
queue that moves is alive. Starved (requests wait, none runs) is not hung, but is said. Blind (metrics cannot be
read) is not dead. Restarting an engine that works costs as much as keeping one that hangs, so liveness fails only
after several reads in a row without progress while work is there, and a canary completion that failed too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from specserve.engine.http.metrics import EngineSnapshot
from specserve.units import duration

ScrapeResult = Literal["ok", "unreachable", "timeout", "status", "malformed"]
CanaryResult = Literal["ok", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One attempt to read the engine's metrics."""

    result: ScrapeResult
    detail: str = ""
    snapshot: EngineSnapshot | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CanaryOutcome:
    """One canary completion. ``refused`` (queue full, no such model, no key) says nothing about progress."""

    result: CanaryResult
    sent_seconds: float
    seconds: float
    detail: str = ""
    full: bool = False
    """Refused because the queue is full: as long as that lasts, the requests in execution are the canary."""


@dataclass(frozen=True, slots=True)
class Context:
    """What somebody else knows: the supervisor, or nobody when the sidecar runs alone."""

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
    """Requests in execution that stand still for so long behind a full queue are as good as a canary that failed."""
    canary_interval_seconds: float = 60.0
    """Between two canaries of an idle, blind or stalled engine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes or no, and why."""

    ok: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"ok": self.ok, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Assessment:
    """What one observation led to."""

    condition: str
    """One of `specserve.metric_families.CONDITIONS`."""
    started: Verdict
    live: Verdict
    ready: Verdict
    wants_canary: bool
    since_progress_seconds: float | None
    """None while idle and before the first read."""


@dataclass(slots=True)
class Probe:
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
        elif context.state == "backoff" != self._state:
            self._lost += 1
        self._state = context.state
        if scrape.snapshot is not None:
            self._read(now, scrape.snapshot)
        else:
            self._unread += 1
            self._unreachable = self._unreachable + 1 if scrape.result == "unreachable" else 0
        if self._stalled is None:
            self._stalled = self._hang(now)
        condition = self._condition(context)
        return Assessment(
            condition=condition,
            started=Verdict(
                self._started is not None, self._started or f"no completion yet; {self._seen()}"
            ),
            live=self._live(condition, context),
            ready=self._settled(self._readiness(condition, context), condition, context),
            wants_canary=context.state in (None, "running") and self._wants_canary(now, condition),
            since_progress_seconds=None
            if condition == "idle" or self._progress_at is None
            else now - self._progress_at,
        )

    def canary_sent(self, now: float) -> None:
        """A canary is on its way; none is asked for until it is back."""
        self._in_flight, self._canary_sent, self._pending = True, now, 0

    def canary_done(self, now: float, outcome: CanaryOutcome) -> None:
        """The canary is back. A token is progress, whatever the counters say."""
        self._in_flight, self._canary = False, outcome
        if outcome.result == "ok":
            self._progress(now)
            self._started = (
                self._started or f"canary produced a token in {duration(outcome.seconds)}"
            )
        elif self._progress_at is None or outcome.sent_seconds >= self._progress_at:
            self._failures += outcome.result == "failed"
            if outcome.full and self._full_since is None:
                self._full_since = outcome.sent_seconds

    def _progress(self, now: float) -> None:
        self._progress_at, self._stalled, self._full_since = now, None, None
        self._still = self._quiet = self._pending = self._failures = 0

    def _read(self, now: float, snapshot: EngineSnapshot) -> None:
        self._unread = self._unreachable = 0
        tokens = snapshot.total("generation_tokens")
        marker = (tokens, _succeeded(snapshot), snapshot.total("steps"))
        start = snapshot.process_start_seconds
        if self._is_restart(marker, start):
            self._started = self._stalled = None
            self._failures, self._was_ready = 0, False
        running, waiting = snapshot.total("running"), snapshot.total("waiting")
        self._work = None if running is None else (running, waiting or 0.0)
        self._asleep = snapshot.asleep
        self._quiet, self._pending = self._quiet + 1, self._pending + self._in_flight
        self._still = self._still + 1 if self._work and any(self._work) else 0
        if marker != self._marker or self._asleep:
            self._progress(now)
        self._marker, self._process_start = marker, start or self._process_start
        if tokens:
            self._started = (
                self._started or f"it had made {tokens:.0f} output tokens when first seen"
            )

    def _is_restart(self, marker: tuple[float | None, ...], start: float | None) -> bool:
        if start is not None and self._process_start is not None and start != self._process_start:
            return True
        before = self._marker or ()
        return any(
            b is not None and a is not None and a < b for a, b in zip(marker, before, strict=False)
        )

    def _hang(self, now: float) -> str | None:
        """Why the engine counts as stalled; None when it does not."""
        blocked = (
            self._full_since is not None
            and now - self._full_since >= self.policy.canary_timeout_seconds
        )
        if self._started is None or not (self._failures or blocked):
            return None
        canary = (
            f"canary {'failed' if self._failures else 'refused'}: {self._canary.detail}"
            if self._canary
            else ""
        )
        if self._unread:
            enough = (
                self._unread >= self.policy.observations
                and self._failures >= 2
                and not self._unreachable
            )
            return (
                f"{self._unread} reads of the metrics failed ({self._scrape.detail}); {canary}"
                if enough
                else None
            )
        running, waiting = self._work or (0.0, 0.0)
        if running and self._still >= self.policy.observations:
            return f"{self._seen()} in {self._still} reads in a row; {canary}"
        # Gauges stand still with the engine: it may have hung between two requests. Then the canary is the work.
        certain = self._failures >= 2 or (
            self._failures and self._pending >= self.policy.observations
        )
        if not running and not waiting and certain:
            return (
                f"nothing runs by its gauges, and it does not complete a request either; {canary}"
            )
        return None

    def _seen(self) -> str:
        """What the last read said, for reasons."""
        if self._scrape.snapshot is None:
            return self._scrape.detail or self._scrape.result
        if self._work is None:
            return "the engine does not report its requests"
        still = ", no token, step or finished request" if self._still else ""
        return f"{self._work[0]:.0f} requests running, {self._work[1]:.0f} waiting{still}"

    def _condition(self, context: Context) -> str:
        """The first that holds."""
        running, waiting = self._work or (0.0, 0.0)
        coming = self._lost <= 1 and (
            self._started is None or context.state in ("starting", "backoff")
        )
        return next(
            name
            for name, holds in (
                ("draining", context.draining or context.state == "stopping"),
                ("stalled", self._stalled is not None),
                ("starting", self._unreachable and coming),
                ("down", self._unreachable),
                ("blind", self._unread >= 2),
                ("starting", self._started is None),
                ("starved", waiting and not running and self._still >= self.policy.observations),
                ("suspect", self._still >= 2 or self._failures),
                ("progressing", running or waiting),
                ("idle", True),
            )
            if holds
        )

    def _live(self, condition: str, context: Context) -> Verdict:
        """Fails for what only a restart can cure, and while nobody else sees to it."""
        if context.state in ("fatal", "starting", "backoff"):
            return Verdict(context.state != "fatal", f"the supervisor is in state {context.state}")
        match condition:
            case "stalled":
                return Verdict(False, self._stalled or "stalled")
            case "down" if self._unreachable >= self.policy.observations:
                return Verdict(
                    False, f"{self._unreachable} reads in a row found nobody: {self._scrape.detail}"
                )
            case "blind":
                return Verdict(
                    True, f"cannot read the metrics ({self._scrape.detail}); blind is not dead"
                )
            case "starved":
                return Verdict(True, f"{self._seen()}; starved is not hung")
            case _:
                return Verdict(True, f"{condition}: {self._seen()}")

    def _readiness(self, condition: str, context: Context) -> Verdict:
        """The first refusal that holds."""
        canary = self._canary.detail if self._canary else ""
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
            (self._failures, f"{condition}, and the canary failed: {canary}"),
        )
        refusal = next((reason for holds, reason in refusals if holds), None)
        return Verdict(refusal is None, refusal or f"{condition}: {self._seen()}; {self._started}")

    def _settled(self, raw: Verdict, condition: str, context: Context) -> Verdict:
        """Damped: what is certain changes at once, the rest after `Policy.settle` reads that agree."""
        managed = context.state not in (None, "running") or context.blocked is not None
        managed = managed or self._asleep
        certain = not raw.ok and (
            condition in ("draining", "stalled", "starved") or self._started is None or managed
        )
        first = raw.ok and not self._was_ready
        self._disagreeing = self._disagreeing + 1 if raw.ok != self._ready else 0
        if raw.ok != self._ready and (certain or first or self._disagreeing >= self.policy.settle):
            self._ready, self._disagreeing = raw.ok, 0
            self._was_ready = self._was_ready or raw.ok
        return (
            raw
            if raw.ok == self._ready
            else Verdict(self._ready, f"not changed yet by one read: {raw.reason}")
        )

    def _wants_canary(self, now: float, condition: str) -> bool:
        if self._in_flight or self._unreachable or self._asleep or condition == "draining":
            return False
        rested = (
            self._canary_sent is None
            or now - self._canary_sent >= self.policy.canary_interval_seconds
        )
        fresh = self._canary_sent is not None and self._canary_sent >= (self._progress_at or 0.0)
        match condition:
            case "starting":
                return rested or self._canary is None or self._canary.result != "refused"
            case "idle":
                return rested and self._quiet >= self.policy.settle
            case "blind" | "stalled" | "starved":
                return rested
            case "suspect":
                return not fresh or rested or not (self._work and any(self._work))
            case (
                _
            ):  # at the first read without progress: its answer is back by the time that it counts
                return bool(self._still) and not fresh


def _succeeded(snapshot: EngineSnapshot) -> float | None:
    """Requests that ended well. Aborts and errors are no progress: a hung engine collects those too."""
    counts = [
        n
        for s in snapshot.engines
        for r, n in (s.finished or {}).items()
        if r not in ("abort", "error")
    ]
    return sum(counts) if counts else None
