#!/usr/bin/env python3
"""What the sidecar costs: CPU of one cycle, memory and start time of the process.

Cycle: parse the exposition, observe, evaluate all built-in alerts, render /metrics. Median of many.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import requests

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from specserve.alert import builtin  # noqa: E402
from specserve.alert.evaluate import Evaluator  # noqa: E402
from specserve.config.schema import Settings  # noqa: E402
from specserve.engine.metrics import parse  # noqa: E402
from specserve.sidecar.collector import exposition  # noqa: E402
from specserve.sidecar.observer import Observer  # noqa: E402
from specserve.sidecar.probe import Scrape  # noqa: E402
from tests.virtual_engine import VirtualEngine  # noqa: E402

SETTINGS = {"models": {"target_model": {"path": "/models/target"}}, "speculative_decoding": {"method": "ngram"}}


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


def process_figures() -> tuple[float, float]:
    """Seconds from exec to the first answered /livez, and resident MiB after some cycles."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
            port, engine = a.getsockname()[1], b.getsockname()[1]
        stub = [sys.executable, str(ROOT / "tests" / "stub_engine.py"), "--port", str(engine), "--model", "stub"]
        stub += ["--speculative-config", '{"num_speculative_tokens": 5}']
        config = Path(folder) / "c.yaml"
        config.write_text(
            f"server: {{port: {engine}, served_model_name: stub}}\nmodels: {{target_model: {{path: /models/stub}}}}\n"
            "speculative_decoding: {method: ngram}\n"
            f"sidecar: {{port: {port}, scrape_interval_seconds: 0.2, state_dir: {folder}}}\n"
        )
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(stub, **quiet) as faked:
            begun = time.monotonic()
            with subprocess.Popen([sys.executable, "-m", "specserve", "sidecar", str(config)], **quiet) as watched:
                try:
                    return _until_answer(port) - begun, _resident(watched.pid)
                finally:
                    watched.terminate()
                    faked.kill()


def _until_answer(port: int) -> float:
    while True:
        try:
            requests.get(f"http://127.0.0.1:{port}/livez", timeout=1)
            return time.monotonic()
        except requests.ConnectionError:
            time.sleep(0.01)


def _resident(pid: int) -> float:
    time.sleep(10)
    return psutil.Process(pid).memory_info().rss / 2**20


def main() -> None:
    for engines, positions, bar in ((1, 5, 10), (16, 16, 50)):
        print(
            f"cycle, {engines} engines x {positions} positions: {cycle_ms(engines, positions):.1f} ms CPU (bar {bar})"
        )
    started, resident = process_figures()
    print(f"start to first answer: {started:.2f} s (bar 1)")
    print(f"resident memory: {resident:.0f} MiB (bar 60)")


if __name__ == "__main__":
    main()
