"""The composition of the sidecar: client, observer, alert rules, receivers, HTTP server.

``serve`` starts it beside the engine that it launched; ``specserve sidecar`` starts it beside any vLLM server.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specserve import __version__
from specserve.alert import builtin
from specserve.alert.evaluate import Evaluation, Evaluator, importance
from specserve.alert.notify import Notifier, Pace
from specserve.alert.rules import State
from specserve.config.schema import Settings
from specserve.engine.http.client import client_of
from specserve.gpu.telemetry import Detached, open_telemetry
from specserve.metric_families import WINDOWS, MetricKey, key
from specserve.sidecar import baseline, page, speedup, status
from specserve.sidecar.canaries import Canaries, output_mismatch
from specserve.sidecar.collector import exposition
from specserve.sidecar.contact import engine_version, scrape
from specserve.sidecar.observer import READY_LOOKS, Observation, Observer, aged
from specserve.sidecar.probe import Assessment, Policy, context_of
from specserve.sidecar.server import Pages, Server
from specserve.supervise.leftovers import runtime_folder

LOG = logging.getLogger("specserve.sidecar")
STOP_SECONDS = 2.0
"""A read that a hung engine never answers is not waited for."""
Facts = Callable[[], Mapping[str, Any]]
"""What the caller knows and the engine's metrics do not tell. All optional:

