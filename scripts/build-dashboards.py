"""Write the Grafana dashboards of the chart: helm/specserve/dashboards/*.json.

.venv/bin/python scripts/build-dashboards.py [--check]

Ratios are sums divided by sums, so that replicas weigh by their traffic. Quantiles cannot be summed: the worst
replica is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "helm" / "specserve" / "dashboards"
COLUMNS = 24
RATE = "[$__rate_interval]"
RATIO, SECONDS, TOKENS, SPEED, COUNT = "percentunit", "s", "suffix:tokens", "suffix:x", "short"
TOKENS_PER_SECOND, REQUESTS_PER_SECOND = "suffix:tokens/s", "reqps"


@dataclass(frozen=True)
class Panel:
    """One picture: what it asks, in which unit, and what it tells an operator."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]
    """(PromQL, legend)."""
    kind: str = "timeseries"
    width: int = 8
    steps: Sequence[tuple[float, str]] = ()
    """(from this value on, colour); below the first one it is green, or red where the first is green."""
    highest: float | None = None


@dataclass(frozen=True)
class Row:
    """A heading and its panels, left to right, wrapped at 24 columns."""

    title: str
    panels: Sequence[Panel]


def m(name: str, more: str = "") -> str:
    """A family of ours, narrowed by the dashboard's variables."""
    where = 'namespace=~"$namespace", model_name=~"$model", instance=~"$instance"'
    return f"specserve_{name}{{{where}{', ' + more if more else ''}}}"


def rate(name: str, more: str = "") -> str:
    return f"rate({m(name + '_total', more)}{RATE})"


def total(name: str, more: str = "", by: str = "") -> str:
    """Per second, over all replicas."""
    return f"sum {f'by ({by}) ' if by else ''}({rate(name, more)})"


def share(part: str, whole: str, by: str = "") -> str:
    """Two counters' rates divided, sums first."""
    return f"{total(part, by=by)} / {total(whole, by=by)}"


def latency(family: str) -> list[tuple[str, str]]:
    return [(f"max by (stat) ({m(family, WINDOW + QUANTILES)})", "{{stat}}")]


def tpot(speculating: int) -> str:
    """Mean time per output token of a model's replicas that speculate, or of those that do not."""
    return (
        f"avg by (namespace, model_name) ({m('time_per_output_token_seconds', WINDOW + MEAN)}"
        f" and on (namespace, pod, instance, model_name) {m('speculation_configured')} == {speculating})"
    )


WINDOW, QUANTILES, MEAN = 'window="5m"', ', stat=~"p50|p90|p99"', ', stat="mean"'
ERRORS, SERVER_ERRORS, AT_LIMIT = 'status=~"4xx|5xx"', 'status="5xx"', 'reason="length"'
ACCEPTANCE = share("accepted_tokens", "draft_tokens")
LENGTH = f"1 + {share('accepted_tokens', 'drafts')}"
SPEEDUP = f"{tpot(0)} / {tpot(1)}"
ERROR_SHARE = (
    f"{total('http_requests', ERRORS, 'status')} / on () group_left () {total('http_requests')}"
)
BY_POSITION = f"{total('accepted_tokens_per_position', by='position')} / on () group_left () {total('drafts')}"
LOW_IS_BAD = ((0.0, "red"), (0.5, "orange"), (0.55, "green"))
PAYS = ((0.0, "red"), (1.0, "orange"), (1.1, "green"))
FULL = ((0.0, "green"), (0.9, "orange"), (0.97, "red"))
ANY_IS_BAD = ((0.0, "green"), (1.0, "red"))

