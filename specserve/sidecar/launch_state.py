"""What the sidecar cannot read from the engine's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.engine.canary.run import CanaryResult
from specserve.engine.output.logs import EngineReport
from specserve.engine.output.stated import Held
from specserve.sidecar.probe import Context

if TYPE_CHECKING:
    from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class LaunchState:
    """What `specserve launch` knows of its engine now. Next to an engine that something else
    started, nothing."""

    context: Context = field(default_factory=Context)
    engine_version: str | None = None
    command: str | None = None
    """Without secrets."""
    plan: Mapping[str, JsonValue] | None = None
    """The memory plan, as JSON: this room knows nothing of memory."""
    reported: EngineReport = field(default_factory=EngineReport)
    held: tuple[Held, ...] = ()
    """What was asked for against what the engine states in its log."""
    reconciliation: Mapping[str, JsonValue] | None = None
    """Plan against report, as JSON."""
    canary: CanaryResult | None = None
    """Of the start-up canary."""
    comparison: CanaryResult | None = None
    """Of the last comparison while serving."""
    repairs: tuple[str, ...] = ()
    engine_pids: tuple[int, ...] = ()


def output_mismatch(state: LaunchState) -> float | None:
    """1 when drafted text was last proven not to be the target's own, 0 when it was compared and
    is; None when nothing is known.

    >>> corrupt = CanaryResult("corrupt")
    >>> output_mismatch(LaunchState(canary=corrupt)), output_mismatch(LaunchState())
    (1.0, None)
    """
    found = state.comparison or state.canary
    if found is None:
        return None
    if found.is_proof:
        return 1.0
    if found.compared_tokens and found.verdict not in ("corrupt", "unproven"):
        return 0.0
    return None
