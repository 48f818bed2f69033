"""Real Prometheus, real Alertmanager and a webhook, as one context for end-to-end tests of alerts."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: did not happen within {seconds:g} s"
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether a GET brings a 2xx."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def process(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends with the block."""
    with (
        log.open("wb") as out,
        subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT) as child,
    ):
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()


@dataclass
class Webhook:
    """What arrived, by path: each alert with its status."""

    url: str
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def alerts(self, path: str, **labels: str) -> list[dict[str, Any]]:
        """Alerts that came to a path and carry these labels, in order."""
        bodies = [json.loads(body) for where, _, body in list(self.got) if where == path]
        return [
            a for body in bodies for a in body["alerts"] if labels.items() <= a["labels"].items()
        ]

    def statuses(self, path: str, **labels: str) -> list[str]:
        """Their statuses, repeats left out."""
        found = [alert["status"] for alert in self.alerts(path, **labels)]
        return [status for n, status in enumerate(found) if n == 0 or found[n - 1] != status]


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver that takes everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    hook = Webhook(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True)
class Stack:
    """Where things listen."""

    alertmanager_url: str
    prometheus_url: str
    hook: Webhook


@contextmanager
def stack(
    folder: Path, *, scrape_port: int, rules: str, alertmanager_port: int, hook: Webhook
) -> Iterator[Stack]:
    """Prometheus scrapes the sidecar every second with these rules, and Alertmanager calls /alertmanager.

    Returns once both answer: a disk that is slow to make Prometheus' folder is not an alert that is late.
    """
    (prometheus_port,) = free_ports(1)
    route = {"receiver": "hook", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
    receiver = {
        "name": "hook",
        "webhook_configs": [{"url": hook.url + "/alertmanager", "send_resolved": True}],
    }
    (folder / "alertmanager.yml").write_text(
        yaml.safe_dump({"route": route, "receivers": [receiver]})
    )
    (folder / "rules.yaml").write_text(rules)
    manager = {"static_configs": [{"targets": [f"127.0.0.1:{alertmanager_port}"]}]}
    target = {"static_configs": [{"targets": [f"127.0.0.1:{scrape_port}"]}]}
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml"],
        "alerting": {"alertmanagers": [manager]},
        "scrape_configs": [{"job_name": "specserve", **target}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    alertmanager = [
        "prometheus-alertmanager",
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'am'}",
        f"--web.listen-address=127.0.0.1:{alertmanager_port}",
        "--cluster.listen-address=",
    ]
    prometheus = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{prometheus_port}",
        "--rules.alert.resend-delay=1s",
    ]
    with (
        process(alertmanager, folder / "alertmanager.log"),
        process(prometheus, folder / "prometheus.log"),
    ):
        made = Stack(
            f"http://127.0.0.1:{alertmanager_port}", f"http://127.0.0.1:{prometheus_port}", hook
        )
        for url in (made.alertmanager_url, made.prometheus_url):
            wait_for(lambda url=url: answers(f"{url}/-/ready"), f"{url} is ready", 120)
        yield made
