"""The rendered pod, run by a stand-in for the kubelet with the stub engine in vLLM's place."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.alert_stack import free_ports, wait_for
from tests.chart.kubelet import Pod
from tests.chart.rendering import ROOT, template

DRIVER = ROOT / "tests" / "process" / "driver.py"


def rendered_pod(folder: Path, ports: tuple[int, int], **values: Any) -> Pod:
    """The pod that the chart renders, on these ports, with the driver that starts the stub."""
    config = {
        "server": {"port": ports[0], "served_model_name": "stub"},
        "models": {"target_model": {"path": str(folder)}},
        "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 3},
        "engine": {"drain_timeout_seconds": 5, "startup_timeout_seconds": 60},
        "sidecar": {"port": ports[1], "scrape_interval_seconds": 0.3, "canary_timeout_seconds": 2},
    }
    probes = {
        "startup": {"periodSeconds": 1},
        "readiness": {"periodSeconds": 1},
        "liveness": {"periodSeconds": 1},
    }
    given = {
        "config": config,
        "probes": probes,
        "shutdown": {"preStopSeconds": 1},
        "gpu": {"resource": ""},
        **values,
    }
    made = template(given)
    folder.mkdir(exist_ok=True)
    maps = {d["metadata"]["name"]: d["data"] for d in made.documents if d["kind"] == "ConfigMap"}
    return Pod(made.pod(), folder, maps, commands={"engine": [sys.executable, str(DRIVER)]})


def complete(port: int, tokens: int = 5) -> int:
    """The status of one completion."""
    body = {"model": "stub", "prompt": "a b c", "max_tokens": tokens}
    return requests.post(
        f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30
    ).status_code


def lost(port: int) -> None:
    """A completion that a restart ends."""
    with contextlib.suppress(requests.RequestException):
        complete(port)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Callable[..., tuple[Pod, int]]]:
    """``pod()`` starts one and gives it with its API port, ready."""
    running: list[Pod] = []

    def start(**values: Any) -> tuple[Pod, int]:
        ports = free_ports(2)
        one = rendered_pod(tmp_path / f"pod-{len(running)}", (ports[0], ports[1]), **values).start()
        running.append(one)
        one.becomes_ready(30)
        return one, ports[0]

    yield start
    with ThreadPoolExecutor() as together:
        list(together.map(Pod.stop, running))


def test_it_starts_in_order(pod: Callable[..., tuple[Pod, int]]) -> None:
    """Started, then ready, and then a completion works; a deletion ends it inside its grace period, not killed."""
    one, port = pod()
    assert one.events == ["engine starts", "started", "ready"]
    assert complete(port) == 200
    one.stop()
    assert (one.killed, one.events[-1]) == (False, "engine is gone")


def test_requests_in_flight_end_well(pod: Callable[..., tuple[Pod, int]]) -> None:
    """Requests that run when the pod is deleted are answered in full."""
    one, port = pod()
    requests.post(f"http://127.0.0.1:{port}/__control", json={"step": 0.02}, timeout=5)
    statuses: list[int] = []
    clients = [
        threading.Thread(target=lambda: statuses.append(complete(port, 180))) for _ in range(4)
    ]
    for client in clients:
        client.start()
    time.sleep(0.5)
    one.stop()
    for client in clients:
        client.join()
    assert statuses == [200] * 4
    assert not one.killed


def test_a_stalled_engine_is_restarted(pod: Callable[..., tuple[Pod, int]]) -> None:
    """/health still answers 200, no step happens: liveness restarts the container, and it becomes ready again."""
    one, port = pod()
    requests.post(f"http://127.0.0.1:{port}/__control", json={"freeze": True}, timeout=5)
    assert requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    client = threading.Thread(target=lost, args=(port,))
    client.start()
    wait_for(lambda: one.restarts == 1, "a restart", 60)
    one.becomes_ready(30)
    client.join(35)
    assert complete(port) == 200
    assert one.events.index("liveness failed") < len(one.events) - 1


def test_a_saturated_engine_is_not_restarted(pod: Callable[..., tuple[Pod, int]]) -> None:
    """Slow steps and a queue are load: it stays alive, and its clients are served."""
    one, port = pod()
    requests.post(f"http://127.0.0.1:{port}/__control", json={"step": 0.05, "ttft": 0.5}, timeout=5)
    statuses: list[int] = []
    clients = [
        threading.Thread(target=lambda: statuses.append(complete(port, 150))) for _ in range(24)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert statuses == [200] * 24
    assert (one.restarts, "liveness failed" in one.events) == (0, False)


def test_a_rolling_restart_loses_no_request(pod: Callable[..., tuple[Pod, int]]) -> None:
    """Two pods, one replaced after the other, clients that are sent to ready pods: every request is answered."""
    pods = [pod(), pod()]
    statuses: list[int] = []
    enough = threading.Event()

    def client() -> None:
        while not enough.is_set():
            ports = [port for one, port in pods if one.ready]
            statuses.append(complete(ports[len(statuses) % len(ports)], 20))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for each in clients:
        each.start()
    for n in range(2):
        pods.append(pod())
        pods[n][0].stop()
    enough.set()
    for each in clients:
        each.join()
    assert set(statuses) == {200}
    assert not any(one.killed for one, _ in pods)
