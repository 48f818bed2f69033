#!/usr/bin/env python3
"""What the sidecar costs: CPU of one cycle, memory and start time of the process; and how soon it finds a hang.

Cycle: parse the exposition, observe, evaluate all built-in alerts, render /metrics. Median of many.
Hang: every step of a busy engine stops, at several moments between two reads; the slowest counts.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import requests

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from specserve.alert import builtin  # noqa: E402
from specserve.alert.evaluate import Evaluator  # noqa: E402
from specserve.config.schema import Settings  # noqa: E402
from specserve.engine.http.metrics import parse  # noqa: E402
from specserve.sidecar.collector import exposition  # noqa: E402
from specserve.sidecar.observer import Observer  # noqa: E402
from specserve.sidecar.probe import Scrape  # noqa: E402
from tests.traffic import traffic  # noqa: E402
from tests.virtual_engine import VirtualEngine  # noqa: E402

SETTINGS = {
    "models": {"target_model": {"path": "/models/target"}},
    "speculative_decoding": {"method": "ngram"},
}


def cycle_ms(engines: int, positions: int, cycles: int = 400) -> float:
    """Median CPU milliseconds of one cycle, after half an hour of virtual scrapes."""
    settings = Settings.model_validate(SETTINGS)
    observer, rules = Observer(speculation_configured=True), Evaluator(builtin.rules(settings))
    ranks = [VirtualEngine(positions=positions, engine=str(i)) for i in range(engines)]
    latest: dict[str, float] = {}
    render = exposition(lambda: latest, model_name="target")
    spent = []
    for i in range(cycles):
        at = 5.0 * i
        for rank in ranks:
            rank.running = 8
            rank.work(drafts=40, rates=tuple(0.8**p for p in range(1, positions + 1)), requests=2)
            rank.observe("ttft", 0.04)
        text = "".join(r.text(start=None) for r in ranks) + "process_start_time_seconds 1000\n"
        begun = time.process_time()
        found = observer.observe(at, 1e9 + at, Scrape("ok", snapshot=parse(text, at_seconds=at)))
        evaluation = rules.evaluate(found.readings, now=at, at=1e9 + at)
        latest = found.readings | rules.readings(evaluation)
        render()
        spent.append((time.process_time() - begun) * 1000)
    return statistics.median(spent[cycles // 2 :])


@contextmanager
def sidecar(interval: float, canary: float) -> Iterator[tuple[str, str, int, float]]:
    """URLs of a stub engine and of a sidecar beside it, the sidecar's pid, and when it was started."""
    with tempfile.TemporaryDirectory() as folder:
        with (
            socket.create_server(("127.0.0.1", 0)) as a,
            socket.create_server(("127.0.0.1", 0)) as b,
        ):
            port, engine = a.getsockname()[1], b.getsockname()[1]
        stub = [
            sys.executable,
            str(ROOT / "tests" / "stub_engine.py"),
            "--port",
            str(engine),
            "--model",
            "stub",
        ]
        stub += ["--speculative-config", '{"num_speculative_tokens": 5}', "--stub-step", "0.02"]
        config = Path(folder) / "c.yaml"
        config.write_text(
            f"server: {{port: {engine}, served_model_name: stub}}\nmodels: {{target_model: {{path: /models/stub}}}}\n"
            "speculative_decoding: {method: ngram}\n"
            f"sidecar: {{port: {port}, scrape_interval_seconds: {interval}, canary_timeout_seconds: {canary}, "
            f"state_dir: {folder}}}\n"
        )
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(stub, **quiet) as faked:
            begun = time.monotonic()
            with subprocess.Popen(
                [sys.executable, "-m", "specserve", "sidecar", str(config)], **quiet
            ) as watched:
                try:
                    yield (
                        f"http://127.0.0.1:{engine}",
                        f"http://127.0.0.1:{port}",
                        watched.pid,
                        begun,
                    )
                finally:
                    watched.terminate()
                    faked.kill()


def process_figures() -> tuple[float, float]:
    """Seconds from exec to the first answered /livez, and resident MiB after some cycles."""
    with sidecar(0.2, 120) as (_, url, pid, begun):
        _until(url, "livez", 503, 200)
        started = time.monotonic() - begun
        time.sleep(10)
        return started, psutil.Process(pid).memory_info().rss / 2**20


def hang_seconds(interval: float, canary: float) -> float:
    """From a hang to /livez 503, the slowest of five hangs at different moments of an interval."""
    spent = []
    with sidecar(interval, canary) as (engine, url, _, _):
        _until(url, "readyz", 200)
        with traffic(engine, "stub", clients=2, timeout=60):
            for i in range(5):
                _until(url, "readyz", 200)
                time.sleep(3 * interval)
                while requests.get(f"{url}/livez", timeout=5).json()["age_seconds"] > interval / 10:
                    time.sleep(0.01)
                time.sleep(i / 5 * interval)
                requests.post(f"{engine}/__control", json={"freeze": True}, timeout=5)
                begun = time.monotonic()
                _until(url, "livez", 503)
                spent.append(time.monotonic() - begun)
                requests.post(f"{engine}/__control", json={"freeze": False}, timeout=5)
    return max(spent)


def _until(url: str, path: str, *statuses: int) -> None:
    while True:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/{path}", timeout=1).status_code in statuses:
                return
        time.sleep(0.01)


def main() -> None:
    for engines, positions, bar in ((1, 5, 10), (16, 16, 50)):
        print(
            f"cycle, {engines} engines x {positions} positions: {cycle_ms(engines, positions):.1f} ms CPU (bar {bar})"
        )
    started, resident = process_figures()
    print(f"start to first answer: {started:.2f} s (bar 1)")
    print(f"resident memory: {resident:.0f} MiB (bar 60)")
    for interval, canary in ((0.5, 2.0), (1.0, 5.0)):
        found = hang_seconds(interval, canary)
        print(
            f"hang, read every {interval:g} s, canary {canary:g} s: {found:.1f} s (bar {3 * interval + canary:g})"
        )


if __name__ == "__main__":
    main()
