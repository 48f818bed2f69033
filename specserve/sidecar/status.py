"""What ``/status`` answers: state, verdicts with reasons, numbers by window, plan against actual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve import __version__
from specserve.config.schema import Settings
from specserve.metric_families import Readings, key
from specserve.sidecar.observer import Observation

PREFIX = "specserve_"


def build(
    settings: Settings,
    engine_url: str,
    seen: Observation | None,
    facts: Mapping[str, Any],
    *,
    age_seconds: float,
) -> dict[str, Any]:
    """The JSON form. ``age_seconds`` is how old the observation is."""
    readings = seen.readings if seen else {}
    return {
        "model_name": settings.served_model_name,
        "method": settings.method,
        "num_speculative_tokens": settings.speculative_decoding.num_speculative_tokens
        if settings.method
        else None,
        "engine_url": engine_url,
        "state": facts.get("state"),
        "condition": seen.assessment.condition if seen else "starting",
        **{
            name: probe(name, seen, age_seconds=age_seconds)
            for name in ("started", "live", "ready")
        },
        "age_seconds": round(age_seconds, 3),
        "versions": {"specserve": __version__, "vLLM": facts.get("engine_version")},
        "command": facts.get("command"),
        "plan": facts.get("plan"),
        "actual": actual(readings, facts),
        "plan_against_actual": facts.get("reconciliation"),
        "canary": facts.get("canary"),
        "comparison": facts.get("comparison"),
        "repairs": list(facts.get("repairs") or ()),
        "now": now(readings),
        "windows": windows(readings),
        "baseline": baseline(readings),
    }


def probe(name: str, seen: Observation | None, *, age_seconds: float) -> dict[str, Any]:
    """One verdict, ``live``, ``ready`` or ``started``, with its reason and its age."""
    if seen is None:
        return {"ok": name == "live", "reason": "the engine has not been looked at yet"}
    verdict = getattr(seen.assessment, name)
    return {
        **verdict.as_dict(),
        "condition": seen.assessment.condition,
        "age_seconds": round(age_seconds, 3),
    }


def now(readings: Readings) -> dict[str, float]:
    """Readings without labels, except counters: short name -> value."""
    return {
        family.removeprefix(PREFIX): value
        for (family, labels), value in readings.items()
        if not labels and not family.endswith("_total")
    }


def windows(readings: Readings) -> dict[str, dict[str, Any]]:
    """Window -> short name -> value; families with one more label become a mapping of that label's values."""
    out: dict[str, dict[str, Any]] = {}
    for (family, labels), value in readings.items():
        others = dict(labels)
        window = others.pop("window", None)
        if window is None:
            continue
        name, found = family.removeprefix(PREFIX), out.setdefault(window, {})
        if others:
            found.setdefault(name, {})[next(iter(others.values()))] = value
        else:
            found[name] = value
    return out


def baseline(readings: Readings) -> dict[str, float]:
    """What is normal here: short name -> value."""
    return {
        family.removeprefix(PREFIX).removesuffix("_baseline"): value
        for (family, _), value in readings.items()
        if family.endswith("_baseline")
    }


def actual(readings: Readings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine reports of its own, to hold against the plan; what its log said comes from the supervisor."""
    found = dict(facts.get("actual") or {})
    tokens = readings.get(key("specserve_kv_cache_tokens"))
    if tokens is not None:
        found.setdefault("kv_cache_tokens", tokens)
    return found
