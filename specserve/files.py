"""Files that are written whole or not at all, and small files that are read within bounds."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

MAX_SMALL_BYTES = 16 * 1024**2
"""Records, profiles, measurements and keys have kilobytes; a result of a long benchmark some
megabytes.
"""


def write_whole(path: Path, text: str) -> None:
    """Write a file; a reader sees the old text or the new one, never half of it.

    Raises OSError, and leaves nothing behind then.
    """
    with replacing(path) as out:
        out.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file to write that takes the place of ``path`` at the end, or of nothing after an
    exception.

    It is made in the folder of ``path`` under a name that nobody can have prepared as a link to
    another file. Where ``path`` is a link itself, the link is replaced and what it points to stays.
    Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # The reader of a message knows the file that was asked for.
        raise OSError(error.errno, error.strerror, str(path)) from None
    is_whole = False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            yield out
        fresh.replace(path)
        is_whole = True
    finally:
        if not is_whole:
            fresh.unlink(missing_ok=True)


def read_small(path: Path, *, limit: int = MAX_SMALL_BYTES) -> str:
    """The text of a small regular file.

    Raises OSError, also for a device or a pipe, which could be endless, and for more than ``limit``
    bytes; raises UnicodeDecodeError for what is not UTF-8.
    """
    data = read_bytes(path, limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", str(path))
    return data.decode("utf-8")


def read_bytes(path: Path, length: int, *, start: int = 0) -> bytes:
    """At most ``length`` bytes of a regular file. Raises OSError, also for a device or a pipe."""
    # Without O_NONBLOCK a pipe that nobody writes to would hold us here.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if start:
            file.seek(start)
        # None where a file of /proc has nothing to give yet.
        return file.read(length) or b""
