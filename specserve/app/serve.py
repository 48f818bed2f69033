"""The composition root: settings -> checks -> command -> supervised engine, with the sidecar beside
it.

Nothing is printed here: the caller gives a :class:`Reporter`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from specserve.app.launch import Launch
from specserve.config.schema import Settings
from specserve.engine.command import args
from specserve.engine.http import metrics
from specserve.engine.http.client import EngineError, own_client
from specserve.engine.inside import repairs
from specserve.engine.output import loading, logs, stated
from specserve.errors import ConfigError, EngineStartError
from specserve.supervise import leftovers, ports
from specserve.supervise.child import Child
from specserve.supervise.output import EngineLog, EngineWarnings
from specserve.supervise.readiness import HEALTH_SECONDS, Readiness
from specserve.supervise.report import Reporter, Serving
from specserve.supervise.state import EngineState, Event, Failed, Lifecycle, Limits, Ready
from specserve.supervise.supervisor import Hooks, Supervisor
from specserve.supervise.verdict import Drained, LastSeen, judge

if TYPE_CHECKING:
    from specserve.app.sidecar import Watch
    from specserve.engine.canary.run import CanaryResult
    from specserve.sidecar.launch_state import LaunchState

DRAIN_MARGIN_SECONDS = 10.0
"""On top of the engine's own drain time: after its last request it still frees the GPU."""

FIRST_LOOK_SECONDS = 1.0
"""The longest that the stop signal waits for a count of what runs; it takes milliseconds."""
DRAIN_LOOK_SECONDS = 0.1
"""Between two looks at what still runs."""

SAID_SECONDS = 1.0
"""A load that took less is not worth a line."""

_log = logging.getLogger("specserve.serve")


def clear(settings: Settings, *, environ: Mapping[str, str], reap: bool) -> list[str]:
    """See that nothing is in the way: an earlier run's engine, or a process that holds our ports.

    Before the checks, because what an engine left behind holds would count against the memory plan.
    Returns what was reaped. Raises EngineStartError.
    """
    folder = leftovers.folders(environ).run
    leftovers.make_private(folder)
    return leftovers.require_clean(folder, _ports(settings), reap=reap)


@contextmanager
def alone(settings: Settings, *, environ: Mapping[str, str]) -> Iterator[list[str]]:
    """Be the only launch on these ports until the block ends; yields what to note.

    Raises EngineStartError, naming the other.
    """
    folder = leftovers.folders(environ).run
    leftovers.make_private(folder)
    numbers = {key: port for key, (_, port) in _ports(settings).items()}
    with ports.claimed(folder, numbers) as notes:
        yield notes


def _ports(settings: Settings) -> dict[str, tuple[str, int]]:
    """Config key -> host and port."""
    server, sidecar = settings.server, settings.sidecar
    if settings.engine.node_rank > 0:  # it follows, and listens nowhere
        return {}
    found = {"server.port": (server.host, server.port)}
    if sidecar.enabled:
        found["sidecar.port"] = (sidecar.host, sidecar.port)
    return found


def run(launch: Launch, report: Reporter) -> None:
    """Start, watch and end the engine. Returns after a clean stop.

    Raises EngineStartError, EngineLost or Interrupted, with the cause named and the engine's last
    lines.
    """
    for note in launch.notes:
        report.note(note)
    if launch.report is not None:
        for finding in launch.report.findings:
            report.finding(finding)
    with EngineLog(launch.log, launch.secrets) as log:
        _Run(launch, report, log).run()


