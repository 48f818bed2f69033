"""One cycle without doing: a scrape in, readings and verdicts out. What a replay, a test and the daemon share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specserve import metric_families as families
from specserve.engine.http.metrics import EngineSnapshot
from specserve.metric_families import WINDOWS, key, window_label
from specserve.sidecar import rates, speedup
from specserve.sidecar.baseline import Baseline
from specserve.sidecar.probe import (
    Assessment,
    CanaryOutcome,
    Context,
    Policy,
    Probe,
    Scrape,
    Verdict,
)
from specserve.sidecar.window import COUNTERS, Window
from specserve.units import duration

HISTORY_SECONDS = 3_600.0
HISTORY_STEP_SECONDS = 15.0
READY_LOOKS, LIVE_LOOKS = 3, 40
"""Looks that may be missed before their verdicts are withdrawn. A sidecar that stands still says nothing about the
engine: it soon may not call it ready, and has it restarted only when nothing else has helped for long."""
_TOTALS = {name: f"specserve_{name}_total" for name in COUNTERS}
_RANK = {
    "specserve_engine_requests_running": "running",
    "specserve_engine_requests_waiting": "waiting",
    "specserve_engine_kv_cache_usage_ratio": "kv_cache_usage_ratio",
}
_PREFIXES = {
    "position": ("specserve_accepted_tokens_per_position_total", "position"),
    "finished": ("specserve_requests_finished_total", "reason"),
    "http": ("specserve_http_requests_total", "status"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of the last hour, for the page. None where nothing was known."""

    at: float
    """Unix seconds."""
    acceptance_rate: float | None
    ttft_p50_seconds: float | None
    ttft_p90_seconds: float | None
    tpot_p50_seconds: float | None
    tpot_p90_seconds: float | None
    generation_tokens_per_second: float | None
    requests_running: float | None
    requests_waiting: float | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What one cycle knows."""

    readings: dict[str, float]
    assessment: Assessment
    keep_baseline: bool = False
    """Whether the baseline learned something that should survive a restart."""


def aged(seen: Observation | None, age_seconds: float, look_seconds: float) -> Observation | None:
    """What may still be said. ``look_seconds`` is the longest that one look should take, with the wait before it."""
    if age_seconds <= READY_LOOKS * look_seconds:
        return seen
    no = Verdict(False, f"the sidecar has not looked at the engine for {duration(age_seconds)}")
    started, live = (
        (seen.assessment.started, seen.assessment.live) if seen else (no, Verdict(True, no.reason))
    )
    live = live if age_seconds <= LIVE_LOOKS * look_seconds else no
    found = Assessment("blind", started, live, no, wants_canary=False, since_progress_seconds=None)
    kept = {
        n: v
        for n, v in (seen.readings if seen else {}).items()
        if n == "specserve_scrape_age_seconds"
    }
    return Observation(kept | _verdicts(found), found)


def _verdicts(found: Assessment) -> dict[str, float]:
    out = {
        f"specserve_{name}": float(getattr(found, name).ok) for name in ("started", "live", "ready")
    }
    return out | {
        key("specserve_engine_condition", condition=c): float(c == found.condition)
        for c in families.CONDITIONS
    }


@dataclass(slots=True)
class Observer:
    """The memory of the sidecar, all of it."""

    spans: tuple[float, ...] = WINDOWS
    policy: Policy = field(default_factory=Policy)
    baseline: Baseline = field(default_factory=Baseline)
    profile: speedup.Profile | None = None
    speculation_configured: bool = False
    history: deque[Point] = field(
        default_factory=lambda: deque(maxlen=int(HISTORY_SECONDS / HISTORY_STEP_SECONDS) + 1)
    )
    _window: Window = field(init=False)
    _probe: Probe = field(init=False)
    _scrapes: dict[str, int] = field(default_factory=dict)
    _canaries: dict[str, int] = field(default_factory=dict)
    _canary: CanaryOutcome | None = None
    _read_at: float | None = None
    _last: EngineSnapshot | None = None
    _state: str | None = None
    _moved: dict[str, tuple[tuple[float | None, ...], float]] = field(default_factory=dict)
    """Engine -> its counters, and when they last changed or it had nothing to do."""

    def __post_init__(self) -> None:
        self._window, self._probe = Window(self.spans), Probe(self.policy)

    def observe(
        self, now: float, wall: float, scrape: Scrape, context: Context | None = None
    ) -> Observation:
        """One cycle. ``now`` is monotonic, ``wall`` is Unix time."""
        context = context or Context()
        if context.state == "running" and self._state not in (None, "running"):
            self.forget()  # what the start-up canary made is not traffic
        self._state = context.state
        self._scrapes[scrape.result] = self._scrapes.get(scrape.result, 0) + 1
        snapshot = scrape.snapshot
        if snapshot is not None and not self._window.add(snapshot):
            scrape = Scrape("malformed", "another, older API server process answered")
            snapshot = None
        if snapshot is not None:
            self._read_at = now
        assessment = self._probe.observe(now, scrape, context)
        readings = (
            _verdicts(assessment) | self._health(now, scrape, assessment, context) | self._counted()
        )
        known, self._last = snapshot or self._last, snapshot
        if known is not None:  # one failed read changes nothing; after two the present is unknown
            readings |= self._instant(known) | self._ranks(now, known)
            for seconds in self.spans:
                readings |= rates.readings(self._window, seconds)
        labels = [window_label(seconds) for seconds in self.spans]
        learned = assessment.condition == "progressing" and self.baseline.observe(wall, readings)
        readings |= self.baseline.readings(wall, readings, labels)
        readings |= speedup.readings(self.profile, readings, labels)
        self._remember(wall, readings)
        return Observation(readings, assessment, learned)

    def forget(self) -> None:
        """Let the windows begin now."""
        self._window.restart()

    def canary_sent(self, now: float) -> None:
        """A canary completion is on its way."""
        self._probe.canary_sent(now)

    def canary_done(self, now: float, outcome: CanaryOutcome) -> None:
        """A canary completion is back."""
        self._canary = outcome
        self._canaries[outcome.result] = self._canaries.get(outcome.result, 0) + 1
        self._probe.canary_done(now, outcome)
        if outcome.result == "ok":
            self._window.exclude(requests=1, tokens=1)

    def _health(
        self, now: float, scrape: Scrape, found: Assessment, context: Context
    ) -> dict[str, float]:
        out = {
            "specserve_speculation_configured": float(self.speculation_configured),
            "specserve_scrape_duration_seconds": scrape.seconds,
            "specserve_engine_restarts_total": float(self._window.restarts),
        }
        if context.state is not None:
            out |= {
                key("specserve_state", state=s): float(s == context.state) for s in families.STATES
            }
        if found.since_progress_seconds is not None:
            out["specserve_seconds_since_progress"] = found.since_progress_seconds
        if self._read_at is not None:
            out["specserve_scrape_age_seconds"] = now - self._read_at
        if self._canary is not None and self._canary.result != "refused":
            out["specserve_canary_success"] = float(self._canary.result == "ok")
            if self._canary.result == "ok":
                out["specserve_canary_duration_seconds"] = self._canary.seconds
        return out

    def _counted(self) -> dict[str, float]:
        """Counters: the engine's, which outlive it here, and our own."""
        out = {key("specserve_scrapes_total", result=r): float(n) for r, n in self._scrapes.items()}
        out |= {
            key("specserve_canaries_total", result=r): float(n) for r, n in self._canaries.items()
        }
        for name, value in self._window.totals().items():
            prefix, _, rest = name.partition("/")
            if name in _TOTALS:
                out[_TOTALS[name]] = value
            elif prefix in _PREFIXES:
                family, label = _PREFIXES[prefix]
                out[key(family, **{label: rest})] = value
        return out

    @staticmethod
    def _instant(snapshot: EngineSnapshot) -> dict[str, float]:
        found: dict[str, float | None] = {
            "specserve_engines": float(len(snapshot.engines)),
            "specserve_requests_running": snapshot.total("running"),
            "specserve_requests_waiting": snapshot.total("waiting"),
            "specserve_kv_cache_usage_ratio": snapshot.kv_cache_usage_ratio,
            "specserve_kv_cache_tokens": snapshot.cache_tokens,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _ranks(self, now: float, snapshot: EngineSnapshot) -> dict[str, float]:
        """Each engine by itself. One rank that hangs among many is seen here: the others' progress hides it from the
        verdicts, and a canary may be answered by another rank."""
        out: dict[str, float] = {}
        for sample in snapshot.engines:
            for family, name in _RANK.items():
                if (value := sample.values.get(name)) is not None:
                    out[key(family, engine=sample.engine)] = value
            marker = tuple(sample.values.get(name) for name in ("generation_tokens", "steps"))
            work = (sample.values.get("running") or 0.0) + (sample.values.get("waiting") or 0.0)
            if marker != self._moved.get(sample.engine, (None, 0.0))[0] or not work:
                self._moved[sample.engine] = (marker, now)
            if work:
                idle = now - self._moved[sample.engine][1]
                out[key("specserve_engine_seconds_since_progress", engine=sample.engine)] = idle
        return out

    def _remember(self, wall: float, readings: dict[str, float]) -> None:
        if self.history and 0 <= wall - self.history[-1].at < HISTORY_STEP_SECONDS:
            return

        def known(name: str, **labels: str) -> float | None:
            return readings.get(key(f"specserve_{name}", **labels))

        ttft, tpot = "time_to_first_token_seconds", "time_per_output_token_seconds"
        self.history.append(
            Point(
                at=wall,
                acceptance_rate=known("acceptance_rate", window="1m"),
                ttft_p50_seconds=known(ttft, stat="p50", window="1m"),
                ttft_p90_seconds=known(ttft, stat="p90", window="1m"),
                tpot_p50_seconds=known(tpot, stat="p50", window="1m"),
                tpot_p90_seconds=known(tpot, stat="p90", window="1m"),
                generation_tokens_per_second=known("generation_tokens_per_second", window="1m"),
                requests_running=known("requests_running"),
                requests_waiting=known("requests_waiting"),
            )
        )
