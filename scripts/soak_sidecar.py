#!/usr/bin/env python3
"""24 hours of virtual scrapes, with resets, restarts, gaps and bad bodies: memory flat, totals right.

scripts/soak_sidecar.py [HOURS]
"""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import psutil
import requests

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from specserve.alert import builtin  # noqa: E402
from specserve.alert.evaluate import Evaluator  # noqa: E402
from specserve.config.schema import Settings  # noqa: E402
from specserve.engine.http.metrics import MetricsError, parse  # noqa: E402
from specserve.metric_families import key  # noqa: E402
from specserve.sidecar.observer import Observer  # noqa: E402
from specserve.sidecar.probe import Scrape  # noqa: E402
from tests.virtual_engine import VirtualEngine  # noqa: E402

INTERVAL = 5.0
SETTINGS = {
    "models": {"target_model": {"path": "/models/target"}},
    "speculative_decoding": {"method": "ngram"},
}


class Soak:
    """A day of a server's life, and what the sidecar made of it."""

    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.engine = VirtualEngine(positions=5)
        self.observer = Observer(speculation_configured=True)
        self.rules = Evaluator(builtin.rules(Settings.model_validate(SETTINGS)))
        self.now, self.start, self.drafts = 0.0, 1000.0, 0.0
        self.unread = 0.0
        """Drafts since the last good read: a restart loses them for everybody."""
        self.recent: list[tuple[float, float, float]] = []
        self.not_live = 0
        self.worst_drift, self.compared = 0.0, 0

    def step(self) -> None:
        """One interval."""
        self.now += INTERVAL
        drafts, rate = self.random.randint(1, 80), self.random.uniform(0.2, 0.9)
        self.engine.running = self.random.randint(1, 32)
        if self.random.random() < 0.0005:
            self.engine.reset()
            self.start += 1
            self.drafts -= self.unread
            self.recent.clear()
        self.engine.work(drafts=drafts, rates=tuple(rate**p for p in range(1, 6)), requests=1)
        self.engine.observe("ttft", self.random.uniform(0.01, 2))
        self.drafts += drafts
        scrape = self.scrape()
        self.unread = 0.0 if scrape.snapshot else self.unread + drafts
        found = self.observer.observe(self.now, 1e9 + self.now, scrape)
        self.rules.evaluate(found.readings, now=self.now, at=1e9 + self.now)
        self.not_live += not found.assessment.live.ok
        if scrape.snapshot:
            self.compare(found.readings)

    def scrape(self) -> Scrape:
        """Mostly good; now and then nobody, a late answer, or half a body."""
        draw = self.random.random()
        if draw < 0.003:
            return Scrape("timeout", "late")
        text = self.engine.text(start=self.start)
        if draw < 0.006:
            text = text[: len(text) // 2].rstrip("\n")
        try:
            return Scrape("ok", snapshot=parse(text, at_seconds=self.now))
        except MetricsError as error:
            return Scrape("malformed", str(error))

    def compare(self, readings: dict[str, float]) -> None:
        """The five-minute window against the engine's counters kept here."""
        c = self.engine.counters
        now = (self.now, c["spec_decode_num_draft_tokens"], c["spec_decode_num_accepted_tokens"])
        self.recent = [r for r in self.recent if r[0] >= self.now - 300] + [now]
        seconds = readings.get(key("specserve_window_seconds", window="5m"))
        if seconds is None:
            return
        base = next((r for r in self.recent if r[0] == self.now - seconds), None)
        if base is not None:
            true = (now[2] - base[2]) / (now[1] - base[1])
            seen = readings[key("specserve_acceptance_rate", window="5m")]
            self.worst_drift, self.compared = (
                max(self.worst_drift, abs(true - seen)),
                self.compared + 1,
            )


def real(minutes: float) -> None:
    """Resident memory by minute, and the totals at the end, of a real sidecar beside the stub engine with traffic."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                ports.append(probe.getsockname()[1])
        config = folder / "c.yaml"
        config.write_text(
            f"server: {{port: {ports[0]}, served_model_name: stub}}\nmodels: {{target_model: {{path: /models/stub}}}}\n"
            "speculative_decoding: {method: ngram}\n"
            f"sidecar: {{port: {ports[1]}, scrape_interval_seconds: 0.5, state_dir: {folder}}}\n"
        )
        stub = [
            sys.executable,
            str(ROOT / "tests" / "stub_engine.py"),
            "--port",
            str(ports[0]),
            "--model",
            "stub",
        ]
        watcher = [sys.executable, "-m", "specserve", "sidecar", str(config)]
        processes = []
        for argv in ([*stub, "--speculative-config", '{"num_speculative_tokens": 5}'], watcher):
            process = stack.enter_context(
                subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            processes.append(psutil.Process(process.pid))
        time.sleep(5)
        engine, sidecar, sizes = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", []
        for minute in range(round(minutes) + 1):
            sizes.append(processes[1].memory_info().rss / 2**20)
            for _ in range(120 if minute < minutes else 0):
                requests.post(f"{engine}/__control", json={"drafts": 20}, timeout=5)
                time.sleep(0.5)
        time.sleep(2)
        sums = [
            _drafts(f"{engine}/metrics", "vllm:spec_decode_num"),
            _drafts(f"{sidecar}/metrics", "specserve"),
        ]
        cpu = sum(processes[1].cpu_times()[:2]) / (time.time() - processes[1].create_time())
        print(f"resident MiB by minute: {' '.join(f'{s:.1f}' for s in sizes)}")
        print(
            f"drafts: engine {sums[0]:.0f}, sidecar {sums[1]:.0f}; CPU {cpu * 100:.1f} % of one core"
        )


def _drafts(url: str, prefix: str) -> float:
    lines = requests.get(url, timeout=5).text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"{prefix}_drafts_total{{")
    )


def main() -> None:
    if sys.argv[1:2] == ["--real"]:
        real(float(sys.argv[2]))
        return
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 24.0
    soak, begun = Soak(), time.monotonic()
    tracemalloc.start()
    per_hour = int(3600 / INTERVAL)
    sizes = []
    for _ in range(round(hours)):
        for _ in range(per_hour):
            soak.step()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0] / 2**20)
    seen = soak.observer.observe(soak.now, 1e9, Scrape("timeout")).readings[
        "specserve_drafts_total"
    ]
    print(
        f"{hours:g} h in {time.monotonic() - begun:.0f} s; memory by hour, MiB: {' '.join(f'{s:.1f}' for s in sizes)}"
    )
    print(f"drafts: engine {soak.drafts - soak.unread:.0f}, sidecar {seen:.0f}")
    print(
        f"largest difference of the 5-minute acceptance rate in {soak.compared} reads: {soak.worst_drift:.2g}"
    )
    print(f"false liveness failures: {soak.not_live}")


if __name__ == "__main__":
    main()
