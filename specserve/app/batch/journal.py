"""What a batch has, kept so that a kill at any moment costs no answer and makes no second one.

Three kinds of files:

- OUTPUT, one line an answer;
- OUTPUT.journal, one line for each line of OUTPUT, written after it: index, bytes, checksum. What
  OUTPUT holds beyond it, or what does not match, is cut on the next start and asked again;
- OUTPUT.waiting-N, answers that came before an earlier one, until their turn. Each file is for a
  stretch of indexes, and is deleted when all of them are in OUTPUT.

Everything is appended, by one thread of one process (a lock on the journal keeps others out). A
kill of the process loses nothing that was written; a power cut loses at most what was written
after the last `sync`, which the checksums find.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Self

from specserve.errors import ConfigError
from specserve.units import MIB

VERSION = 1
WINDOW = 65_536
"""Answers that may wait for an earlier one. Beyond it no new request starts until that one ends."""
SEGMENT = 4_096
"""Indexes for which one waiting file is made."""
MAX_LINE_BYTES = 256 * MIB
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write fails with where there is no room."""
_MAX_ENTRY_BYTES = 4_096
_ENTRY = re.compile(rb"(\d{1,15}) (\d{1,15}) ([0-9a-f]{8}) ([afb]) (\d{1,15}|-)\n")
_WAITING = re.compile(rb"(\d{1,15}) ([0-9a-f]{8}) ([afb]) (\d{1,15}|-) ")


class Fate(Enum):
    """How a request ended."""

    ANSWERED = "a"
    FAILED = "f"
    BAD_LINE = "b"
    """The line of the input is no request."""


@dataclass(frozen=True)
class Kept:
    """One line of OUTPUT."""

    fate: Fate
    line: bytes
    """With its line feed."""
    tokens: int | None = None
    """Tokens that were made for it; None where the server did not say."""

    @property
    def trailer(self) -> str:
        """Fate and tokens, as the files have them."""
        tokens = "-"
        if self.tokens is not None:
            tokens = str(self.tokens)
        return f"{self.fate.value} {tokens}"


@dataclass
class Totals:
    """What OUTPUT holds."""

    answered: int = 0
    failed: int = 0
    bad_lines: int = 0
    tokens: int = 0
    without_tokens: int = 0
    """Answers whose number of tokens the server did not say."""

    @property
    def lines(self) -> int:
        """All lines."""
        return self.answered + self.failed + self.bad_lines

    def add(self, fate: Fate, tokens: int | None) -> None:
        """Count one line."""
        match fate:
            case Fate.ANSWERED:
                self.answered += 1
                self.tokens += tokens or 0
                self.without_tokens += tokens is None
            case Fate.FAILED:
                self.failed += 1
            case Fate.BAD_LINE:
                self.bad_lines += 1