# fmt: off
OVERVIEW = (
    Row("Is it well?", (
        Panel("Ready replicas",
              "Replicas where a completion asked now would make progress (/readyz).",
              COUNT, [(f"sum({m('ready')})", "ready"), (f"count({m('ready')})", "all")], "stat", 4),
        Panel("Alerts firing",
              "Alerts that the sidecars fire now; their names are at the end of this page.",
              COUNT, [(f"sum({m('alert_firing')})", "firing")], "stat", 4, ANY_IS_BAD),
        Panel("Acceptance rate",
              "Accepted / drafted tokens. Empty while nothing is drafted. Alerts fire below 50 % by default; what "
              "pays depends on the load, see the break-even on the speculation page.",
              RATIO, [(ACCEPTANCE, "acceptance")], "stat", 4, LOW_IS_BAD),
        Panel("Mean acceptance length",
              "Tokens that one step of the target brings: 1 + accepted tokens / drafts.",
              TOKENS, [(LENGTH, "length")], "stat", 4),
        Panel("Measured speedup",
              "Time per output token without speculation / with it, from the canary pair of each model. Below 1 "
              "speculation costs. Empty without canary.enabled.",
              SPEED, [(SPEEDUP, "{{model_name}}")], "stat", 4, PAYS),
        Panel("Estimated speedup",
              "From live acceptance and the step times of a benchmark profile. Empty without "
              "sidecar.benchmark_profile.",
              SPEED, [(f"avg({m('estimated_speedup_ratio', WINDOW)})", "speedup")], "stat", 4, PAYS),
        Panel("Condition",
              "What each engine does: idle and progressing are well; stalled means work and no progress although "
              "/health may answer 200.",
              COUNT, [(f"sum by (condition) ({m('engine_condition')})", "{{condition}}")], width=24),
    )),
    Row("Service levels", (
        Panel("Time to first token",
              "From request to first token over 5 minutes, the worst replica.",
              SECONDS, latency("time_to_first_token_seconds")),
        Panel("Time per output token",
              "(Latency - TTFT) / (output tokens - 1) of finished requests over 5 minutes, the worst replica. This "
              "is what speculation improves.",
              SECONDS, latency("time_per_output_token_seconds")),
        Panel("Request latency",
              "End to end, of finished requests over 5 minutes, the worst replica.",
              SECONDS, latency("request_latency_seconds")),
        Panel("Errors",
              "Answers by status class / all answers. 503 with Retry-After also counts as 5xx: it is the limit "
              "max_concurrent_requests at work.",
              RATIO, [(ERROR_SHARE, "{{status}}")], highest=1),
        Panel("Queue time",
              "Time that finished requests spent waiting, the worst replica. Rising queue time with free KV cache "
              "means that the step is the limit.",
              SECONDS, latency("queue_time_seconds")),
        Panel("Seconds since progress",
              "Time since tokens, finished requests or steps last advanced, while there is work. Liveness acts on "
              "this, not on /health.",
              SECONDS, [(f"max by (instance) ({m('seconds_since_progress')})", "{{instance}}")]),
    )),
    Row("Load", (
        Panel("Requests",
              "Requests in execution and waiting, all replicas.",
              COUNT, [(f"sum({m('requests_running')})", "running"), (f"sum({m('requests_waiting')})", "waiting")]),
        Panel("Tokens",
              "Output and prompt tokens per second, all replicas.",
              TOKENS_PER_SECOND, [(total("generation_tokens"), "output"), (total("prompt_tokens"), "prompt")]),
        Panel("KV cache in use",
              "The fullest engine of each replica. Near 100 % requests wait or are preempted.",
              RATIO, [(f"max by (instance) ({m('kv_cache_usage_ratio')})", "{{instance}}")], steps=FULL, highest=1),
    )),
    Row("GPU", (
        Panel("GPU utilization",
              "Part of the time in which a kernel ran. High says busy, not efficient.",
              RATIO, [(m("gpu_utilization_ratio"), "{{instance}} GPU {{gpu}}")], width=6, highest=1),
        Panel("GPU memory",
              "Memory in use by all processes / memory of the device. Flat by design: vLLM takes its share at "
              "start.",
              RATIO, [(m("gpu_memory_used_ratio"), "{{instance}} GPU {{gpu}}")], width=6, steps=FULL, highest=1),
        Panel("GPU temperature",
              "Temperature, and the limit at which the device slows down.",
              "celsius",
              [(m("gpu_temperature_celsius"), "{{instance}} GPU {{gpu}}"),
               (f"min({m('gpu_temperature_limit_celsius')})", "limit")],
              width=6),
        Panel("GPU throttled",
              "Shows 1 while clocks are held down, by reason.",
              COUNT,
              [(f"max by (instance, gpu, reason) ({m('gpu_throttled')})", "{{instance}} GPU {{gpu}} {{reason}}")],
              width=6, highest=1),
    )),
    Row("Alerts", (
        Panel("Alerts",
              "Alerts of the sidecars that fire or are pending: 1 fires. Each name has a runbook.",
              COUNT,
              [(f"max by (alert, severity, instance) ({m('alert_firing')} > 0 or {m('alert_pending')} * 0.5)",
                "{{alert}} {{instance}}")],
              width=24, highest=1),
    )),
)