class _Run:
    """One launch, from the first start to the last stop."""

    def __init__(self, launch: Launch, report: Reporter, log: EngineLog) -> None:
        self._launch, self._report, self._log = launch, report, log
        settings = launch.settings
        self._client = own_client(settings)
        self._readiness = Readiness(
            self._client, settings.served_model_name, self._canary, self._stranger
        )
        self._said_unseen = False
        self._drained = Drained()
        self._drain: threading.Thread | None = None
        self._first_look = threading.Event()
        self._follows = settings.engine.node_rank > 0
        hooks = Hooks(self._spawn, self._check_ready, self._check_alive, self._changed, self._gone)
        self._limits = limits(settings)
        self._supervisor = Supervisor(hooks, self._limits)
        self._phases, self._started = ["starting"], time.monotonic()
        self._seen, self._served = LastSeen(launch.log), False
        self._warnings = EngineWarnings()
        self._telling = threading.Lock()
        self._record: Path | None = None
        self._canary_result: CanaryResult | None = None
        self._said = logs.EngineReport()
        self._statement: str | None = None
        self._loaded: loading.WeightsLoaded | None = None
        self._held: tuple[stated.Held, ...] = ()
        self._reconciliation: dict[str, JsonValue] | None = None
        self._repairs: tuple[str, ...] = ()
        self._sidecar: Watch | None = None
        if settings.sidecar.enabled and not self._follows:
            self._sidecar = self._watch()

    def run(self) -> None:
        """Raises unless the engine stopped cleanly.

        The sidecar outlives the engine: it sees the drain to its end.
        """
        if self._sidecar is not None:
            self._sidecar.start()
        try:
            machine = self._supervisor.run()
        finally:
            if self._sidecar is not None:
                self._sidecar.stop()
        judge(machine, self._seen, self._limits)

    def _watch(self) -> Watch:
        from specserve.app.sidecar import Watch
        from specserve.app.traits import of_models, of_settings

        found = self._launch.report
        if found is not None:
            facts = of_models(self._launch.settings, found.target, found.draft)
        else:
            facts = of_settings(self._launch.settings, self._launch.env)
        try:
            return Watch(
                self._launch.settings,
                facts=facts,
                launch_state=self._launch_state,
                state_dir=self._launch.state_folder or self._launch.folder,
                visible_devices=self._launch.visible_devices,
                changed_alerts=self._launch.changed_alerts,
            )
        except ConfigError as error:
            if [problem.where for problem in error.problems] == ["sidecar.port"]:
                # It was free a moment ago: a port that is taken is no fault of the config.
                raise EngineStartError(error.problems) from error
            raise

    def _launch_state(self) -> LaunchState:
        """What the sidecar cannot read from the engine's metrics."""
        from specserve.sidecar.launch_state import LaunchState
        from specserve.sidecar.probe import Context

        machine, child, launch = self._supervisor.machine, self._supervisor.child, self._launch
        state = machine.state
        if machine == Lifecycle():
            state = EngineState.STARTING
        draining = state is EngineState.STOPPING and machine.stopped_from is EngineState.RUNNING
        plan = None
        pids: tuple[int, ...] = ()
        if launch.report is not None and launch.report.plan is not None:
            plan = launch.report.plan.as_dict()
        if child is not None:
            pids = child.session.members()
        return LaunchState(
            context=Context(state.value, draining=draining),
            engine_version=launch.engine_version,
            command=args.public_line(launch.command),
            plan=plan,
            reported=self._said,
            held=self._held,
            reconciliation=self._reconciliation,
            canary=self._canary_result,
            repairs=self._repairs,
            engine_pids=pids,
        )

    def _spawn(self) -> Child:
        self._statement, self._loaded = None, None
        self._phases, self._started = ["starting"], time.monotonic()
        self._seen, self._served = LastSeen(self._launch.log), False
        self._tell()
        child = Child(self._launch.command.argv, self._launch.env, self._line, tied=True)
        self._keep_record(child)
        return child

    def _keep_record(self, child: Child) -> None:
        """Where that cannot be done, as on a full disk, the engine serves all the same."""
        self._record, folder = None, self._launch.folder
        record = leftovers.record_of(
            child.session, port=self._launch.settings.server.port, log=self._launch.log
        )
        unknown = "if specserve is killed, the next start will not know this engine"
        if record is None:
            self._report.note(f"Warning: /proc cannot be read; {unknown}")
            return
        try:
            self._record = record.write(folder)
        except OSError as error:
            self._report.note(
                f"Warning: {folder}: cannot be written ({error.strerror}); {unknown}. "
                "Fix: free some space there, or export XDG_STATE_HOME=another"
            )

    def _line(self, raw: str) -> None:
        """One line of the engine's output; called in the thread that drains it."""
        line = self._log.write(raw)
        self._report.engine_output(line)
        if self._statement is None and stated.is_statement(line):
            self._statement = line  # kept here: progress bars may push it out of the last lines
        warning = self._warnings.of(line)
        if warning:
            # An engine that is told to end complains of being ended; the log has it.
            if self._supervisor.machine.state is not EngineState.STOPPING:
                self._report.engine_line(warning)
        elif warning is None and self._supervisor.machine.state is EngineState.STARTING:
            phase = logs.phase(line)
            if phase is not None:
                self._tell(phase)
            took = loading.seconds(line)
            if took is not None and took >= SAID_SECONDS:
                self._tell_load(took)

    def _tell_load(self, took: float) -> None:
        """The speed at which the target's weights came, once: what follows is other workers' or the
        draft's."""
        report = self._launch.report
        if self._loaded is not None or report is None or report.target is None:
            return
        weights = report.target.total_size_bytes
        if weights is None:
            return
        self._loaded = loading.WeightsLoaded(weights, took, self._read_from_storage())
        self._report.note(self._loaded.words)
        if self._loaded.warning is not None:
            self._report.note(f"Warning: {self._loaded.warning}")

    def _read_from_storage(self) -> int | None:
        """What the engine's processes have read from storage; None where one does not tell."""
        import psutil

        child = self._supervisor.child
        if child is None:
            return None
        try:
            return sum(
                psutil.Process(pid).io_counters().read_bytes for pid in child.session.members()
            )
        except (psutil.Error, OSError):
            return None

    def _tell(self, phase: str | None = None) -> None:
        """Say where it is. Phases only go forward; a line of an earlier one is its echo. The thread
        that drains the output and the one that checks both come here."""
        with self._telling:
            if phase is not None and phase not in self._phases:
                self._phases.append(phase)
            self._report.phase(self._phases[-1], time.monotonic() - self._started)

    def _check_ready(self) -> Event | None:
        self._tell()
        if self._follows:  # it has no API: that its process lives is all that can be known here
            return Ready()
        return self._readiness.check_ready()

    def _check_alive(self) -> Event | None:
        if self._follows:
            return None
        return self._readiness.check_alive() or self._hang()

    def _hang(self) -> Event | None:
        """A hang, where it is to be ended: proven by the sidecar, of this engine, after it was
        ready."""
        machine = self._supervisor.machine
        if (
            not self._launch.settings.engine.restart_when_stalled
            or self._sidecar is None
            or machine.state is not EngineState.RUNNING
        ):
            return None
        reason = self._sidecar.stalled_since(machine.since)
        if reason is None:
            return None
        return Failed(f"it hangs: {reason}")

    def _stranger(self) -> str | None:
        """Who it is that answers in our engine's place; None when it is ours, or cannot be told."""
        child, port = self._supervisor.child, self._launch.settings.server.port
        if child is None:
            return "the engine has ended"
        who, words = ports.answerer(child.session, port)
        if who is ports.Answerer.STRANGER:
            return words
        if who is ports.Answerer.UNSEEN and not self._said_unseen:
            run = self._client.run_id(timeout=HEALTH_SECONDS)
            if run is not None and run != child.session.run:
                return f"port {port} is answered by another engine of specserve"
            if run is None:
                self._said_unseen = True
                self._report.note(f"Warning: {words}; ready is whatever answers there")
        return None

    def _canary(self) -> Failed | None:
        """Why it must not be called ready. What is merely doubtful is said and let pass."""
        from specserve.engine.canary import run as canary

        self._tell("canary")
        settings = self._launch.settings
        result = self._canary_result = canary.run(self._client, settings)
        if result.verdict == "ok":
            return None
        words = f"canary: {result.verdict}: {'; '.join(result.reasons)}"
        if result.blocks(settings.engine.canary):
            key = "acceptance_policy"
            if result.verdict == "corrupt":
                key = "policy"
            off = "--set speculative_decoding.enabled=false"
            fix = f"{off}; to serve all the same: --set engine.canary.{key}=warn"
            return Failed(words, retry=False, fix=fix)
        self._report.note(words)
        return None

    def _watch_drain(self, child: Child) -> None:
        """Count what still runs, for as long as it answers; the first time before the signal."""
        self._look_at_drain(0.0)
        began = time.monotonic()
        self._first_look.set()
        while child.poll() is None:
            time.sleep(DRAIN_LOOK_SECONDS)
            self._look_at_drain(time.monotonic() - began)
        self._drained = replace(self._drained, ended_seconds=time.monotonic() - began)

    def _look_at_drain(self, seconds: float) -> None:
        with suppress(EngineError, metrics.MetricsError):
            # In this order: a core that has ended with nothing left to do is not dead.
            is_alive = self._client.health(timeout=HEALTH_SECONDS)
            text = self._client.metrics_text(timeout=HEALTH_SECONDS)
            seen = metrics.parse(text, at_seconds=time.monotonic())
            running = seen.total("running")
            if running is not None:
                unfinished = round(running + (seen.total("waiting") or 0))
                self._drained = Drained(unfinished, not is_alive, seconds)

    def _changed(self, machine: Lifecycle, reason: str) -> None:
        _log.debug("%s: %s", machine.state, reason)
        drains = (
            machine.state is EngineState.STOPPING and machine.stopped_from is EngineState.RUNNING
        )
        child = self._supervisor.child
        if drains and child is not None and self._drain is None and not self._follows:
            self._drain = threading.Thread(
                target=self._watch_drain, args=(child,), name="drain", daemon=True
            )
            self._drain.start()
            self._first_look.wait(FIRST_LOOK_SECONDS)
        self._report.changed(machine.state, reason)
        if machine.state is EngineState.RUNNING:
            self._served = True
            lines: list[str] = []
            if self._supervisor.child is not None:
                lines = self._supervisor.child.lines()
            self._said, self._repairs = logs.read_report(lines), repairs.applied_in(lines)
            statement = stated.read([self._statement or ""])
            self._held = stated.hold(
                self._launch.settings, statement, self._said.attention_backends
            )
            if self._follows:
                self._report.note(follows(self._launch.settings))
            else:
                self._report.ready(self._serving())
                self._reconcile()
        # Last, when all that it tells is known; or /readyz would say so an interval later.
        if self._sidecar is not None:
            self._sidecar.look()

    def _reconcile(self) -> None:
        """Hold the engine's own memory figures against the plan, and keep them for the next plan
        if asked to."""
        from specserve.memory import calibration

        launch = self._launch
        if launch.report is None or launch.report.plan is None or not launch.report.plan.gpus:
            return
        planned = launch.report.plan
        found = calibration.reconcile(planned, self._said)
        self._reconciliation = found.as_dict()
        if found.warning:
            self._report.note(f"Warning: {found.warning}")
        if launch.calibrate is None:
            return
        name = calibration.key(launch.settings, launch.engine_version, planned.gpu_name)
        measured = calibration.measure(planned, self._said, key=name, engine=launch.engine_version)
        if measured is None:
            self._report.note("the engine did not say enough to calibrate the memory plan")
            return
        try:
            self._report.note(
                f"memory figures kept in {calibration.save(measured, launch.calibrate)}"
            )
        except OSError as error:  # the server is up, and stays so
            path = calibration.path_for(launch.calibrate)
            self._report.note(f"Warning: {path}: cannot be written ({error.strerror})")

    def _serving(self) -> Serving:
        settings, said = self._launch.settings, self._said
        tokens = sidecar_url = None
        if settings.method:
            tokens = settings.num_speculative_tokens
        if self._sidecar is not None:
            sidecar_url = self._sidecar.url
        return Serving(
            url=f"{settings.base_url}/v1",
            model=settings.served_model_name,
            method=settings.method,
            num_speculative_tokens=tokens,
            kv_cache_tokens=said.kv_cache_tokens,
            ready_seconds=time.monotonic() - self._started,
            sidecar_url=sidecar_url,
            log=self._launch.log,
            as_asked=stated.summary(self._held) or None,
            differences=tuple(held.warning for held in self._held if held.warning is not None),
        )

    def _gone(self, child: Child) -> None:
        if self._drain is not None:
            self._drain.join(FIRST_LOOK_SECONDS)
        self._seen = LastSeen(
            self._launch.log,
            self._phases[-1],
            tuple(child.lines()),
            child.poll(),
            self._readiness.last_answer,
            self._drained,
            self._served,
        )
        if self._record is not None and not child.session.members():
            leftovers.forget(self._record)


def follows(settings: Settings) -> str:
    """What a node says that does not lead."""
    engine = settings.engine
    place = f"node {engine.node_rank} of {engine.node_count}"
    return f"{place} works for {engine.leader_address}, which has the API"


def limits(settings: Settings) -> Limits:
    """The supervisor's times and counts."""
    engine = settings.engine
    return Limits(
        start_timeout_seconds=engine.startup_timeout_seconds,
        drain_timeout_seconds=engine.drain_timeout_seconds + DRAIN_MARGIN_SECONDS,
        engine_drain_seconds=engine.drain_timeout_seconds,
        max_restarts=engine.max_restarts,
        backoff_seconds=engine.restart_backoff_seconds,
    )
