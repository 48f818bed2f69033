"""A checkpoint in a folder on this machine."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specserve.files import read_bytes


@dataclass(frozen=True)
class LocalFolder:
    """A checkpoint in a folder."""

    name: str
    folder: Path
    revision: str | None = None

    def files(self) -> Mapping[str, int]:
        """Regular files at the top of the folder (links are followed: the Hub cache is made of
        them).
        """
        found: dict[str, int] = {}
        for entry in self.folder.iterdir():
            try:
                status = entry.stat()
            except OSError:  # a dangling link is a file that is not there
                continue
            if stat.S_ISREG(status.st_mode):
                found[entry.name] = status.st_size
        return dict(sorted(found.items()))

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of one file."""
        return read_bytes(self.folder / name, length, start=start)
