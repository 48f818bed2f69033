"""``specserve verify``: the go-live list against a running server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specserve.commands.options import (
    answer,
    follows,
    format_option,
    http_url,
    interruptible,
    secret_in,
)

if TYPE_CHECKING:
    from specserve.app.golive import Outcome, Subject
    from specserve.config.load import Loaded

_COLOURS = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key of CONFIG."
)
@click.option(
    "--url",
    callback=http_url,
    help="Base URL of the server; default: the one that CONFIG describes.",
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="Key for --url without CONFIG."
)
@click.option(
    "--launch",
    "start",
    is_flag=True,
    help="Launch CONFIG first, and check at the end that it drains.",
)
@click.option(
    "--junit", type=click.Path(path_type=Path), help="Also write the outcome as JUnit XML."
)
@format_option
@interruptible
def verify(
    config: Path | None, overrides: tuple[str, ...], url: str | None, output: str, **options: Any
) -> None:
    """Check that a running server is fit for traffic.

    The server of CONFIG, or the one at --url. PASS, FAIL and SKIP lines; exit code 6 on a FAIL.
    """
    from specserve.config.load import load
    from specserve.errors import ConfigError

    loaded = None
    if config:
        loaded = load(config, environ=os.environ, overrides=overrides)
    if loaded is None and (url is None or options["start"]):
        raise ConfigError(
            "neither CONFIG nor --url is given; must have one",
            where="verify",
            fix="specserve verify --url URL",
        )

    def told(outcome: Outcome) -> None:
        if output == "text":
            _say(outcome)

    if options["start"] and loaded is not None:
        outcomes = _launched(loaded, told)
    else:
        from specserve.app import golive

        outcomes = golive.run(_subject(loaded, url, options["api_key_file"]), told)
    after = f"specserve bench {config}"
    if loaded is None:
        after = f"specserve sidecar --engine-url {url}"
    _finish(outcomes, output, options["junit"], after=after)


def _say(outcome: Outcome) -> None:
    status = click.style(outcome.status, fg=_COLOURS[outcome.status])
    click.echo(f"{status}  {outcome.name:12} {outcome.message}")


def _subject(loaded: Loaded | None, url: str | None, key_file: Path | None) -> Subject:
    from specserve.app.golive import Subject
    from specserve.engine.http.client import EngineClient, own_client

    key = None
    if key_file is not None:
        key = secret_in(key_file, "--api-key-file")
    if loaded is None:
        return Subject(EngineClient(url or "", key), None, has_key=key is not None)
    settings = loaded.settings
    if key is None:
        key = settings.server.own_key
    if url is None:
        client = own_client(settings, key=key)
    else:
        client = EngineClient(url, key)
    return Subject(client, settings, has_key=key is not None)


def _launched(loaded: Loaded, told: Any) -> list[Outcome]:
    from tempfile import TemporaryDirectory

    from specserve.app import golive
    from specserve.app.arm import ArmServer, ArmSpec

    with TemporaryDirectory() as folder:
        server = ArmServer(ArmSpec("verify", loaded), Path(folder), dict(os.environ))
        try:
            server.start()
            subject = _subject(loaded, None, None)
            outcomes = golive.run(subject, told)
            drained = golive.drain(subject, server.terminate, server.wait)
            told(drained)
        finally:
            server.stop()
    return [*outcomes, drained]


def _finish(outcomes: list[Outcome], output: str, junit: Path | None, *, after: str) -> None:
    from dataclasses import asdict

    from specserve.errors import Unsound

    if junit is not None:
        junit.write_text(_junit(outcomes), encoding="utf-8")
    failed = [o for o in outcomes if o.status == "FAIL"]
    skipped = [o for o in outcomes if o.status == "SKIP"]
    passed = len(outcomes) - len(failed) - len(skipped)
    refused = None
    if failed:
        message = f"{len(failed)} of {passed + len(failed)} checks failed; not fit to go live"
        if skipped:
            message += f" ({len(skipped)} more were not made)"
        refused = Unsound(message, where="verify")
    if output == "json":
        answer({"checks": [asdict(o) | {"seconds": _rounded(o)} for o in outcomes]}, refused)
    elif refused is not None:
        raise refused
    else:
        click.echo(_passed(passed, len(skipped)))
        follows(after)


def _rounded(outcome: Outcome) -> float:
    """Milliseconds: what is finer is noise."""
    return round(outcome.seconds, 3)


def _passed(passed: int, skipped: int) -> str:
    """The last sentence of a pass, which says what it does not cover."""
    said = f"Fit for traffic: {passed} checks passed"
    if skipped:
        said += f"; {skipped} were not made, their lines say why"
    return f"{said}."


def _junit(outcomes: list[Outcome]) -> str:
    """The outcomes as JUnit XML, as CI systems read it."""
    from xml.etree import ElementTree

    suite = ElementTree.Element(
        "testsuite",
        name="specserve verify",
        tests=str(len(outcomes)),
        failures=str(sum(o.status == "FAIL" for o in outcomes)),
        skipped=str(sum(o.status == "SKIP" for o in outcomes)),
        time=f"{sum(o.seconds for o in outcomes):.3f}",
    )
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname="verify", name=outcome.name, time=f"{outcome.seconds:.3f}"
        )
        if outcome.status == "PASS":
            ElementTree.SubElement(case, "system-out").text = outcome.message
        else:
            tag = "skipped"
            if outcome.status == "FAIL":
                tag = "failure"
            ElementTree.SubElement(case, tag, message=outcome.message)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
