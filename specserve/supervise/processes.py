"""Which processes are ours, proven before any signal. Pids and session numbers come again.

A process carries the run id of its engine in its environment, and writes to its output. A program
may overwrite the first (``setproctitle``, as vLLM's engine core does) and close the second; it is
still reached through its session, once another process of that session has been proven: the kernel
does not give a session's number away while a process of it lives. Times are clock ticks since the
boot, as /proc tells them: no step of the clock moves them.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specserve.engine.command.environment import RUN_VARIABLE

PROC = Path("/proc")
FIRST_SESSION = 2
"""0 is a session of another pid namespace, 1 that of the machine's or the container's init."""
TRACKER_SECONDS = 5.0
"""Under load a resource tracker that has the processor for itself in a moment takes seconds."""


@dataclass(frozen=True)
class ProcessFacts:
    """One process as the kernel describes it."""

    pid: int
    session: int
    started: int
    """Clock ticks since the boot."""
    zombie: bool
    """It holds neither port nor memory."""


@dataclass(frozen=True)
class HostUse:
    """What processes hold of the host."""

    memory_bytes: float
    """Private memory (RssAnon): what a leak is made of, and what no other process has."""
    threads: float


def host_use(pids: Iterable[int]) -> HostUse | None:
    """Summed over the processes that still live; None when there is none."""
    memory = threads = 0.0
    seen = False
    for pid in pids:
        try:
            text = (PROC / str(pid) / "status").read_text("utf-8", "replace")
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "RssAnon" not in fields:
            # A zombie holds nothing.
            continue
        seen = True
        memory += 1024 * float(fields["RssAnon"].split()[0])
        threads += float(fields["Threads"])
    if not seen:
        return None
    return HostUse(memory, threads)


def boot_id() -> str | None:
    """This boot of this machine; None where the kernel does not say."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def pid_namespace() -> int:
    """In which pids mean the same; 0 where the kernel does not say."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def look(pid: int) -> ProcessFacts | None:
    """What /proc says of a process; None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name may hold blanks and brackets
    if len(fields) < 20:
        return None
    return ProcessFacts(pid, int(fields[3]), int(fields[19]), fields[0] in "ZX")


def started_at(pid: int) -> int | None:
    """When a living process started, in ticks; None when there is none, or only its zombie."""
    facts = look(pid)
    if facts is None or facts.zombie:
        return None
    return facts.started


def _everybody() -> Iterator[ProcessFacts]:
    try:
        names = [path.name for path in PROC.iterdir()]
    except OSError:
        return
    for name in names:
        if name.isdecimal():
            facts = look(int(name))
            if facts is not None:
                yield facts


@dataclass(frozen=True)
class EngineSession:
    """The processes of one start of an engine."""

    run: str
    """The run id, which only this start has in its environment."""
    leader: int
    """Pid of the first process, which is also the number of the session."""
    started: int | None
    """When the leader started, in ticks; None where /proc cannot be read."""
    output: int | None = None
    """The inode of the pipe that it writes to."""
    is_child: bool = False
    """We started it ourselves: then the leader's pid and start are proof enough. In a record they
    are a claim."""

    def members(self) -> tuple[int, ...]:
        """Living processes that are proven to be ours, by pid."""
        return tuple(sorted(facts.pid for facts in self._members()))

    def _members(self) -> list[ProcessFacts]:
        if self.started is None or self.leader < FIRST_SESSION:
            return []
        later = [
            facts
            for facts in _everybody()
            # A child starts after its parent.
            if facts.started >= self.started and facts.pid != os.getpid()
        ]
        inside = [facts for facts in later if facts.session == self.leader]
        is_proven = any(self._marked(facts.pid) for facts in inside)
        if self.is_child and not is_proven:
            is_proven = any(self._is_leader(facts) for facts in inside)
        # A descendant may have made a session of its own.
        outside = [
            facts
            for facts in later
            if facts.session not in (self.leader, 0, 1) and self._carries(facts.pid)
        ]
        if not is_proven:
            inside = []
        return [facts for facts in (*inside, *outside) if not facts.zombie]

    def _is_leader(self, facts: ProcessFacts) -> bool:
        return facts.pid == self.leader and facts.started == self.started

    def _marked(self, pid: int) -> bool:
        return self._carries(pid) or self._writes_to_us(pid)

    def _carries(self, pid: int) -> bool:
        """Whether its environment holds our run id."""
        try:
            environment = (PROC / str(pid) / "environ").read_bytes()
        except OSError:  # gone, or of another user
            return False
        return f"{RUN_VARIABLE}={self.run}".encode() in environment.split(b"\0")

    def _writes_to_us(self, pid: int) -> bool:
        if self.output is None:
            return False
        for stream in ("1", "2"):
            with suppress(OSError):
                end = (PROC / str(pid) / "fd" / stream).readlink()
                if end.name == f"pipe:[{self.output}]":
                    return True
        return False

    def kill(self, *, timeout: float) -> tuple[int, ...]:
        """KILL every member and wait until they are gone; returns those that outlive ``timeout``.

        Python's resource trackers are left for a moment: they end by themselves when their program
        has gone, and delete its shared memory, which would otherwise fill /dev/shm kill by kill.
        """
        began = time.monotonic()
        members = self._members()
        while members:
            waited = time.monotonic() - began
            if waited >= timeout:
                break
            for facts in members:
                if waited >= TRACKER_SECONDS or not _is_tracker(facts.pid):
                    _end(facts)
            time.sleep(0.02)
            for facts in members:
                if facts.pid != self.leader:
                    _reap(facts.pid)
            members = self._members()
        return tuple(sorted(facts.pid for facts in members))


def _end(facts: ProcessFacts) -> None:
    """KILL exactly this process: held by a descriptor, its pid cannot come again meanwhile."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            held = os.pidfd_open(facts.pid)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENFILE):
                return
            if look(facts.pid) == facts:  # an old kernel, or a sandbox
                os.kill(facts.pid, signal.SIGKILL)
            return
        try:
            now = look(facts.pid)
            if now is not None and now.started == facts.started:
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)


def _reap(pid: int) -> None:
    """As process 1 of a container, specserve inherits orphans: without this each would stay a
    zombie.
    """
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
