"""The composition root: settings -> checks -> command -> supervised engine, with the sidecar beside it.

Nothing is printed here: whoever calls gives a :class:`Reporter`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specserve.config.load import Loaded
from specserve.config.schema import Settings
from specserve.engine import args, environment, introspect, logs
from specserve.engine.client import EngineClient
from specserve.errors import EngineLost, EngineStartError, Interrupted, PreflightRefused, Problem
from specserve.findings import Finding
from specserve.supervise import leftovers
from specserve.supervise.child import Child
from specserve.supervise.output import EngineLog, is_trouble
from specserve.supervise.readiness import Readiness
from specserve.supervise.state import Event, Failed, Limits, Machine, State
from specserve.supervise.supervisor import Hooks, Supervisor

TAIL_LINES = 20
DRAIN_MARGIN_SECONDS = 10.0
"""On top of the engine's own drain time: after its last request it still frees the GPU."""

_log = logging.getLogger("specserve.serve")


@dataclass(frozen=True)
class Serving:
    """What is known once the server is ready. None where the engine did not say."""

    url: str
    model: str
    method: str | None
    num_speculative_tokens: int | None
    kv_cache_tokens: int | None
    ready_seconds: float
    sidecar_url: str | None
    log: Path


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Reporter:
    """Whom to tell. Each may be called from another thread than the main one."""

    note: Callable[[str], None] = _silent
    finding: Callable[[Finding], None] = _silent
    phase: Callable[[str, float], None] = _silent
    """Phase of loading and seconds since the start; again and again while it lasts."""
    engine_line: Callable[[str], None] = _silent
    """A warning or an error of the engine."""
    changed: Callable[[State, str], None] = _silent
    ready: Callable[[Serving], None] = _silent


@dataclass(frozen=True)
class Launch:
    """Everything that is needed to start, decided but not begun."""

    settings: Settings
    command: args.EngineCommand
    """As it is shown: only what differs from the caller's environment."""
    env: Mapping[str, str]
    """The engine's whole environment."""
    folder: Path
    """For records and logs."""
    log: Path
    secrets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def plan(
    loaded: Loaded,
    *,
    environ: Mapping[str, str],
    skip: Sequence[str] = (),
    engine_log: Path | None = None,
    check: bool = True,
) -> Launch:
    """Check and decide; starts nothing. Raises PreflightRefused or ConfigError with everything that is wrong."""
    from specserve import gpu, preflight

    settings = loaded.settings
    engine = introspect.installed()
    if engine is None:
        raise PreflightRefused(
            "vLLM is not installed beside specserve; launch needs it",
            where="engine",
            fix="pip install 'specserve[gpu]', or 'specserve[cpu]' on a machine without a GPU",
        )
    findings: tuple[Finding, ...] = ()
    if check:
        report = preflight.run(loaded, skip=skip, environ=environ)
        preflight.require(report)
        findings = report.findings
    devices = gpu.devices()
    cpu = environment.on_cpu(engine.distribution, engine.version, None if devices is None else len(devices))
    prepared = environment.prepare(settings, environ, cpu=cpu)
    command = args.build(settings, installed=engine)
    folder = leftovers.runtime_folder(environ)
    return Launch(
        settings=settings,
        command=args.EngineCommand(command.argv, {**prepared.env, **command.env}),
        env={**prepared.over(environ), **command.env},
        folder=folder,
        log=engine_log or folder / f"engine-{settings.server.port}.log",
        secrets=loaded.secrets(),
        notes=prepared.notes,
        findings=findings,
    )


def run(launch: Launch, report: Reporter, *, reap: bool = False) -> None:
    """Start, watch and end the engine. Returns after a clean stop.

    Raises EngineStartError, EngineLost or Interrupted, with the cause named and the engine's last lines.
    """
    server = launch.settings.server
    leftovers.make_private(launch.folder)
    reaped = leftovers.require_clean(launch.folder, server.host, server.port, reap=reap)
    for note in [*reaped, *launch.notes]:
        report.note(note)
    for finding in launch.findings:
        report.finding(finding)
    with EngineLog(launch.log, launch.secrets) as log:
        _Run(launch, report, log).run()


