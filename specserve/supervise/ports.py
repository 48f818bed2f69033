"""Ports: one launch at a time has them, and who it is that answers on one.

vLLM binds its port at once and listens only when it has loaded, minutes later. Until then a second
bind succeeds, and what answers may be somebody else's engine.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path

from specserve.errors import EngineStartError, Problem
from specserve.supervise.leftovers import command_of, listeners
from specserve.supervise.processes import PROC, EngineSession, look

WILDCARDS = frozenset({"0.0.0.0", "::"})


@contextmanager
def claimed(folder: Path, ports: Mapping[str, int]) -> Iterator[list[str]]:
    """Have these ports (config key -> port) for one launch alone, until the block ends.

    A lock of the kernel, which a process that is killed gives back. Yields what to note. Raises
    EngineStartError, naming who has a port.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    with ExitStack() as held:
        for key, port in ports.items():
            try:
                holder = _lock(_path(folder, port), held)
            except OSError as error:  # a disk or a file system that cannot: the port itself is left
                notes.append(
                    f"Warning: {_path(folder, port)}: cannot be locked ({error.strerror}); "
                    "a second launch on this port would not be noticed before it has loaded"
                )
                continue
            if holder is not None:
                problems.append(_held(key, port, holder))
        if problems:
            raise EngineStartError(problems)
        yield notes


def _path(folder: Path, port: int) -> Path:
    """Machines may share the folder, and so may network namespaces, each with ports of its own."""
    namespace = 0
    with suppress(OSError):
        namespace = (PROC / "self/ns/net").stat().st_ino
    return folder / f"port-{socket.gethostname()}-{namespace}-{port}.lock"


def _lock(path: Path, held: ExitStack) -> str | None:
    """Take the lock for as long as ``held``; else what its holder wrote into it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with os.fdopen(descriptor, "rb") as file:
                return file.read(16).decode("ascii", "replace")
        except OSError:
            os.close(descriptor)
            raise
        if _is_at(path, descriptor):
            break
        os.close(descriptor)  # its holder has just ended, and deleted the file that we opened
    held.callback(_unlock, path, descriptor)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _unlock(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _held(key: str, port: int, holder: str) -> Problem:
    who, rows = "another specserve", []
    # In another pid namespace its pid says nothing here.
    if holder.isdecimal() and look(int(holder)) is not None:
        who = f"specserve pid {holder}"
        rows.append((f"pid {holder}", command_of(int(holder))))
    return Problem(
        f"is held by {who}, whose engine runs or is starting there; it must be free",
        f"{key} {port}",
        tuple(rows),
        f"--set {key}=N with a free port, or end that process",
    )


class Answerer(Enum):
    """Whose process it is that listens on a port."""

    OURS = "ours"
    STRANGER = "stranger"
    UNSEEN = "unseen"
    """/proc does not tell."""


def answerer(engine: EngineSession, port: int) -> tuple[Answerer, str]:
    """Who gets a connection to this port, and in words who else listens there.

    Several API servers have a socket each, or share one: all of them have to be the engine's.
    """
    found = listeners(port)
    members = set(engine.members())
    ours = {listener.address for listener in found if listener.pid in members}
    strangers = [
        listener
        for listener in found
        if listener.pid is not None
        and listener.pid not in members
        and _overlaps(listener.address, ours)
    ]
    if strangers:
        rows = sorted({f"pid {s.pid} ({command_of(s.pid or 0)})" for s in strangers})
        return (
            Answerer.STRANGER,
            f"port {port} is answered by {', '.join(rows)}, not by this engine",
        )
    if ours:
        return Answerer.OURS, ""
    return Answerer.UNSEEN, f"who listens on port {port} cannot be seen"


def _overlaps(address: str, ours: set[str]) -> bool:
    """Whether both could get the same connection; where none is ours, whoever answers did."""
    return not ours or address in ours or bool(WILDCARDS & {address, *ours})
