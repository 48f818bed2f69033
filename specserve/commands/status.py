"""`specserve status`: what the sidecar knows, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from specserve.commands.options import NOT_A_SIDECAR, ask, format_option, http_url

if TYPE_CHECKING:
    from rich.console import RenderableType

WINDOWS = ("1m", "5m", "30m")
ROWS = (
    ("time covered", "window_seconds", "seconds"),
    ("acceptance rate", "acceptance_rate", "ratio"),
    ("  of draft tokens", "window_draft_tokens", "0f"),
    ("mean acceptance length", "mean_acceptance_length", "2f"),
    ("tokens per step", "tokens_per_step", "2f"),
    ("estimated speedup", "estimated_speedup_ratio", "2f"),
    ("output tokens/s", "generation_tokens_per_second", "0f"),
    ("requests/s", "requests_per_second", "2f"),
    ("TTFT P50", "time_to_first_token_seconds.p50", "seconds"),
    ("TTFT P90", "time_to_first_token_seconds.p90", "seconds"),
    ("TPOT P50", "time_per_output_token_seconds.p50", "seconds"),
    ("TPOT P90", "time_per_output_token_seconds.p90", "seconds"),
    ("prefix cache hits", "prefix_cache_hit_ratio", "ratio"),
    ("running", "requests_running", "0f"),
    ("waiting", "requests_waiting", "0f"),
    ("KV cache in use", "kv_cache_usage_ratio", "ratio"),
)
"""Title, name on /status (with its statistic), unit or format."""

_KEYS = {
    "model_name", "engine_url", "method", "num_speculative_tokens", "versions", "state", "condition", "ready", "live",
    "started", "windows", "now", "plan_against_actual", "alerts",
}  # fmt: skip
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
@click.option("--watch", is_flag=True, help="Again every few seconds, until Ctrl-C.")
@click.option(
    "--interval",
    default=2.0,
    show_default=True,
    type=_SECONDS,
    help="Seconds between two looks with --watch.",
)
@format_option
def status(url: str, watch: bool, interval: float, output: str) -> None:
    """Show state, acceptance, latency and alerts of a server.

    Exit code 0 when the server is ready, 1 when it is not, 5 when no sidecar answers.
    """
    import json
    import time

    while True:
        found = _fetch(url)
        if output == "json":  # while watching, one line a look
            click.echo(json.dumps(found, indent=None if watch else 2))
        else:
            if watch:
                click.clear()
            _show(found)
        if not watch:
            break
        time.sleep(interval)
    if not found["ready"]["ok"]:
        raise click.exceptions.Exit(1)


def _fetch(url: str) -> Mapping[str, Any]:
    from specserve.errors import EngineLost

    found = ask(url.rstrip("/") + "/status", 5)
    if isinstance(found, Mapping) and not found.keys() >= _KEYS:
        found = NOT_A_SIDECAR
    if isinstance(found, str):
        raise EngineLost(
            f"no sidecar answers ({found}); must be the address of `specserve launch` or `specserve sidecar`",
            where=url,
            fix="specserve status --url http://HOST:PORT",
        )
    return found


def _show(found: Mapping[str, Any]) -> None:
    from rich.console import Console, Group

    Console().print(Group(*_parts(found)))


def _parts(found: Mapping[str, Any]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    method = found["method"] or "none (the target alone)"
    versions = ", ".join(
        f"{name} {version}" for name, version in found["versions"].items() if version
    )
    for name, value in (
        ("model", found["model_name"]),
        ("engine", found["engine_url"]),
        (
            "method",
            method
            + (f", {found['num_speculative_tokens']} tokens per draft" if found["method"] else ""),
        ),
        ("versions", versions),
        ("supervisor", found["state"] or "none: something else started the engine"),
        *((name, _checked(found[name])) for name in ("canary", "comparison") if found.get(name)),
        *_planned(found["plan_against_actual"] or {}),
        ("condition", found["condition"]),
    ):
        head.add_row(Text(name, style="dim"), Text(str(value)))
    for name in ("ready", "live", "started"):
        verdict = found[name]
        word = Text(
            "yes" if verdict["ok"] else "no", style="green" if verdict["ok"] else "bold red"
        )
        head.add_row(
            Text(name, style="dim"), Text.assemble(word, ("  " + verdict["reason"], "dim"))
        )
    parts: list[RenderableType] = [head, Text(), _numbers(found["windows"], found["now"])]
    return [*parts, Text(), *_alerts(found["alerts"])]


def _checked(result: Mapping[str, Any]) -> str:
    """The verdict of the start-up canary, or of the last comparison while serving."""
    from specserve.units import percent

    rate = result["position0_acceptance"]
    first = (
        []
        if rate is None
        else [f"{percent(rate)} of the first draft tokens accepted on repetitive text"]
    )
    return "; ".join([result["verdict"], *result["reasons"], *first])


def _planned(against: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """The memory plan against what the engine reports."""
    tokens = against.get("kv_cache_tokens")
    if tokens is None:
        return []
    planned, measured = tokens["planned"], tokens["measured"]
    return [
        (
            "KV cache",
            f"{measured:,.0f} tokens, planned {planned:,.0f} ({100 * (planned / measured - 1):+.1f} %)",
        )
    ]


def _numbers(windows: Mapping[str, Mapping[str, Any]], now: Mapping[str, float]) -> RenderableType:
    """A row for each quantity that is known somewhere, a column for now and each window."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("", "now", *WINDOWS):
        table.add_column(name, justify="left" if not name else "right")
    for title, path, unit in ROWS:
        name, _, stat = path.partition(".")
        cells = [None if stat else now.get(name)]
        for window in WINDOWS:
            value = windows.get(window, {}).get(name)
            cells.append(value.get(stat) if stat and value else value)
        if any(cell is not None for cell in cells):
            table.add_row(title, *("" if cell is None else _text(cell, unit) for cell in cells))
    return table if table.row_count else "no numbers yet"


def _text(value: float, unit: str) -> str:
    from specserve.units import duration, percent

    match unit:
        case "ratio":
            return percent(value)
        case "seconds":
            return f"{value * 1000:.3g} ms" if value < 0.1 else duration(value)
        case _:
            return f"{value:,.{unit}}"


def _alerts(alerts: list[Mapping[str, Any]]) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    if not alerts:
        return [Text("no alert is pending or firing", style="dim")]
    rows: list[RenderableType] = []
    for alert in alerts:
        style = "bold red" if alert["severity"] == "critical" else "yellow"
        words = [
            alert["severity"],
            alert["state"],
            *(f"{n} {v}" for n, v in alert["labels"].items()),
        ]
        words += [f"explained by {alert['inhibited_by']}"] if alert["inhibited_by"] else []
        likely = [f"Likely: {'; '.join(alert['causes'])}"] if alert["causes"] else []
        likely += [f"Runbook: {alert['runbook_url']}"] if alert["runbook_url"] else []
        rows.append(Text.assemble((alert["name"], style), f"  {', '.join(words)}"))
        rows += [
            Padding(text, (0, 0, 0, 2))
            for text in (alert["summary"], alert["description"], *likely)
        ]
    return rows
