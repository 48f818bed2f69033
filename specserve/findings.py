"""What a check found, in the one shape that every check returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One statement about a configuration.

    ``code`` is a stable kebab-case name (documented, usable with ``--skip``); ``where`` is a config key or a
    file; ``fix`` is something to type, None where nothing needs doing.
    """

    code: str
    severity: Severity
    where: str
    message: str
    fix: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        """The JSON form."""
        return asdict(self)
