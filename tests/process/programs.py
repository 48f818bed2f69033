"""Starting real programs and watching what they say and how they end."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests

STUB = Path(__file__).parents[1] / "stub_engine.py"
DRIVER = Path(__file__).with_name("driver.py")
MARK = "STUB_TEST_ID"
"""Inherited by every descendant, so that a test finds what it left behind."""


OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A command in front of another, which then sees only its own processes."""


def require_own_pids() -> None:
    """Skip where this machine allows no pid namespace: killers are tried in one, or not at all."""
    try:
        out = subprocess.run([*OWN_PIDS, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here, and so no pid namespace for killers")
    if out.returncode != 0:
        pytest.skip(f"no pid namespace may be made here: {out.stderr.strip()}")


def wait_until(condition: Callable[[], object], seconds: float = 40.0, what: str = "") -> None:
    """Poll until true; fail loudly after the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s: {what or condition}"
        time.sleep(0.05)


def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry a test's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@dataclass
class Program:
    """A started program whose output lies in a file."""

    process: subprocess.Popen[bytes]
    path: Path
    port: int

    @property
    def output(self) -> str:
        """stdout and stderr so far."""
        return self.path.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        """Where the engine listens."""
        return f"http://127.0.0.1:{self.port}"

    def control(self, **switches: object) -> dict:
        """``POST /__control`` of the stub."""
        return requests.post(f"{self.url}/__control", json=switches, timeout=20).json()

    def crash(self) -> None:
        """Let the stub exit with status 1."""
        with contextlib.suppress(
            requests.RequestException
        ):  # it may be gone before it has answered
            self.control(crash=1)

    def says(self, text: str, seconds: float = 40.0) -> None:
        """Wait for a text in the output."""
        wait_until(
            lambda: text in self.output or self.process.poll() is not None,
            seconds,
            f"{text!r} in the output",
        )
        assert text in self.output, self.output

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program alone."""
        self.process.send_signal(number)

    def ends(self, seconds: float = 40.0) -> int:
        """Wait for the end; the exit status."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.output}")


def start(argv: list[str], path: Path, port: int, *, through: str | None = None) -> Program:
    """Start a program in a session of its own. ``through`` is a command that reads its stdout, as behind a pipe."""
    with path.open("wb") as out:
        if through is None:
            process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            return Program(process, path, port)
        reader = subprocess.Popen(through.split(), stdin=subprocess.PIPE, stdout=out)
    assert reader.stdin is not None
    with reader.stdin as pipe:
        process = subprocess.Popen(
            argv, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
    reader.wait()
    return Program(process, path, port)


def start_on_terminal(argv: list[str], path: Path, port: int) -> Program:
    """Start a program on a terminal of its own; what it paints goes to the file."""
    ours, its = pty.openpty()
    process = subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    path.touch()

    def copy() -> None:
        with (
            path.open("ab", buffering=0) as out,
            contextlib.suppress(OSError),
        ):  # EIO: the last holder has closed it
            while data := os.read(ours, 4096):
                out.write(data)
        os.close(ours)

    threading.Thread(target=copy, daemon=True).start()
    return Program(process, path, port)
