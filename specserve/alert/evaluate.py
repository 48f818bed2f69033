"""A round of all rules: their memory, inhibition, and what receivers should hear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from specserve.alert.causes import Cause
from specserve.alert.rules import (
    SIGNS,
    AlertState,
    Instance,
    Reason,
    Rule,
    RuleInput,
    advance,
    observe,
)
from specserve.metric_families import Labels, MetricKey, Readings, key
from specserve.units import duration


class AlertJson(TypedDict):
    """An alert on /status."""

    name: str
    severity: str
    value: float | None
    summary: str
    description: str
    runbook_url: str | None
    started_at: float | None
    ended_at: float | None
    causes: list[str]
    state: str
    reason: str
    labels: dict[str, str]
    inhibited_by: str | None


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as others see it: on /status, in metrics and in notifications."""

    name: str
    severity: str
    state: AlertState
    reason: Reason
    labels: Labels
    """What tells the instances of one rule apart (gpu, engine ...)."""
    value: float | None
    summary: str
    description: str
    runbook_url: str | None
    started_at: float | None
    """Unix seconds at which it began to fire; None before."""
    ended_at: float | None = None
    inhibited_by: str | None = None
    """The firing alert that explains this one; it is not sent while that lasts."""
    causes: tuple[str, ...] = ()
    """What the evidence speaks for; where there is none, what it usually is."""

    def as_dict(self) -> AlertJson:
        """The JSON form."""
        return {
            "name": self.name,
            "severity": self.severity,
            "value": self.value,
            "summary": self.summary,
            "description": self.description,
            "runbook_url": self.runbook_url,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "causes": list(self.causes),
            "state": self.state.value,
            "reason": self.reason.value,
            "labels": dict(self.labels),
            "inhibited_by": self.inhibited_by,
        }


def importance(alert: Alert) -> tuple[bool, int, str]:
    """What is to be read first sorts first: firing before pending, then by severity."""
    return (
        alert.state is not AlertState.FIRING,
        ("critical", "warning", "info").index(alert.severity),
        alert.name,
    )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one round."""

    active: tuple[Alert, ...] = ()
    """Pending and firing alerts, inhibited ones included."""
    changed: tuple[Alert, ...] = ()
    """Alerts that began to fire or ended in this round, for the log."""
    to_send: tuple[Alert, ...] = ()
    """What receivers should know now: firing alerts, and those just resolved. Not one that was
    inhibited throughout."""


@dataclass(slots=True)
class _Tracked:
    instance: Instance = field(default_factory=Instance)
    started_at: float | None = None
    changed: bool = False
    announced: bool = False


class Evaluator:
    """The rules and the memory of their instances."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._tracked: dict[tuple[int, Labels], _Tracked] = {}

    def take(self, rules: Sequence[Rule]) -> None:
        """Go on with other rules; what is tracked stays with the rule of its name and severity."""
        numbers: dict[tuple[str, str], int] = {}
        for number, rule in enumerate(rules):
            numbers.setdefault((rule.name, rule.severity), number)
        kept = {}
        for (number, labels), tracked in self._tracked.items():
            before = self.rules[number]
            now = numbers.get((before.name, before.severity))
            if now is not None and rules[now].metric == before.metric:
                kept[now, labels] = tracked
        self.rules, self._tracked = tuple(rules), kept

    def evaluate(
        self, readings: Readings, *, now: float, at: float, causes: Sequence[Cause] = ()
    ) -> Evaluation:
        """One round. ``now`` is a monotonic clock in seconds, ``at`` the wall clock in Unix
        seconds; ``causes`` are those of what is seen now."""
        alerts: list[tuple[Alert, _Tracked]] = []
        for number, rule in enumerate(self.rules):
            inputs = observe(rule, readings)
            for tracked_rule, labels in self._tracked:
                if tracked_rule == number:
                    inputs.setdefault(labels, RuleInput(None))
            for labels, seen in inputs.items():
                tracked = self._tracked.setdefault((number, labels), _Tracked())
                self._step(rule, tracked, seen, now, at)
                if tracked.instance.state is AlertState.INACTIVE:
                    del self._tracked[number, labels]
                else:
                    found = tuple(c.line for c in causes if c.symptom == rule.symptom)
                    alert = replace(
                        _alert(rule, labels, tracked, now, at), causes=found or rule.causes
                    )
                    alerts.append((alert, tracked))
        return _announce(alerts, {rule.name: rule.inhibited_by for rule in self.rules})

    @staticmethod
    def _step(rule: Rule, tracked: _Tracked, seen: RuleInput, now: float, at: float) -> None:
        before = tracked.instance.state
        tracked.instance = advance(rule, tracked.instance, seen, now)
        state = tracked.instance.state
        tracked.changed = state is not before
        if before is AlertState.RESOLVED:
            tracked.started_at, tracked.announced = None, False
        if state is AlertState.FIRING and before is not AlertState.FIRING:
            tracked.started_at = at
        if tracked.started_at is not None:
            # The clock may be set back, and Alertmanager refuses an end before the start.
            tracked.started_at = min(tracked.started_at, at)

    def readings(self, evaluation: Evaluation) -> dict[MetricKey, float]:
        """The ``specserve_alert_*`` samples: one for each rule that is switched on, 0 while it is
        quiet."""
        result: dict[MetricKey, float] = {}
        for rule in self.rules:
            for family in ("specserve_alert_firing", "specserve_alert_pending"):
                result[key(family, alert=rule.name, severity=rule.severity)] = 0.0
        for alert in evaluation.active:
            family = "specserve_alert_pending"
            if alert.state is AlertState.FIRING:
                family = "specserve_alert_firing"
            result[key(family, alert=alert.name, severity=alert.severity)] = 1.0
        return result


