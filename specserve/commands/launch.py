"""`specserve launch`: check, start, watch, drain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specserve.commands.options import config_command

if TYPE_CHECKING:
    from specserve.config.load import Loaded
    from specserve.serve import Launch, Reporter, Serving


@click.command()
@config_command
@click.option("--dry-run", is_flag=True, help="Print the engine's command and environment; start nothing.")
@click.option("--skip", multiple=True, metavar="CODE", help="Leave out a preflight finding by its code.")
@click.option("--reap", is_flag=True, help="First end what a killed specserve left behind.")
@click.option("--engine-log", type=click.Path(dir_okay=False, path_type=Path), help="File for the engine's output.")
@click.pass_context
def launch(
    context: click.Context, *, loaded: Loaded, dry_run: bool, skip: tuple[str, ...], reap: bool, engine_log: Path | None
) -> None:
    """Start the server of CONFIG and stay with it until it is stopped.

    SIGTERM and Ctrl-C drain: running requests finish, new ones get 503. A second signal ends it at once.
    """
    import os

    from specserve import log, serve
    from specserve.engine.args import shell_line

    log.setup(debug=bool((context.obj or {}).get("debug")), secrets=loaded.secrets())
    plan = serve.plan(loaded, environ=os.environ, skip=skip, engine_log=engine_log)
    if dry_run:
        click.echo(shell_line(plan.command))
        return
    run(plan, reap=reap)


def run(plan: Launch, *, reap: bool = False) -> None:
    """Run a launch with this terminal as its reporter."""
    from specserve import serve

    display = Display(animated=click.get_text_stream("stdout").isatty())
    try:
        serve.run(plan, display.reporter(), reap=reap)
    finally:
        display.close()


class Display:
    """Phases on one moving line on a terminal, one line each otherwise; then the block."""

    def __init__(self, *, animated: bool) -> None:
        self._status = None
        if animated:
            from rich.console import Console

            self._status = Console().status("starting")
            self._status.start()

    def reporter(self) -> Reporter:
        """The callables that serve wants."""
        from specserve.serve import Reporter

        return Reporter(
            note=click.echo,
            finding=lambda f: click.echo(f"{f.severity}: {f.where}: {f.message}", err=True),
            phase=self._phase,
            engine_line=lambda line: click.echo(line, err=True),
            changed=lambda _, reason: click.echo(reason),
            ready=self._ready,
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._status is not None:
            self._status.stop()

    def _phase(self, name: str, seconds: float) -> None:
        if self._status is not None:
            self._status.update(f"{name} ({seconds:.0f} s)")
        else:
            click.echo(f"{seconds:6.1f} s  {name}")

    def _ready(self, serving: Serving) -> None:
        self.close()
        click.echo(block(serving))


def block(serving: Serving) -> str:
    """What a user needs now, once."""
    from specserve.units import duration

    rows = [
        ("URL", serving.url),
        ("model", serving.model),
        ("method", serving.method or "none (the target alone)"),
        ("num_speculative_tokens", serving.num_speculative_tokens),
        ("KV cache tokens", None if serving.kv_cache_tokens is None else f"{serving.kv_cache_tokens:,}"),
        ("ready in", duration(serving.ready_seconds)),
        ("sidecar", serving.sidecar_url),
        ("engine log", serving.log),
    ]
    return "\n".join(["Ready", *(f"  {name:<22}  {value}" for name, value in rows if value is not None)])
