"""The composition root: settings -> checks -> command -> supervised engine, with the sidecar beside it.

Nothing is printed here: whoever calls gives a :class:`Reporter`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path

from specserve.config.load import Loaded
from specserve.config.schema import Settings
from specserve.engine import args, environment, introspect, logs
from specserve.engine.client import EngineClient
from specserve.errors import ConfigError, EngineLost, EngineStartError, Interrupted, PreflightRefused, Problem
from specserve.findings import Finding
from specserve.log import Redactor
from specserve.supervise import leftovers
from specserve.supervise.child import Child
from specserve.supervise.readiness import Readiness
from specserve.supervise.state import Limits, Machine, State
from specserve.supervise.supervisor import Hooks, Supervisor

LOG_BYTES = 10 * 1024**2
"""Size at which the engine's log starts anew, keeping one older file."""
TAIL_LINES = 20
DRAIN_MARGIN_SECONDS = 10.0
"""On top of the engine's own drain time: it frees the GPU after the last request."""

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
    """Phase of loading, seconds since the start."""
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
    log: Path
    secrets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = field(default=())


def plan(
    loaded: Loaded, *, environ: Mapping[str, str], skip: Sequence[str] = (), engine_log: Path | None = None
) -> Launch:
    """Check and decide. Raises PreflightRefused or ConfigError with everything that is wrong; starts nothing."""
    from specserve import gpu, preflight

    settings = loaded.settings
    engine = introspect.installed()
    if engine is None:
        raise PreflightRefused(
            "vLLM is not installed beside specserve; launch needs it",
            where="engine",
            fix="pip install 'specserve[gpu]', or 'specserve[cpu]' on a machine without a GPU",
        )
    report = preflight.run(loaded, skip=skip)
    preflight.require(report)
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
        findings=report.findings,
    )


def run(launch: Launch, report: Reporter, *, reap: bool = False) -> None:
    """Start, watch and end the engine. Returns after a clean stop.

    Raises EngineStartError, EngineLost or Interrupted, with the cause named and the engine's last lines.
    """
    server = launch.settings.server
    for note in leftovers.require_clean(launch.folder, server.host, server.port, reap=reap):
        report.note(note)
    for note in launch.notes:
        report.note(note)
    with EngineLog(launch.log, launch.secrets) as log:
        _Run(launch, report, log).run()


