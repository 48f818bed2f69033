"""What a launch will be: command and environment, decided after the checks, before any start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.app.changing import ChangingAlerts
from specserve.config.load import Loaded
from specserve.config.schema import Settings
from specserve.engine.command import args, environment
from specserve.engine.installed import introspect
from specserve.engine.installed.chosen import KEY, Chosen, choose
from specserve.errors import Change, PreflightRefused, Problem
from specserve.supervise import leftovers

if TYPE_CHECKING:
    from specserve.app.preflight import PreflightReport
    from specserve.checkpoint.lock import Progress

DRAINING = "specserve.engine.inside.draining.RefuseWhileDraining"


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
    report: PreflightReport | None = None
    engine_version: str | None = None
    state_folder: Path | None = None
    """Where the sidecar keeps its baseline; None beside the records."""
    visible_devices: str | None = None
    changed_alerts: Callable[[], Settings | None] = lambda: None
    """The settings with other alerts, when the config file has some."""
    calibrate: Path | None = None
    """The config file beside which the engine's own memory figures are kept; None keeps nothing."""


def plan(
    loaded: Loaded,
    *,
    environ: Mapping[str, str],
    skip: Sequence[str] = (),
    engine_log: Path | None = None,
    check: bool = True,
    calibrate: bool = False,
    progress: Progress = lambda _name, _n: None,
) -> Launch:
    """Check and decide; starts nothing. Raises PreflightRefused or ConfigError with every problem.

    Without ``check``, for a look at the command, a vLLM is assumed where none is installed; a note
    says so.
    """
    from specserve.app import preflight

    settings = loaded.settings
    chosen = _chosen(settings, assume=not check)
    engine, notes = chosen.engine, tuple(f.message for f in chosen.findings)
    report = weights = calibrated = None
    if check:
        report = preflight.run(
            loaded,
            skip=skip,
            environ=environ,
            chosen=chosen,
            purpose="launch",
            progress=progress,
        )
        preflight.require(report)
        weights = report.weights_bytes
    if calibrate:
        calibrated = loaded.path
    prepared = environment.prepare(settings, environ, cpu=engine.on_cpu, weights_bytes=weights)
    command = args.build(settings, installed=engine, middleware=[DRAINING])
    folders = leftovers.folders(environ)
    return Launch(
        settings=settings,
        command=args.EngineCommand(command.argv, {**prepared.env, **command.env}),
        env={**prepared.over(environ), **command.env},
        folder=folders.run,
        log=engine_log or folders.run / f"engine-{settings.server.port}.log",
        secrets=loaded.secrets(),
        notes=(*notes, *prepared.notes),
        report=report,
        engine_version=engine.version,
        state_folder=folders.state,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        changed_alerts=ChangingAlerts(loaded, environ).changed,
        calibrate=calibrated,
    )


def _chosen(settings: Settings, *, assume: bool) -> Chosen:
    """The installed vLLM, which must be the stated one; one may be assumed for a look alone."""
    here = introspect.installed()
    chosen = choose(settings, here=here)
    if assume or chosen.is_here:
        return chosen
    if here is None:
        raise PreflightRefused(
            "vLLM is not installed beside specserve; launch needs it",
            where="engine",
            fix="pip install 'vllm>=0.28'; without a GPU: scripts/setup engine, in a clone",
        )
    stated = Problem(
        f"is '{settings.engine.version}'; must be the installed version: {here}",
        KEY,
        fix=str(Change(KEY, here.version)),
        code="engine-not-this",
        changes=(Change(KEY, here.version),),
    )
    raise PreflightRefused([stated])
