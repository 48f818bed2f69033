"""The dashboards: every panel explained and in its unit, every query answered by a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import requests
import yaml

from specserve.metric_families import FAMILIES
from tests import needed
from tests.alert_stack import free_ports, process, wait_for
from tests.chart.rendering import CHART, ROOT

PATHS = sorted((CHART / "dashboards").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in PATHS}
UNITS = {"percentunit", "s", "short", "reqps", "ops", "celsius", "watt"}
ADDED_BY_PROMETHEUS = {"namespace", "pod", "instance", "job"}
NEEDS_MORE = {
    "acceptance_rate_drift",  # a good period of its own
    "estimated_speedup_ratio",  # a benchmark profile
    "break_even_acceptance_rate",
    "break_even_margin",
    "seconds_since_progress",  # work that waits while the sidecar looks
    "engine_seconds_since_progress",
    "output_mismatch",  # an engine that lists its tokens; the stub does not
    "queue_time_seconds",  # a queue; the stub has none
}
ONLY_AFTER_ERRORS = ('status="5xx"', 'status=~"4xx|5xx"')
SPECULATIVE = ("--speculative-config", '{"num_speculative_tokens": 3}')


def panels(name: str) -> list[dict[str, Any]]:
    return [p for p in DASHBOARDS[name]["panels"] if p["type"] != "row"]


QUERIES = [
    pytest.param(target["expr"], id=f"{name}-{panel['title']}-{target['refId']}")
    for name in DASHBOARDS
    for panel in panels(name)
    for target in panel["targets"]
]


def filled(expression: str) -> str:
    """A query as Grafana sends it when every variable is All."""
    return re.sub(r"\$(namespace|model|instance)", ".*", expression).replace(
        "$__rate_interval", "1m"
    )


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """Every selector in an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for field in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (child := getattr(node, field, None)) is not None and not isinstance(child, str | float):
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def test_dashboards_are_fresh() -> None:
    """They follow from the script."""
    argv = [sys.executable, str(ROOT / "scripts" / "build-dashboards.py"), "--check"]
    out = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout


def test_there_are_three() -> None:
    """Overview, speculation and capacity; each with an identity of its own and the same variables."""
    assert list(DASHBOARDS) == ["capacity", "overview", "speculation"]
    assert len({d["uid"] for d in DASHBOARDS.values()}) == 3
    for dashboard in DASHBOARDS.values():
        names = [v["name"] for v in dashboard["templating"]["list"]]
        assert names == ["datasource", "namespace", "model", "instance"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_explain_themselves(name: str) -> None:
    """Each panel has a sentence of its own, a unit, a title that its dashboard has once, and a legend for each line."""
    titles = [p["title"] for p in panels(name)]
    assert len(titles) == len(set(titles))
    for panel in panels(name):
        assert re.match(r"[A-Z(].{25,}\.$", panel["description"]), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit.startswith("suffix:"), panel["title"]
        assert all(t["legendFormat"] for t in panel["targets"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fit_the_grid(name: str) -> None:
    """No panel leaves the 24 columns, none covers another, and ids are unique."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [p["id"] for p in DASHBOARDS[name]["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("expression", QUERIES)
def test_queries_ask_for_what_is_exported(expression: str) -> None:
    """Every series is a family of ours, narrowed by the dashboard's variables and by labels that the family has."""
    found = list(selectors(promql_parser.parse(filled(expression))))
    assert found
    for selector in found:
        family = FAMILIES[selector.name]
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert {"namespace", "model_name", "instance"} <= labels
        assert labels - ADDED_BY_PROMETHEUS - {"model_name"} <= set(family.labels)


@pytest.mark.parametrize("expression", QUERIES)
def test_quantiles_and_ratios_are_never_summed(expression: str) -> None:
    """Two replicas with 40 % of their cache in use are not one with 80 %."""
    for family in FAMILIES.values():
        if family.unit in ("ratio", "seconds"):
            assert not re.search(rf"sum( by \([^)]*\))? ?\({family.name}\{{", expression)


@dataclass
class Live:
    """A Prometheus that scraped two real sidecars, and one exporter of everything that may exist."""

    url: str

    def answer(self, expression: str, job: str) -> list[dict[str, Any]]:
        """Series of a query, asked of one job alone."""
        narrowed = filled(expression).replace('namespace=~".*"', f'job=~"{job}"')
        out = requests.get(
            f"{self.url}/api/v1/query", params={"query": narrowed}, timeout=10
        ).json()
        assert out["status"] == "success", out
        return out["data"]["result"]

    def answers(self, expression: str, job: str) -> None:
        """Wait for a series; one scrape that came late leaves a gap."""
        wait_for(lambda: self.answer(expression, job), expression, 20)


def everything() -> str:
    """One sample of every family that the table promises, as text."""
    choices = {"window": "5m", "stat": "p90", "status": "5xx", "reason": "length", "position": "0"}
    lines = []
    for family in FAMILIES.values():
        lines.append(f"# TYPE {family.name} {family.kind}")
        labels = {name: choices.get(name, "a") for name in family.labels} | {"model_name": "m"}
        inside = ",".join(f'{k}="{v}"' for k, v in labels.items())
        lines.append(f"{family.name}{{{inside}}} {time.time() if family.kind == 'counter' else 1}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def exporter() -> Iterator[int]:
    """The port of a server that exports every family."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = everything().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def sidecar_config(folder: Path, engine: int, port: int, *, speculates: bool) -> Path:
    config = {
        "server": {"port": engine, "served_model_name": "stub"},
        "models": {"target_model": {"path": "/models/stub"}},
        "speculative_decoding": {
            "enabled": speculates,
            "method": "ngram",
            "num_speculative_tokens": 3,
        },
        "sidecar": {
            "port": port,
            "scrape_interval_seconds": 0.3,
            "state_dir": str(folder / f"state-{port}"),
        },
    }
    path = folder / f"sidecar-{port}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def prometheus_config(folder: Path, jobs: dict[str, list[int]]) -> Path:
    scrapes = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
        for job, ports in jobs.items()
    ]
    path = folder / "prometheus.yml"
    path.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes})
    )
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, exporter: int) -> Iterator[Live]:
    """Two stub engines, with and without speculation, their sidecars, traffic, and Prometheus."""
    needed.programs("prometheus", "prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("live")
    on, off, on_sidecar, off_sidecar, prometheus = free_ports(5)
    python, stub = sys.executable, str(ROOT / "tests" / "stub_engine.py")
    stubs = [
        [python, stub, "--port", str(port), "--model", "stub", "--stub-step", "0.002", *more]
        for port, more in ((on, SPECULATIVE), (off, ()))
    ]
    sidecars = [
        [
            python,
            "-m",
            "specserve",
            "sidecar",
            str(sidecar_config(folder, engine, port, speculates=engine == on)),
        ]
        for engine, port in ((on, on_sidecar), (off, off_sidecar))
    ]
    configuration = prometheus_config(
        folder, {"real": [on_sidecar, off_sidecar], "all": [exporter]}
    )
    storage, listen = (
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{prometheus}",
    )
    server = ["prometheus", f"--config.file={configuration}", storage, listen]
    with (
        process(stubs[0], folder / "on.log"),
        process(stubs[1], folder / "off.log"),
        process(sidecars[0], folder / "on-sidecar.log"),
        process(sidecars[1], folder / "off-sidecar.log"),
        process(server, folder / "prometheus.log"),
    ):
        found = Live(f"http://127.0.0.1:{prometheus}")
        for port in (on, off):
            wait_for(
                lambda port=port: answers(f"http://127.0.0.1:{port}/health"), "the stub engine"
            )
        wait_for(lambda: answers(f"{found.url}/-/ready"), "Prometheus")
        settle(found, (on, off))
        yield found


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=2).status_code == 200
    except requests.RequestException:
        return False


def settle(found: Live, engines: tuple[int, int]) -> None:
    """Traffic until the latest things to appear are there: rates, latencies of both arms, positions."""
    wanted = (
        'sum(specserve_ready{job="real"}) == 2',
        'count(rate(specserve_steps_total{job="real"}[1m])) == 2',
    )
    latency = (
        'count(specserve_time_per_output_token_seconds{job="real",stat="mean",window="5m"}) == 2'
    )

    def there() -> bool:
        body = {"model": "stub", "prompt": "a b c", "max_tokens": 20}
        for port in engines:
            requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=10)
        queries = (*wanted, latency)
        got = [
            requests.get(f"{found.url}/api/v1/query", params={"query": q}, timeout=10).json()
            for q in queries
        ]
        return all(answer["data"]["result"] for answer in got)

    wait_for(there, "samples of both sidecars", 60)


@pytest.mark.parametrize("expression", QUERIES)
def test_queries_answer(live: Live, expression: str) -> None:
    """Each query has an answer where all families exist; on real sidecars, all but those that need more."""
    speedup = "specserve_speculation_configured" in expression
    if not speedup:
        live.answers(expression, "all")
    names = {
        s.name.removeprefix("specserve_")
        for s in selectors(promql_parser.parse(filled(expression)))
    }
    absent = any(name.startswith(("gpu_", "canary_")) or name in NEEDS_MORE for name in names)
    if not absent and not any(label in expression for label in ONLY_AFTER_ERRORS):
        live.answers(expression, "real")


def test_the_measured_speedup_is_that_of_the_pair(live: Live) -> None:
    """The stub's steps take the same time in both arms, so tokens per step are the speedup: above 1."""
    (panel,) = [p for p in panels("overview") if p["title"] == "Measured speedup"]
    expression = panel["targets"][0]["expr"]
    live.answers(expression, "real")
    (series,) = live.answer(expression, "real")
    assert 1.2 < float(series["value"][1]) < 4


def run_query(
    folder: Path, panel: str, samples: dict[str, float], expected: dict[str, float]
) -> None:
    """Ask a panel's first query of promtool, with these series at a constant value."""
    needed.programs("promtool")
    (found,) = [p for p in panels("overview") if p["title"] == panel]
    asked = {"expr": filled(found["targets"][0]["expr"]), "eval_time": "5m"}
    asked["exp_samples"] = [
        {"labels": labels, "value": value} for labels, value in expected.items()
    ]
    series = [{"series": name, "values": f"{value}+0x9"} for name, value in samples.items()]
    case = {
        "rule_files": [],
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(case))
    argv = ["promtool", "test", "rules", "test.yaml"]
    out = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout + out.stderr


def test_the_speedup_is_that_of_each_model(tmp_path: Path) -> None:
    """A model without a canary has no measured speedup, and does not change that of another."""
    samples = {}
    for model, pod, asks, seconds in (
        ("big", "a", 1, 0.01),
        ("big", "c", 0, 0.02),
        ("small", "s", 1, 0.05),
    ):
        own = f'namespace="n", pod="{pod}", instance="{pod}", model_name="{model}"'
        samples[f'specserve_time_per_output_token_seconds{{{own}, window="5m", stat="mean"}}'] = (
            seconds
        )
        samples[f"specserve_speculation_configured{{{own}}}"] = asks
    run_query(tmp_path, "Measured speedup", samples, {'{namespace="n", model_name="big"}': 2})


def test_pending_alerts_are_shown(tmp_path: Path) -> None:
    """A pending alert is half, a firing one is 1 whether it is said to be pending or not."""
    samples, expected = {}, {}
    for name, firing, pending, shown in (("A", 0, 1, 0.5), ("B", 1, 0, 1), ("C", 0, 0, 0)):
        labels = f'{{alert="{name}", severity="warning", instance="i"}}'
        samples |= {
            f"specserve_alert_firing{labels}": firing,
            f"specserve_alert_pending{labels}": pending,
        }
        expected[labels] = shown
    run_query(tmp_path, "Alerts", samples, expected)