class EngineLog:
    """The engine's output as a file, bounded in size, secrets redacted. A full disk does not stop the engine."""

    def __init__(self, path: Path, secrets: Sequence[str]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handler = RotatingFileHandler(path, mode="w", maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot be written ({error.strerror})", where=str(path), fix="--engine-log FILE"
            ) from error
        self._handler.addFilter(Redactor(secrets))
        self._handler.handleError = _silent  # type: ignore[assignment]

    def __enter__(self) -> EngineLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._handler.close()

    def write(self, line: str) -> None:
        """Append one line."""
        self._handler.handle(logging.makeLogRecord({"msg": line}))
        _log.debug("%s", line)


class _Run:
    """One launch, from the first start to the last stop."""

    def __init__(self, launch: Launch, report: Reporter, log: EngineLog) -> None:
        self._launch, self._report, self._log = launch, report, log
        settings = launch.settings
        self._client = engine_client(settings)
        self._readiness = Readiness(self._client, settings.served_model_name, self._canary)
        engine = settings.engine
        limits = Limits(
            start_timeout_seconds=engine.startup_timeout_seconds,
            drain_timeout_seconds=engine.drain_timeout_seconds + DRAIN_MARGIN_SECONDS,
            max_restarts=engine.max_restarts,
            backoff_seconds=engine.restart_backoff_seconds,
        )
        hooks = Hooks(self._spawn, self._readiness.check_ready, self._readiness.check_alive, self._changed, self._gone)
        self._supervisor = Supervisor(hooks, limits)
        self._phase, self._started = "starting", time.monotonic()
        self._lines: list[str] = []
        self._record: Path | None = None

    def run(self) -> None:
        """Raises unless the engine stopped cleanly."""
        verdict(self._supervisor.run(), self._phase, self._lines, self._launch)

    def _spawn(self) -> Child:
        self._phase, self._started = "starting", time.monotonic()
        child = Child(self._launch.command.argv, self._launch.env, self._line)
        server = self._launch.settings.server
        record = leftovers.record_of(
            child.pid, port=server.port, command=self._launch.command.argv, log=str(self._launch.log)
        )
        self._record = record.write(self._launch.folder)
        return child

    def _line(self, line: str) -> None:
        """One line of the engine's output; called in the thread that drains it."""
        self._log.write(line)
        if self._supervisor.machine.state is State.STARTING:
            phase = logs.phase(line)
            if phase is not None and phase != self._phase:
                self._phase = phase
                self._report.phase(phase, time.monotonic() - self._started)
        if is_trouble(line):
            self._report.engine_line(line)

    def _canary(self) -> str | None:
        self._phase = "canary"
        return None

    def _changed(self, machine: Machine, reason: str) -> None:
        self._report.changed(machine.state, reason)
        if machine.state is State.RUNNING:
            self._report.ready(self._serving())

    def _serving(self) -> Serving:
        settings, child = self._launch.settings, self._supervisor.child
        said = logs.read_report(child.lines() if child else ())
        sidecar = settings.sidecar
        return Serving(
            url=f"{settings.base_url}/v1",
            model=settings.served_model_name,
            method=settings.method,
            num_speculative_tokens=settings.speculative_decoding.num_speculative_tokens if settings.method else None,
            kv_cache_tokens=said.kv_cache_tokens,
            ready_seconds=time.monotonic() - self._started,
            sidecar_url=f"http://{sidecar.host}:{sidecar.port}" if sidecar.enabled else None,
            log=self._launch.log,
        )

    def _gone(self, child: Child) -> None:
        self._lines = child.lines()
        if self._record is not None:
            self._record.unlink(missing_ok=True)


def engine_client(settings: Settings) -> EngineClient:
    """A client of the engine on this machine. Its certificate is not checked: the name in it is not 127.0.0.1."""
    key = settings.server.api_key
    return EngineClient(
        settings.base_url,
        key.get_secret_value() if key else None,
        verify=settings.server.tls.cert_file is None,
        model=settings.served_model_name,
    )


def is_trouble(line: str) -> bool:
    """Whether the engine logged it as a warning or worse.

    >>> is_trouble("(EngineCore pid=7) WARNING 11-29 22:00:00 [x.py:1] slow"), is_trouble("INFO: no ERROR here")
    (True, False)
    """
    words = line.removeprefix("(").partition(") ")[2].split(None, 1) if line.startswith("(") else line.split(None, 1)
    return bool(words) and words[0].rstrip(":") in {"WARNING", "ERROR", "CRITICAL"}


def verdict(machine: Machine, phase: str, lines: Sequence[str], launch: Launch) -> None:
    """The end of a run as an exception, or nothing after a clean stop."""
    drain = launch.settings.engine.drain_timeout_seconds
    if machine.state is State.FATAL:
        error = EngineLost if machine.was_ready else EngineStartError
        raise error([failure(machine, phase, lines, launch)])
    if machine.stopped_from is not State.RUNNING or machine.cut_short:
        raise Interrupted(f"{machine.stop_signal} while {_doing(machine)}", where="launch")
    if machine.killed:
        raise EngineLost(
            f"did not end within {drain:g} s after SIGTERM and was killed; running requests were cut off",
            where="engine",
            fix=f"--set engine.drain_timeout_seconds={drain * 2:g}",
        )


def _doing(machine: Machine) -> str:
    if machine.cut_short and machine.stopped_from is State.RUNNING:
        return "draining; running requests were cut off"
    return "the engine was not ready"


def failure(machine: Machine, phase: str, lines: Sequence[str], launch: Launch) -> Problem:
    """What happened, the named cause where the log tells one, and the last lines."""
    what = machine.cause or "is gone"
    during = "after it had been ready" if machine.was_ready else f"while {phase}"
    tail = [("log", line) for line in lines[-TAIL_LINES:]]
    return Problem(f"{what} {during}", where="engine", facts=tuple(tail), fix=f"read {launch.log}")
