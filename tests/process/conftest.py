"""Fixtures around real processes: the stub engine, and specserve around it. Nothing survives a test."""

from __future__ import annotations

import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest
from programs import DRIVER, MARK, STUB, Program, marked, start, start_on_terminal, unused_port


@pytest.fixture(autouse=True)
def mark(monkeypatch) -> Iterator[str]:
    """No process of a test outlives it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    left = [f"{p.pid} {' '.join(p.cmdline())}" for p in marked(value)]
    for process in marked(value):
        process.kill()
    assert left == []


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    return unused_port()


@pytest.fixture
def stub(tmp_path, free_port) -> Iterator[Callable[..., Program]]:
    """``stub("--stub-ready-after", 1)`` starts the stub engine by itself and waits until it answers."""
    started: list[Program] = []

    def launch(*flags: object, port: int = free_port, answers: bool = True) -> Program:
        argv = [sys.executable, str(STUB), "--port", str(port), "--model", "stub", *map(str, flags)]
        program = start(argv, tmp_path / f"stub-{len(started)}.log", port)
        started.append(program)
        if answers:
            program.says("Application startup complete.")
        return program

    yield launch
    for program in started:
        program.process.kill()
        program.process.wait()


CONFIG = """
server: {{port: {port}, served_model_name: tiny}}
models: {{target_model: {{path: /models/tiny}}}}
speculative_decoding: {{method: ngram, num_speculative_tokens: 3}}
engine: {{drain_timeout_seconds: 5, startup_timeout_seconds: 20, restart_backoff_seconds: 0.1}}
sidecar: {{enabled: false}}
"""


@pytest.fixture
def launch(tmp_path, free_port, monkeypatch) -> Iterator[Callable[..., Program]]:
    """``launch("--stub-hang")`` is the launch command with the stub in vLLM's place; --set and --reap work."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    started: list[Program] = []

    def go(
        *flags: object,
        port: int = free_port,
        through: str | None = None,
        tty: bool = False,
        before: Sequence[str] = (),
    ) -> Program:
        config = tmp_path / f"config-{port}.yaml"
        config.write_text(CONFIG.format(port=port), encoding="utf-8")
        argv = [*before, sys.executable, str(DRIVER), str(config), *map(str, flags)]
        path = tmp_path / f"launch-{len(started)}.log"
        program = (
            start_on_terminal(argv, path, port) if tty else start(argv, path, port, through=through)
        )
        started.append(program)
        return program

    yield go
    for program in started:
        if program.process.poll() is None:
            program.signal(signal.SIGQUIT)
            program.ends()


@pytest.fixture
def records(tmp_path) -> Callable[[], list[str]]:
    """Names of the run records in the runtime folder."""
    return lambda: sorted(p.name for p in (tmp_path / "specserve" / "run").glob("engine-*.json"))
