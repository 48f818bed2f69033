"""`specserve sidecar` and `specserve probe`: watch an engine that something else started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from specserve.commands.options import (
    NOT_A_SIDECAR,
    ask,
    follows,
    format_option,
    http_url,
    loaded_from,
    set_option,
    warn,
)

if TYPE_CHECKING:
    from specserve.config.load import Loaded

_RETRY_SECONDS = 2.0
SECONDS = click.FloatRange(min=0, max=3600, min_open=True)


@click.command()
@click.argument("config", required=False, type=click.Path())
@set_option
@click.option(
    "--engine-url", callback=http_url, help="Base URL of the vLLM server; default from CONFIG."
)
@click.pass_context
def sidecar(
    context: click.Context,
    *,
    config: str | None,
    overrides: tuple[str, ...],
    engine_url: str | None,
) -> None:
    """Watch a running vLLM server: probes, metrics, alerts. Needs no vLLM here.

    Without CONFIG the server at --engine-url is asked for what it serves.
    """
    import os
    import queue

    from specserve import log
    from specserve.app.changing import ChangingAlerts
    from specserve.app.sidecar import Watch
    from specserve.app.traits import of_settings
    from specserve.supervise.leftovers import folders
    from specserve.supervise.supervisor import captured_signals, next_signal

    method = None
    if config is not None:
        loaded = loaded_from(config, overrides, asks_checkpoints=True)
    else:
        loaded, method = _asked(engine_url, overrides)
    log.setup(debug=bool((context.obj or {}).get("debug")), secrets=loaded.secrets())
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with captured_signals(signals.put):
        running = Watch(
            loaded.settings,
            engine_url=engine_url or loaded.settings.base_url,
            state_dir=folders(os.environ).state,
            visible_devices=loaded.settings.engine.env.get("CUDA_VISIBLE_DEVICES"),
            changed_alerts=ChangingAlerts(loaded, os.environ).changed,
            method_told=method,
            facts=of_settings(loaded.settings, os.environ),
        ).start()
        click.echo(f"sidecar at {running.url}, watching {running.engine_url}")
        follows(f"specserve status --url {running.url}")
        try:
            next_signal(signals)
        finally:
            running.stop()


def _asked(engine_url: str | None, overrides: tuple[str, ...]) -> tuple[Loaded, str | None]:
    """A config made of what the server says, once it answers, and what to call its method."""
    import os
    import time

    from specserve.app.look import discover
    from specserve.engine.http.client import EngineUnreachable
    from specserve.errors import ConfigError

    if engine_url is None:
        raise ConfigError(
            "neither CONFIG nor --engine-url is given; must have one",
            where="sidecar",
            fix="specserve sidecar --engine-url http://127.0.0.1:8000",
        )
    waited = ""
    while True:
        try:
            found = discover(engine_url, environ=os.environ, overrides=overrides)
        except EngineUnreachable as error:
            why = error.problems[0].message
            if why != waited:
                click.echo(f"{engine_url}: {why}; waiting for it", err=True)
            waited = why
            time.sleep(_RETRY_SECONDS)
        else:
            for warning in found.loaded.warnings:
                warn(warning)
            return found.loaded, found.method


@click.command()
@click.argument("name", type=click.Choice(["live", "ready", "startup"]))
@click.option(
    "--url",
    default="http://127.0.0.1:9400",
    show_default=True,
    callback=http_url,
    help="Where the sidecar listens.",
)
@click.option(
    "--timeout", default=3.0, show_default=True, type=SECONDS, help="Longest time in seconds."
)
@format_option
def probe(name: str, url: str, timeout: float, output: str) -> None:
    """Ask the sidecar for one verdict: live, ready or startup.

    For exec probes: exit code 0 for yes, 1 for no or no answer.
    """
    answer = ask(
        url.rstrip("/") + {"live": "/livez", "ready": "/readyz", "startup": "/startupz"}[name],
        timeout,
    )
    if isinstance(answer, str):
        ok, reason = False, f"no answer from {url}: {answer}"
    elif isinstance(answer.get("ok"), bool) and isinstance(answer.get("reason"), str):
        ok, reason = answer["ok"], answer["reason"]
    else:
        ok, reason = False, f"{url}: {NOT_A_SIDECAR}"
    word = "no"
    if ok:
        word = "yes"
    if output == "json":
        click.echo(json.dumps({"ok": ok, "probe": name, "reason": reason}, indent=2))
    else:
        click.echo(f"{name}: {word}: {reason}")
        follows(f"specserve status --url {url}")
    if not ok:
        raise click.exceptions.Exit(1)