def _announce(
    alerts: Sequence[tuple[Alert, _Tracked]], inhibited_by: Mapping[str, frozenset[str]]
) -> Evaluation:
    firing = {alert.name for alert, _ in alerts if alert.state is AlertState.FIRING}
    active: list[Alert] = []
    changed: list[Alert] = []
    to_send: list[Alert] = []
    for found, tracked in alerts:
        inhibitor = min(inhibited_by[found.name] & firing, default=None)
        alert = replace(found, inhibited_by=inhibitor)
        if tracked.changed and alert.state in (AlertState.FIRING, AlertState.RESOLVED):
            changed.append(alert)
        if alert.state is AlertState.RESOLVED:
            if tracked.announced:
                to_send.append(alert)
            continue
        active.append(alert)
        if alert.state is AlertState.FIRING and (inhibitor is None or tracked.announced):
            # Once announced, an alert is sent again and again: Alertmanager takes silence for its
            # end.
            tracked.announced = True
            to_send.append(alert)
    return Evaluation(tuple(active), tuple(changed), tuple(to_send))


def _alert(rule: Rule, labels: Labels, tracked: _Tracked, now: float, at: float) -> Alert:
    instance, ended_at = tracked.instance, None
    if instance.state is AlertState.RESOLVED:
        ended_at = at
    return Alert(
        name=rule.name,
        severity=rule.severity,
        state=instance.state,
        reason=instance.reason,
        labels=tuple(pair for pair in labels if len(rule.labels.get(pair[0], ())) != 1),
        value=instance.value,
        summary=rule.summary,
        causes=rule.causes,
        description=_describe(rule, labels, instance, now),
        runbook_url=rule.runbook_url,
        started_at=tracked.started_at,
        ended_at=ended_at,
    )


def _describe(rule: Rule, labels: Labels, instance: Instance, now: float) -> str:
    value, limits, reason = "unknown", "", instance.reason.value
    if instance.value is not None:
        value = f"{instance.value:.4g}"
    if rule.fire or rule.resolve:
        sign, back = SIGNS[rule.direction]
        limits = f" (fires {sign} {rule.fire:g}, resolves {back} {rule.resolve:g})"
    if instance.state is AlertState.PENDING and instance.pending_since is not None:
        waited = duration(now - instance.pending_since)
        reason = f"pending for {waited} of {duration(rule.for_seconds)}"
    what = str(MetricKey(rule.metric, labels))
    if instance.is_fast and rule.fast is not None:
        what = rule.fast.metric
        limits = f" (fires < {rule.fire:g} and under {rule.fast.share:.0%} of the usual)"
    return f"{what} is {value}{limits}: {reason}"