``state`` of the supervisor, ``draining``, ``blocked`` (why readiness is withheld), ``engine_version``, ``command``
(redacted), ``plan``, ``actual`` and ``reconciliation`` (JSON), ``canary`` (JSON of the start-up canary, with
``verdict``, ``compared_tokens`` and ``position0_acceptance``), ``repairs``, ``engine_pids``.
"""


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_STATE_HOME/specserve``, by default under ``~/.local/state``, else in the temp folder: by the records of
    `launch`."""
    records = runtime_folder(environ)
    return records.parent if records.name == "run" else records


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last cycle left for the HTTP threads; replaced whole, never changed."""

    at: float
    observation: Observation | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    facts: Mapping[str, Any] | None = None


class Watch:
    """The running sidecar."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine_url: str | None = None,
        facts: Facts = dict,
        state_dir: Path,
        visible_devices: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``engine_url`` None watches the engine that these settings launch. Raises ConfigError when the sidecar's
        port is taken or the benchmark profile cannot be used."""
        sidecar, self._settings = settings.sidecar, settings
        alone = engine_url is not None
        self.engine_url = (engine_url or settings.base_url).rstrip("/")
        self._facts, self._clock, self._wall = facts, clock, wall
        self._interval = sidecar.scrape_interval_seconds
        self._client = client_of(settings, self.engine_url, alone=alone)
        self._rules = Evaluator(builtin.rules(settings))
        # The machine's name, since the address is loopback or 0.0.0.0 on every one of them.
        identity = {
            "model_name": settings.served_model_name,
            "instance": f"{platform.node()}:{sidecar.port}",
        }
        pace = Pace(repeat=settings.alerts.repeat_interval_seconds, interval=self._interval)
        self._notifier = Notifier(
            settings.alerts.notify, identity={**identity, **settings.alerts.labels}, pace=pace
        )
        folder = Path(sidecar.state_dir) if sidecar.state_dir else state_dir
        self._baseline_path = (
            folder / f"baseline-{settings.server.port}-{baseline.identity(settings)}.json"
        )
        profile = sidecar.benchmark_profile
        self.observer = Observer(
            spans=tuple(sorted({*WINDOWS, *builtin.windows(settings.alerts)})),
            policy=Policy(
                canary_timeout_seconds=sidecar.canary_timeout_seconds,
                canary_interval_seconds=sidecar.canary_interval_seconds,
            ),
            baseline=baseline.load(self._baseline_path),
            profile=speedup.load(Path(profile)) if profile else None,
            speculation_configured=settings.method is not None,
        )
        target = settings.models.target_model
        gpus = (
            target.tensor_parallel_size
            * target.pipeline_parallel_size
            // settings.engine.node_count
        )
        telemetry = open_telemetry(visible_devices, gpus)
        self._gpu = (
            Detached(telemetry, kept_seconds=READY_LOOKS * self._look_seconds)
            if telemetry
            else None
        )
        self._seen, self._verdicts = _Seen(clock()), ("", "", "")
        self._stop, self._wake = threading.Event(), threading.Event()
        self._canaries = Canaries(
            self._client, settings, alone=alone, clock=clock, late=self._wake.set
        )
        self._version: str | None = None
        self._restarts = 0.0
        self._thread = threading.Thread(target=self._loop, name="sidecar", daemon=True)
        render = exposition(self.readings, model_name=settings.served_model_name)
        self._server = Server(
            sidecar.host, sidecar.port, Pages(render, self.status, self.probe, self.page)
        )

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

    def stop(self) -> None:
        """End: send what receivers have not heard yet, keep the baseline, give the port back."""
        self._stop.set()
        self._wake.set()
        self._thread.join(STOP_SECONDS)
        if (seen := self._seen.observation) is not None and not self._thread.is_alive():
            self._alert(
                self._clock(), seen, self._canaries.facts() | dict(self._facts())
            )  # why it ends, perhaps
        self._notifier.stop()
        baseline.save(self.observer.baseline, self._baseline_path)
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
        return (
            out
            | self._rules.readings(seen.evaluation)
            | self._notifier.readings()
            | self._info(seen)
        )

    def status(self) -> dict[str, Any]:
        """What /status answers."""
        seen, age = self._current()
        facts = {"engine_version": self._version, **(seen.facts or {})}
        found = status.build(
            self._settings, self.engine_url, seen.observation, facts, age_seconds=age
        )
        return {
            **found,
            "alerts": [a.as_dict() for a in sorted(seen.evaluation.active, key=importance)],
        }

    def probe(self, name: str) -> dict[str, Any]:
        """One verdict: ``live``, ``ready`` or ``started``."""
        seen, age = self._current()
        return status.probe(name, seen.observation, age_seconds=age)

    def page(self) -> str:
        """The HTML page."""
        points = tuple(self.observer.history)
        return page.render(
            self.status(), points, refresh_seconds=max(5.0, self._interval), now=self._wall()
        )

    def _current(self) -> tuple[_Seen, float]:
        """What may be said of the last cycle, and its age."""
        seen = self._seen
        age = max(0.0, self._clock() - seen.at)
        return replace(seen, observation=aged(seen.observation, age, self._look_seconds)), age

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
            except (
                Exception
            ):  # a mistake of ours: the next look may be well, and while none is the verdicts age
                LOG.exception("a look at the engine failed")
            self._wake.wait(max(0.0, self._interval - (self._clock() - started)))
            self._wake.clear()

    def cycle(self) -> None:
        """Scrape, judge, evaluate, publish: once."""
        facts = dict(self._facts())
        if (back := self._canaries.collect()) is not None:
            self.observer.canary_done(self._clock(), back[0])
            if back[1]:
                self.observer.forget()
        facts = self._canaries.facts() | facts
        found = scrape(self._client, now=self._clock(), timeout=self._timeout, clock=self._clock)
        now = self._clock()
        observation = self.observer.observe(now, self._wall(), found, context_of(facts))
        if self._restarts != (
            restarts := observation.readings[key("specserve_engine_restarts_total")]
        ):
            self._restarts = restarts
            self._canaries.forget()
        self._alert(now, observation, facts)
        self._log(observation.assessment)
        if observation.keep_baseline:
            baseline.save(self.observer.baseline, self._baseline_path)
        if observation.assessment.wants_canary:
            self.observer.canary_sent(now)
            self._canaries.send(found)
        calm = observation.assessment.condition in ("idle", "progressing")
        if observation.assessment.ready.ok or (self._canaries.withholds and calm):
            self._canaries.compare(now)
        if self._version is None and found.snapshot is not None and "engine_version" not in facts:
            self._version = engine_version(self.engine_url)

    def _alert(self, now: float, observation: Observation, facts: Mapping[str, Any]) -> None:
        """Evaluate the rules, tell receivers and the log, publish."""
        observation = replace(observation, readings=observation.readings | self._outside(facts))
        evaluation = self._rules.evaluate(observation.readings, now=now, at=self._wall())
        self._notifier.publish(evaluation.to_send, now=now)
        for alert in evaluation.changed:
            level = logging.WARNING if alert.state is State.FIRING else logging.INFO
            extra = {
                "severity": alert.severity,
                "detail": alert.description,
                "inhibited_by": alert.inhibited_by,
            }
            LOG.log(level, "alert %s %s", alert.name, alert.state.value, extra=extra)
        self._seen = _Seen(now, observation, evaluation, facts)

    def _outside(self, facts: Mapping[str, Any]) -> dict[MetricKey, float]:
        """Readings that come from elsewhere than the engine's metrics."""
        pids: Collection[int] = facts.get("engine_pids") or ()
        out = self._gpu.readings(pids) if self._gpu else {}
        for sampling in ("", "default_"):
            rate = (facts.get("canary") or {}).get(f"{sampling}position0_acceptance")
            if rate is not None:
                out[key(f"specserve_canary_{sampling}position0_acceptance_rate")] = float(rate)
        if (mismatch := output_mismatch(facts)) is not None:
            out[key("specserve_output_mismatch")] = mismatch
        return out

    def _info(self, seen: _Seen) -> dict[MetricKey, float]:
        version = (seen.facts or {}).get("engine_version") or self._version or "unknown"
        labels = {
            "version": __version__,
            "engine_version": str(version),
            "method": self._settings.method or "none",
        }
        return {key("specserve_info", **labels): 1.0}

    def _log(self, assessment: Assessment) -> None:
        """Say what changed, with the reason."""
        parts = (
            ("started", assessment.started),
            ("live", assessment.live),
            ("ready", assessment.ready),
        )
        for index, (name, verdict) in enumerate(parts):
            word = f"{name}: {'yes' if verdict.ok else 'no'}"
            if word != self._verdicts[index]:
                level = logging.INFO if verdict.ok or name != "live" else logging.ERROR
                LOG.log(
                    level,
                    "%s",
                    word,
                    extra={"reason": verdict.reason, "condition": assessment.condition},
                )
        self._verdicts = tuple(f"{n}: {'yes' if v.ok else 'no'}" for n, v in parts)  # type: ignore[assignment]


def start(settings: Settings, **given: Any) -> Watch:
    """Start watching; ``given`` as in `Watch`."""
    return Watch(settings, **given).start()
