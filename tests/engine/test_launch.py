"""`specserve launch` with the real vLLM: ready, streamed, drained, lost, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import requests

from specserve.supervise import leftovers
from tests.engine.conftest import QUICKSTART

PROMPT = "def add(first, second):\n    return first"


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Poll until true; fail after the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.02)


def counter(url: str, name: str) -> float:
    """Sum of a counter's series on /metrics."""
    text = requests.get(f"{url}/metrics", timeout=10).text
    return sum(
        float(v)
        for v in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    )


def stream(url: str, max_tokens: int, model: str = "tiny") -> tuple[int, int | None, bool]:
    """Status, completion tokens and whether the stream was closed properly."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=120)
    if answer.status_code != 200:
        return answer.status_code, None, False
    events = [
        line.removeprefix("data: ")
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    usage = [u for e in events if e != "[DONE]" if (u := json.loads(e).get("usage"))]
    return 200, usage[-1]["completion_tokens"] if usage else None, events[-1] == "[DONE]"


class Engine:
    """The engine's processes. By session, because vLLM's workers write a title over their own environment."""

    def __init__(self, launched) -> None:
        (self.leader,) = psutil.Process(launched.process.pid).children()

    def members(self) -> list[int]:
        """Living pids."""
        return [p.pid for p in psutil.process_iter() if self._is_member(p)]

    def core(self) -> psutil.Process:
        """vLLM's EngineCore: the leader's child that is not Python's resource tracker."""
        (core,) = [
            p for p in self.leader.children() if "resource_tracker" not in " ".join(p.cmdline())
        ]
        return core

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            return (
                os.getsid(process.pid) == self.leader.pid
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False


def test_the_tiny_pair_is_ready_and_says_so_once(engine_server):
    """One block with what the engine itself reported, after phases in their order."""
    log = engine_server.log()
    assert log.count("\nReady\n") == 1
    block = dict(re.findall(r"^  (\S.*?)\s{2,}(.+)$", log.partition("\nReady\n")[2], re.MULTILINE))
    assert block["URL"] == f"{engine_server.base_url}/v1"
    assert (block["model"], block["method"], block["num_speculative_tokens"]) == (
        "tiny",
        "draft_model",
        "3",
    )
    assert int(block["KV cache tokens"].replace(",", "")) > 1000
    assert block["sidecar"] == engine_server.sidecar_url
    phases = re.findall(r"^ *[\d.]+ s  (.+)$", log.partition("\nReady\n")[0], re.MULTILINE)
    wanted = [
        "checking",
        "starting",
        "importing",
        "loading target weights",
        "loading draft",
        "canary",
    ]
    assert [p for p in phases if p in wanted and phases.index(p) >= 0][:1] == ["checking"]
    assert phases[-1] == "canary"
    assert set(wanted) <= set(phases)


def test_a_streamed_completion_is_drafted(engine_server):
    """Tokens arrive, and the acceptance counters move."""
    name = "vllm:spec_decode_num_accepted_tokens_total"
    before = counter(engine_server.base_url, name)
    assert stream(engine_server.base_url, 60) == (200, 60, True)
    assert counter(engine_server.base_url, name) > before


def test_the_supervisor_stays_small(engine_server):
    """specserve itself, sidecar included, loads no model library."""
    maps = psutil.Process(engine_server.process.pid).memory_maps()
    assert [m.path for m in maps if "torch" in m.path or "tokenizers" in m.path] == []


DRAIN_SECONDS = 60


def test_term_drains_eight_requests_and_leaves_nothing(launch, smollm2):
    """Running requests finish in full, new ones get 503, exit code 0."""
    # Not the tiny pair: its eight answers are all written before anybody has seen them run.
    server = launch(
        f"{QUICKSTART} speculative_decoding.enabled=false"
        f" engine.drain_timeout_seconds={DRAIN_SECONDS}"
    )
    engine = Engine(server)
    length = int(min(500, DRAIN_SECONDS / 2 * speed_of_eight(server.base_url)))
    assert length >= 40, "eight requests that outlast the signal do not fit the time to drain"
    answers: list[tuple[int, int | None, bool]] = []
    ask = partial(stream, server.base_url, length, "smollm2")
    threads = [threading.Thread(target=lambda: answers.append(ask())) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: counter(server.base_url, "vllm:num_requests_running") == 8, 60)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log(), 10)
    assert any(t.is_alive() for t in threads), (
        "the streams must outlast the signal for this test to mean anything"
    )
    late = stream(server.base_url, 5, "smollm2")
    for thread in threads:
        thread.join()
    assert answers == [(200, length, True)] * 8
    assert late[0] == 503
    assert server.process.wait(DRAIN_SECONDS) == 0
    assert engine.members() == []


