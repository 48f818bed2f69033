"""What the repair cpu-yielding changes: how long a program beside the CPU engine stands still, and what requests cost.

    python scripts/bench_yielding.py [--seconds 120] [--rounds 2] [--json FILE]

The tiny pair, with its repair and without it in turns. Single requests one after the other and, in the second half,
sixteen at a time; meanwhile a program on each core sleeps for 20 ms again and again and notes how late it woke. Only a
kernel with the fault shows it (Linux 6.18: yes), and only while the engine core and its worker share a core, so every
run of a minute differs: the sum of the late seconds and the worst are printed, none is asserted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_launch import TINY, Server, free_port, launch_command, running

NAP_SECONDS = 0.02
LATE_SECONDS = 0.5
CONCURRENCY = 16
TOKENS = 48
WITHOUT = "engine.repairs=[cpu-speculative-sampling]"


def naps(core: int, seconds: float, out: multiprocessing.SimpleQueue[list[float]]) -> None:
    """Sleep on one core again and again; how late each wake-up was that came late, in seconds."""
    os.sched_setaffinity(0, {core})
    end, late = time.monotonic() + seconds, []
    while (began := time.monotonic()) < end:
        time.sleep(NAP_SECONDS)
        if (over := time.monotonic() - began - NAP_SECONDS) > LATE_SECONDS:
            late.append(over)
    out.put(late)


def ask(server: Server, seconds: float, concurrency: int) -> list[float]:
    """Requests until the time is over; the seconds that each took."""
    end = time.monotonic() + seconds

    def one_after_the_other(worker: int) -> list[float]:
        took = []
        while (began := time.monotonic()) < end:
            server.client.complete(
                f"def update_{worker}(order):\n",
                max_tokens=TOKENS,
                temperature=2.0 * (worker % 2),
                timeout=300,
            )
            took.append(time.monotonic() - began)
        return took

    with ThreadPoolExecutor(concurrency) as pool:
        return [
            seconds
            for took in pool.map(one_after_the_other, range(concurrency))
            for seconds in took
        ]


def measure(seconds: float, settings: list[str], folder: Path) -> dict[str, Any]:
    """One server, both halves."""
    port = free_port()
    argv = [
        *launch_command(port, free_port(), TINY),
        *(part for one in settings for part in ("--set", one)),
    ]
    with running(
        argv, dict(os.environ), port, log=folder / f"{port}.log", supervised=True
    ) as server:
        out: multiprocessing.SimpleQueue[list[float]] = multiprocessing.SimpleQueue()
        sleepers = [
            multiprocessing.Process(target=naps, args=(c, seconds, out))
            for c in os.sched_getaffinity(0)
        ]
        for sleeper in sleepers:
            sleeper.start()
        single, many = (ask(server, seconds / 2, n) for n in (1, CONCURRENCY))
        late = [over for _ in sleepers for over in out.get()]
        for sleeper in sleepers:
            sleeper.join()
    return {
        "late_seconds": round(sum(late), 2),
        "worst_seconds": round(max(late, default=0.0), 2),
        "single_ms": round(1000 * statistics.median(single), 1),
        "requests_per_second": round(len(many) / (seconds / 2), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of requests for each server")
    parser.add_argument("--rounds", type=int, default=2, help="of both, in turns")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"repaired": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.rounds):
            for name in sorted(found, reverse=bool(turn % 2)):
                found[name].append(
                    measure(given.seconds, [WITHOUT] if name == "without" else [], Path(folder))
                )
                print(f"{name:9} {found[name][-1]}", flush=True)
    print(
        f"Linux {platform.release()}, {os.cpu_count()} cores; in {given.seconds * given.rounds:g} s each"
    )
    for name, runs in found.items():
        late, worst = sum(r["late_seconds"] for r in runs), max(r["worst_seconds"] for r in runs)
        print(f"{name:9} stood still {late:6.1f} s, at worst {worst:5.1f} s at once")
    for figure in ("single_ms", "requests_per_second"):
        repaired, without = (
            statistics.median(r[figure] for r in found[name]) for name in ("repaired", "without")
        )
        print(
            f"{figure}: {repaired} with the repair, {without} without, ratio {repaired / without:.3f}"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
