"""From the engine's counters to somebody's webhook: sidecar, Prometheus and Alertmanager as real processes."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.alert_stack import free_ports, process, stack, wait_for, webhook

STUB = Path(__file__).parents[1] / "stub_engine.py"
SPECSERVE = (sys.executable, "-m", "specserve")
LOW = "AcceptanceRateLow"


def post(url: str, body: dict[str, Any]) -> None:
    """Send JSON and wait for the answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


def text(url: str) -> str:
    """The body; empty while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""


@contextmanager
def drafting(engine: str) -> Iterator[None]:
    """A hundred drafts five times a second, as traffic would make them."""
    enough = threading.Event()

    def run() -> None:
        while not enough.wait(0.2):
            post(f"{engine}/__control", {"drafts": 100})

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def config(folder: Path, sidecar_port: int, alertmanager_port: int, hook_url: str) -> Path:
    settings = {
        "models": {"target_model": {"path": "tiny"}},
        "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 3},
        "server": {"served_model_name": "tiny"},
        "sidecar": {
            "port": sidecar_port,
            "scrape_interval_seconds": 0.3,
            "state_dir": str(folder / "state"),
        },
        "alerts": {
            "acceptance_rate": {
                "window_seconds": 4,
                "for_seconds": 1,
                "keep_firing_for_seconds": 1,
                "min_draft_tokens": 300,
            },
            "notify": [
                {"type": "alertmanager", "url": f"http://127.0.0.1:{alertmanager_port}"},
                {"type": "webhook", "url": hook_url + "/direct", "secret": "signing-key"},
                {"type": "slack", "url": "http://127.0.0.1:9/services/nobody-listens"},
            ],
            "labels": {"cluster": "test"},
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.needs("prometheus", "prometheus-alertmanager")
def test_low_acceptance_reaches_the_webhook_and_is_resolved(tmp_path: Path) -> None:
    """Acceptance falls: the sidecar tells a signed webhook and Alertmanager, Prometheus' rule does too; it recovers:
    all three hear that. A receiver that is not there changes nothing."""
    engine_port, sidecar_port, alertmanager_port = free_ports(3)
    engine = f"http://127.0.0.1:{engine_port}"
    stub = [sys.executable, str(STUB), "--port", str(engine_port), "--served-model-name", "tiny"]
    stub += [
        "--speculative-config",
        '{"num_speculative_tokens": 3}',
        "--stub-acceptance",
        "0.9,0.8,0.7",
    ]
    with webhook() as hook:
        path = config(tmp_path, sidecar_port, alertmanager_port, hook.url)
        rules = subprocess.run(
            [*SPECSERVE, "alerts", "rules", str(path)], capture_output=True, text=True, check=True
        )
        sidecar = [*SPECSERVE, "sidecar", str(path), "--engine-url", engine]
        metrics = f"http://127.0.0.1:{sidecar_port}/metrics"
        firing = f'specserve_alert_firing{{alert="{LOW}",model_name="tiny",severity="warning"}} '
        with (
            process(stub, tmp_path / "engine.log"),
            process(sidecar, tmp_path / "sidecar.log"),
            stack(
                tmp_path,
                scrape_port=sidecar_port,
                rules=rules.stdout,
                alertmanager_port=alertmanager_port,
                hook=hook,
            ) as running,
        ):
            wait_for(
                lambda: text(f"{engine}/health") or text(f"{engine}/metrics"), "the engine answers"
            )
            wait_for(lambda: text(f"{running.alertmanager_url}/-/ready"), "Alertmanager is ready")
            with drafting(engine):
                wait_for(lambda: firing + "0.0" in text(metrics), "the sidecar knows the alert")
                wait_for(
                    lambda: (
                        'specserve_acceptance_rate{model_name="tiny",window="4s"} 0.'
                        in text(metrics)
                    ),
                    "a rate",
                )
                assert hook.got == []

                post(f"{engine}/__control", {"acceptance": "0.3,0.1,0.05"})
                from_sidecar = {"alertname": LOW, "cluster": "test"}
                from_prometheus = {"alertname": LOW, "job": "specserve"}
                wait_for(lambda: hook.alerts("/direct", **from_sidecar), "the webhook hears of it")
                wait_for(
                    lambda: hook.alerts("/alertmanager", **from_sidecar), "Alertmanager hears of it"
                )
                wait_for(
                    lambda: hook.alerts("/alertmanager", **from_prometheus),
                    "Prometheus' rule fires",
                )
                assert firing + "1.0" in text(metrics)
                (shown,) = json.loads(text(f"http://127.0.0.1:{sidecar_port}/status"))["alerts"]
                assert (shown["name"], shown["state"], shown["value"] < 0.5) == (
                    LOW,
                    "firing",
                    True,
                )

                post(f"{engine}/__control", {"acceptance": "0.9,0.8,0.7"})
                for path_, labels in (
                    ("/direct", from_sidecar),
                    ("/alertmanager", from_sidecar),
                    ("/alertmanager", from_prometheus),
                ):
                    wait_for(
                        lambda p=path_, w=labels: hook.statuses(p, **w) == ["firing", "resolved"],
                        f"{path_} hears of the end from {labels}",
                    )
        signed = [(headers, body) for where, headers, body in hook.got if where == "/direct"]
        for headers, body in signed:
            stamp, digest = (
                part.partition("=")[2] for part in headers["x-specserve-signature"].split(",")
            )
            expected = hmac.new(
                b"signing-key", stamp.encode() + b"." + body, hashlib.sha256
            ).hexdigest()
            assert hmac.compare_digest(digest, expected)
    log = (tmp_path / "sidecar.log").read_text()
    assert "nobody-listens" not in log
    assert "signing-key" not in log


def test_what_ails_the_engine_reaches_the_webhook(tmp_path: Path) -> None:
    """A starved engine, one whose metrics fail and one that is gone: each under its own name."""
    engine_port, sidecar_port = free_ports(2)
    engine = f"http://127.0.0.1:{engine_port}"
    soon = {"for_seconds": 0.5, "keep_firing_for_seconds": 0.5}
    names = ("EngineDown", "EngineStarved", "MetricsBlind")
    with webhook() as hook:
        settings = {
            "models": {"target_model": {"path": "tiny"}},
            "server": {"served_model_name": "tiny"},
            "speculative_decoding": {"enabled": False},
            "sidecar": {
                "port": sidecar_port,
                "scrape_interval_seconds": 0.2,
                "state_dir": str(tmp_path / "state"),
            },
            "alerts": {
                "rules": dict.fromkeys(names, soon),
                "notify": [{"type": "webhook", "url": hook.url + "/direct"}],
            },
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(settings))
        stub = [
            sys.executable,
            str(STUB),
            "--port",
            str(engine_port),
            "--served-model-name",
            "tiny",
        ]
        sidecar = [*SPECSERVE, "sidecar", str(path), "--engine-url", engine]

        def hears(name: str, *statuses: str) -> None:
            wait_for(
                lambda: hook.statuses("/direct", alertname=name) == list(statuses),
                f"{name} {statuses}",
            )

        with (
            process(stub, tmp_path / "engine.log") as child,
            process(sidecar, tmp_path / "sidecar.log"),
        ):
            wait_for(
                lambda: "ready: yes" in (tmp_path / "sidecar.log").read_text(),
                "the sidecar finds it ready",
            )
            assert hook.got == []
            post(f"{engine}/__control", {"starve": True})
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
            waiting = threading.Thread(target=post, args=(f"{engine}/v1/completions", body))
            waiting.start()
            hears("EngineStarved", "firing")
            post(f"{engine}/__control", {"starve": False})
            hears("EngineStarved", "firing", "resolved")
            waiting.join()
            post(f"{engine}/__control", {"metrics_status": 500})
            hears("MetricsBlind", "firing")
            post(f"{engine}/__control", {"metrics_status": 200})
            hears("MetricsBlind", "firing", "resolved")
            child.kill()
            hears("EngineDown", "firing")
        told = {alert["labels"]["alertname"] for alert in hook.alerts("/direct")}
        assert told == {"EngineStarved", "MetricsBlind", "EngineDown"}
