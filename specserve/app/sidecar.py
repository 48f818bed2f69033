"""The composition of the sidecar: client, observer, alert rules, receivers, HTTP server.

``serve`` starts it beside the engine that it launched; ``specserve sidecar`` starts it beside any
vLLM server.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from specserve import __version__
from specserve.alert import builtin, causes
from specserve.alert.evaluate import Evaluation, Evaluator
from specserve.alert.notify import Notifier, NotifyTimes
from specserve.alert.rules import AlertState
from specserve.config.schema import Settings
from specserve.engine.http.client import own_client
from specserve.gpu.telemetry import ThreadedTelemetry, open_telemetry
from specserve.metric_families import WINDOWS, MetricKey, Readings, key
from specserve.sidecar import baseline, page, speedup, status
from specserve.sidecar.canaries import Canaries
from specserve.sidecar.changes import Changes
from specserve.sidecar.collector import exposition
from specserve.sidecar.contact import engine_version, scrape
from specserve.sidecar.growth import Growth
from specserve.sidecar.launch_state import LaunchState, output_mismatch
from specserve.sidecar.observer import READY_LOOKS, Observation, Observer, aged
from specserve.sidecar.presentation import LastNumbersJson, ProbeJson, ProbeName, StatusJson
from specserve.sidecar.probe import Assessment, Policy, ProbeVerdict
from specserve.sidecar.server import Pages, SidecarServer
from specserve.supervise.processes import host_use

LOG = logging.getLogger("specserve.sidecar")
_GROWS = {
    "specserve_engine_host_memory_bytes": "memory",
    "specserve_engine_threads": "threads",
}
STOP_SECONDS = 2.0
"""The longest wait for a read that a hung engine may never answer."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last cycle left for the HTTP threads; replaced whole, never changed."""

    at: float
    observation: Observation | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    state: LaunchState = field(default_factory=LaunchState)
    causes: tuple[causes.Cause, ...] = ()


@dataclass(frozen=True, slots=True)
class _Known:
    """The newest readings that held numbers of the engine."""

    at: float
    readings: Readings