def speed_of_eight(url: str) -> float:
    """Tokens per second of each of eight streams at once, on this machine now."""
    tokens = 24
    started = time.monotonic()
    threads = [threading.Thread(target=stream, args=(url, tokens, "smollm2")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens / (time.monotonic() - started)


LOSS_SECONDS = 5
"""vLLM looks every 5 s whether its core lives, and then ends its API process. /health, which is asked
every second, says so before, unless vLLM's look falls between two questions: then the loss is said when
the process has ended."""


def losses(log: str) -> int:
    """How often the engine was lost: its core dead under a living API process, or that has ended."""
    return len(
        re.findall(r"stopped because its engine core|exited with status -?\d+; restart", log)
    )


@pytest.mark.alone
def test_a_killed_core_is_restarted_as_often_as_configured(launch):
    """Within seconds the loss is said. After the last restart: exit code 5."""
    server = launch("tiny-pair.yaml engine.max_restarts=1 engine.restart_backoff_seconds=0.1")
    first = Engine(server)
    first.core().kill()
    wait_until(lambda: losses(server.log()) == 1, LOSS_SECONDS)
    wait_until(lambda: server.log().count("\nReady\n") == 2, 300)
    assert first.members() == []
    assert "restart 1 of 1" in server.log()
    assert stream(server.base_url, 10) == (200, 10, True)
    second = Engine(server)
    second.core().kill()
    wait_until(lambda: losses(server.log()) == 2 or server.process.poll() is not None, LOSS_SECONDS)
    assert server.process.wait(60) == 5
    assert "after it had been ready" in server.log()
    assert second.members() == []


def test_a_killed_api_process_takes_core_and_worker_along(last_engine_server):
    """kill -9 of the leader leaves no process, and no shared memory of it."""
    server = last_engine_server
    engine = Engine(server)
    held = {path for pid in engine.members() for path in shared_memory(pid)}
    assert len(engine.members()) > 2
    assert held
    engine.leader.kill()
    assert server.process.wait(60) == 5
    assert engine.members() == []
    assert {path for path in held if path.exists()} == set()


def shared_memory(pid: int) -> set[Path]:
    """Named shared memory that a process has mapped."""
    mapped = {Path(area.path) for area in psutil.Process(pid).memory_maps()}
    return {path for path in mapped if path.is_relative_to("/dev/shm") and path.exists()}


def test_an_interrupt_while_the_model_loads_leaves_nothing(launch):
    """vLLM is in the middle of its start; exit code 130, and no worker is orphaned."""
    server = launch("tiny-pair.yaml", wait=False)
    wait_until(lambda: "loading target weights" in server.log(), 240)
    engine = Engine(server)
    assert len(engine.members()) > 2
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 130
    assert "before the engine was ready" in server.log()
    assert engine.members() == []


def test_an_engine_whose_specserve_is_killed_drains_and_leaves_nothing(launch):
    """kill -9 of specserve: the kernel tells vLLM's API process, which ends its core and workers;
    they are grandchildren, whom no such signal reaches."""
    server = launch("tiny-pair.yaml sidecar.enabled=false")
    engine = Engine(server)
    assert len(engine.members()) > 2
    server.process.kill()
    wait_until(lambda: engine.members() == [], 60)


def test_what_is_left_of_an_engine_is_found_by_its_output(launch, tmp_path, monkeypatch):
    """specserve and the API process are killed at once: the core, whose title has overwritten its
    environment, is still proven to be this engine's. (Reaping is tried in a pid namespace of its own.)"""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    server = launch("tiny-pair.yaml sidecar.enabled=false")
    engine = Engine(server)
    core = engine.core()
    core.suspend()  # else it may notice and end by itself
    server.process.kill()
    engine.leader.kill()
    server.process.wait()
    (leftover,) = leftovers.find(leftovers.folders(os.environ).run)
    assert core.pid in leftover.pids
    left = [psutil.Process(pid) for pid in engine.members()]
    assert set(leftover.pids) == {process.pid for process in left}
    for process in left:
        process.kill()
    wait_until(lambda: engine.members() == [], 30)
