"""What an earlier run left behind: engines whose specserve is gone, and what holds our port.

Each run keeps a small record of its engine. A record whose supervisor is gone, but whose engine's
session still has living processes, is a leftover. Pids are compared together with start times,
because pids come again.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from specserve.engine.command.args import EngineCommand, redacted
from specserve.errors import ConfigError, EngineStartError, Problem
from specserve.files import read_small, write_whole
from specserve.supervise.child import kill_session, session_members

CLOCK_SLACK_SECONDS = 2.0
"""psutil derives start times from the boot time, which shifts a little when the clock is corrected.
"""
COMMAND_CHARACTERS = 160


@dataclass(frozen=True)
class Folders:
    """Where specserve keeps what it must find again."""

    state: Path
    """What outlives a run: the sidecar's baseline."""
    run: Path
    """Records of engines, and their logs."""


def folders(environ: Mapping[str, str]) -> Folders:
    """``$XDG_STATE_HOME/specserve`` and ``run`` in it, by default under ``~/.local/state``; where
    that cannot be written, ``specserve-UID`` in the temp folder for both.

    Not ``$XDG_RUNTIME_DIR``: a service and a login of the same user have different ones and would
    not see each other's engines. The temp folder comes last because cleaners empty it under a long
    run.
    """
    root = None
    if environ.get("XDG_STATE_HOME"):
        root = Path(environ["XDG_STATE_HOME"])
    elif environ.get("HOME"):
        root = Path(environ["HOME"]) / ".local" / "state"
    if root is not None and _writable(root):
        return Folders(root / "specserve", root / "specserve" / "run")
    temporary = Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"specserve-{os.getuid()}"
    return Folders(temporary, temporary)


def _writable(folder: Path) -> bool:
    """Whether it can be written, or made."""
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def make_private(folder: Path) -> None:
    """Make it, for its owner alone. Raises ConfigError when somebody else owns it: the temp folder
    is everybody's, and what lies in ours decides which processes ``--reap`` ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
        if facts.st_uid == os.getuid() and facts.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot be made ({error.strerror}); specserve keeps its records there",
            where=str(folder),
            fix="make room there, or export XDG_STATE_HOME=a folder that you may write",
        ) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(
            f"belongs to user {facts.st_uid}; it must be a folder of your own",
            where=str(folder),
            fix="export XDG_STATE_HOME=a folder of your own",
        )


@dataclass(frozen=True)
class Record:
    """One engine that was started.

    Start times are seconds since the epoch, as psutil gives them.
    """

    session: int
    """Pid of the engine's first process, which is also its session."""
    host: str
    """A home folder may be shared by machines, and pids are not."""
    session_started: float
    supervisor: int
    supervisor_started: float
    port: int
    log: str

    def write(self, folder: Path) -> Path:
        """Store it, whole or not at all."""
        path = folder / f"engine-{self.host}-{self.session}.json"
        write_whole(path, json.dumps(asdict(self)))
        return path


def forget(record: Path) -> None:
    """Delete it.

    Where the folder has become read-only it stays: an engine that is gone cannot be mistaken.
    """
    with suppress(OSError):
        record.unlink()


@dataclass(frozen=True)
class Leftover:
    """An engine, or what remains of it, that nobody supervises."""

    record: Record
    path: Path
    pids: tuple[int, ...]

    def reap(self, *, timeout: float = 15.0) -> tuple[int, ...]:
        """KILL it; returns the pids that are still there. Nobody waits for its answers any more."""
        left = kill_session(self.record.session, timeout=timeout)
        if not left:
            forget(self.path)
        return left


def started_at(pid: int) -> float | None:
    """When a process started; None when there is none, or only its zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.create_time()
    except psutil.NoSuchProcess:
        return None


def record_of(session: int, *, port: int, log: str) -> Record:
    """A record of an engine that this process has just started."""
    me = os.getpid()
    return Record(
        session=session,
        host=socket.gethostname(),
        session_started=started_at(session) or psutil.Process(me).create_time(),
        supervisor=me,
        supervisor_started=psutil.Process(me).create_time(),
        port=port,
        log=log,
    )


def find(folder: Path) -> list[Leftover]:
    """Every leftover of this folder's records.

    Records of engines that are gone are deleted on the way.
    """
    found = []
    for path, record in _records(folder):
        if record.host != socket.gethostname() or _same(
            record.supervisor, record.supervisor_started
        ):
            continue
        pids = _members(record)
        if pids:
            found.append(Leftover(record, path, pids))
        else:
            forget(path)
    return found


def require_clean(folder: Path, ports: Mapping[str, tuple[str, int]], *, reap: bool) -> list[str]:
    """Refuse to start beside leftovers or on a taken port, or with ``reap`` end the leftovers
    first.

    ``ports``: key of the config file -> host and port. Returns what was reaped, in sentences.
    Raises EngineStartError, naming every process. A process that is not a leftover of ours is never
    ended.
    """
    notes, problems = [], []
    for leftover in find(folder):
        if not reap:
            problems.append(_left_behind(leftover))
            continue
        stuck = leftover.reap()
        if stuck:
            problems.append(_stuck(leftover, stuck))
        else:
            notes.append(f"ended what an earlier run left behind: {_words(leftover)}")
    if problems:
        raise EngineStartError(problems)
    for key, (host, port) in ports.items():
        problem = port_problem(folder, key, host, port)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise EngineStartError(problems)
    return notes


def port_problem(folder: Path, key: str, host: str, port: int) -> Problem | None:
    """Why the port cannot be bound; None when it can."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            return _taken(folder, key, host, port, error)
    return None