class Watch:
    """The running sidecar."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine_url: str | None = None,
        launch_state: Callable[[], LaunchState] = LaunchState,
        state_dir: Path,
        visible_devices: str | None = None,
        method_told: str | None = None,
        facts: causes.ServerFacts | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        changed_alerts: Callable[[], Settings | None] = lambda: None,
    ) -> None:
        """``engine_url`` None watches the engine that these settings launch; ``changed_alerts``
        gives settings with other alerts when there are any. ``method_told`` is
        shown in place of the settings' method: they were made from what a server says. ``facts``
        is what is known of the draft.

        Raises ConfigError when the sidecar's port is taken or the benchmark profile cannot be used.
        """
        sidecar, self._settings = settings.sidecar, settings
        self._method = method_told or settings.method
        alone = engine_url is not None
        if engine_url is not None:
            engine_url = engine_url.rstrip("/")
        self.engine_url = engine_url or settings.base_url
        self._launch_state, self._clock, self._wall = launch_state, clock, wall
        self._interval = sidecar.scrape_interval_seconds
        self._client = own_client(settings, engine_url)
        self._rules = Evaluator(builtin.rules(settings))
        self._changed_alerts = changed_alerts
        self._notifier = self._new_notifier(settings)
        self._store = baseline.Store.of(settings, Path(sidecar.state_dir or state_dir))
        self._facts = facts or causes.ServerFacts(settings.method)
        past = self._store.load()
        self._changes = Changes(past.setup, baseline.setup(settings))
        profile = None
        if sidecar.benchmark_profile:
            profile = speedup.load(Path(sidecar.benchmark_profile))
        self.observer = Observer(
            spans=tuple(sorted({*WINDOWS, *builtin.windows(settings.alerts)})),
            policy=Policy(
                canary_timeout_seconds=sidecar.canary_timeout_seconds,
                canary_interval_seconds=sidecar.canary_interval_seconds,
            ),
            baseline=past,
            profile=profile,
            speculation_configured=settings.method is not None,
            draft_context_tokens=self._facts.draft_context_tokens,
        )
        telemetry = open_telemetry(visible_devices, settings.gpus_per_node)
        self._gpu = None
        if telemetry is not None:
            self._gpu = ThreadedTelemetry(telemetry, kept_seconds=READY_LOOKS * self._look_seconds)
        self._seen = _Seen(clock())
        self._growths = {name: Growth() for name in _GROWS}
        self._known: _Known | None = None
        self._logged: dict[str, bool] = {}
        self._stop, self._wake = threading.Event(), threading.Event()
        self._canaries = Canaries(
            self._client, settings, alone=alone, clock=clock, late=self._wake.set
        )
        self._version: str | None = None
        self._restarts = 0.0
        self._thread = threading.Thread(target=self._loop, name="sidecar", daemon=True)
        render = exposition(self.readings, model_name=settings.served_model_name)
        pages = Pages(render, self.status, self.probe, self.page)
        token = None
        if sidecar.token is not None:
            token = sidecar.token.get_secret_value()
        self._server = SidecarServer(sidecar.host, sidecar.port, pages, token)

    def _new_notifier(self, settings: Settings) -> Notifier:
        # The machine's name, since the address is loopback or 0.0.0.0 on every one of them.
        identity = {
            "model_name": settings.served_model_name,
            "instance": f"{platform.node()}:{settings.sidecar.port}",
        }
        alerts = settings.alerts
        times = NotifyTimes(repeat=alerts.repeat_interval_seconds, interval=self._interval)
        return Notifier(alerts.notify, identity=identity | alerts.labels, times=times)

    @property
    def url(self) -> str:
        """Where the sidecar listens."""
        return self._server.url

    def start(self) -> Watch:
        """Begin; returns at once."""
        self._server.start()
        self._notifier.start()
        self._thread.start()
        LOG.info("the sidecar watches %s", self.engine_url, extra={"url": self.url})
        return self

    def look(self) -> None:
        """Begin the next cycle now: something is known to have changed."""
        self._wake.set()

    def stalled_since(self, start: float) -> str | None:
        """Why the engine counts as stalled, proven by a look after ``start``; else None."""
        seen = self._seen
        if seen.observation is None or seen.at < start:
            return None
        assessment = seen.observation.assessment
        if assessment.condition != "stalled":
            return None
        return assessment.live.reason

    def stop(self) -> None:
        """End: send what receivers have not heard yet, keep the baseline, give the port back."""
        self._stop.set()
        self._wake.set()
        self._thread.join(STOP_SECONDS)
        seen = self._seen.observation
        if seen is not None and not self._thread.is_alive():
            # Why it ends, perhaps.
            self._alert(self._clock(), seen, self._canaries.added_to(self._launch_state()))
        self._notifier.stop()
        self._store.save(self.observer.baseline)
        self._server.stop()

    def readings(self) -> dict[MetricKey, float]:
        """Everything known at this moment."""
        seen, age = self._current()
        if seen.observation is None:
            return {}
        out = dict(seen.observation.readings)
        scrape_age = key("specserve_scrape_age_seconds")
        if scrape_age in out:
            out[scrape_age] += age
        info = key(
            "specserve_info",
            version=__version__,
            engine_version=seen.state.engine_version or "unknown",
            method=self._method or "none",
        )
        out |= self._rules.readings(seen.evaluation) | self._notifier.readings()
        return out | {info: 1.0}

    def status(self) -> StatusJson:
        """What /status returns."""
        seen, age = self._current()
        return status.build(
            self._settings,
            self.engine_url,
            seen.observation,
            seen.state,
            seen.evaluation.active,
            method=self._method,
            causes=seen.causes,
            age_seconds=age,
            last=self._last_numbers(),
        )

    def _last_numbers(self) -> LastNumbersJson | None:
        """The newest numbers of the engine, for while it has none."""
        known = self._known
        if known is None:
            return None
        age = max(0.0, self._clock() - known.at)
        return status.kept(known.readings, at=self._wall() - age, age_seconds=age)

    def probe(self, name: ProbeName) -> ProbeJson:
        """One verdict."""
        seen, age = self._current()
        return status.probe(name, seen.observation, age_seconds=age)

    def page(self) -> str:
        """The HTML page."""
        points = tuple(self.observer.history)
        return page.render(
            self.status(), points, refresh_seconds=max(5.0, self._interval), now=self._wall()
        )

    def _current(self) -> tuple[_Seen, float]:
        """What may still be said of the last cycle, and its age."""
        seen = self._seen
        age = max(0.0, self._clock() - seen.at)
        state = seen.state
        if state.engine_version is None:
            state = replace(state, engine_version=self._version)
        observation = aged(seen.observation, age, self._look_seconds)
        found = seen.causes
        if observation is not seen.observation:
            found = ()
        return replace(seen, observation=observation, state=state, causes=found), age

    @property
    def _timeout(self) -> float:
        """Of one read. Generous: an API server under load answers late, and late is not blind."""
        return max(10.0, self._interval)

    @property
    def _look_seconds(self) -> float:
        return self._interval + self._timeout

    def _loop(self) -> None:
        while not self._stop.is_set():
            started = self._clock()
            try:
                self.cycle()
            except Exception:
                # A bug of ours: the next look may succeed, and while none does the verdicts age.
                LOG.exception("a look at the engine failed")
            self._wake.wait(max(0.0, self._interval - (self._clock() - started)))
            self._wake.clear()

    def cycle(self) -> None:
        """Scrape, judge, evaluate, publish: once."""
        self._take_changed_alerts()
        state = self._launch_state()
        back = self._canaries.collect()
        if back is not None:
            self.observer.canary_done(self._clock(), back.outcome)
            if back.started_up:
                self.observer.forget()
        state = self._canaries.added_to(state)
        found = scrape(self._client, now=self._clock(), timeout=self._timeout, clock=self._clock)
        now = self._clock()
        observation = self.observer.observe(now, self._wall(), found, state.context)
        restarts = observation.readings[key("specserve_engine_restarts_total")]
        if restarts != self._restarts:
            self._restarts = restarts
            self._canaries.forget()
        self._alert(now, observation, state)
        assessment = observation.assessment
        self._log(assessment)
        if observation.keep_baseline:
            self._store.save(self.observer.baseline)
        if assessment.wants_canary:
            self.observer.canary_sent(now)
            self._canaries.send(found)
        calm = assessment.condition in ("idle", "progressing")
        if assessment.ready.ok or (self._canaries.withholds and calm):
            self._canaries.compare(now)
        if self._version is None and found.snapshot is not None and state.engine_version is None:
            self._version = engine_version(self._client)

    def _take_changed_alerts(self) -> None:
        """Go on with the alerts that the config has now; the engine is not touched."""
        settings = self._changed_alerts()
        if settings is None:
            return
        before, now = self._settings.alerts, settings.alerts
        self._settings = self._settings.model_copy(update={"alerts": now})
        self._rules.take(builtin.rules(self._settings))
        uncounted = builtin.windows(now) - set(self.observer.spans)
        if uncounted:
            LOG.warning("a window of %g s is counted from the next start on", min(uncounted))
        told = before.notify, before.labels, before.repeat_interval_seconds
        if told != (now.notify, now.labels, now.repeat_interval_seconds):
            old, self._notifier = self._notifier, self._new_notifier(self._settings)
            self._notifier.start()
            old.stop()
        LOG.info("alerts have changed in the config and are in force")

    def _alert(self, now: float, observation: Observation, state: LaunchState) -> None:
        """Evaluate the rules, tell receivers and the log, publish."""
        readings = observation.readings | self._elsewhere(state)
        found = self._causes(readings, state)
        if self._settings.method is not None:
            suspect = float(causes.suspects_output(found))
            readings[key("specserve_output_suspect")] = suspect
        evaluation = self._rules.evaluate(readings, now=now, at=self._wall(), causes=found)
        self._notifier.publish(evaluation.to_send, now=now)
        for alert in evaluation.changed:
            level = logging.INFO
            if alert.state is AlertState.FIRING:
                level = logging.WARNING
            extra = {
                "severity": alert.severity,
                "detail": alert.description,
                "inhibited_by": alert.inhibited_by,
            }
            LOG.log(level, "alert %s %s", alert.name, alert.state.value, extra=extra)
        seen = replace(observation, readings=readings)
        if status.has_numbers(readings):
            self._known = _Known(now, readings)
        self._seen = _Seen(now, seen, evaluation, state, found)

    def _causes(self, readings: Readings, state: LaunchState) -> tuple[causes.Cause, ...]:
        """What explains the present best; the record of the setup is kept when it changes."""
        wall = self._wall()
        restarts = readings[key("specserve_engine_restarts_total")]
        changed = self._changes.observe(wall, restarts, state.engine_version or self._version)
        if changed is not None:
            self.observer.baseline.setup = changed
            self._store.save(self.observer.baseline)
        facts = replace(self._facts, changes=self._changes.now(wall))
        return causes.find(readings, facts)

    def _host(self, state: LaunchState) -> dict[MetricKey, float]:
        """What the engine's processes hold of the host; nothing beside an engine that something
        else started."""
        used = host_use(state.engine_pids)
        if used is None:
            return {}
        now, out = self._clock(), {}
        for name, value in (
            ("specserve_engine_host_memory_bytes", used.memory_bytes),
            ("specserve_engine_threads", used.threads),
        ):
            out[key(name)] = value
            grown = self._growths[name].observe(now, value, state.engine_pids)
            if grown is not None:
                out[key("specserve_engine_host_growth_ratio", of=_GROWS[name])] = grown
        return out

    def _elsewhere(self, state: LaunchState) -> dict[MetricKey, float]:
        """Readings that do not come from the engine's metrics."""
        out = self._host(state)
        if self._gpu is not None:
            out |= self._gpu.readings(state.engine_pids)
        found: dict[str, float | None] = {"specserve_output_mismatch": output_mismatch(state)}
        if state.canary is not None:
            greedy, default = "specserve_canary_", "specserve_canary_default_"
            rate = "position0_acceptance_rate"
            found[greedy + rate] = state.canary.position0_acceptance
            found[default + rate] = state.canary.default_position0_acceptance
        return out | {key(name): value for name, value in found.items() if value is not None}

    def _log(self, assessment: Assessment) -> None:
        """Say what changed, with the reason."""
        for name in ("started", "live", "ready"):
            verdict: ProbeVerdict = getattr(assessment, name)
            if self._logged.get(name) is verdict.ok:
                continue
            self._logged[name] = verdict.ok
            level, word = logging.INFO, "yes"
            if not verdict.ok:
                word = "no"
                if name == "live":
                    level = logging.ERROR
            extra = {"reason": verdict.reason, "condition": assessment.condition}
            LOG.log(level, "%s: %s", name, word, extra=extra)
