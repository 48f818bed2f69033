"""The page at ``/``: one self-contained HTML document, readable on a phone, no script and nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from specserve.sidecar.chart import Chart
from specserve.sidecar.observer import Point
from specserve.units import duration, percent

_STYLE = """
:root{--ink:#1b1f24;--soft:#5b6470;--line:#d8dde3;--card:#fff;--back:#f4f6f8;--a:#1a66c2;--b:#c2571a;
--good:#1d7a3f;--warn:#96660a;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--line:#343b44;--card:#1b2027;--back:#12161b;
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
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;min-width:0}
.tiles{display:grid;gap:8px;grid-template-columns:repeat(auto-fill,minmax(98px,1fr));margin-bottom:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 10px}
.tile b{display:block;font-size:1.1rem;font-variant-numeric:tabular-nums;white-space:nowrap}
.bar{display:grid;grid-template-columns:1.5em 1fr 4em;gap:8px;align-items:center;font-size:.85rem}
.bar i{display:block;height:9px;border-radius:3px;background:var(--a)}.bar b{text-align:right;font-weight:400}
h2+.bar{margin-top:2px}.card h2:nth-of-type(n+2){margin-top:16px}
.verdict{margin:0 0 6px;overflow-wrap:anywhere}.verdict b{display:inline-block;min-width:4.2em}
.verdict b+b{min-width:2.2em}h2 .soft{font-weight:400}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.grid-line{stroke:var(--line);stroke-width:1}.ref{stroke:var(--soft);stroke-dasharray:5 4;stroke-width:1.5}
.sa,.sb{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.sa{stroke:var(--a)}.sb{stroke:var(--b)}
.key{display:inline-block;width:16px;border-top:3px solid;vertical-align:middle;margin:0 5px 0 10px}
.ka{border-color:var(--a)}.kb{border-color:var(--b)}.kr{border-top:2px dashed var(--soft)}
.alert{border-left:4px solid;padding:2px 0 2px 10px;margin:0 0 10px;overflow-wrap:anywhere}
.alert p{margin:2px 0;color:var(--ink)}.alert p.soft{color:var(--soft)}a{color:var(--a)}
"""


def render(
    status: Mapping[str, Any], points: Sequence[Point], *, refresh_seconds: float, now: float
) -> str:
    """The whole document. ``status`` is what /status answers; ``now`` is Unix time."""
    title = escape(str(status["model_name"]))
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    refresh = max(2, round(refresh_seconds))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title} - specserve</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><meta http-equiv="refresh" content="{refresh}">
<style>{_STYLE}</style></head><body><main>
{_header(status, title, stamp, refresh)}
{_tiles(status)}
<div class="grid">
<section class="card"><h2>Alerts</h2>{_alerts(status["alerts"], now)}</section>
<section class="card"><h2>Verdicts</h2>{_verdicts(status)}{_positions(status)}</section>
{_charts(status, points, now)}
</div></main></body></html>
"""


def _header(status: Mapping[str, Any], title: str, stamp: str, refresh: int) -> str:
    condition = str(status["condition"])
    color = {"progressing": "good", "idle": "good", "stalled": "bad", "down": "bad"}.get(
        condition, "warn"
    )
    ready = ("good", "ready") if status["ready"]["ok"] else ("bad", "not ready")
    versions = ", ".join(
        f"{name} {version}" for name, version in status["versions"].items() if version
    )
    supervisor = f" · supervisor: {escape(str(status['state']))}" if status["state"] else ""
    return (
        f'<header><h1>{title}</h1><span class="pill {color}">{escape(condition)}</span>'
        f'<span class="pill {ready[0]}">{ready[1]}</span>'
        f'<span class="soft">{escape(_method(status))} · {escape(versions)}{supervisor}'
        f" · {stamp}, again every {refresh} s</span></header>"
    )


def _method(status: Mapping[str, Any]) -> str:
    if not status["method"]:
        return "no speculation"
    return f"{status['method']}, {status['num_speculative_tokens']} tokens per draft"


def _positions(status: Mapping[str, Any]) -> str:
    """How often the draft's first, second, ... token is accepted: where to cut drafts."""
    found = status["windows"].get("5m", {}).get("acceptance_rate_per_position", {})
    bars = "".join(
        f'<div class="bar"><span class="soft">{int(position) + 1}</span>'
        f'<i style="width:{100 * rate:.1f}%"></i><b>{percent(rate)}</b></div>'
        for position, rate in sorted(found.items(), key=lambda row: int(row[0]))
    )
    return (
        f'<h2>Accepted by place in the draft <span class="soft">5 min</span></h2>{bars}'
        if bars
        else ""
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _tiles(status: Mapping[str, Any]) -> str:
    minute, now = status["windows"].get("1m", {}), status["now"]
    ttft, tpot = (
        minute.get(f"{name}_seconds", {})
        for name in ("time_to_first_token", "time_per_output_token")
    )
    speedup = minute.get("estimated_speedup_ratio")
    tiles = (
        ("acceptance rate", percent(minute.get("acceptance_rate"))),
        ("acceptance length", _number(minute.get("mean_acceptance_length"), 2)),
        ("tokens per step", _number(minute.get("tokens_per_step"), 2)),
        *((("estimated speedup", f"{speedup:.2f}x"),) if speedup is not None else ()),
        ("output tokens/s", _number(minute.get("generation_tokens_per_second"))),
        ("requests/s", _number(minute.get("requests_per_second"), 2)),
        ("running", _number(now.get("requests_running"))),
        ("waiting", _number(now.get("requests_waiting"))),
        ("KV cache in use", percent(now.get("kv_cache_usage_ratio"))),
        ("TTFT P90", _seconds(ttft.get("p90"))),
        ("TPOT P90", _seconds(tpot.get("p90"))),
    )
    cells = "".join(
        f'<div class="tile"><b>{escape(v)}</b><span class="soft">{escape(n)}</span></div>'
        for n, v in tiles
    )
    return f'<div class="tiles">{cells}</div><p class="soft">Rates and percentiles are of the last minute.</p>'


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.3g} ms" if value < 0.1 else duration(value)


def _verdicts(status: Mapping[str, Any]) -> str:
    rows = []
    for name in ("ready", "live", "started"):
        verdict = status[name]
        word, color = ("yes", "good") if verdict["ok"] else ("no", "bad")
        rows.append(
            f'<p class="verdict"><b>{name}</b> <b class="{color}">{word}</b> '
            f'<span class="soft">{escape(str(verdict["reason"]))}</span></p>'
        )
    return "".join(rows)


def _alerts(alerts: Iterable[Mapping[str, Any]], now: float) -> str:
    rows = []
    for alert in alerts:
        color = "bad" if alert["severity"] == "critical" else "warn"
        words = [str(alert["severity"]), str(alert["state"])]
        words += (
            [f"for {duration(max(0.0, now - alert['started_at']))}"] if alert["started_at"] else []
        )
        words += [f"{name} {value}" for name, value in alert["labels"].items()]
        words += [f"explained by {alert['inhibited_by']}"] if alert["inhibited_by"] else []
        more = [str(alert["description"])]
        more += [f"Likely: {'; '.join(alert['causes'])}"] if alert["causes"] else []
        rows.append(
            f'<div class="alert {color}"><b>{escape(str(alert["name"]))}</b> '
            f'<span class="soft">{escape(" · ".join(words))}</span>'
            f"<p>{escape(str(alert['summary']))}</p>"
            + "".join(f'<p class="soft">{escape(text)}</p>' for text in more)
            + _runbook(alert["runbook_url"])
            + "</div>"
        )
    return "".join(rows) or '<p class="soft">none pending, none firing</p>'


def _runbook(url: str | None) -> str:
    """A link where it is an address; a path in the repository otherwise."""
    if not url:
        return ""
    text = escape(url)
    link = f'<a href="{text}">{text}</a>' if url.startswith(("https://", "http://")) else text
    return f'<p class="soft">Runbook: {link}</p>'


def _charts(status: Mapping[str, Any], points: Sequence[Point], now: float) -> str:
    baseline = status["baseline"].get("acceptance_rate")
    charts = (
        Chart(
            "Acceptance rate",
            (("1 min", "a", "acceptance_rate"),),
            _percent,
            top=1.0,
            reference=baseline,
        ),
        Chart(
            "Time to first token",
            (("P50", "a", "ttft_p50_seconds"), ("P90", "b", "ttft_p90_seconds")),
            _seconds,
        ),
        Chart(
            "Time per output token",
            (("P50", "a", "tpot_p50_seconds"), ("P90", "b", "tpot_p90_seconds")),
            _seconds,
        ),
        Chart(
            "Output tokens per second",
            (("1 min", "a", "generation_tokens_per_second"),),
            "{:,.4g}".format,
        ),
    )
    return "\n".join(chart.html(points, now) for chart in charts)


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"
