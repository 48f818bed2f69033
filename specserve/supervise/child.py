"""One engine process with all its descendants. The only home of Popen.

The child leads a session of its own, so everything it spawns can be found and ended also when the
leader has gone: a surviving EngineCore would hold the GPU memory. stdout and stderr share one pipe,
drained by one thread, so a talkative child never blocks on a full pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from specserve.engine.command.environment import RUN_VARIABLE
from specserve.supervise.processes import EngineSession, look

KEPT_LINES = 2000
KEPT_BYTES = 1 << 20
LINE_BYTES = 4000
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


_TIED = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
except (AttributeError, OSError):
    pass  # not Linux
if os.getppid() != int(sys.argv[1]):
    raise SystemExit("whoever started it has gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    raise SystemExit(f"{sys.argv[2]}: cannot be executed ({error.strerror})")
"""
"""Becomes the program, which then gets SIGTERM when we die, however we die. Not a ``preexec_fn``:
that would run between fork and exec of a process that has threads."""


def _tied(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    if shutil.which(argv[0], path=env.get("PATH", os.defpath)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *argv]


class Child:
    """A started engine."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        sink: Callable[[str], None],
        *,
        tied: bool = False,
    ) -> None:
        """Start it. Raises OSError when the program cannot be executed.

        ``tied``: it gets SIGTERM when the thread that calls this ends, as when we are killed; its
        own children do not.
        """
        run = uuid.uuid4().hex
        env = {**env, RUN_VARIABLE: run}
        command = list(argv)
        if tied and sys.executable:  # which is empty in a program that embeds Python
            command = _tied(argv, env)
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        """Also the id of its process group and its session."""
        started = None
        facts = look(self.pid)  # also of its zombie: nobody has waited for it yet
        if facts is not None:
            started = facts.started
        output = self._process.stdout
        assert output is not None
        inode = os.fstat(output.fileno()).st_ino
        self.session = EngineSession(run, self.pid, started, inode, is_child=True)
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
        if self.poll() is None:
            self._process.kill()
        left = self.session.kill(timeout=timeout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self._reader.join(timeout=1.0)
        return left

    def finish(self, *, linger: float = 1.0) -> tuple[int, ...]:
        """After the leader's end: give descendants a moment to follow, then KILL the rest.

        Returns the pids that had to be killed.
        """
        end = time.monotonic() + linger
        members = self.session.members()
        while members and time.monotonic() < end:
            time.sleep(0.02)
            members = self.session.members()
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
