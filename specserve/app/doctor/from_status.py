"""Causes from a sidecar's ``/status``: what it has watched for minutes and compared with its own
good times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from specserve.app.doctor import from_server
from specserve.app.doctor.report import Confidence, DoctorCause, Fact, Look, Step
from specserve.app.doctor.rules import OWN, PLACES
from specserve.sidecar import presentation

if TYPE_CHECKING:
    from specserve.alert.evaluate import AlertJson
    from specserve.sidecar.presentation import StatusJson

_DOUBTED: dict[str, Confidence] = {"pending": "possible"}


def look(found: StatusJson, url: str) -> Look:
    """What a sidecar says."""
    causes = [*_alerts(found["alerts"])]
    causes += _by_evidence(found)
    causes += _canaries(found)
    causes += _differing(found)
    explained = {cause.step for cause in causes}
    if not found["ready"]["ok"] and not explained & {"load", "memory", "output"}:
        causes.append(_not_ready(found))
    steps: set[Step] = {"load", "memory"}
    window = found["windows"].get("5m", {})
    if window.get("window_draft_tokens"):
        steps |= {"traffic", "parameters", "vocabulary"}
    if "estimated_speedup_ratio" in window:
        steps.add("speed")
    if found.get("canary") is not None or found.get("comparison") is not None:
        steps.add("output")
    return Look(f"sidecar {url}", frozenset(steps), tuple(causes), tuple(_facts(found)))


def silent(url: str, why: str) -> Look:
    """No sidecar answers there."""
    fact = Fact("load", f"no sidecar answers at {url}: {why}")
    return Look(f"sidecar {url}", frozenset(), (), (fact,))


def _alerts(alerts: list[AlertJson]) -> Iterator[DoctorCause]:
    for alert in alerts:
        if alert["state"] not in ("firing", "pending") or alert["inhibited_by"] is not None:
            continue
        place = PLACES.get(alert["name"], OWN)
        labels = [f"{name} {value}" for name, value in alert["labels"].items()]
        summary = alert["summary"]
        yield DoctorCause(
            place.step,
            alert["name"],
            "; ".join([summary[:1].lower() + summary[1:], *labels]),
            _DOUBTED.get(alert["state"], "likely"),
            (f"{alert['state']}: {alert['description']}",),
            place.fix,
            tuple(alert["causes"]),
            stops=place.stops and alert["state"] == "firing",
            explains=from_server.rule_explains(alert["name"]),
        )


_EXPLAINED = frozenset({"AcceptanceRateLow", "AcceptanceDrift", "AcceptanceLengthLow"})
_BY_EVIDENCE: Mapping[str, tuple[Step, str]] = {
    "wrong_output": ("output", "specserve doctor CONFIG --url URL --canary"),
    "draft_not_applied": ("vocabulary", "specserve check CONFIG   # the draft and its target"),
    "engine_changed": ("load", "specserve status   # what changed, and when"),
    "rank_differs": ("vocabulary", "specserve models verify CONFIG   # on every node"),
    "prompts_beyond_draft_context": (
        "parameters",
        "specserve check CONFIG   # the context that the draft was made for",
    ),
    "pruned_vocabulary": ("vocabulary", "specserve check CONFIG --sample FILE"),
    "traffic_mix": ("traffic", "specserve bench CONFIG   # with prompts of this traffic"),
    "machine_slow": ("speed", "nvidia-smi -q -d PERFORMANCE"),
}
"""Causes of :mod:`specserve.alert.causes` -> their step, and what to type."""


def _by_evidence(found: StatusJson) -> Iterator[DoctorCause]:
    """What the sidecar itself explains the fall by."""
    for one in found.get("causes", []):
        step, fix = _BY_EVIDENCE.get(one["name"], ("traffic", "specserve status"))
        against = [f"against it: {text}" for text in one["against"]]
        explains: frozenset[str] = frozenset()
        if one["symptom"] == "acceptance":
            explains = _EXPLAINED
        yield DoctorCause(
            step,
            one["name"],
            one["summary"],
            "likely",
            (*one["supports"], *against),
            fix,
            explains=explains,
        )


def _canaries(found: StatusJson) -> Iterator[DoctorCause]:
    """The newest verdict: a comparison while serving says more than the start."""
    result = found.get("comparison") or found.get("canary")
    if result is not None:
        proof = not result["failed"]
        yield from from_server.of_verdict(result["verdict"], result["reasons"], proof=proof)


def _differing(found: StatusJson) -> Iterator[DoctorCause]:
    for one in found.get("asked_against_stated", []):
        if one.get("verdict") == "different":
            said = f"{one['key']}: {one['asked']} was asked for, and the engine says {one['said']}"
            yield DoctorCause(
                "parameters",
                "not-as-asked",
                f"the engine does not run what the config asks for: {said}",
                "proven",
                fix="specserve launch CONFIG --dry-run   # the command line to start it with",
            )


def _not_ready(found: StatusJson) -> DoctorCause:
    return DoctorCause(
        "load",
        "not-ready",
        f"the sidecar calls the engine not ready: {found['ready']['reason']}",
        "proven",
        (f"condition {found['condition']}, supervisor {found['state'] or 'none'}",),
        "specserve doctor CONFIG --log FILE   # the engine's log",
        stops=True,
    )


def _facts(found: StatusJson) -> Iterator[Fact]:
    steps: dict[str, Step] = {
        "acceptance rate": "traffic",
        "tokens per step": "speed",
        "estimated speedup": "speed",
        "KV cache in use": "memory",
        "waiting": "memory",
    }
    window = found["windows"].get("5m", {})
    yield Fact("load", f"ready: {found['ready']['reason']}")
    for row in presentation.ROWS:
        step = steps.get(row.title)
        cell = row.cell(window) or row.cell(found["now"])
        if step is not None and cell:
            yield Fact(step, f"{row.title} {cell}, says the sidecar")
