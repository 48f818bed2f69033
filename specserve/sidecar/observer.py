"""One cycle without input or output: a scrape in, readings and verdicts out. Replays, tests and the
sidecar share it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from specserve.engine.http.metrics import EngineSample, EngineSnapshot
from specserve.engine.inside.step_profile import StepProfile
from specserve.metric_families import (
    CONDITIONS,
    STATES,
    WINDOWS,
    MetricKey,
    Readings,
    key,
    window_label,
)
from specserve.sidecar import rates, speedup
from specserve.sidecar.baseline import Baseline
from specserve.sidecar.probe import (
    Assessment,
    CanaryOutcome,
    Context,
    Policy,
    ProbeVerdict,
    ProgressProbe,
    Scrape,
)
from specserve.sidecar.window import COUNTERS, Window
from specserve.units import duration

HISTORY_SECONDS = 3_600.0
HISTORY_STEP_SECONDS = 15.0
READY_LOOKS, LIVE_LOOKS = 3, 40
"""Looks that may be missed before their verdicts are withdrawn. A sidecar that stands still says
nothing about the engine: it soon may not call it ready, and has it restarted only when nothing else
has helped for long."""
ACCEPTANCE = key("specserve_acceptance_rate", window="1m")
OUTPUT = key("specserve_generation_tokens_per_second", window="1m")
TTFT_P50, TTFT_P90, TPOT_P50, TPOT_P90 = (
    key(f"specserve_{latency}_seconds", stat=stat, window="1m")
    for latency in ("time_to_first_token", "time_per_output_token")
    for stat in ("p50", "p90")
)
CHARTED = (ACCEPTANCE, OUTPUT, TTFT_P50, TTFT_P90, TPOT_P50, TPOT_P90)
"""What the page draws over time."""
_AGE = key("specserve_scrape_age_seconds")
RESTARTS_SECONDS = 3_600.0
"""Restarts of this time count as in a row."""
_BY_ENGINE = {
    "running": "specserve_engine_requests_running",
    "waiting": "specserve_engine_requests_waiting",
    "kv_cache_usage_ratio": "specserve_engine_kv_cache_usage_ratio",
}
_LABELLED = {
    "finished": ("specserve_requests_finished_total", "reason"),
    "http": ("specserve_http_requests_total", "status"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of the last hour, for the page."""

    at: float
    """Unix seconds."""
    readings: Readings
    """Of `CHARTED`, what was known."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one cycle knows."""

    readings: dict[MetricKey, float]
    assessment: Assessment
    keep_baseline: bool = False
    """Whether the baseline learned something that should survive a restart."""


def aged(seen: Observation | None, age_seconds: float, look_seconds: float) -> Observation | None:
    """What may still be said. ``look_seconds`` is the longest that one look should take, with the
    wait before it."""
    if age_seconds <= READY_LOOKS * look_seconds:
        return seen
    no = ProbeVerdict(
        False, f"the sidecar has not looked at the engine for {duration(age_seconds)}"
    )
    started, live = no, ProbeVerdict(True, no.reason)
    kept: dict[MetricKey, float] = {}
    if seen is not None:
        started, live = seen.assessment.started, seen.assessment.live
        if _AGE in seen.readings:
            kept[_AGE] = seen.readings[_AGE]
    if age_seconds > LIVE_LOOKS * look_seconds:
        live = no
    found = Assessment("blind", started, live, no, wants_canary=False, since_progress_seconds=None)
    return Observation(kept | _verdicts(found), found)


def _verdicts(found: Assessment) -> dict[MetricKey, float]:
    out = {
        key("specserve_started"): float(found.started.ok),
        key("specserve_live"): float(found.live.ok),
        key("specserve_ready"): float(found.ready.ok),
    }
    for condition in CONDITIONS:
        out[key("specserve_engine_condition", condition=condition)] = float(
            condition == found.condition
        )
    return out