class Journal:
    """The lines of OUTPUT, in the input's order or, ``ordered`` False, as they come.

    ``identity`` says what is answered and how: a journal of anything else is not continued.
    Use as a context manager. Raises ConfigError for what cannot be continued or written.
    """

    def __init__(
        self,
        output: Path | None,
        identity: str,
        *,
        ordered: bool = True,
        resume: bool = False,
        window: int = WINDOW,
    ) -> None:
        """``output`` None is standard output, which cannot be resumed; nor can a pipe or device."""
        self._window, self._ordered = window, ordered
        self._header = _header(identity, ordered=ordered)
        self.totals = Totals()
        self.next = 0
        """The first index that is not in OUTPUT."""
        self._offsets = array("q", bytes(8 * window))
        self._lengths = array("l", bytes(array("l").itemsize * window))
        """Of waiting answers, at index % window; 0: there is none. Where OUTPUT is unordered, 1
        marks what is in it."""
        self._segments: dict[int, FileIO] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._journal: int | None = None
        self._path = output or Path("standard output")
        self.resumable = output is not None and not _is_stream(output)
        try:
            if output is None:
                self._output = os.dup(1)
            elif self.resumable:
                self._open(output, resume=resume)
                return
            else:
                self._output = os.open(output, os.O_WRONLY | os.O_CLOEXEC)
            self._folder = tempfile.TemporaryDirectory(prefix="specserve-batch-")
            self._waiting = str(Path(self._folder.name) / "waiting-")
        except OSError as error:
            raise _unwritable(error, self._path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        for file in self._segments.values():
            file.close()
        self._segments.clear()
        os.close(self._output)
        if self._journal is not None:
            os.close(self._journal)
        if self._folder is not None:
            self._folder.cleanup()

    # --- while it runs ---

    def has(self, index: int) -> bool:
        """Whether the answer of a request is here, in OUTPUT or waiting."""
        return index < self.next or (
            index < self.next + self._window and self._lengths[index % self._window] != 0
        )

    def has_room(self, index: int) -> bool:
        """Whether an answer at this index can be kept; if not, an earlier one must come first."""
        return index < self.next + self._window

    def add(self, index: int, kept: Kept) -> None:
        """Keep one answer. Raises ConfigError where the disk is full or gone."""
        assert not self.has(index)
        assert self.has_room(index)
        try:
            if not self._ordered:
                self._put(index, kept)
                self._lengths[index % self._window] = 1
                self._advance()
            elif index == self.next:
                self._put(index, kept)
                self.next += 1
                self._flush()
            else:
                self._wait(index, kept)
        except BrokenPipeError:
            raise  # whoever reads standard output has gone, which is no fault
        except OSError as error:
            raise _unwritable(error, self._path) from error

    def sync(self) -> None:
        """Have the disk hold all that was written: OUTPUT before the journal that speaks of it."""
        if self._journal is None:
            return
        try:
            for file in self._segments.values():
                os.fsync(file.fileno())
            os.fsync(self._output)
            os.fsync(self._journal)
        except OSError as error:
            raise _unwritable(error, self._path) from error

    def _put(self, index: int, kept: Kept) -> None:
        _write(self._output, kept.line)
        if self._journal is not None:
            checksum = zlib.crc32(kept.line)
            entry = f"{index} {len(kept.line)} {checksum:08x} {kept.trailer}\n"
            _write(self._journal, entry.encode())
        self.totals.add(kept.fate, kept.tokens)

    def _wait(self, index: int, kept: Kept) -> None:
        head = f"{index} {zlib.crc32(kept.line):08x} {kept.trailer} ".encode()
        file = self._segment(index // SEGMENT)
        at = file.seek(0, os.SEEK_END)
        _write(file.fileno(), head + kept.line)
        self._remember(index, at, len(head) + len(kept.line))

    def _remember(self, index: int, offset: int, length: int) -> None:
        self._offsets[index % self._window] = offset
        self._lengths[index % self._window] = length

    def _flush(self) -> None:
        """Move what is due from the waiting files to OUTPUT."""
        while self._lengths[self.next % self._window]:
            slot = self.next % self._window
            file = self._segment(self.next // SEGMENT)
            record = os.pread(file.fileno(), self._lengths[slot], self._offsets[slot])
            _, kept = _waiting(record)
            self._put(self.next, kept)
            self._lengths[slot] = 0
            self.next += 1
        self._drop()

    def _advance(self) -> None:
        """Unordered: move up to the first index that is not in OUTPUT."""
        while self._lengths[self.next % self._window]:
            self._lengths[self.next % self._window] = 0
            self.next += 1

    def _segment(self, number: int) -> FileIO:
        if number not in self._segments:
            self._segments[number] = FileIO(f"{self._waiting}{number}", "a+")
        return self._segments[number]

    def _drop(self) -> None:
        """Delete the waiting files whose answers are all in OUTPUT."""
        for number in [n for n in self._segments if (n + 1) * SEGMENT <= self.next]:
            self._segments.pop(number).close()
            Path(f"{self._waiting}{number}").unlink(missing_ok=True)

    def finish(self) -> None:
        """All is answered: nothing waits any more."""
        self.sync()
        for number in list(self._segments):
            self._segments.pop(number).close()
            Path(f"{self._waiting}{number}").unlink(missing_ok=True)

    # --- at the start ---

    def _open(self, output: Path, *, resume: bool) -> None:
        journal = output.with_name(f"{output.name}.journal")
        self._waiting = f"{output}.waiting-"
        held = output.exists() and output.stat().st_size > 0
        if not resume and (held or (output.exists() and _waiting_files(output))):
            raise ConfigError(
                "exists already; must be a new file",
                where=str(output),
                fix="add --resume to go on with it, or name another file",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._journal = os.open(journal, flags, 0o666)
        try:
            self._output = os.open(output, flags, 0o666)
        except OSError:
            os.close(self._journal)
            raise
        is_ours = False
        try:
            self._lock(output)
            if resume and self._is_begun(output, journal, held=held):
                self._load(output)
            else:
                for _, path in _waiting_files(output):
                    path.unlink()
                os.ftruncate(self._journal, 0)
                _write(self._journal, self._header)
            is_ours = True
        finally:
            if not is_ours:
                self.close()

    def _lock(self, output: Path) -> None:
        assert self._journal is not None
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another specserve batch writes it now; only one may",
                where=str(output),
                fix="wait for the other, or name another file",
            ) from None

    def _is_begun(self, output: Path, journal: Path, *, held: bool) -> bool:
        """Whether there is a journal to go on with; False where a kill came before its first
        line."""
        assert self._journal is not None
        head, line_feed, _ = os.pread(self._journal, _MAX_ENTRY_BYTES, 0).partition(b"\n")
        if not line_feed:
            if held:
                if not head:  # we have just made it
                    journal.unlink()
                raise ConfigError(
                    f"holds lines, and {journal.name} does not say whose; cannot go on with it",
                    where=str(output),
                    fix="name another file",
                )
            return False
        if head + b"\n" != self._header:
            raise ConfigError(
                f"is of another batch: {_difference(head, self._header)}",
                where=str(output),
                fix="give the input and options with which it began, or name another file",
            )
        return True

    def _load(self, output: Path) -> None:
        """Read what is there; cut what is torn."""
        assert self._journal is not None
        length, at = len(self._header), 0
        with (
            os.fdopen(os.dup(self._journal), "rb") as journal,
            os.fdopen(os.dup(self._output), "rb") as lines,
        ):
            journal.seek(length)
            lines.seek(0)
            while True:
                entry = journal.readline(_MAX_ENTRY_BYTES)
                match = _ENTRY.fullmatch(entry)
                if match is None:
                    break
                index, size = int(match[1]), int(match[2])
                if not self._is_next(index) or size > MAX_LINE_BYTES:
                    break
                line = lines.read(size)
                if zlib.crc32(line) != int(match[3], 16) or len(line) < size:
                    _require_torn(line, size, output)
                    break
                self.totals.add(Fate(match[4].decode()), _tokens(match[5]))
                self._passed(index)
                length, at = length + len(entry), at + size
        os.ftruncate(self._output, at)
        os.ftruncate(self._journal, length)
        os.lseek(self._output, at, os.SEEK_SET)
        os.lseek(self._journal, length, os.SEEK_SET)
        if self._ordered:
            self._load_waiting(output)

    def _is_next(self, index: int) -> bool:
        if self._ordered:
            return index == self.next
        return self.has_room(index) and not self.has(index)

    def _passed(self, index: int) -> None:
        if self._ordered:
            self.next += 1
        else:
            self._lengths[index % self._window] = 1
            self._advance()

    def _load_waiting(self, output: Path) -> None:
        for number, path in _waiting_files(output):
            if (number + 1) * SEGMENT <= self.next:
                path.unlink()
                continue
            file = self._segment(number)
            whole = 0
            for at, record in _records(file):
                try:
                    index, _ = _waiting(record)
                except ValueError:
                    break
                whole = at + len(record)
                mine = index // SEGMENT == number
                if mine and index >= self.next and self.has_room(index):
                    self._remember(index, at, len(record))
            file.truncate(whole)
        self._flush()


def _waiting_files(output: Path) -> list[tuple[int, Path]]:
    found = []
    for path in output.parent.glob(f"{_escape(output.name)}.waiting-*"):
        number = path.name.rpartition("-")[2]
        if re.fullmatch(r"\d{1,15}", number, re.ASCII):
            found.append((int(number), path))
    return sorted(found)


def _escape(name: str) -> str:
    """A name as a pattern that matches only it.

    >>> _escape("out[1].jsonl")
    'out[[]1].jsonl'
    """
    return re.sub(r"([*?[])", r"[\1]", name)


def _records(file: FileIO) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each whole line."""
    with os.fdopen(os.dup(file.fileno()), "rb") as lines:
        lines.seek(0)
        at = 0
        while True:
            record = lines.readline(MAX_LINE_BYTES)
            if not record.endswith(b"\n"):
                return
            yield at, record
            at += len(record)


def _waiting(record: bytes) -> tuple[int, Kept]:
    """Index and answer of a line of a waiting file. Raises ValueError for what is none."""
    match = _WAITING.match(record)
    if match is None:
        raise ValueError("not a waiting answer")
    line = record[match.end() :]
    if zlib.crc32(line) != int(match[2], 16):
        raise ValueError("a waiting answer with another checksum")
    return int(match[1]), Kept(Fate(match[3].decode()), line, _tokens(match[4]))


def _tokens(text: bytes) -> int | None:
    if text == b"-":
        return None
    return int(text)


def _header(identity: str, *, ordered: bool) -> bytes:
    body = {"specserve_batch": VERSION, "ordered": ordered, "identity": identity}
    return json.dumps(body).encode() + b"\n"


def _difference(held: bytes, wanted: bytes) -> str:
    try:
        old, new = json.loads(held), json.loads(wanted)
        names = [name for name in new if old.get(name) != new[name]]
    except (ValueError, AttributeError):
        return "its journal is not one of specserve batch"
    words = {
        "specserve_batch": "it was written by another version",
        "ordered": "it was begun with --unordered, or this run is",
        "identity": "the input or the options that shape its requests have changed",
    }
    return ", ".join(words[name] for name in names)


def _require_torn(line: bytes, size: int, output: Path) -> None:
    """A line that does not match is what a power cut leaves: short, or with blocks of zeros.
    Anything else was changed by someone, and is not ours to cut."""
    if len(line) == size and b"\0" not in line:
        raise ConfigError(
            "was changed since it was written; the lines must be as they were to go on with it",
            where=str(output),
            fix="name another file",
        )


def _is_stream(path: Path) -> bool:
    """Whether it is there and no regular file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _write(descriptor: int, data: bytes) -> None:
    """All of it; the system may take it in pieces."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _unwritable(error: OSError, path: Path) -> ConfigError:
    fix = "name a file in a folder that you may write to"
    if error.errno in _FULL:
        fix = "free some space"
    where = path
    with contextlib.suppress(TypeError):
        where = Path(error.filename)
    return ConfigError(f"cannot be written: {error.strerror}", where=str(where), fix=fix)
