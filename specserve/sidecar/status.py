"""What ``/status`` says: state, verdicts with reasons, numbers by window, plan against actual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from specserve import __version__
from specserve.alert.causes import Cause
from specserve.alert.evaluate import Alert, importance
from specserve.config.schema import Settings
from specserve.engine.canary.run import CanaryResult
from specserve.metric_families import Readings, key
from specserve.sidecar.launch_state import LaunchState
from specserve.sidecar.observer import Observation
from specserve.sidecar.presentation import (
    CanaryJson,
    LastNumbersJson,
    ProbeJson,
    ProbeName,
    StatusJson,
)

if TYPE_CHECKING:
    from pydantic import JsonValue

PREFIX = "specserve_"


def build(
    settings: Settings,
    engine_url: str,
    seen: Observation | None,
    state: LaunchState,
    alerts: Sequence[Alert] = (),
    *,
    method: str | None,
    causes: Sequence[Cause] = (),
    age_seconds: float,
    last: LastNumbersJson | None = None,
) -> StatusJson:
    """The JSON form. ``method`` is what is shown as such; ``age_seconds`` is how old the
    observation is; ``last`` are the newest numbers that there were."""
    readings: Readings = {}
    condition, tokens = "starting", None
    if seen is not None:
        readings, condition = seen.readings, seen.assessment.condition
    if settings.method:
        tokens = settings.num_speculative_tokens
    found: StatusJson = {
        "model_name": settings.served_model_name,
        "method": method,
        "num_speculative_tokens": tokens,
        "engine_url": engine_url,
        "state": state.context.state,
        "condition": condition,
        "started": probe("started", seen, age_seconds=age_seconds),
        "live": probe("live", seen, age_seconds=age_seconds),
        "ready": probe("ready", seen, age_seconds=age_seconds),
        "age_seconds": round(age_seconds, 3),
        "versions": {"specserve": __version__, "vLLM": state.engine_version},
        "command": state.command,
        "plan": state.plan,
        "actual": _actual(readings, state),
        "plan_against_actual": state.reconciliation,
        "asked_against_stated": [held.as_dict() for held in state.held],
        "canary": _canary(state.canary),
        "comparison": _canary(state.comparison),
        "repairs": list(state.repairs),
        "now": _now(readings),
        "windows": by_window(readings),
        "baseline": _baseline(readings),
        "causes": [cause.as_dict() for cause in causes],
        "alerts": [alert.as_dict() for alert in sorted(alerts, key=importance)],
    }
    if last is not None and not has_numbers(readings):
        found["last_numbers"] = last
    return found


def has_numbers(readings: Readings) -> bool:
    """Whether the engine could be read."""
    return key("specserve_engines") in readings


def kept(readings: Readings, *, at: float, age_seconds: float) -> LastNumbersJson:
    """Numbers that are no longer those of now."""
    return {
        "at": at,
        "age_seconds": round(age_seconds, 3),
        "now": _now(readings),
        "windows": by_window(readings),
    }


def probe(name: ProbeName, seen: Observation | None, *, age_seconds: float) -> ProbeJson:
    """One verdict with its reason and its age."""
    if seen is None:
        return {"ok": name == "live", "reason": "the engine has not been looked at yet"}
    verdict = getattr(seen.assessment, name)
    return {
        "ok": verdict.ok,
        "reason": verdict.reason,
        "condition": seen.assessment.condition,
        "age_seconds": round(age_seconds, 3),
    }


def _canary(result: CanaryResult | None) -> CanaryJson | None:
    if result is None:
        return None
    return {
        "verdict": result.verdict,
        "reasons": list(result.reasons),
        "position0_acceptance": result.position0_acceptance,
        "default_position0_acceptance": result.default_position0_acceptance,
        "drafts": result.drafts,
        "compared_tokens": result.compared_tokens,
        "seconds": result.seconds,
        "failed": result.failed,
    }


def _actual(readings: Readings, state: LaunchState) -> dict[str, JsonValue]:
    """What the engine itself reports, to hold against the plan: its log, and where that is silent
    its metrics."""
    found: dict[str, JsonValue] = {
        name: value for name, value in asdict(state.reported).items() if value is not None
    }
    tokens = readings.get(key("specserve_kv_cache_tokens"))
    if tokens is not None:
        found.setdefault("kv_cache_tokens", tokens)
    return found


def _now(readings: Readings) -> dict[str, float]:
    """Readings without labels, except counters: short name -> value."""
    return {
        family.removeprefix(PREFIX): value
        for (family, labels), value in readings.items()
        if not labels and not family.endswith("_total")
    }


def by_window(readings: Readings) -> dict[str, dict[str, float | dict[str, float]]]:
    """Window -> short name -> value; families with one more label become a mapping of that label's
    values."""
    out: dict[str, dict[str, float | dict[str, float]]] = {}
    for (family, labels), value in readings.items():
        others = dict(labels)
        window = others.pop("window", None)
        if window is None:
            continue
        name, found = family.removeprefix(PREFIX), out.setdefault(window, {})
        if not others:
            found[name] = value
            continue
        members = found.setdefault(name, {})
        assert isinstance(members, dict)  # a family has the same labels in all its readings
        (label,) = others.values()
        members[label] = value
    return out


def _baseline(readings: Readings) -> dict[str, float]:
    """What is normal here: short name -> value."""
    return {
        family.removeprefix(PREFIX).removesuffix("_baseline"): value
        for (family, _), value in readings.items()
        if family.endswith("_baseline")
    }