SPECULATION = (
    Row("Acceptance", (
        Panel("Acceptance rate",
              "Accepted / drafted tokens by model, all replicas.",
              RATIO,
              [(share("accepted_tokens", "draft_tokens", "model_name"), "{{model_name}}")],
              steps=LOW_IS_BAD, highest=1),
        Panel("Against its own baseline",
              "Acceptance rate of each replica over 5 minutes minus that of its recent good period. A fall at "
              "steady traffic points at the models or the engine, not at the load.",
              RATIO, [(f"avg by (instance) ({m('acceptance_rate_drift', WINDOW)})", "{{instance}}")]),
        Panel("Mean acceptance length",
              "Tokens that one step brings: 1 + accepted / drafts, by replica.",
              TOKENS, [(f"1 + {share('accepted_tokens', 'drafts', 'instance')}", "{{instance}}")]),
    )),
    Row("Positions", (
        Panel("Acceptance by position",
              "Accepted at the position / drafts, counted from 0, unconditional. Where it is near zero the draft is "
              "longer than it is good for: lower num_speculative_tokens.",
              RATIO, [(BY_POSITION, "position {{position}}")], width=12, highest=1),
        Panel("Conditional acceptance by position",
              "Accepted at the position / accepted at the one before, the worst replica. Flat is normal; a fall says "
              "where the draft loses the thread.",
              RATIO,
              [(f"min by (position) ({m('conditional_acceptance_rate_per_position', WINDOW)})",
                "position {{position}}")],
              width=12, highest=1),
    )),
    Row("Does it pay?", (
        Panel("Measured speedup",
              "Time per output token without speculation / with it, from the canary pair; below 1 speculation "
              "costs. Needs canary.enabled.",
              SPEED, [(SPEEDUP, "{{namespace}} {{model_name}}")], steps=PAYS),
        Panel("On and off",
              "Mean time per output token of the replicas that speculate, and of the canary that does not.",
              SECONDS, [(tpot(1), "{{model_name}} with speculation"), (tpot(0), "{{model_name}} without")]),
        Panel("Estimated speedup",
              "Tokens per step x step time without / with speculation, from the benchmark profile. Needs "
              "sidecar.benchmark_profile.",
              SPEED, [(f"avg by (instance) ({m('estimated_speedup_ratio', WINDOW)})", "{{instance}}")], steps=PAYS),
        Panel("Acceptance and break-even",
              "Below its break-even the present batch size is served slower with speculation than without. The "
              "break-even rises with the load.",
              RATIO,
              [(f"avg({m('break_even_acceptance_rate')})", "break-even"),
               (ACCEPTANCE, "acceptance")],
              highest=1),
        Panel("Break-even margin",
              "Acceptance rate minus break-even, by replica; negative is slower than off.",
              RATIO, [(f"avg by (instance) ({m('break_even_margin', WINDOW)})", "{{instance}}")]),
        Panel("Tokens per step",
              "Output tokens a sequence gains per step; 1 without speculation.",
              TOKENS, [(f"avg by (instance) ({m('tokens_per_step', WINDOW)})", "{{instance}}")]),
    )),
    Row("Work", (
        Panel("Drafted and accepted",
              "Tokens per second. The gap is work that was thrown away.",
              TOKENS_PER_SECOND,
              [(total("draft_tokens"), "drafted"),
               (total("accepted_tokens"), "accepted"),
               (total("generation_tokens"), "output")]),
        Panel("Share of output from drafts",
              "Accepted tokens / output tokens.",
              RATIO, [(share("accepted_tokens", "generation_tokens"), "from drafts")], highest=1),
        Panel("Yield of verified positions",
              "Accepted / (drafted tokens + drafts): what part of the target's verified positions became accepted "
              "tokens.",
              RATIO,
              [(f"{total('accepted_tokens')} / ({total('draft_tokens')} + {total('drafts')})", "yield")],
              highest=1),
    )),
    Row("Engines", (
        Panel("Acceptance by engine",
              "Data parallel ranks of each replica. One that differs from the rest has other weights, or a fault.",
              RATIO,
              [(f"avg by (instance, engine) ({m('engine_acceptance_rate', WINDOW)})",
                "{{instance}} engine {{engine}}")],
              highest=1),
        Panel("Sample size",
              "Draft tokens of the last 5 minutes. Rates of a few tokens mean nothing; alerts wait for enough of "
              "them.",
              TOKENS, [(f"sum by (instance) ({m('window_draft_tokens', WINDOW)})", "{{instance}}")]),
        Panel("Acceptance of the start-up canary",
              "At position 0 on repetitive text, which any working draft continues. Near zero: the draft is wired "
              "wrongly.",
              RATIO, [(m("canary_position0_acceptance_rate"), "{{instance}} greedy"),
                      (m("canary_default_position0_acceptance_rate"), "{{instance}} default sampling")], highest=1),
        Panel("Rank without progress",
              "Time since each data parallel rank advanced, while it has requests. One that grows alone hangs.",
              SECONDS, [(f"max by (instance, engine) ({m('engine_seconds_since_progress')})",
                         "{{instance}} engine {{engine}}")]),
        Panel("Drafted text against the target's own",
              "At 1 the last comparison proved that drafted text is not the target's own, so answers are wrong. "
              "Empty where the engine gives nothing to compare.",
              COUNT, [(f"max by (instance) ({m('output_mismatch')})", "{{instance}}")]),
    )),
)

