"""The page at ``/``: one self-contained HTML document, readable on a phone, no script and nothing
from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from specserve.alert.causes import CauseJson
from specserve.alert.evaluate import AlertJson
from specserve.sidecar import presentation
from specserve.sidecar.chart import Chart, Line
from specserve.sidecar.observer import (
    ACCEPTANCE,
    OUTPUT,
    TPOT_P50,
    TPOT_P90,
    TTFT_P50,
    TTFT_P90,
    Point,
)
from specserve.sidecar.presentation import NO_ALERT, PROBES, ROWS, StatusJson
from specserve.units import percent

_STYLE = """
:root{--ink:#1b1f24;--soft:#5b6470;--line:#d8dde3;--card:#fff;--back:#f4f6f8;
--a:#1a66c2;--b:#c2571a;
--good:#1d7a3f;--warn:#96660a;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--line:#343b44;--card:#1b2027;
--back:#12161b;
--a:#6fb1ff;--b:#ff9d5c;--good:#5fd08a;--warn:#f0c05a;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:16px}
h1{font-size:1.15rem;margin:0;overflow-wrap:anywhere}h2{font-size:.95rem;margin:0 0 8px}
header{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center;margin-bottom:14px}
header .soft{flex-basis:100%}
.soft{color:var(--soft);font-size:.85rem}
.pill{border:1.5px solid currentColor;border-radius:999px;padding:1px 11px;font-weight:600}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.grid{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;
min-width:0}
.tiles{display:grid;gap:8px;grid-template-columns:repeat(auto-fill,minmax(98px,1fr));
margin-bottom:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 10px}
.tile b{display:block;font-size:1.1rem;font-variant-numeric:tabular-nums;white-space:nowrap}
.bar{display:grid;grid-template-columns:1.5em 1fr 4em;gap:8px;align-items:center;font-size:.85rem}
.bar i{display:block;height:9px;border-radius:3px;background:var(--a)}.bar b{text-align:right;
font-weight:400}
h2+.bar{margin-top:2px}.card h2:nth-of-type(n+2){margin-top:16px}
.verdict{margin:0 0 6px;overflow-wrap:anywhere}.verdict b{display:inline-block;min-width:4.2em}
.verdict b+b{min-width:2.2em}h2 .soft{font-weight:400}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.grid-line{stroke:var(--line);stroke-width:1}.ref{stroke:var(--soft);stroke-dasharray:5 4;
stroke-width:1.5}
.sa,.sb{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.sa{stroke:var(--a)}
.sb{stroke:var(--b)}
.key{display:inline-block;width:16px;border-top:3px solid;vertical-align:middle;margin:0 5px 0 10px}
.ka{border-color:var(--a)}.kb{border-color:var(--b)}.kr{border-top:2px dashed var(--soft)}
.alert{border-left:4px solid;padding:2px 0 2px 10px;margin:0 0 10px;overflow-wrap:anywhere}
.old{opacity:.45}
.alert p{margin:2px 0;color:var(--ink)}.alert p.soft{color:var(--soft)}a{color:var(--a)}
"""


def render(
    status: StatusJson, points: Sequence[Point], *, refresh_seconds: float, now: float
) -> str:
    """The whole document. ``status`` is what /status returns; ``now`` is Unix time."""
    title = escape(status["model_name"])
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    refresh = max(2, round(refresh_seconds))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title} - specserve</title>
<meta name="viewport" content="width=device-width,initial-scale=1">\
<meta http-equiv="refresh" content="{refresh}">
<style>{_STYLE}</style></head><body><main>
{_header(status, title, stamp, refresh)}
{_tiles(status)}
<div class="grid">
<section class="card"><h2>Alerts</h2>{_alerts(status["alerts"], now)}\
{_causes(status.get("causes", []))}</section>
<section class="card"><h2>Verdicts</h2>{_verdicts(status)}{_positions(status)}</section>
{_charts(status, points, now)}
</div></main></body></html>
"""


def _header(status: StatusJson, title: str, stamp: str, refresh: int) -> str:
    condition = status["condition"]
    colors = {"progressing": "good", "idle": "good", "stalled": "bad", "down": "bad"}
    ready, color = "not ready", "bad"
    if status["ready"]["ok"]:
        ready, color = "ready", "good"
    about = [presentation.method(status), presentation.versions(status)]
    if status["state"]:
        about.append(f"supervisor: {status['state']}")
    about.append(f"{stamp}, again every {refresh} s")
    return (
        f'<header><h1>{title}</h1><span class="pill {colors.get(condition, "warn")}">'
        f'{escape(condition)}</span><span class="pill {color}">{ready}</span>'
        f'<span class="soft">{escape(" · ".join(about))}</span></header>'
    )


def _positions(status: StatusJson) -> str:
    """How often the draft's first, second, ... token is accepted: where to cut drafts."""
    found = status["windows"].get("5m", {}).get("acceptance_rate_per_position")
    if not isinstance(found, dict):
        return ""
    bars = "".join(
        f'<div class="bar"><span class="soft">{int(position) + 1}</span>'
        f'<i style="width:{100 * rate:.1f}%"></i><b>{percent(rate)}</b></div>'
        for position, rate in sorted(found.items(), key=lambda row: int(row[0]))
    )
    return f'<h2>Acceptance by draft position <span class="soft">5 min</span></h2>{bars}'


def _tiles(status: StatusJson) -> str:
    cells = []
    now, windows = presentation.numbers(status)
    silence = presentation.silence(status)
    below, dimmed = "Rates and percentiles are of the last minute.", ""
    if silence is not None:
        below, dimmed = silence.replace("; the last ones:", ". These are the last ones."), " old"
    for row in ROWS:
        if not row.tile:
            continue
        text = row.cell(windows.get("1m", {})) or row.cell(now)
        if not text and row.unit == "times":  # known with a benchmark profile only
            continue
        cells.append(
            f'<div class="tile"><b>{escape(text or "-")}</b>'
            f'<span class="soft">{escape(row.title)}</span></div>'
        )
    return (
        f'<div class="tiles{dimmed}">{"".join(cells)}</div>'
        f'<p class="soft">{escape(below[0].upper() + below[1:])}</p>'
    )


def _verdicts(status: StatusJson) -> str:
    rows = []
    for name in PROBES:
        verdict = status[name]
        word, color = "no", "bad"
        if verdict["ok"]:
            word, color = "yes", "good"
        rows.append(
            f'<p class="verdict"><b>{name}</b> <b class="{color}">{word}</b> '
            f'<span class="soft">{escape(verdict["reason"])}</span></p>'
        )
    return "".join(rows)


def _alerts(alerts: Iterable[AlertJson], now: float) -> str:
    rows = []
    for alert in alerts:
        color = "warn"
        if alert["severity"] == "critical":
            color = "bad"
        words = escape(" · ".join(presentation.alert_words(alert, now)))
        lines = [f'<p class="soft">{escape(line)}</p>' for line in presentation.alert_lines(alert)]
        rows.append(
            f'<div class="alert {color}"><b>{escape(alert["name"])}</b> '
            f'<span class="soft">{words}</span><p>{escape(alert["summary"])}</p>'
            f"{''.join(lines)}{_runbook(alert['runbook_url'])}</div>"
        )
    return "".join(rows) or f'<p class="soft">{NO_ALERT}</p>'


def _causes(causes: Sequence[CauseJson]) -> str:
    """What explains the present, the best supported first; nothing while nothing is wrong."""
    if not causes:
        return ""
    rows = []
    for cause in causes:
        lines = "".join(
            f'<p class="soft">{escape(line)}</p>' for line in presentation.cause_lines(cause)
        )
        rows.append(f'<div class="alert"><b>{escape(cause["summary"])}</b>{lines}</div>')
    return f'<h2>Causes <span class="soft">best supported first</span></h2>{"".join(rows)}'


def _runbook(url: str | None) -> str:
    """A link when it is an address, and plain text when it is a path in the repository."""
    if not url:
        return ""
    link = escape(url)
    if url.startswith(("https://", "http://")):
        link = f'<a href="{link}">{link}</a>'
    return f'<p class="soft">Runbook: {link}</p>'


def _charts(status: StatusJson, points: Sequence[Point], now: float) -> str:
    seconds, baseline = presentation.seconds, status["baseline"].get("acceptance_rate")
    acceptance, output = Line("1 min", "a", ACCEPTANCE), Line("1 min", "a", OUTPUT)
    ttft = (Line("P50", "a", TTFT_P50), Line("P90", "b", TTFT_P90))
    tpot = (Line("P50", "a", TPOT_P50), Line("P90", "b", TPOT_P90))
    charts = (
        Chart("Acceptance rate", (acceptance,), _percent, top=1.0, reference=baseline),
        Chart("Time to first token", ttft, seconds),
        Chart("Time per output token", tpot, seconds),
        Chart("Output tokens per second", (output,), "{:,.4g}".format),
    )
    return "\n".join(chart.html(points, now) for chart in charts)


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"
