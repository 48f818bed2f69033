"""Where the engine's output goes: a file of bounded size, and the warnings in it to the user."""

from __future__ import annotations

import errno
import logging
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Self

from specserve.errors import ConfigError
from specserve.log import Redactor

LOG_BYTES = 10 * 1024**2
"""Size at which a new file begins; one older file is kept. The runtime folder is often memory."""

_log = logging.getLogger("specserve.engine")
_WARNING = re.compile(
    r"(\([^()]*pid=\d+\) )?(?P<level>WARNING|ERROR|"
    r"CRITICAL):? +(\d\d-\d\d [\d:]{8} )?(\[[^\]]*\] )?(?P<text>.*)"
)
REMEMBERED = 1000
"""So many messages are remembered; repetitions of later ones are not noticed."""


class EngineLog:
    """The engine's output as a file, secrets redacted.

    A disk that fills up does not stop the engine.
    """

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_pipe(path)
            self._handler = _Quiet(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
            if path.stat().st_size:
                self._handler.doRollover()  # the run before this one
        except OSError as error:
            raise ConfigError(
                f"cannot be written ({error.strerror}); the engine's log must be a file that you "
                "may write",
                where=str(path),
                fix="--engine-log FILE",
            ) from error
        self._redactor = Redactor(secrets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing writes what a full disk has refused so far; how the engine ended stands all the
        # same.
        with suppress(OSError):
            self._handler.close()

    def write(self, line: str) -> str:
        """Append one line; returns it as it may be shown."""
        clean = self._redactor.redact(line)
        self._handler.handle(logging.makeLogRecord({"msg": clean}))
        _log.debug("%s", clean)
        return clean


def _refuse_pipe(path: Path) -> None:
    """Opening one waits for a reader, and a reader that stops would stop us."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, "it is a pipe", str(path))


class _Quiet(RotatingFileHandler):
    """``logging`` prints a traceback to stderr for every line that a full disk refuses."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Nothing."""


class EngineWarnings:
    """Warnings and errors in the output, each message once: every process of the engine repeats its
    parent's.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def of(self, line: str) -> str | None:
        """The line to show, without process, time and place; empty for a repetition,
        None for a line that is no warning.

        >>> warnings = EngineWarnings()
        >>> warnings.of("(EngineCore pid=7) WARNING 11-29 22:00:00 [x.py:1] slow")
        'warning: slow'
        >>> (warnings.of("(Worker pid=8) WARNING 11-29 22:00:01 [x.py:1] slow"),
        ...  warnings.of("INFO: no ERROR here"))
        ('', None)
        """
        match = _WARNING.match(line)
        if match is None:
            return None
        if match["text"] in self._seen:
            return ""
        if len(self._seen) < REMEMBERED:
            self._seen.add(match["text"])
        return f"{match['level'].lower()}: {match['text']}"