def _taken(folder: Path, key: str, host: str, port: int, error: OSError) -> Problem:
    where = f"{key} {port}"
    if not isinstance(error, socket.gaierror) and error.errno == errno.EADDRINUSE:
        here = socket.gethostname()
        sessions = {r.session for _, r in _records(folder) if r.port == port and r.host == here}
        ours = {pid for session in sessions for pid in session_members(session)}
        what = "is taken by a process that cannot be seen; it must be free"
        rows = []
        for pid in _listeners(port):
            what = "is taken; it must be free"
            command = _command(pid)
            if pid in ours:
                command = f"another specserve's engine: {command}"
            rows.append((f"pid {pid}", command))
        fix = f"--set {key}=N with a free port, or end that process"
        return Problem(what, where, tuple(rows), fix)
    return Problem(
        f"cannot listen on {host}: {error.strerror}; it must be an address of this machine and a "
        "port that you may use",
        where,
        fix=f"set {key.removesuffix('port')}host and {key}",
    )


def _listeners(port: int) -> list[int]:
    """Pids that listen on a TCP port; those of other users only with the right to see them."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    pids = set()
    for connection in connections:
        local = connection.laddr
        if connection.status == psutil.CONN_LISTEN and local and local.port == port:
            pids.add(connection.pid)
    return sorted(pid for pid in pids if pid is not None)


def _records(folder: Path) -> Iterator[tuple[Path, Record]]:
    for path in sorted(folder.glob("engine-*.json")):
        try:
            yield path, Record(**json.loads(read_small(path)))
        except OSError:
            continue  # another run has just ended; or it is a folder, or somebody else's
        except (ValueError, TypeError):
            forget(path)  # of another version: nothing can be known from it


def _same(pid: int, started: float) -> bool:
    now = started_at(pid)
    return now is not None and abs(now - started) <= CLOCK_SLACK_SECONDS


def _members(record: Record) -> tuple[int, ...]:
    """Living processes of the recorded session.

    A session whose leader is another process is another session.
    """
    leader = started_at(record.session)
    if leader is not None and abs(leader - record.session_started) > CLOCK_SLACK_SECONDS:
        return ()
    return session_members(record.session)


def _words(leftover: Leftover) -> str:
    pids = ", ".join(map(str, leftover.pids))
    record = leftover.record
    return f"pid {pids} (engine of specserve pid {record.supervisor}, port {record.port})"


def _left_behind(leftover: Leftover) -> Problem:
    record = leftover.record
    rows = [(f"pid {pid}", _command(pid)) for pid in leftover.pids]
    return Problem(
        f"specserve pid {record.supervisor} is gone and its engine still runs on port "
        f"{record.port}; it holds memory and must end first",
        where="left behind",
        facts=(*rows, ("log", record.log)),
        fix="the same command with --reap",
    )


def _stuck(leftover: Leftover, pids: Sequence[int]) -> Problem:
    return Problem(
        f"pid {', '.join(map(str, pids))} did not end after SIGKILL; a process that hangs in a "
        "driver call does not",
        where="left behind",
        facts=tuple((f"pid {pid}", _command(pid)) for pid in leftover.pids),
        fix="nvidia-smi; a GPU reset or a reboot ends such a process",
    )


def _command(pid: int) -> str:
    """The command line of a process without secrets, cut to a readable length."""
    try:
        process = psutil.Process(pid)
        text = " ".join(redacted(EngineCommand(tuple(process.cmdline()))).argv) or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "(unknown)"
    if len(text) <= COMMAND_CHARACTERS:
        return text
    return text[:COMMAND_CHARACTERS] + " ..."
