"""One engine process with all its descendants. The only home of Popen.

The child leads a session of its own, so everything it spawns can be found and ended also when the
leader has gone: a surviving EngineCore would hold the GPU memory. stdout and stderr share one pipe,
drained by one thread, so a talkative child never blocks on a full pipe.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

KEPT_LINES = 2000
KEPT_BYTES = 1 << 20
LINE_BYTES = 4000
TRACKER_SECONDS = 1.0
_READ_BYTES = 1 << 16
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars rewrite their line with \r


class LastLines:
    """The last lines of the output, bounded in number and in bytes."""

    def __init__(self, lines: int = KEPT_LINES, size: int = KEPT_BYTES) -> None:
        self._lines: deque[str] = deque()
        self._count = lines
        self._room = size
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Append; the oldest give way."""
        with self._lock:
            self._lines.append(line)
            self._room -= len(line)
            while len(self._lines) > self._count or (self._room < 0 and len(self._lines) > 1):
                self._room += len(self._lines.popleft())

    def lines(self) -> list[str]:
        """A copy, oldest first."""
        with self._lock:
            return list(self._lines)


def session_members(session: int) -> tuple[int, ...]:
    """Living processes of a session, by pid.

    Zombies hold neither port nor memory and do not count.
    """
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return tuple(found)


def kill_session(session: int, *, timeout: float) -> tuple[int, ...]:
    """KILL every member and wait until they are gone; returns those that outlive ``timeout``.

    Python's resource trackers are left for a moment: they end by themselves when their program has
    gone, and delete its shared memory, which would otherwise fill /dev/shm kill by kill.
    """
    started = time.monotonic()
    members = session_members(session)
    while members:
        waited = time.monotonic() - started
        if waited >= timeout:
            break
        for pid in members:
            if waited >= TRACKER_SECONDS or not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap(pid for pid in members if pid != session)
        members = session_members(session)
    return members


def _reap(pids: Iterable[int]) -> None:
    """As process 1 of a container, specserve inherits orphans: without this each would stay a
    zombie.
    """
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _is_tracker(pid: int) -> bool:
    try:
        return any("resource_tracker" in part for part in psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


class Child:
    """A started engine."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], sink: Callable[[str], None]
    ) -> None:
        """Start it. Raises OSError when the program cannot be executed."""
        self._process = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        """Also the id of its process group and its session."""
        self._tail = LastLines()
        self._sink = sink
        self._reader = threading.Thread(target=self._drain, name="engine-output", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The leader's exit status; negative for a signal; None while it lives."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """The last lines of its output."""
        return self._tail.lines()

    def terminate(self) -> None:
        """TERM to the leader alone: vLLM's API server drains and then ends its own processes, while
        its workers answer TERM by exiting in the middle of a request (``WorkerProc.worker_main``,
        vLLM 0.32)."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self, *, timeout: float = 10.0) -> tuple[int, ...]:
        """KILL the whole session, also without its leader; returns the pids that outlived it, as a
        process in a driver call does.
        """
        left = kill_session(self.pid, timeout=timeout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self._reader.join(timeout=1.0)
        return left

    def finish(self, *, linger: float = 1.0) -> tuple[int, ...]:
        """After the leader's end: give descendants a moment to follow, then KILL the rest.

        Returns the pids that had to be killed.
        """
        end = time.monotonic() + linger
        members = session_members(self.pid)
        while members and time.monotonic() < end:
            time.sleep(0.02)
            members = session_members(self.pid)
        self.kill()
        return members

    def _drain(self) -> None:
        """Read to the end of the pipe. Lines longer than LINE_BYTES are cut."""
        output = self._process.stdout
        assert output is not None
        rest = b""
        for chunk in iter(lambda: os.read(output.fileno(), _READ_BYTES), b""):
            *whole, rest = _LINE_END.split(rest + chunk)
            for line in whole:
                self._line(line)
            if len(rest) > LINE_BYTES:
                rest = rest[: LINE_BYTES + 1]
        self._line(rest)
        output.close()

    def _line(self, raw: bytes) -> None:
        if not raw.strip():
            return
        line = raw[:LINE_BYTES].decode("utf-8", "replace")
        if len(raw) > LINE_BYTES:
            line += " ..."
        self._tail.add(line)
        # A terminal may have gone, a file may be closed: the pipe must be drained all the same.
        with contextlib.suppress(OSError, ValueError):
            self._sink(line)


def exit_cause(status: int) -> str:
    """An exit status as a sentence.

    >>> exit_cause(1), exit_cause(-11)
    ('exited with status 1', 'was killed by SIGSEGV')
    >>> exit_cause(-9)
    'was killed by SIGKILL (out of memory, or somebody ended it)'
    """
    if status >= 0:
        return f"exited with status {status}"
    cause = f"was killed by {signal.Signals(-status).name}"
    if -status == signal.SIGKILL:
        cause += " (out of memory, or somebody ended it)"
    return cause