class _Run:
    """One launch, from the first start to the last stop."""

    def __init__(self, launch: Launch, report: Reporter, log: EngineLog) -> None:
        self._launch, self._report, self._log = launch, report, log
        settings = launch.settings
        self._client = engine_client(settings)
        self._readiness = Readiness(self._client, settings.served_model_name, self._canary)
        hooks = Hooks(self._spawn, self._check_ready, self._readiness.check_alive, self._changed, self._gone)
        self._supervisor = Supervisor(hooks, limits(settings))
        self._phases, self._started = ["starting"], time.monotonic()
        self._end = End()
        self._record: Path | None = None

    def run(self) -> None:
        """Raises unless the engine stopped cleanly."""
        machine = self._supervisor.run()
        verdict(machine, self._end, self._launch)

    def _spawn(self) -> Child:
        self._phases, self._started = ["starting"], time.monotonic()
        self._end = End()
        server, argv = self._launch.settings.server, self._launch.command.argv
        child = Child(argv, self._launch.env, self._line)
        record = leftovers.record_of(child.pid, port=server.port, command=argv, log=str(self._launch.log))
        self._record = record.write(self._launch.folder)
        return child

    def _line(self, raw: str) -> None:
        """One line of the engine's output; called in the thread that drains it."""
        line = self._log.write(raw)
        if self._supervisor.machine.state is State.STARTING:
            self._enter(logs.phase(line))
        if is_trouble(line):
            self._report.engine_line(line)

    def _enter(self, phase: str | None) -> None:
        """Phases only go forward; a line of an earlier one is its echo."""
        if phase is not None and phase not in self._phases:
            self._phases.append(phase)
            self._report.phase(phase, time.monotonic() - self._started)

    def _check_ready(self) -> Event | None:
        self._report.phase(self._phases[-1], time.monotonic() - self._started)
        return self._readiness.check_ready()

    def _canary(self) -> Failed | None:
        """Why it must not be called ready. What is merely doubtful is said and let pass."""
        from specserve.engine import canary

        self._enter("canary")
        settings = self._launch.settings
        result = canary.run(self._client, settings)
        if result.verdict == "ok":
            return None
        words = f"canary: {result.verdict}: {'; '.join(result.reasons)}"
        if result.blocks(settings.engine.canary):
            key = "policy" if result.verdict == "corrupt" else "acceptance_policy"
            fix = f"--set speculative_decoding.enabled=false; to serve all the same: --set engine.canary.{key}=warn"
            return Failed(words, retry=False, fix=fix)
        self._report.note(words)
        return None

    def _changed(self, machine: Machine, reason: str) -> None:
        _log.debug("%s: %s", machine.state, reason)
        self._report.changed(machine.state, reason)
        if machine.state is State.RUNNING:
            self._report.ready(self._serving())

    def _serving(self) -> Serving:
        settings, child = self._launch.settings, self._supervisor.child
        sidecar = settings.sidecar
        return Serving(
            url=f"{settings.base_url}/v1",
            model=settings.served_model_name,
            method=settings.method,
            num_speculative_tokens=settings.speculative_decoding.num_speculative_tokens if settings.method else None,
            kv_cache_tokens=logs.read_report(child.lines() if child else ()).kv_cache_tokens,
            ready_seconds=time.monotonic() - self._started,
            sidecar_url=f"http://{sidecar.host}:{sidecar.port}" if sidecar.enabled else None,
            log=self._launch.log,
        )

    def _gone(self, child: Child) -> None:
        self._end = End(self._phases[-1], tuple(child.lines()), child.poll(), self._readiness.last_answer)
        if self._record is not None:
            self._record.unlink(missing_ok=True)


def limits(settings: Settings) -> Limits:
    """The supervisor's times and counts."""
    engine = settings.engine
    return Limits(
        start_timeout_seconds=engine.startup_timeout_seconds,
        drain_timeout_seconds=engine.drain_timeout_seconds + DRAIN_MARGIN_SECONDS,
        max_restarts=engine.max_restarts,
        backoff_seconds=engine.restart_backoff_seconds,
    )


def engine_client(settings: Settings) -> EngineClient:
    """A client of the engine on this machine. Its certificate is not checked: the name in it is not 127.0.0.1."""
    key = settings.server.api_key
    return EngineClient(
        settings.base_url,
        key.get_secret_value() if key else None,
        verify=settings.server.tls.cert_file is None,
        model=settings.served_model_name,
    )


@dataclass(frozen=True)
class End:
    """The last that was seen of an engine."""

    phase: str = "starting"
    lines: tuple[str, ...] = ()
    status: int | None = None
    answer: str | None = None
    """What the last readiness check met."""


def verdict(machine: Machine, end: End, launch: Launch) -> None:
    """The end of a run as an exception, or nothing after a clean stop."""
    if machine.state is State.FATAL:
        error = EngineLost if machine.was_ready else EngineStartError
        raise error([failure(machine, end, launch)])
    if machine.stopped_from is not State.RUNNING:
        raise Interrupted(f"{machine.stop_signal} before the engine was ready", where="launch")
    if machine.cut_short:
        raise Interrupted("ended without draining, as asked; running requests were cut off", where="launch")
    if machine.killed:
        drain = launch.settings.engine.drain_timeout_seconds
        raise EngineLost(
            f"did not end within {drain:g} s (and {DRAIN_MARGIN_SECONDS:g} s more) after SIGTERM and was killed; "
            "running requests were cut off",
            where="engine",
            fix=f"--set engine.drain_timeout_seconds={drain * 2:g}",
        )


def failure(machine: Machine, end: End, launch: Launch) -> Problem:
    """What happened, the cause where the log names one, and the last lines."""
    from specserve.engine import failures

    log = (f"whole log: {launch.log}",)
    cause = machine.cause or "is gone"
    if machine.fix is not None:  # our own verdict: the engine's lines have nothing to say about it
        return Problem(cause, "engine", (log,), machine.fix)
    named = failures.diagnose(end.lines, exit_status=end.status)
    what = f"{cause}, {'after it had been ready' if machine.was_ready else f'in phase {end.phase!r}'}"
    if named is not None:
        what += f"; {named.message}"
    elif end.answer is not None:
        what += f"; the last check met: {end.answer}"
    rows = [(line,) for line in end.lines[-TAIL_LINES:]]
    return Problem(what, "engine", (*rows, log), named.fix if named else f"read {launch.log}")
