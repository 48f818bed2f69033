"""What `specserve launch` costs, and what its preload brings on a CPU.

    python scripts/bench_launch.py [--only cost|preload] [--requests N] [--rounds N] [--json FILE]

launched   specserve launch
by hand    the same command and environment, as printed by --dry-run, started without specserve
bare       the same command with only the environment that the config file itself sets: no preload

Cost: SmolLM2, single requests to launched and by hand in blocks A B B A, so that drift of the machine hits both. While
one is asked, every process of the other is stopped: two engines would share the memory's bandwidth.
Preload: the tiny pair, blocks at concurrency 16 to launched and bare in turns, the other one stopped. The worker's
threads are shown, because with one of them OpenMP has nothing to do; and the best block beside the median, because
vLLM's processes wait for one another by polling, and whoever takes a core from them slows a block several times.
Nothing is asserted: a loaded machine gives loaded figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from models import text

from specserve.bench import workload
from specserve.engine.http.client import EngineClient, EngineError, Streamed, collect

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "tiny-pair.yaml"
SMOLLM2 = ROOT / "configs" / "quickstart.yaml"
START_SECONDS = 400
CONCURRENCY = 16
TOKENS = 100
BLOCK = 8
BLOCK_TOKENS = 48


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    client: EngineClient
    pid: int
    spawn_seconds: float | None
    """From starting specserve to the engine's process; None without specserve."""
    ready_seconds: float
    """From starting the command to its first token (launched: to its own word that it is ready)."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def dry_run(port: int, config: Path = TINY) -> tuple[list[str], dict[str, str]]:
    """Command and environment that `specserve launch` would use."""
    argv = [*launch_command(port, free_port(), config), "--dry-run"]
    printed = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    words = shlex.split(printed.strip().splitlines()[-1])
    env = {}
    while re.fullmatch(r"[A-Z0-9_]+=.*", words[0], re.DOTALL):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return words, env


def launch_command(port: int, sidecar_port: int, config: Path = TINY) -> list[str]:
    ports = ["--set", f"server.port={port}", "--set", f"sidecar.port={sidecar_port}"]
    return [sys.executable, "-m", "specserve", "launch", str(config), *ports]


@contextmanager
def running(
    argv: Sequence[str], env: Mapping[str, str], port: int, *, log: Path, supervised: bool
) -> Iterator[Server]:
    """Start, wait until ready, and stop at the end."""
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    client = EngineClient(f"http://127.0.0.1:{port}")
    try:
        spawned = None
        if supervised:
            _until(lambda: _engine_of(process.pid) is not None, process, log, pause=0.01)
            spawned = time.monotonic() - began
            _until(lambda: "\nReady\n" in log.read_text(errors="replace"), process, log)
        else:
            _until(lambda: _answers(client), process, log)
        yield Server(client, process.pid, spawned, time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _engine_of(pid: int) -> psutil.Process | None:
    """The engine among the children of specserve; a subprocess of preflight is none."""
    for child in psutil.Process(pid).children():
        try:
            if "vllm.entrypoints" in " ".join(child.cmdline()):
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def _answers(client: EngineClient) -> bool:
    try:
        return bool(client.complete("def add_", max_tokens=1, timeout=60).completion_tokens)
    except EngineError:
        return False


def _until(
    happened: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, pause: float = 0.1
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(pause)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """None of its processes runs, and none of its requests: it takes nothing from the one that is measured."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def ask(server: Server, prompts: Sequence[str]) -> list[Streamed]:
    """One request after another; the first is thrown away."""
    answers = [
        collect(
            server.client.stream(
                messages=[{"role": "user", "content": prompt}],
                max_tokens=BLOCK_TOKENS,
                temperature=0,
                ignore_eos=True,
                timeout=120,
            )
        )
        for prompt in ("Say hello.", *prompts)
    ]
    return answers[1:]


def one_by_one(first: Server, second: Server, requests: int) -> dict[str, float | list[float]]:
    """TTFT and TPOT of `first` over `second`: the median ratio of the same prompt, with a 95 % bootstrap interval."""
    found = [workload.builtin(name) for name in workload.builtin_names()]
    texts = [m["content"] for w in found for r in w.requests for m in r.messages or ()]
    prompts = Random(0).sample(texts, min(requests, len(texts)))
    pairs: list[tuple[Streamed, Streamed]] = []
    for number in range(0, len(prompts), BLOCK):
        answers: dict[int, list[Streamed]] = {}
        for arm in (0, 1) if number // BLOCK % 2 == 0 else (1, 0):
            with stopped((second, first)[arm]):
                answers[arm] = ask((first, second)[arm], prompts[number : number + BLOCK])
        pairs += zip(answers[0], answers[1], strict=True)
    figures: dict[str, float | list[float]] = {"requests": len(pairs)}
    for name in ("ttft_seconds", "tpot_seconds"):
        times = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
        ratios = [a / b for a, b in times if a is not None and b is not None]
        figures[name] = [statistics.median(t[arm] for t in times) for arm in (0, 1)]
        figures[name.replace("seconds", "ratio")] = statistics.median(ratios)
        figures[name.replace("seconds", "ratio_95")] = _interval(ratios)
    return figures


