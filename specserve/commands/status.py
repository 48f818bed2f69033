"""`specserve status`: what the sidecar knows, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import click

from specserve.commands.options import NOT_A_SIDECAR, ask, format_option, http_url, secret_in

if TYPE_CHECKING:
    from pydantic import JsonValue
    from rich.console import RenderableType

    from specserve.alert.causes import CauseJson
    from specserve.alert.evaluate import AlertJson
    from specserve.app.look import LookReport
    from specserve.sidecar.presentation import CanaryJson, Numbers, ProbeJson, StatusJson

WINDOWS = ("1m", "5m", "30m")
_KEYS = {
    "model_name",
    "engine_url",
    "method",
    "num_speculative_tokens",
    "versions",
    "state",
    "condition",
    "ready",
    "live",
    "started",
    "windows",
    "now",
    "plan_against_actual",
    "alerts",
}
"""What /status always has."""
_SECONDS = click.FloatRange(min=0.1, max=3600)


@click.command()
@click.option(
    "--url",
    default="http://127.0.0.1:9400",
    show_default=True,
    callback=http_url,
    help="Where the sidecar listens.",
)
@click.option(
    "--engine-url",
    callback=http_url,
    help="Look at this vLLM server itself: no sidecar, no config.",
)
@click.option("--watch", is_flag=True, help="Again every few seconds, until Ctrl-C.")
@click.option(
    "--interval",
    type=_SECONDS,
    help="Seconds between two looks with --watch (2), or between the two reads of "
    "--engine-url (5).",
)
@click.option(
    "--token-file",
    envvar="SPECSERVE_SIDECAR__TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File with the token of sidecar.token_file.",
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File with the key of --engine-url."
)
@format_option
def status(
    *,
    url: str,
    engine_url: str | None,
    watch: bool,
    interval: float | None,
    token_file: Path | None,
    api_key_file: Path | None,
    output: str,
) -> None:
    """Show state, acceptance, latency and alerts of a server.

    Exit code 0 when the server is ready, 1 when it is not, 5 when nothing answers.
    """
    import json
    import time

    if engine_url is not None:
        _look(engine_url, api_key_file, watch=watch, interval=interval or 5.0, output=output)
        return
    interval = interval or 2.0
    token = None
    if token_file is not None:
        token = secret_in(token_file, "--token-file")
    while True:
        found = _fetch(url, token)
        if output == "json" and watch:
            click.echo(json.dumps(found))
        elif output == "json":
            click.echo(json.dumps(found, indent=2))
        else:
            if watch:
                click.clear()
            _show(found)
        if not watch:
            break
        time.sleep(interval)
    if not found["ready"]["ok"]:
        raise click.exceptions.Exit(1)


def _look(url: str, key_file: Path | None, *, watch: bool, interval: float, output: str) -> None:
    """One look at the engine itself, or one after another."""
    import json

    from specserve.app.look import look_at

    key = None
    if key_file is not None:
        key = secret_in(key_file, "--api-key-file")
    while True:
        found = look_at(url, key, interval_seconds=interval)
        if output == "json" and watch:
            click.echo(json.dumps(found.as_dict()))
        elif output == "json":
            click.echo(json.dumps(found.as_dict(), indent=2))
        else:
            if watch:
                click.clear()
            _show_look(found)
        if not watch:
            break
    if not found.is_ready:
        raise click.exceptions.Exit(1)


def _show_look(found: LookReport) -> None:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from specserve.sidecar.presentation import LOOK_ROWS

    seen = found.seen
    head = Table.grid(padding=(0, 2))
    for name, text in _look_head(found):
        head.add_row(Text(name, style="dim"), Text(text))
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("")
    table.add_column("now", justify="right")
    before: Numbers = {}
    if seen.usual is not None:
        table.add_column(seen.usual.since, justify="right")
        before = seen.usual.numbers
    for row in LOOK_ROWS:
        cells = [row.cell(seen.now), row.cell(before)]
        if any(cells):
            table.add_row(row.title, *cells[: len(table.columns) - 1])
    parts: list[RenderableType] = [head, Text(), table, Text()]
    if seen.no_usual is not None:
        parts += [Text(f"no usual values: {seen.no_usual}", style="dim"), Text()]
    parts += _diagnosis(found)
    Console(highlight=False).print(Group(*parts))


def _look_head(found: LookReport) -> list[tuple[str, str]]:
    from specserve.units import duration

    seen = found.seen
    method = "no speculation"
    if seen.num_speculative_tokens:
        method = f"speculates, {seen.num_speculative_tokens} tokens per draft"
    elif seen.num_speculative_tokens is not None:
        method = "speculates"
    engine = found.url
    if seen.engines > 1:
        engine += f", {seen.engines} engines"
    if seen.age_seconds is not None:
        engine += f", started {duration(seen.age_seconds)} ago"
    return [
        ("model", ", ".join(seen.model_names) or "not named"),
        ("engine", engine),
        ("method", method),
        ("versions", f"vLLM {found.version or 'unknown'}"),
        ("looked", f"for {duration(seen.covered_seconds)}"),
    ]


_STYLES = {"ok": "bold green", "idle": "green", "degraded": "bold yellow", "down": "bold red"}


def _diagnosis(found: LookReport) -> list[RenderableType]:
    """The verdict in words, what it points to, and the next command: the last lines."""
    from rich.text import Text

    said = found.seen.diagnosis
    lines: list[RenderableType] = [
        Text.assemble((said.word.upper(), _STYLES[said.word]), "  ", said.sentence)
    ]
    if said.likely is not None:
        lines.append(Text(f"Likely: {said.likely}"))
    if said.advice is not None and not said.advice.startswith("specserve "):
        lines.append(Text(f"Try: {said.advice}"))
    lines.append(Text(f"Next: {found.follows}"))
    return lines


def _fetch(url: str, token: str | None) -> StatusJson:
    from specserve.errors import EngineLost

    found = ask(url.rstrip("/") + "/status", 5, token)
    if isinstance(found, Mapping) and is_status(found):
        return found
    why = NOT_A_SIDECAR
    if isinstance(found, str):
        why = found
    raise EngineLost(
        f"no sidecar answers ({why}); "
        "must be the address of `specserve launch` or `specserve sidecar`",
        where=url,
        fix="specserve status --url http://HOST:PORT",
    )


def is_status(found: Mapping[str, JsonValue]) -> TypeGuard[StatusJson]:
    return found.keys() >= _KEYS


def _show(found: StatusJson) -> None:
    from rich.console import Console, Group
    from rich.text import Text

    parts = [_head(found), Text(), _numbers(found), Text(), *_alerts(found["alerts"])]
    parts += _causes(found.get("causes", []))
    Console().print(Group(*parts))


def _head(found: StatusJson) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from specserve.sidecar import presentation

    rows = [
        ("model", found["model_name"]),
        ("engine", found["engine_url"]),
        ("method", presentation.method(found)),
        ("versions", presentation.versions(found)),
        ("supervisor", found["state"] or "none: something else started the engine"),
    ]
    for name, result in (("canary", found.get("canary")), ("comparison", found.get("comparison"))):
        if result:
            rows.append((name, _checked(result)))
    rows += _planned(found["plan_against_actual"])
    rows += _differing(found.get("asked_against_stated", []))
    rows.append(("condition", found["condition"]))
    head = Table.grid(padding=(0, 2))
    for name, text in rows:
        head.add_row(Text(name, style="dim"), Text(text))
    for probe in presentation.PROBES:
        head.add_row(Text(probe, style="dim"), _verdict(found[probe]))
    return head


def _verdict(verdict: ProbeJson) -> RenderableType:
    from rich.text import Text

    word = Text("no", style="bold red")
    if verdict["ok"]:
        word = Text("yes", style="green")
    return Text.assemble(word, ("  " + verdict["reason"], "dim"))


def _checked(result: CanaryJson) -> str:
    """The verdict of the start-up canary, or of the last comparison while serving."""
    from specserve.units import percent

    parts = [result["verdict"], *result["reasons"]]
    rate = result["position0_acceptance"]
    if rate is not None:
        parts.append(f"{percent(rate)} of the first draft tokens accepted on repetitive text")
    return "; ".join(parts)


def _planned(against: Mapping[str, JsonValue] | None) -> list[tuple[str, str]]:
    """The memory plan against what the engine reports."""
    match against:
        case {"kv_cache_tokens": {"planned": int() | float() as planned, "measured": measured}}:
            assert isinstance(measured, int | float)
            off = 100 * (planned / measured - 1)
            text = f"{measured:,.0f} tokens, planned {planned:,.0f} ({off:+.1f} %)"
            return [("KV cache", text)]
        case _:
            return []


def _differing(held: list[dict[str, JsonValue]]) -> list[tuple[str, str]]:
    """What the engine runs otherwise than it was asked to."""
    return [
        ("not as asked", f"{one['key']}: asked {one['asked']}, the engine says {one['said']}")
        for one in held
        if one.get("verdict") == "different"
    ]


def _numbers(found: StatusJson) -> RenderableType:
    """A row for each quantity that is known somewhere, a column for now and each window."""
    from rich.table import Table

    from specserve.sidecar.presentation import ROWS

    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("")
    for name in ("now", *WINDOWS):
        table.add_column(name, justify="right")
    columns: list[Numbers] = [
        found["now"],
        *(found["windows"].get(window, {}) for window in WINDOWS),
    ]
    for row in ROWS:
        cells = [row.cell(numbers) for numbers in columns]
        if any(cells):
            table.add_row(row.title, *cells)
    if not table.row_count:
        return "no numbers yet"
    return table


def _alerts(alerts: list[AlertJson]) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    from specserve.sidecar import presentation

    if not alerts:
        return [Text(presentation.NO_ALERT, style="dim")]
    rows: list[RenderableType] = []
    for alert in alerts:
        style = "yellow"
        if alert["severity"] == "critical":
            style = "bold red"
        words = ", ".join(presentation.alert_words(alert))
        rows.append(Text.assemble((alert["name"], style), f"  {words}"))
        lines = [alert["summary"], *presentation.alert_lines(alert)]
        if alert["runbook_url"]:
            lines.append(f"Runbook: {alert['runbook_url']}")
        rows += [Padding(line, (0, 0, 0, 2)) for line in lines]
    return rows


def _causes(causes: list[CauseJson]) -> list[RenderableType]:
    """What explains the present, the best supported first."""
    from rich.padding import Padding
    from rich.text import Text

    from specserve.sidecar import presentation

    if not causes:
        return []
    rows: list[RenderableType] = [Text(), Text("causes, best supported first", style="dim")]
    for cause in causes:
        rows.append(Text(cause["summary"]))
        rows += [Padding(line, (0, 0, 0, 2)) for line in presentation.cause_lines(cause)]
    return rows
