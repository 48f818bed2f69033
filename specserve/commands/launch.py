"""`specserve launch`: check, start, watch, drain."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from specserve.commands.options import config_command, follows, format_option, same_config

if TYPE_CHECKING:
    from rich.status import Status

    from specserve.app.launch import Launch
    from specserve.checkpoint.lock import Progress
    from specserve.config.load import Loaded
    from specserve.findings import Finding
    from specserve.supervise.owner import Owner
    from specserve.supervise.report import Reporter, Serving
    from specserve.supervise.state import EngineState

STILL_SECONDS = 30.0
"""A phase that lasts is mentioned again this often where nothing moves on the screen."""

_FILE = click.Path(dir_okay=False, path_type=Path)
_SHOWN = Path("-")


def owner_of(_context: click.Context, _option: click.Parameter, text: str | None) -> Owner | None:
    """Callback of ``--owner PID:TICKS``, with which bench and verify launch: it ends with them."""
    from specserve.supervise.owner import Owner

    if text is None:
        return None
    try:
        return Owner.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@config_command
@format_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the engine's command and environment; check and start nothing.",
)
@click.option(
    "--skip", multiple=True, metavar="CODE", help="Leave out a preflight finding by its code."
)
@click.option("--reap", is_flag=True, help="First end what a killed specserve left behind.")
@click.option(
    "--engine-log",
    type=_FILE,
    help="File for the engine's output; - shows it on standard error as well.",
)
@click.option(
    "--calibrate", is_flag=True, help="Keep the engine's own memory figures for the next plan."
)
@click.option(
    "--ready-file",
    type=_FILE,
    help="Written as JSON when the server is ready: for scripts that wait.",
)
@click.option("--owner", hidden=True, callback=owner_of)
@click.pass_context
def launch(
    context: click.Context,
    *,
    loaded: Loaded,
    output: str,
    dry_run: bool,
    skip: tuple[str, ...],
    reap: bool,
    engine_log: Path | None,
    ready_file: Path | None,
    calibrate: bool,
    owner: Owner | None,
) -> None:
    """Start the server of CONFIG and stay with it until it is stopped.

    SIGTERM and Ctrl-C drain: running requests finish, new ones get 503. A second signal ends it at
    once.
    """
    import os

    from specserve.app.launch import plan
    from specserve.errors import ConfigError

    if dry_run:
        planned = plan(loaded, environ=os.environ, check=False)
        show(planned, output, f"specserve launch {same_config(loaded)}")
        return
    if ready_file is not None and not ready_file.parent.is_dir():
        raise ConfigError(
            "there is no such folder; must be one to write to", where=f"--ready-file {ready_file}"
        )
    if ready_file is not None and _is_special(ready_file):
        raise ConfigError(
            "is a device or a pipe; must be a file", where=f"--ready-file {ready_file}"
        )
    debug = bool((context.obj or {}).get("debug"))
    shows_engine = engine_log == _SHOWN
    if shows_engine:
        engine_log = None
    run(
        loaded,
        lambda progress: plan(
            loaded,
            environ=os.environ,
            skip=skip,
            engine_log=engine_log,
            calibrate=calibrate,
            progress=progress,
        ),
        output=output,
        debug=debug,
        reap=reap,
        ready_file=ready_file,
        owner=owner,
        shows_engine=shows_engine,
    )


def _is_special(path: Path) -> bool:
    """A file of an earlier run is deleted at the start, which would delete a device, too."""
    import stat

    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return path.is_relative_to("/dev") or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode))


def show(planned: Launch, output: str, after: str | None = None) -> None:
    """The command on stdout, for a shell or as JSON, which is a YAML list too; notes on stderr."""
    import json

    from specserve.engine.command.args import masked_names, redacted, shell_line

    for note in planned.notes:
        click.echo(note, err=True)
    shown = redacted(planned.command)
    body = {"env": shown.env, "argv": shown.argv}
    click.echo(json.dumps(body, indent=1) if output == "json" else shell_line(shown))
    names = masked_names(planned.command)
    if names:
        click.echo(f"Masked above, passed on as they are: {', '.join(names)}", err=True)
    if after is not None and output == "text":
        follows(after, err=True)


def run(
    loaded: Loaded,
    plan: Callable[[Progress], Launch],
    *,
    output: str = "text",
    debug: bool = False,
    reap: bool = False,
    ready_file: Path | None = None,
    owner: Owner | None = None,
    shows_engine: bool = False,
) -> None:
    """Clear the way, plan and run, with this terminal as the reporter."""
    import os

    from specserve import log
    from specserve.app import serve

    if owner is not None:
        owner.end_with_it()
    animated = sys.stdout.isatty() and sys.stderr.isatty()
    with (
        serve.alone(loaded.settings, environ=os.environ) as notes,
        Display(
            animated=animated, output=output, ready_file=ready_file, shows_engine=shows_engine
        ) as display,
    ):
        # After the display, which puts log lines above its moving line.
        log.setup(debug=debug, secrets=loaded.secrets())
        if display.animated and not debug:
            # A person reads the block; the sidecar's turns of mind are for log files.
            logging.getLogger("specserve.sidecar").setLevel(logging.WARNING)
        display.phase("checking", 0.0)
        for note in (*notes, *serve.clear(loaded.settings, environ=os.environ, reap=reap)):
            display.say(note)
        serve.run(plan(display.hashed), display.reporter())


class Display:
    """Phases on one moving line on a terminal, one line each otherwise; then the block.

    Where ``output`` is json, stdout has nothing but the block, as JSON.
    """

    def __init__(
        self,
        *,
        animated: bool,
        output: str = "text",
        ready_file: Path | None = None,
        shows_engine: bool = False,
    ) -> None:
        self._shows_engine = shows_engine
        self._as_json = output == "json"
        self.animated, self._ready_file = animated and not self._as_json, ready_file
        self._status: Status | None = None
        self._phase, self._shown, self._began = "", 0.0, time.monotonic()

    def __enter__(self) -> Self:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)  # of an earlier run
        if self.animated:
            from rich.console import Console

            self._status = Console().status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._still()

    def reporter(self) -> Reporter:
        """The callables that serve wants."""
        from specserve.supervise.report import Reporter

        return Reporter(
            note=self.say,
            finding=_finding,
            phase=self.phase,
            engine_line=self._engine_line,
            engine_output=self._engine_output,
            changed=self._changed,
            ready=self._ready,
        )

    def _engine_line(self, line: str) -> None:
        """A warning of the engine's, where its whole output does not have it already."""
        if not self._shows_engine:
            _say(f"engine: {line}", err=True)

    def _engine_output(self, line: str) -> None:
        """Every line of the engine's, for whoever collects logs from here, as Kubernetes does."""
        if self._shows_engine:
            _say(line, err=True)

    def say(self, text: str) -> None:
        """Say something that is no answer to a script."""
        _say(text, err=self._as_json)

    def phase(self, name: str, seconds: float) -> None:
        """Show a phase of loading."""
        if self._status is not None:
            self._status.update(f"{name} ({seconds:.0f} s)")
        elif name != self._phase or seconds - self._shown >= STILL_SECONDS:
            self.say(f"{seconds:6.1f} s  {name}")
            self._phase, self._shown = name, seconds

    def hashed(self, file: str, _n: int) -> None:
        """Show that weights are read, which takes minutes; the checks themselves take a second."""
        self.phase(f"hashing {file}", time.monotonic() - self._began)

    def _changed(self, state: EngineState, reason: str) -> None:
        """Stops and restarts are said; that it starts and is ready is seen."""
        if state in ("stopping", "backoff", "stopped"):
            self.say(reason)

    def _ready(self, serving: Serving) -> None:
        self._still()
        if self._as_json:
            _say(as_json(serving))
        else:
            _say(block(serving))
        if self._ready_file is not None:
            try:
                write_ready(serving, self._ready_file)
            except (
                OSError
            ) as error:  # the server is up; only the script that waits has nothing to read
                _say(f"Warning: {self._ready_file}: cannot be written ({error.strerror})", err=True)

    def _still(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _say(text: str, *, err: bool = False) -> None:
    """Print. A reader that went away, or a closed terminal, is no reason to stop serving."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(text, err=err)


def _finding(finding: Finding) -> None:
    if finding.fix:
        fix = f"\n  Fix: {finding.fix}"
    else:
        fix = ""
    if finding.severity != "info":
        _say(f"{finding.severity.capitalize()}: {finding.where}: {finding.message}{fix}", err=True)


def write_ready(serving: Serving, path: Path) -> None:
    """What is known of the server, as JSON; a reader sees the whole file or none."""
    from specserve.files import write_whole

    write_whole(path, as_json(serving))


def as_json(serving: Serving) -> str:
    """What is known of the server."""
    import json
    from dataclasses import asdict

    return json.dumps(asdict(serving), default=str, indent=1)


def block(serving: Serving) -> str:
    """What a user needs now, once."""
    from specserve.units import duration

    rows = [
        ("URL", serving.url),
        ("model", serving.model),
        ("method", serving.method or "none, the target alone"),
        ("num_speculative_tokens", serving.num_speculative_tokens),
        (
            "KV cache tokens",
            None if serving.kv_cache_tokens is None else f"{serving.kv_cache_tokens:,}",
        ),
        ("time to ready", duration(serving.ready_seconds)),
        ("sidecar", serving.sidecar_url),
        ("engine log", serving.log),
        ("as asked", serving.as_asked),
        *(("Warning", difference) for difference in serving.differences),
    ]
    return "\n".join(
        ["Ready", *(f"  {name:<22}  {value}" for name, value in rows if value is not None)]
    )