CAPACITY = (
    Row("Demand", (
        Panel("Requests per second",
              "Finished requests by how they ended.",
              REQUESTS_PER_SECOND, [(total("requests_finished", by="reason"), "{{reason}}")]),
        Panel("Tokens per request",
              "Mean prompt and output tokens of a finished request. Capacity follows from these two more than from "
              "the number of requests.",
              TOKENS,
              [(f"{total('prompt_tokens')} / {total('requests_finished')}", "prompt"),
               (f"{total('generation_tokens')} / {total('requests_finished')}", "output")]),
        Panel("Ended at the token limit",
              "Requests that ended at max_tokens / finished requests. A jump can mean output that never ends.",
              RATIO,
              [(f"{total('requests_finished', AT_LIMIT)} / {total('requests_finished')}", "length")],
              highest=1),
    )),
    Row("Replicas", (
        Panel("Replicas",
              "Replicas that report and those that are ready. Autoscaling follows waiting requests.",
              COUNT, [(f"count({m('live')})", "reporting"), (f"sum({m('ready')})", "ready")]),
        Panel("Running per replica",
              "Requests in execution. The step batch decides whether speculation pays.",
              COUNT, [(f"sum by (instance) ({m('requests_running')})", "{{instance}}")]),
        Panel("Waiting per replica",
              "Requests that wait: what KEDA or the HPA scales on.",
              COUNT, [(f"sum by (instance) ({m('requests_waiting')})", "{{instance}}")]),
        Panel("Output tokens per replica",
              "Tokens per second of each replica; its highest value under load is what "
              "autoscaling.keda.tokensPerSecond should stay below.",
              TOKENS_PER_SECOND, [(total("generation_tokens", by="instance"), "{{instance}}")]),
        Panel("Steps per second",
              "Engine steps by replica. Fewer steps for the same tokens is what speculation does.",
              "ops", [(total("steps", by="instance"), "{{instance}}")]),
        Panel("Restarts",
              "Changes of the engine's process in an hour, by replica.",
              COUNT, [(f"sum by (instance) (increase({m('engine_restarts_total')}[1h]))", "{{instance}}")]),
    )),
    Row("KV cache", (
        Panel("KV cache in use",
              "The fullest engine of each replica.",
              RATIO, [(f"max by (instance) ({m('kv_cache_usage_ratio')})", "{{instance}}")], steps=FULL, highest=1),
        Panel("KV cache size",
              "Tokens of context that fit, by replica. The draft model's cache takes its part of the memory.",
              TOKENS, [(f"sum by (instance) ({m('kv_cache_tokens')})", "{{instance}}")]),
        Panel("Preemptions",
              "Requests pushed out of the KV cache per second; each is computed again.",
              REQUESTS_PER_SECOND, [(total("preemptions", by="instance"), "{{instance}}")]),
        Panel("Prefix cache hits",
              "Prompt tokens found in the prefix cache / looked up.",
              RATIO, [(share("prefix_cache_hits", "prefix_cache_queries", "instance"), "{{instance}}")], highest=1),
        Panel("Queue time",
              "Time that finished requests spent waiting, the worst replica.",
              SECONDS, latency("queue_time_seconds")),
        Panel("Refused",
              "Answers with 5xx per second; 503 is the limit on concurrent requests.",
              REQUESTS_PER_SECOND, [(total("http_requests", SERVER_ERRORS, "instance"), "{{instance}}")]),
    )),
    Row("GPU", (
        Panel("Output tokens per GPU",
              "Tokens per second / GPUs in use. Over several nodes only the first node's GPUs are seen: divide by "
              "leaderWorkerSet.size.",
              TOKENS_PER_SECOND, [(f"{total('generation_tokens')} / count({m('gpu_info')})", "tokens/s")]),
        Panel("Power",
              "Power drawn by all GPUs of these replicas; over several nodes, by those of the first.",
              "watt", [(f"sum({m('gpu_power_watts')})", "power")]),
        Panel("Output tokens per joule",
              "Output tokens per second / power: what the energy buys. Over several nodes only the first node's power "
              "is seen: divide by leaderWorkerSet.size.",
              "suffix:tokens/J", [(f"{total('generation_tokens')} / sum({m('gpu_power_watts')})", "tokens/J")]),
    )),
)
# fmt: on

