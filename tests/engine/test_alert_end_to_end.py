"""Real acceptance, really low: from vLLM's counters through Prometheus and Alertmanager to a webhook."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.alert_stack import (
    Webhook,
    free_ports,
    process,
    stack,
    wait_for,
    webhook,
)

SPECSERVE = (sys.executable, "-m", "specserve")
LOW = "AcceptanceRateLow"
BAD_DRAFT = "tiny-pair.yaml models.draft_model.path=.cache/models/tiny-draft-bad"
PROMPTS = (
    "def update_order(order, limit):\n",
    "def load_table(table, size):\n",
    "def merge_index(index, key):\n",
)
pytestmark = pytest.mark.needs("prometheus", "prometheus-alertmanager")


def complete(url: str, prompt: str, temperature: float) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 48, "temperature": temperature}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()


@contextmanager
def traffic(url: str, temperature: float) -> Iterator[None]:
    """One request after the other. A failed request fails the test: silence would look like an alert that is late."""
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def run() -> None:
            for prompt in itertools.cycle(PROMPTS):
                if enough.is_set():
                    return
                complete(url, prompt, temperature)

        sent = pool.submit(run)
        try:
            yield
        finally:
            enough.set()
            sent.result()


@contextmanager
def watched(folder: Path, engine_url: str, **acceptance_rate: float) -> Iterator[Webhook]:
    """The sidecar beside an engine that runs, with Prometheus and Alertmanager; what the webhook hears."""
    sidecar_port, alertmanager_port = free_ports(2)
    low = {
        "window_seconds": 10,
        "for_seconds": 2,
        "keep_firing_for_seconds": 5,
        "min_draft_tokens": 50,
    }
    with webhook() as hook:
        settings = {
            "models": {"target_model": {"path": "tiny"}, "draft_model": {"path": "draft"}},
            "speculative_decoding": {"num_speculative_tokens": 3},
            "server": {"served_model_name": "tiny"},
            "sidecar": {
                "port": sidecar_port,
                "scrape_interval_seconds": 1,
                "state_dir": str(folder / "state"),
            },
            "alerts": {
                "acceptance_rate": {**low, **acceptance_rate},
                "rules": {"AcceptanceCollapsed": {"enabled": False}},
                "notify": [
                    {"type": "alertmanager", "url": f"http://127.0.0.1:{alertmanager_port}"},
                    {"type": "webhook", "url": hook.url + "/direct"},
                ],
            },
        }
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(settings))
        rules = subprocess.run(
            [*SPECSERVE, "alerts", "rules", str(path)], capture_output=True, text=True, check=True
        )
        sidecar = [*SPECSERVE, "sidecar", str(path), "--engine-url", engine_url]
        ports = {"scrape_port": sidecar_port, "alertmanager_port": alertmanager_port}
        log = folder / "sidecar.log"
        with process(sidecar, log), stack(folder, **ports, rules=rules.stdout, hook=hook):
            try:
                wait_for(lambda: "sidecar watches" in log.read_text(), "the sidecar runs")
                yield hook
            except BaseException as error:
                error.add_note(f"heard: {hook.got}")
                for part in ("sidecar", "prometheus", "alertmanager"):
                    error.add_note(
                        f"{part}: {(folder / part).with_suffix('.log').read_text()[-4000:]}"
                    )
                raise


WAYS = (
    ("/direct", {"alertname": LOW, "model_name": "tiny"}),
    ("/alertmanager", {"alertname": LOW, "job": "specserve"}),
)
"""Sidecar to webhook, and sidecar to Prometheus to Alertmanager to webhook."""


def hears(hook: Webhook, status: str) -> None:
    """Wait until this is the last that both ways have brought, and the first was that the alert fires.

    A machine that stands still for longer than the window makes a hole in the traffic, and the alert ends and fires
    once more, as it should; tests/unit proves when it must not.
    """
    for path, labels in WAYS:

        def told(path: str = path, labels: dict[str, str] = labels) -> bool:
            statuses = hook.statuses(path, **labels)
            return statuses[:1] == ["firing"] and statuses[-1] == status

        wait_for(told, f"{path} hears {status}", 240)


def why(hook: Webhook) -> str:
    """The reason in the last that the sidecar told the webhook."""
    return hook.alerts("/direct", **WAYS[0][1])[-1]["annotations"]["description"]


def test_acceptance_that_falls_and_recovers(engine_server, tmp_path: Path) -> None:
    """A greedy draft accepts little of text sampled at a high temperature: the alert fires; greedy again: it ends."""
    with watched(tmp_path, engine_server.base_url, fire_below=0.35, resolve_above=0.45) as hook:
        for _ in range(3):
            with traffic(engine_server.base_url, temperature=2.0):
                hears(hook, "firing")
            with traffic(engine_server.base_url, temperature=0.0):
                hears(hook, "resolved")
            if not why(hook).endswith(
                ": too few samples in the window"
            ):  # a hole in the traffic: see hears
                break
        assert why(hook).endswith(": the condition is not met")


@pytest.mark.parametrize("engine_server", [BAD_DRAFT], indirect=True)
def test_a_truly_bad_draft(engine_server, tmp_path: Path) -> None:
    """A draft of noise fires the alert at the default threshold; without traffic it ends for want of data."""
    with watched(tmp_path, engine_server.base_url) as hook:
        with traffic(engine_server.base_url, temperature=0.0):
            hears(hook, "firing")
        hears(hook, "resolved")
        assert why(hook).endswith(": too few samples in the window")
