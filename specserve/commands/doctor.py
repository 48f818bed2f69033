"""``specserve doctor``: why does it not start, why is it not faster, why is the text wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specserve.commands.options import (
    NOT_A_SIDECAR,
    ask,
    format_option,
    http_url,
    interruptible,
    loaded_from,
    secret_in,
)
from specserve.commands.status import is_status

if TYPE_CHECKING:
    from specserve.app.doctor.report import DoctorCause, DoctorReport, StepReport
    from specserve.app.doctor.run import AskedSidecar, Given
    from specserve.config.load import Loaded
    from specserve.engine.http.client import EngineClient

_SIDECAR_SECONDS = 5


class _WithBundle(click.Command):
    """``doctor bundle OUT`` is a command of its own; a config of that name is ``./bundle``."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] == ["bundle"]:
            return bundle.make_context(f"{info_name} bundle", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


def _sources(function: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG and the options that say what to look at."""
    for option in reversed(
        (
            click.argument("config", required=False, type=click.Path(path_type=Path)),
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="KEY=VALUE",
                help="Override one key of CONFIG.",
            ),
            click.option(
                "--url", callback=http_url, help="Base URL of the engine; read for two seconds."
            ),
            click.option("--api-key-file", type=click.Path(path_type=Path), help="Key for --url."),
            click.option("--sidecar", callback=http_url, help="Base URL of its sidecar."),
            click.option(
                "--token-file",
                envvar="SPECSERVE_SIDECAR__TOKEN_FILE",
                type=click.Path(path_type=Path),
                help="File with the token of sidecar.token_file.",
            ),
            click.option(
                "--log", type=click.Path(path_type=Path), metavar="FILE", help="The engine's log."
            ),
            click.option(
                "--profile",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="Benchmark profile that `specserve bench` wrote.",
            ),
        )
    ):
        function = option(function)
    return function


@click.command(cls=_WithBundle)
@_sources
@click.option(
    "--canary", is_flag=True, help="Also send the canary of a launch to --url; takes longer."
)
@format_option
@interruptible
def doctor(
    config: Path | None, overrides: tuple[str, ...], url: str | None, output: str, **options: Any
) -> None:
    """Find why a server does not start, is slow, or answers wrongly.

    Looks at whatever is given: CONFIG, --url, --sidecar, --log, each alone or all together. Ends
    with the first cause in one sentence. Exit code 0 whatever it finds.

    `specserve doctor bundle OUT.tar.gz [CONFIG] ...` packs the same for a bug report, redacted.
    """
    from specserve.app.doctor import run as looking
    from specserve.errors import ConfigError

    if options["canary"] and url is None:
        raise ConfigError(
            "--canary is given without --url; must have a server to ask",
            where="doctor",
            fix="specserve doctor --url URL --canary",
        )
    given = _given(config, overrides, url, options)
    found = looking.run(given, environ=os.environ)
    if output == "json":
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)


def _given(
    config: Path | None, overrides: tuple[str, ...], url: str | None, options: Mapping[str, Any]
) -> Given:
    """What there is to look at. Raises ConfigError where it is nothing."""
    from specserve.app.doctor.run import Given
    from specserve.errors import ConfigError

    loaded = None
    if config is not None:
        loaded = loaded_from(str(config), overrides, asks_checkpoints=True)
    client = None
    if url is not None:
        client = _client(loaded, url, options["api_key_file"])
    sidecar = None
    if options["sidecar"] is not None:
        sidecar = _sidecar(options["sidecar"], options["token_file"])
    given = Given(
        loaded, client, sidecar, options["log"], options["profile"], options.get("canary", False)
    )
    if not given.names:
        raise ConfigError(
            "nothing to look at is given; must have CONFIG, --url, --sidecar, --log or --profile",
            where="doctor",
            fix="specserve doctor CONFIG --log FILE",
        )
    return given


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@_sources
@click.option("--yes", is_flag=True, help="Write without a question; needed without a terminal.")
@interruptible
def bundle(
    out: Path,
    config: Path | None,
    overrides: tuple[str, ...],
    url: str | None,
    yes: bool,
    **options: Any,
) -> None:
    """Pack what a bug report needs into OUT, without secrets.

    Shows what the archive holds before it is written: versions, the doctor's report, the config
    with masks, the check, the last lines of the log, /status and /metrics.
    """
    from specserve.app.doctor import bundle as packing
    from specserve.app.doctor import run as looking
    from specserve.errors import ConfigError
    from specserve.units import size

    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to ask on; must have --yes",
            where="doctor bundle",
            fix="specserve doctor bundle OUT.tar.gz CONFIG --yes",
        )
    given = _given(config, overrides, url, options)
    found = looking.run(given, environ=os.environ)
    files = packing.collect(given, found, environ=os.environ)
    for one in files:
        click.echo(f"{one.name:14} {size(one.size_bytes)}")
    click.echo("Secrets are replaced; read it before you send it: paths and model names are kept.")
    if not yes:
        click.confirm(f"Write {out}?", abort=True)
    packing.write(out, files)
    click.echo(f"wrote {out}")


def _client(loaded: Loaded | None, url: str, key_file: Path | None) -> EngineClient:
    from specserve.engine.http.client import EngineClient, own_client

    key = None
    if key_file is not None:
        key = secret_in(key_file, "--api-key-file")
    if loaded is None:
        return EngineClient(url, key)
    return own_client(loaded.settings, url, key=key)


def _sidecar(url: str, token_file: Path | None) -> AskedSidecar:
    from specserve.app.doctor.run import AskedSidecar

    token = None
    if token_file is not None:
        token = secret_in(token_file, "--token-file")
    found = ask(url + "/status", _SIDECAR_SECONDS, token)
    if isinstance(found, Mapping) and is_status(found):
        return AskedSidecar(url, found)
    if isinstance(found, str):
        return AskedSidecar(url, found)
    return AskedSidecar(url, NOT_A_SIDECAR)


def _show(found: DoctorReport) -> None:
    from specserve.log import printable

    for line in _lines(found):
        click.echo(printable(line))


def _lines(found: DoctorReport) -> list[str]:
    """The tree, and the conclusion as the last line."""
    from specserve.app.doctor.report import TITLES

    out = [f"looked at    {source}" for source in found.sources]
    width = max(map(len, TITLES.values()))
    for step in found.steps:
        out += _step(step, TITLES[step.step].ljust(width))
    first = found.first
    if first is not None and first.fix is not None:
        out.append(f"Fix: {first.fix}")
    head = "Nothing found"
    if first is None:
        out.append(head + found.conclusion.removeprefix(head.lower()))
    else:
        out.append(f"First cause: {found.conclusion}")
    return out


def _step(step: StepReport, title: str) -> list[str]:
    out = [f"{title}  {step.state}"]
    for cause in step.causes:
        out += _cause(cause)
    out += [f"  {fact}" for fact in step.facts]
    if step.needs is not None:
        out.append(f"  to look at this give {step.needs}")
    return out


def _cause(cause: DoctorCause) -> list[str]:
    out = [f"  {cause.confidence} {cause.name}: {cause.message}"]
    out += [f"    {line}" for line in cause.evidence]
    if cause.usually:
        out.append(f"    mostly: {'; '.join(cause.usually)}")
    if cause.fix is not None:
        out.append(f"    Fix: {cause.fix}")
    return out
