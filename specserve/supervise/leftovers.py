"""What an earlier run left behind: engines whose specserve is gone, and what holds our port.

Each run keeps a small record of its engine. A record whose supervisor is gone, but whose engine
still has living processes, is a leftover. What a record says is believed only where the processes
themselves prove it, see `specserve.supervise.processes`.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specserve.engine.command.args import EngineCommand, redacted
from specserve.errors import ConfigError, EngineStartError, Problem
from specserve.files import read_small, write_whole
from specserve.supervise.processes import (
    FIRST_SESSION,
    EngineSession,
    boot_id,
    pid_namespace,
    started_at,
)

MAX_RECORD_BYTES = 64 * 1024
MAX_PID = 2**22
"""The most that Linux gives out."""
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
    for place in (folder, *folder.parents):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError:  # a home that we may not enter, a file on the way
            return False
        return stat.S_ISDIR(mode) and os.access(place, os.W_OK | os.X_OK)
    return False


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


class Record(BaseModel):
    """One engine that was started.

    Start times are clock ticks since the boot, which no step of the clock moves.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    """The engine's processes carry it in their environment."""
    boot: str = Field(min_length=1, max_length=64)
    """Of the machine: after a reboot, and on another machine, pids mean nothing."""
    pid_namespace: int = Field(ge=0, lt=2**64)
    """The same within one boot: containers may share this folder."""
    host: str = Field(max_length=256)
    session: int = Field(ge=FIRST_SESSION, le=MAX_PID)
    """Pid of the engine's first process, which is also its session."""
    session_started: int = Field(ge=0, lt=2**63)
    output: int | None = Field(ge=0, lt=2**64)
    """Inode of the pipe that the engine writes to."""
    supervisor: int = Field(ge=1, le=MAX_PID)
    supervisor_started: int = Field(ge=0, lt=2**63)
    port: int = Field(ge=0, le=65535)
    log: str = Field(max_length=4096)

    @property
    def engine(self) -> EngineSession:
        """Its processes."""
        return EngineSession(self.run, self.session, self.session_started, self.output)

    def write(self, folder: Path) -> Path:
        """Store it, whole or not at all."""
        path = folder / f"engine-{self.host}-{self.run}.json"
        write_whole(path, self.model_dump_json())
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
        left = self.record.engine.kill(timeout=timeout)
        if not left:
            forget(self.path)
        return left


def record_of(engine: EngineSession, *, port: int, log: Path) -> Record | None:
    """A record of an engine that this process has just started; None where /proc does not tell
    what would prove it."""
    boot, me = boot_id(), os.getpid()
    supervisor_started = started_at(me)
    if boot is None or supervisor_started is None or engine.started is None:
        return None
    return Record(
        run=engine.run,
        boot=boot,
        pid_namespace=pid_namespace(),
        host=socket.gethostname(),
        session=engine.leader,
        session_started=engine.started,
        output=engine.output,
        supervisor=me,
        supervisor_started=supervisor_started,
        port=port,
        log=os.fsencode(log).decode("utf-8", "backslashreplace"),
    )


def find(folder: Path) -> list[Leftover]:
    """Every leftover of this folder's records.

    Records of engines that are gone are deleted on the way.
    """
    found = []
    boot = boot_id()
    for path, record in _records(folder):
        if isinstance(record, DamagedRecord) or boot is None:
            continue
        if record.boot != boot:
            if record.host == socket.gethostname():
                forget(path)  # before this boot
            continue
        if record.pid_namespace != pid_namespace():
            continue
        if started_at(record.supervisor) == record.supervisor_started:
            continue
        pids = record.engine.members()
        if pids:
            found.append(Leftover(record, path, pids))
        else:
            forget(path)
    return found


def damaged(folder: Path) -> list[str]:
    """A sentence for each file that has the name of a record and is none.

    Nothing follows from it, and so nothing is ended because of it.
    """
    return [
        f"Warning: {path}: {record}; nothing is ended because of it. "
        f"Fix: rm -r -- {shlex.quote(str(path))}"
        for path, record in _records(folder)
        if isinstance(record, DamagedRecord)
    ]


def require_clean(folder: Path, ports: Mapping[str, tuple[str, int]], *, reap: bool) -> list[str]:
    """Refuse to start beside leftovers or on a taken port, or with ``reap`` end the leftovers
    first.

    ``ports``: key of the config file -> host and port. Returns what was reaped, and what is no
    record, in sentences.
    Raises EngineStartError, naming every process. A process that is not a leftover of ours is never
    ended.
    """
    notes, problems = damaged(folder), []
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
        records = [r for _, r in _records(folder) if isinstance(r, Record) and r.port == port]
        ours = {pid for record in records for pid in record.engine.members()}
        what = "is taken by a process that cannot be seen; it must be free"
        rows = []
        for pid in sorted({found.pid for found in listeners(port) if found.pid is not None}):
            what = "is taken; it must be free"
            command = command_of(pid)
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


@dataclass(frozen=True)
class Listener:
    """A socket that listens; ``pid`` None where its process cannot be seen."""

    address: str
    pid: int | None


def listeners(port: int) -> list[Listener]:
    """Who listens on a TCP port; processes of other users only with the right to see them."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.AccessDenied, OSError):
        return []
    return [
        Listener(connection.laddr.ip, connection.pid)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
    ]


@dataclass(frozen=True)
class DamagedRecord:
    """A file with the name of a record that is none."""

    why: str

    def __str__(self) -> str:
        return f"is no record of an engine ({self.why})"


def _records(folder: Path) -> Iterator[tuple[Path, Record | DamagedRecord]]:
    for path in sorted(folder.glob("engine-*.json")):
        try:
            yield path, Record.model_validate_json(read_small(path, limit=MAX_RECORD_BYTES))
        except FileNotFoundError:
            continue  # another run has just ended
        except OSError as error:
            yield path, DamagedRecord(error.strerror or "it cannot be read")
        except UnicodeDecodeError:
            yield path, DamagedRecord("it is not UTF-8 text")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            why = first["msg"].partition("\n")[0]
            if place:
                why = f"{place}: {why}"
            yield path, DamagedRecord(why[:COMMAND_CHARACTERS])


def _words(leftover: Leftover) -> str:
    pids = ", ".join(map(str, leftover.pids))
    record = leftover.record
    return f"pid {pids} (engine of specserve pid {record.supervisor}, port {record.port})"


def _left_behind(leftover: Leftover) -> Problem:
    record = leftover.record
    rows = [(f"pid {pid}", command_of(pid)) for pid in leftover.pids]
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
        facts=tuple((f"pid {pid}", command_of(pid)) for pid in leftover.pids),
        fix="nvidia-smi; a GPU reset or a reboot ends such a process",
    )


def command_of(pid: int) -> str:
    """The command line of a process without secrets, cut to a readable length."""
    try:
        process = psutil.Process(pid)
        text = " ".join(redacted(EngineCommand(tuple(process.cmdline()))).argv) or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "(unknown)"
    if len(text) <= COMMAND_CHARACTERS:
        return text
    return text[:COMMAND_CHARACTERS] + " ..."