DASHBOARDS = {
    "overview": (
        "specserve / Overview",
        "Service levels, acceptance, speedup, load and GPUs.",
        OVERVIEW,
    ),
    "speculation": (
        "specserve / Speculation",
        "Where acceptance comes from, and whether it pays.",
        SPECULATION,
    ),
    "capacity": (
        "specserve / Capacity",
        "What is asked for, what a replica gives, what limits it.",
        CAPACITY,
    ),
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel as Grafana stores it."""
    steps = [
        {"value": at if n else None, "color": colour} for n, (at, colour) in enumerate(panel.steps)
    ]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0 if panel.highest else None,
        "max": panel.highest,
    }
    if steps:
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 8, "showPoints": "never", "spanNulls": False}
        if steps:  # a line at each threshold; without it Grafana shows none
            defaults["custom"]["thresholdsStyle"] = {"mode": "dashed"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "colorMode": "value" if steps else "none",
        }
    targets = [
        {
            "refId": chr(65 + n),
            "expr": expr,
            "legendFormat": legend,
            "datasource": SOURCE,
            "range": True,
        }
        for n, (expr, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height(panel)},
        "fieldConfig": {
            "defaults": {k: v for k, v in defaults.items() if v is not None},
            "overrides": [],
        },
        "options": options,
        "targets": targets,
    }


def height(panel: Panel) -> int:
    """Grid rows of a panel."""
    return 4 if panel.kind == "stat" else 8


def laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows and panels with their places."""
    out: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        grid = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        head = {
            "id": len(out) + 1,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
        }
        out.append(head | {"gridPos": grid})
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            out.append(drawn(panel, len(out) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, height(panel))
        y += tallest
    return out


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice of label values. All is `.*`, which also matches a Prometheus that has no such label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard as JSON."""
    title, description, rows = DASHBOARDS[name]
    inside = 'namespace=~"$namespace"'
    of_model = inside + ', model_name=~"$model"'
    return {
        "uid": f"specserve-{name}",
        "title": title,
        "description": description,
        "tags": ["specserve", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["specserve"], "title": "specserve", "keepTime": True,
                   "includeVars": True, "asDropdown": False}],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            variable("namespace", "Namespace", "label_values(specserve_live, namespace)"),
            variable("model", "Model", f"label_values(specserve_live{{{inside}}}, model_name)"),
            variable("instance", "Instance", f"label_values(specserve_live{{{of_model}}}, instance)"),
        ]},
        "panels": laid_out(rows),
    }  # fmt: skip


def main() -> int:
    """Write, or with --check tell what is stale."""
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        path, text = FOLDER / f"{name}.json", json.dumps(dashboard(name), indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run scripts/build-dashboards.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
