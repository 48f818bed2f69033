"""The rendered pod with the real engine: a stand-in for the kubelet runs what the chart says, init container first."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from tests.alert_stack import answers, free_ports, process, wait_for
from tests.chart.kubelet import Pod
from tests.chart.rendering import Rendered, fetch_tools, template

ROOT = Path(__file__).parents[2]
START_SECONDS = 420
PROMPT = "def add(a, b):"


@dataclass
class Running:
    """One pod, and what the chart rendered with it."""

    pod: Pod
    port: int
    made: Rendered
    folder: Path

    def complete(self, tokens: int = 8) -> int:
        """The status of one completion."""
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return requests.post(
            f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=300
        ).status_code

    def lose(self) -> None:
        """A completion that a restart ends."""
        with contextlib.suppress(requests.RequestException):
            self.complete()

    def together(self, clients: int, tokens: int) -> Callable[[], list[int]]:
        """Start so many requests at once; call it to wait for their statuses."""
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(self.complete(tokens)))
            for _ in range(clients)
        ]
        for thread in threads:
            thread.start()

        def wait() -> list[int]:
            for thread in threads:
                thread.join()
            return statuses

        return wait

    def engine_core(self) -> psutil.Process:
        """The process that steps the model."""
        leader = self.pod.leader()
        assert leader is not None
        (core,) = [
            p
            for p in psutil.Process(leader).children(recursive=True)
            if "EngineCore" in " ".join(p.cmdline())
        ]
        return core


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: dict[str, Path], engine_host: Any
) -> Iterator[Running]:
    """The tiny pair in the pod that the chart renders for it, ready."""
    fetch_tools()
    engine_host.end()
    folder = tmp_path_factory.mktemp("pod")
    port, sidecar = free_ports(2)
    config = yaml.safe_load((ROOT / "configs" / "tiny-pair.yaml").read_text())
    config["server"]["port"] = port
    config["models"] = {
        "target_model": {"path": str(tiny_pair["target"]), "dtype": "float32"},
        "draft_model": {"path": str(tiny_pair["draft"])},
    }
    config["sidecar"] = {"port": sidecar, "scrape_interval_seconds": 1, "canary_timeout_seconds": 8}
    values = {
        "config": config,
        "gpu": {"resource": ""},
        "models": {
            "existingClaim": "models",
            "mountPath": str(ROOT / ".cache" / "models"),
            "pull": True,
        },
        "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
        "shutdown": {"preStopSeconds": 2},
        "metrics": {"podMonitor": {"enabled": True, "interval": "1s"}},
        "probes": {"startup": {"periodSeconds": 2}, "liveness": {"periodSeconds": 3}},
    }
    made = template(values)
    maps = {d["metadata"]["name"]: d["data"] for d in made.documents if d["kind"] == "ConfigMap"}
    pod = Pod(made.pod(), folder, maps, given={"models": ROOT / ".cache" / "models"}).start()
    found = Running(pod, port, made, folder)
    try:
        pod.becomes_ready(START_SECONDS)
        yield found
    finally:
        pod.stop()


def test_it_starts_in_order(running: Running) -> None:
    """The init container finds the models, the engine starts, and ready means that a completion works."""
    order = ["pull-models starts", "pull-models ended with 0", "engine starts", "started", "ready"]
    assert running.pod.events == order
    assert running.complete() == 200


@pytest.mark.needs("prometheus")
def test_metrics_reach_prometheus(running: Running) -> None:
    """The rendered PodMonitor's port and path lead to samples, and the dashboards' queries have answers."""
    (endpoint,) = running.made.of("PodMonitor")["spec"]["podMetricsEndpoints"]
    (engine,) = running.made.pod()["containers"]
    (target,) = [p["containerPort"] for p in engine["ports"] if p["name"] == endpoint["port"]]
    scrape = {
        "job_name": "pod",
        "metrics_path": endpoint["path"],
        "scrape_interval": endpoint["interval"],
    }
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (running.folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    (listen,) = free_ports(1)
    argv = [
        "prometheus",
        f"--config.file={running.folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={running.folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{listen}",
    ]

    def ask(query: str) -> list[Any]:
        url = f"http://127.0.0.1:{listen}/api/v1/query"
        return requests.get(url, params={"query": query}, timeout=10).json()["data"]["result"]

    with process(argv, running.folder / "prometheus.log"):
        wait_for(lambda: answers(f"http://127.0.0.1:{listen}/-/ready"), "Prometheus")
        wait_for(lambda: ask("specserve_ready == 1"), "a sample of the pod", 30)
        running.together(4, 100)()
        wait_for(
            lambda: running.complete() == 200 and ask("rate(specserve_drafts_total[10s]) > 0"),
            "drafts",
            60,
        )
        for _ in range(10):
            empty = [title for title, query in questions() if not ask(query)]
            if not empty:
                break
            time.sleep(1)
    assert empty == []


def questions() -> Iterator[tuple[str, str]]:
    """Title and query of every panel that needs neither GPU, canary pair, profile, errors nor a long past."""
    more = r"gpu_|speculation_configured|estimated|break_even|drift|status=|seconds_since_progress"
    for path in sorted((ROOT / "helm" / "specserve" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                if not re.search(more, target["expr"]):
                    query = re.sub(r"\$(namespace|model|instance)", ".*", target["expr"])
                    yield panel["title"], query.replace("$__rate_interval", "1m")


def test_a_saturated_engine_is_not_restarted(running: Running) -> None:
    """More requests than one step takes are load: it stays, and all are answered."""
    before = running.pod.restarts
    assert set(running.together(96, 60)()) == {200}
    assert running.pod.restarts == before


def test_a_stalled_engine_is_restarted(running: Running) -> None:
    """The process that steps the model stands still; /health answers 200; liveness restarts it."""
    running.engine_core().send_signal(signal.SIGSTOP)
    stuck = threading.Thread(target=running.lose)
    stuck.start()
    assert requests.get(f"http://127.0.0.1:{running.port}/health", timeout=10).status_code == 200
    wait_for(lambda: "liveness failed" in running.pod.events, "a failed liveness probe", 180)
    wait_for(lambda: running.pod.restarts == 1, "the end of the old engine", 120)
    running.pod.becomes_ready(START_SECONDS)
    stuck.join()
    assert running.complete() == 200


def test_requests_in_flight_end_inside_the_grace(running: Running) -> None:
    """A deletion lets running requests finish and ends before the rendered grace period; nothing is left."""
    statuses = running.together(8, 100)
    time.sleep(0.5)
    leader = running.pod.leader()
    assert leader is not None
    family = psutil.Process(leader).children(recursive=True)
    took = running.pod.stop()
    assert statuses() == [200] * 8
    assert not running.pod.killed
    assert took < running.made.pod()["terminationGracePeriodSeconds"]
    assert psutil.wait_procs(family, timeout=5)[1] == []