def _interval(ratios: Sequence[float], draws: int = 2000) -> list[float]:
    rng = Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return [medians[int(draws * 0.025)], medians[int(draws * 0.975)]]


def block(server: Server, seed: int) -> float:
    """Tokens per second of 32 requests at concurrency 16."""
    prompts = [sample.prompt for sample in text.held_out(2 * CONCURRENCY, seed=seed)]

    def one(prompt: str) -> int:
        answer = server.client.complete(
            prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, timeout=120
        )
        return answer.completion_tokens or 0

    began = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        tokens = sum(pool.map(one, prompts))
    return tokens / (time.monotonic() - began)


def cost(folder: Path, requests: int) -> dict[str, object]:
    """Launched against the same command started by hand: time to ready, memory, and what a request takes."""
    ports = [free_port(), free_port()]
    by_hand, env = dry_run(ports[1], SMOLLM2)
    command = launch_command(ports[0], free_port(), SMOLLM2)
    environ = dict(os.environ)
    with (
        running(
            by_hand, environ | env, ports[1], log=folder / "hand.log", supervised=False
        ) as hand,
        running(
            command, environ, ports[0], log=folder / "launched.log", supervised=True
        ) as launched,
    ):
        return {
            "engine_spawned_after_seconds": launched.spawn_seconds,
            "ready_seconds": {"launched": launched.ready_seconds, "by_hand": hand.ready_seconds},
            **one_by_one(launched, hand, requests),
            "supervisor_rss_mib": psutil.Process(launched.pid).memory_info().rss / 1024**2,
        }


def preload(folder: Path, rounds: int) -> dict[str, object]:
    """Launched against a bare start at concurrency 16."""
    ports = [free_port(), free_port()]
    bare, ours = dry_run(ports[1])
    environ = dict(os.environ)
    config_env = {name: value for name, value in ours.items() if name == "VLLM_CPU_KVCACHE_SPACE"}
    with (
        running(
            bare, environ | config_env, ports[1], log=folder / "bare.log", supervised=False
        ) as plain,
        running(
            launch_command(ports[0], free_port()),
            environ,
            ports[0],
            log=folder / "tiny.log",
            supervised=True,
        ) as launched,
    ):
        for server in (launched, plain):
            block(server, seed=99)  # warm
        speeds: dict[str, list[float]] = {"launched": [], "bare": []}
        for number in range(rounds):
            pair = [("launched", launched, plain), ("bare", plain, launched)]
            for name, server, other in pair if number % 2 == 0 else reversed(pair):
                with stopped(other):
                    speeds[name].append(block(server, seed=number))
    return {
        "worker_threads": worker_threads((folder / "bare.log").read_text(errors="replace")),
        "tokens_per_second_at_16": {
            name: statistics.median(values) for name, values in speeds.items()
        },
        "best_tokens_per_second_at_16": {name: max(values) for name, values in speeds.items()},
        "preload_speedup": statistics.median(speeds["launched"])
        / statistics.median(speeds["bare"]),
        "best_preload_speedup": max(speeds["launched"]) / max(speeds["bare"]),
    }


def worker_threads(log: str) -> int | None:
    """Cores that vLLM bound the first worker's threads to."""
    found = re.search(r"local_rank=0, core ids=\[([\d, ]*)\]", log)
    return len(found[1].split(",")) if found else None


def _rounded(value: object) -> object:
    """Four significant digits are more than a run can promise."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list():
            return [_rounded(item) for item in value]
        case _:
            return value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["cost", "preload"], help="one part instead of both")
    parser.add_argument("--requests", type=int, default=96, help="single requests per arm")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of 32 requests per arm")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    with tempfile.TemporaryDirectory(prefix="bench-launch-") as folder:
        found = {
            **(cost(Path(folder), args.requests) if args.only != "preload" else {}),
            **(preload(Path(folder), args.rounds) if args.only != "cost" else {}),
        }
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(json.dumps(_rounded(found), indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
