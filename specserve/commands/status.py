"""`specserve status`: what the sidecar knows, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import click

from specserve.commands.options import (
    NOT_A_SIDECAR,
    ask,
    follows,
    format_option,
    http_url,
    secret_in,
)
from specserve.units import duration

if TYPE_CHECKING:
    from pydantic import JsonValue
    from rich.console import RenderableType

    from specserve.alert.causes import CauseJson
    from specserve.alert.evaluate import AlertJson
    from specserve.app.look import LookReport
    from specserve.commands.live import Watched
    from specserve.errors import EngineLost
    from specserve.sidecar.presentation import CanaryJson, Numbers, ProbeJson, StatusJson

WINDOWS = ("1m", "5m", "30m")
_DEFAULT_URL = "http://127.0.0.1:9400"
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
    "urls",
    multiple=True,
    callback=http_url,
    help="Where the sidecar listens; may be repeated, the worst comes first.  "
    "[default: http://127.0.0.1:9400]",
)
@click.option(
    "--engine-url",
    callback=http_url,
    help="Look at this vLLM server itself: no sidecar, no config.",
)
@click.option("--watch", is_flag=True, help="A live view, until Ctrl-C.")
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
    urls: tuple[str, ...],
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
    if engine_url is not None:
        _look(engine_url, api_key_file, watch=watch, interval=interval or 5.0, output=output)
        return
    token = None
    if token_file is not None:
        token = secret_in(token_file, "--token-file")
    asked = tuple(dict.fromkeys(urls)) or (_DEFAULT_URL,)
    if watch:
        _watch(asked, token, interval=interval or 2.0, output=output)
    elif len(asked) == 1:
        _once(asked[0], token, output)
    else:
        _several(asked, token, output)


def _once(url: str, token: str | None, output: str) -> None:
    """One server, once."""
    import json

    found = _fetch(url, token)
    if isinstance(found, str):
        raise _absent(url, found)
    if output == "json":
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)
        follows(_following(found, url))
    if not found["ready"]["ok"]:
        raise click.exceptions.Exit(1)


def _several(urls: tuple[str, ...], token: str | None, output: str) -> None:
    """Several servers, once: the worst first."""
    import json
    import time

    from rich.console import Console

    from specserve.commands import live
    from specserve.errors import ExitCode

    watched = [live.Watched(url) for url in urls]
    live.ask_all(watched, lambda url: _fetch(url, token))
    worst = sorted(watched, key=lambda one: one.rank)
    if output == "json":
        click.echo(json.dumps({"servers": [_entry(one) for one in worst]}, indent=2))
    else:
        stamp = time.strftime("%H:%M:%S")
        Console(highlight=False).print(live.render(watched, now=time.monotonic(), stamp=stamp))
        follows(f"specserve status --url {worst[0].url}")
    if any(one.silent_since is not None for one in watched):
        raise click.exceptions.Exit(ExitCode.ENGINE_LOST)
    if any(one.found is not None and not one.found["ready"]["ok"] for one in watched):
        raise click.exceptions.Exit(1)


def _entry(one: Watched) -> dict[str, JsonValue]:
    """One of several servers in JSON: what it says, or why it says nothing."""
    if one.silent_since is not None:
        return {"url": one.url, "verdict": one.word, "error": one.why, "status": None}
    return {"url": one.url, "verdict": one.word, "error": None, "status": as_json(one.found)}


def as_json(found: StatusJson | None) -> JsonValue:
    """The answer as it came."""
    import json

    copied: JsonValue = json.loads(json.dumps(found))
    return copied


def _watch(urls: tuple[str, ...], token: str | None, *, interval: float, output: str) -> None:
    """Again and again until Ctrl-C; a sidecar that restarts is waited for."""
    import json
    import time

    from specserve.commands import live

    watched = [live.Watched(url) for url in urls]
    with _screen() as show:
        while True:
            live.ask_all(watched, lambda url: _fetch(url, token))
            if output == "json":
                for one in watched:
                    line = as_json(one.found)
                    if one.silent_since is not None:
                        line = {"ok": False, "url": one.url, "error": one.why}
                    click.echo(json.dumps(line))
            else:
                stamp = time.strftime("%H:%M:%S")
                show(live.render(watched, now=time.monotonic(), stamp=stamp))
            time.sleep(interval)


@contextmanager
def _screen() -> Iterator[Callable[[RenderableType], None]]:
    """The terminal's other screen, drawn anew at each look; where there is no terminal, one text
    after another.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as view:
        yield lambda renderable: view.update(renderable, refresh=True)


def _following(found: StatusJson, url: str) -> str:
    """What to type after one look at a sidecar."""
    if found["alerts"] or not found["ready"]["ok"]:
        return f"specserve status --engine-url {found['engine_url']}"
    return f"specserve status --url {url} --watch"


def _look(url: str, key_file: Path | None, *, watch: bool, interval: float, output: str) -> None:
    """One look at the engine itself, or one after another."""
    import json

    from rich.console import Console

    from specserve.app.look import look_at

    key = None
    if key_file is not None:
        key = secret_in(key_file, "--api-key-file")
    if watch:
        _watch_engine(url, key, interval=interval, output=output)
        return
    found = look_at(url, key, interval_seconds=interval)
    if output == "json":
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        Console(highlight=False).print(_show_look(found))
    if not found.is_ready:
        raise click.exceptions.Exit(1)


def _watch_engine(url: str, key: str | None, *, interval: float, output: str) -> None:
    import json
    import time

    from rich.text import Text

    from specserve.app.look import look_at
    from specserve.errors import EngineLost

    answered = time.monotonic()
    with _screen() as show:
        while True:
            try:
                found = look_at(url, key, interval_seconds=interval)
            except EngineLost as error:
                why = error.problems[0].message
                silent = duration(max(1.0, round(time.monotonic() - answered)))
                if output == "json":
                    click.echo(json.dumps({"ok": False, "engine_url": url, "error": why}))
                else:
                    show(Text(f"{url}: no answer for {silent} ({why}), trying again"))
                time.sleep(interval)
                continue
            answered = time.monotonic()
            if output == "json":
                click.echo(json.dumps(found.as_dict()))
            else:
                show(_show_look(found))


def _show_look(found: LookReport) -> RenderableType:
    from rich.console import Group
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
    return Group(*parts)


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


def _fetch(url: str, token: str | None) -> StatusJson | str:
    """What the sidecar says, or why it does not."""
    found = ask(url.rstrip("/") + "/status", 5, token)
    if isinstance(found, Mapping) and is_status(found):
        return found
    if isinstance(found, str):
        return found
    return NOT_A_SIDECAR


def _absent(url: str, why: str) -> EngineLost:
    from specserve.errors import EngineLost

    return EngineLost(
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
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from specserve.sidecar import presentation
    from specserve.sidecar.presentation import ROWS

    silence = presentation.silence(found)
    style = ""
    if silence is not None:
        style = "dim"
    table = Table(box=None, padding=(0, 2), header_style="dim", style=style)
    table.add_column("")
    for name in ("now", *WINDOWS):
        table.add_column(name, justify="right")
    now, windows = presentation.numbers(found)
    columns: list[Numbers] = [now, *(windows.get(window, {}) for window in WINDOWS)]
    for row in ROWS:
        cells = [row.cell(numbers) for numbers in columns]
        if any(cells):
            table.add_row(row.title, *cells)
    if not table.row_count:
        return "no numbers yet"
    if silence is not None:
        return Group(Text(silence, style="bold"), table)
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
