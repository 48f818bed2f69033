"""What changed about the server: restarts, versions, configuration. Pure but for the clock that is
given."""

from __future__ import annotations

from dataclasses import dataclass, field

from specserve.alert.causes import ServerChange
from specserve.sidecar.baseline import SetupRecord

KEPT_SECONDS = 86_400.0
KEPT = 50


@dataclass(slots=True)
class Changes:
    """The changes of the last day, newest last."""

    record: SetupRecord | None
    """What an earlier run has seen; None when nothing is known."""
    setup: str
    """Digits for what the engine is started with now."""
    _seen: list[tuple[float, str, bool]] = field(default_factory=list)
    """(Unix seconds, what, whether version or configuration changed)."""
    _restarts: float | None = None
    _compared: bool = False

    def observe(self, wall: float, restarts: float, version: str | None) -> SetupRecord | None:
        """Take one look in. The record to keep, when it is another one."""
        if self._restarts is not None and restarts > self._restarts:
            self._note(wall, "the engine restarted", is_setup=False)
        self._restarts = restarts
        before = self.record
        if version == "unknown":
            version = None
        if before is not None and not self._compared and before.setup != self.setup:
            self._note(wall, "its configuration was changed", is_setup=True)
        self._compared = True
        past = None
        if before is not None:
            past = before.engine_version
        if past is not None and version is not None and past != version:
            self._note(wall, f"vLLM {past} became {version}", is_setup=True)
        known = version or past
        self.record = SetupRecord(setup=self.setup, engine_version=known)
        if self.record == before:
            return None
        return self.record

    def now(self, wall: float) -> tuple[ServerChange, ...]:
        """The changes of the last day, with their age."""
        self._seen = [row for row in self._seen if row[0] > wall - KEPT_SECONDS][-KEPT:]
        return tuple(
            ServerChange(what, max(0.0, wall - at), is_setup) for at, what, is_setup in self._seen
        )

    def _note(self, wall: float, what: str, *, is_setup: bool) -> None:
        self._seen.append((wall, what, is_setup))