@dataclass(slots=True)
class Observer:
    """The memory of the sidecar, all of it."""

    spans: tuple[float, ...] = WINDOWS
    policy: Policy = field(default_factory=Policy)
    baseline: Baseline = field(default_factory=Baseline)
    profile: StepProfile | None = None
    speculation_configured: bool = False
    draft_context_tokens: int | None = None
    """The longest text that the draft was made for, where that is known."""
    history: deque[Point] = field(
        default_factory=lambda: deque(maxlen=int(HISTORY_SECONDS / HISTORY_STEP_SECONDS) + 1)
    )
    _window: Window = field(init=False)
    _probe: ProgressProbe = field(init=False)
    _scrapes: Counter[str] = field(default_factory=Counter)
    _canaries: Counter[str] = field(default_factory=Counter)
    _canary: CanaryOutcome | None = None
    _read_at: float | None = None
    _last: EngineSnapshot | None = None
    _state: str | None = None
    _waiting: tuple[tuple[float | None, ...], float] | None = None
    """Counters while requests wait and none runs, and since when they stand so."""
    _lost_at: list[float] = field(default_factory=list)
    """When the supervisor lost the engine, in the last hour."""
    _restarted_at: list[float] = field(default_factory=list)
    """When the engine's process became another, in the last hour."""
    _restarts: int = 0
    _moved: dict[str, tuple[tuple[float | None, float | None], float]] = field(default_factory=dict)
    """Engine -> its counters, and when they last changed or it had nothing to do."""

    def __post_init__(self) -> None:
        self._window = Window(self.spans)
        self._probe = ProgressProbe(self.policy)

    def observe(
        self, now: float, wall: float, scrape: Scrape, context: Context | None = None
    ) -> Observation:
        """One cycle. ``now`` is monotonic, ``wall`` is Unix time."""
        context = context or Context()
        if context.state == "running" and self._state not in (None, "running"):
            self.forget()  # what the start-up canary made is not traffic
        if context.state == "backoff" and self._state != "backoff":
            self._lost_at.append(now)
        self._state = context.state
        self._scrapes[scrape.result] += 1
        snapshot = scrape.snapshot
        if snapshot is not None and not self._window.add(snapshot):
            scrape = Scrape("malformed", "another, older API server process answered")
            snapshot = None
        if snapshot is not None:
            self._read_at = now
        self._restarted_at += [now] * (self._window.restarts - self._restarts)
        self._restarts = self._window.restarts
        found = self._probe.observe(now, scrape, context)
        readings = _verdicts(found) | self._health(now, scrape, found, context) | self._counted()
        known, self._last = snapshot or self._last, snapshot
        if known is not None:  # one failed read changes nothing; after two the present is unknown
            readings |= self._instant(known) | self._by_engine(now, known)
            for seconds in self.spans:
                readings |= rates.readings(self._window, seconds, self.draft_context_tokens)
            readings |= rates.recent(self._window)
        labels = [window_label(seconds) for seconds in self.spans]
        learned = found.condition == "progressing" and self.baseline.observe(wall, readings)
        readings |= self.baseline.readings(wall, readings, labels)
        readings |= speedup.readings(self.profile, readings, labels)
        self._remember(wall, readings)
        return Observation(readings, found, learned)

    def forget(self) -> None:
        """Let the windows begin now."""
        self._window.restart()

    def canary_sent(self, now: float) -> None:
        """A canary completion is on its way."""
        self._probe.canary_sent(now)

    def canary_done(self, now: float, outcome: CanaryOutcome) -> None:
        """A canary completion is back."""
        self._canary = outcome
        self._canaries[outcome.result] += 1
        self._probe.canary_done(now, outcome)
        if outcome.result == "ok":
            self._window.exclude(requests=1, tokens=1)

    def _health(
        self, now: float, scrape: Scrape, found: Assessment, context: Context
    ) -> dict[MetricKey, float]:
        out = {
            key("specserve_speculation_configured"): float(self.speculation_configured),
            key("specserve_scrape_duration_seconds"): scrape.seconds,
            key("specserve_engine_restarts_total"): float(self._window.restarts),
        }
        if context.state is not None:
            for state in STATES:
                out[key("specserve_state", state=state)] = float(state == context.state)
        for times in (self._lost_at, self._restarted_at):
            times[:] = [at for at in times if at > now - RESTARTS_SECONDS]
        # One crash shows in both.
        recent = max(len(self._lost_at), len(self._restarted_at))
        out[key("specserve_recent_restarts")] = float(recent)
        unscheduled = self._unscheduled(now, scrape.snapshot)
        if unscheduled is not None:
            out[key("specserve_unscheduled_seconds")] = unscheduled
        if found.since_progress_seconds is not None:
            out[key("specserve_seconds_since_progress")] = found.since_progress_seconds
        if self._read_at is not None:
            out[_AGE] = now - self._read_at
        if self._canary is not None and self._canary.result != "refused":
            out[key("specserve_canary_success")] = float(self._canary.result == "ok")
            if self._canary.result == "ok":
                out[key("specserve_canary_duration_seconds")] = self._canary.seconds
        return out

    def _unscheduled(self, now: float, snapshot: EngineSnapshot | None) -> float | None:
        """Seconds for which requests have waited while none ran and none advanced, from the very
        start on; None while that is unknown."""
        if snapshot is None:
            return None
        waiting, running = snapshot.total("waiting"), snapshot.total("running")
        if waiting is None or running is None:
            return None
        if not waiting or running or snapshot.asleep:
            self._waiting = None
            return 0.0
        marker = (snapshot.total("generation_tokens"), snapshot.finished_requests)
        if self._waiting is None or self._waiting[0] != marker:
            self._waiting = (marker, now)
        return now - self._waiting[1]

    def _counted(self) -> dict[MetricKey, float]:
        """Counters: the engine's, which outlive it here, and our own."""
        out: dict[MetricKey, float] = {}
        for result, n in self._scrapes.items():
            out[key("specserve_scrapes_total", result=result)] = float(n)
        for result, n in self._canaries.items():
            out[key("specserve_canaries_total", result=result)] = float(n)
        for (name, label, number), value in self._window.totals().items():
            if name in COUNTERS:
                out[key(f"specserve_{name}_total")] = value
            elif name == "position":
                family = "specserve_accepted_tokens_per_position_total"
                out[key(family, position=f"{number:.0f}")] = value
            elif name in _LABELLED:
                family, label_name = _LABELLED[name]
                out[key(family, **{label_name: label})] = value
        return out

    @staticmethod
    def _instant(snapshot: EngineSnapshot) -> dict[MetricKey, float]:
        found: dict[str, float | None] = {
            "specserve_engines": float(len(snapshot.engines)),
            "specserve_requests_running": snapshot.total("running"),
            "specserve_requests_waiting": snapshot.total("waiting"),
            "specserve_kv_cache_usage_ratio": snapshot.kv_cache_usage_ratio,
            "specserve_kv_cache_tokens": snapshot.cache_tokens,
        }
        return {key(name): value for name, value in found.items() if value is not None}

    def _by_engine(self, now: float, snapshot: EngineSnapshot) -> dict[MetricKey, float]:
        """Each engine by itself. One rank that hangs among many is seen here: the others' progress
        hides it from the verdicts, and another rank may answer the canary."""
        out: dict[MetricKey, float] = {}
        for sample in snapshot.engines:
            for name, family in _BY_ENGINE.items():
                value = sample.values.get(name)
                if value is not None:
                    out[key(family, engine=sample.engine)] = value
            since = self._since_progress(now, sample)
            if since is not None:
                out[key("specserve_engine_seconds_since_progress", engine=sample.engine)] = since
        return out

    def _since_progress(self, now: float, sample: EngineSample) -> float | None:
        """Seconds; None for an engine without requests."""
        values = sample.values
        marker = (values.get("generation_tokens"), values.get("steps"))
        busy = bool(values.get("running") or values.get("waiting"))
        before, at = self._moved.get(sample.engine, (None, now))
        if marker != before or not busy:
            at = now
        self._moved[sample.engine] = (marker, at)
        if not busy:
            return None
        return now - at

    def _remember(self, wall: float, readings: Readings) -> None:
        if self.history and 0 <= wall - self.history[-1].at < HISTORY_STEP_SECONDS:
            return
        known = {name: readings[name] for name in CHARTED if name in readings}
        self.history.append(Point(wall, known))
