"""Alerts as a pure state machine: inactive, pending, firing, resolved.

Nothing here reads a clock, sends anything or knows an alert by name. The same semantics as
Prometheus' where both have them (``for``, ``keep_firing_for``), plus two thresholds, a minimum
sample, and a fixed meaning of "absent": it neither fires nor clears. A pending alert whose value
goes absent starts over; a firing one stays for ``keep_firing_for`` and then resolves with the
reason "no data".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from specserve.alert.causes import Symptom
from specserve.metric_families import FAMILIES, Labels, MetricKey, Readings, key


class AlertState(Enum):
    """Where an alert is. ``resolved`` lasts for the one evaluation in which a firing alert ends."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Reason(Enum):
    """Why an alert is in its state."""

    CLEAR = "the condition is not met"
    NO_DATA = "no data"
    TOO_FEW_SAMPLES = "too few samples in the window"
    GUARDED = "does not apply now"
    WAITING = "the condition is met, but not yet for long enough"
    HOLDS = "the condition is met"
    BETWEEN = "between the two thresholds"
    KEEPING = "the condition is no longer met; kept for keep_firing_for_seconds"
    KEEPING_NO_DATA = "no data; kept for keep_firing_for_seconds"


SIGNS = {"below": ("<", ">="), "above": (">", "<=")}
"""Direction of a rule -> how its firing and its resolving threshold are written."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A rule speaks only while this reading is at least, or at most, the limit. An absent reading
    fails it."""

    family: str
    at_least: float | None = None
    at_most: float | None = None

    def passes(self, readings: Readings) -> bool:
        """Whether the rule applies."""
        value = readings.get(key(self.family))
        if value is None:
            return False
        if self.at_least is not None and value < self.at_least:
            return False
        return self.at_most is None or value <= self.at_most


@dataclass(frozen=True, slots=True)
class FastPath:
    """A second, quicker way to fire: a reading of the newest time is beyond the rule's threshold,
    and has lost most of what is usual here, at several looks in a row."""

    metric: str
    usual: str
    """Reading of what is usual; without it the quick way stays shut."""
    share: float
    """Part of the usual value that the reading must be below."""
    looks: int = 3

    def value(self, readings: Readings) -> float | None:
        """The newest value; None when there is none."""
        return readings.get(key(self.metric))

    def is_lost(self, readings: Readings) -> bool:
        """Whether the newest value has lost most of the usual one."""
        value, usual = self.value(readings), readings.get(key(self.usual))
        return value is not None and usual is not None and value < self.share * usual


@dataclass(frozen=True, slots=True)
class Rule:
    """When an alert over one family fires; one instance for each set of labels that it matches."""

    name: str
    metric: str
    direction: Literal["below", "above"]
    fire: float
    resolve: float
    severity: str = "warning"
    summary: str = ""
    causes: tuple[str, ...] = ()
    """What it usually is."""
    symptom: Symptom | None = None
    """Of which kind it is; causes by evidence are told with the alerts of their kind."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> values that match. Labels that are not named make one instance each."""
    for_seconds: float = 0.0
    keep_firing_for_seconds: float = 0.0
    sample: MetricKey | None = None
    """Reading that is the sample size of the value."""
    min_samples: float = 0.0
    guards: tuple[Guard, ...] = ()
    fast: FastPath | None = None
    when_absent: float | None = None
    """The value to assume when the reading is absent, for rules whose guards prove that absence
    means none."""
    inhibited_by: frozenset[str] = frozenset()
    runbook_url: str | None = None

    def breaches(self, value: float) -> bool:
        """Beyond the firing threshold."""
        if self.direction == "below":
            return value < self.fire
        return value > self.fire

    def clears(self, value: float) -> bool:
        """At or beyond the resolving threshold."""
        if self.direction == "below":
            return value >= self.resolve
        return value <= self.resolve


@dataclass(frozen=True, slots=True)
class RuleInput:
    """What a rule sees of one instance at one moment: a value, or the reason why there is none."""

    value: float | None
    absent: Reason = Reason.NO_DATA
    fast: float | None = None
    """The newest value, where it meets the condition of the rule's quick way."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One alert over time."""

    state: AlertState = AlertState.INACTIVE
    reason: Reason = Reason.CLEAR
    pending_since: float | None = None
    """When the condition began to hold without a break."""
    held_at: float | None = None
    """When the condition last held; keep_firing_for counts from here."""
    value: float | None = None
    """The last value that was known."""
    looks: int = 0
    """Looks in a row that met the condition of the quick way."""
    is_fast: bool = False
    """Whether ``value`` is the newest one, of the quick way."""


def advance(rule: Rule, instance: Instance, seen: RuleInput, now: float) -> Instance:
    """The instance after one more observation.

    >>> low = Rule("Low", "specserve_acceptance_rate", "below", 0.5, 0.55, for_seconds=60)
    >>> pending = advance(low, Instance(), RuleInput(0.4), now=0)
    >>> pending.state.value, advance(low, pending, RuleInput(0.4), now=60).state.value
    ('pending', 'firing')
    """
    value, looks = seen.value, 0
    if seen.fast is not None:
        looks = instance.looks + 1
    if value is not None:
        instance = replace(instance, value=value, is_fast=False)
    if seen.fast is not None and not (value is not None and rule.breaches(value)):
        instance = replace(instance, value=seen.fast, is_fast=True)
    instance = replace(instance, looks=looks)
    if instance.state is AlertState.FIRING:
        return _advance_firing(rule, instance, seen, now)
    breached = value is not None and rule.breaches(value)
    if not breached and seen.fast is None:
        return _ended(instance, AlertState.INACTIVE, seen)
    since, state, reason = instance.pending_since, AlertState.PENDING, Reason.WAITING
    if since is None:
        since = now
    is_long = breached and now - since >= rule.for_seconds
    if is_long or (rule.fast is not None and looks >= rule.fast.looks):
        state, reason = AlertState.FIRING, Reason.HOLDS
    return replace(instance, state=state, reason=reason, pending_since=since, held_at=now)


def _advance_firing(rule: Rule, instance: Instance, seen: RuleInput, now: float) -> Instance:
    value = seen.value
    if seen.fast is not None or (value is not None and not rule.clears(value)):
        reason = Reason.BETWEEN
        if seen.fast is not None or (value is not None and rule.breaches(value)):
            reason = Reason.HOLDS
        return replace(instance, reason=reason, held_at=now)
    held_at = instance.held_at
    if held_at is not None and now - held_at < rule.keep_firing_for_seconds:
        reason = Reason.KEEPING
        if value is None:
            reason = Reason.KEEPING_NO_DATA
        return replace(instance, reason=reason)
    return _ended(instance, AlertState.RESOLVED, seen)


def _ended(instance: Instance, state: AlertState, seen: RuleInput) -> Instance:
    reason = Reason.CLEAR
    if seen.value is None:
        reason = seen.absent
    return Instance(state, reason, value=instance.value, is_fast=instance.is_fast)


def observe(rule: Rule, readings: Readings) -> dict[Labels, RuleInput]:
    """What the rule sees now, by instance.

    A rule whose labels are all fixed to one value has exactly one instance, with or without a
    reading.
    """
    excuse = _excuse(rule, readings)
    found = {labels: RuleInput(value) for labels, value in _matches(rule, readings)}
    only = _only_instance(rule)
    if not found and only is not None:
        found[only] = RuleInput(rule.when_absent)
    if excuse is not None:
        found = {labels: RuleInput(None, excuse) for labels in found}
    fast = _fast(rule, readings)
    if fast is None or only is None or excuse is Reason.GUARDED:
        return found
    return {labels: replace(seen, fast=fast) for labels, seen in found.items()}


def _fast(rule: Rule, readings: Readings) -> float | None:
    """The newest value, where it meets the condition of the quick way."""
    if rule.fast is None:
        return None
    value = rule.fast.value(readings)
    if value is None or not rule.breaches(value) or not rule.fast.is_lost(readings):
        return None
    return value


def _excuse(rule: Rule, readings: Readings) -> Reason | None:
    """Why nothing may be said now; None when the value counts."""
    if not all(guard.passes(readings) for guard in rule.guards):
        return Reason.GUARDED
    if rule.sample is not None and rule.min_samples > 0:
        sample = readings.get(rule.sample)
        if sample is None or sample < rule.min_samples:
            return Reason.TOO_FEW_SAMPLES
    return None


def _matches(rule: Rule, readings: Readings) -> Iterable[tuple[Labels, float]]:
    only = _only_instance(rule)
    if only is not None:
        value = readings.get(MetricKey(rule.metric, only))
        if value is not None:
            yield only, value
        return
    names = set(FAMILIES[rule.metric].labels)
    for (family, labels), value in readings.items():
        if family != rule.metric:
            continue
        found = dict(labels)
        wanted = all(found.get(name) in values for name, values in rule.labels.items())
        if wanted and found.keys() == names:
            yield labels, value


def _only_instance(rule: Rule) -> Labels | None:
    """The labels of the rule's single instance; None when readings decide how many there are."""
    names = FAMILIES[rule.metric].labels
    if any(len(rule.labels.get(name, ())) != 1 for name in names):
        return None
    return tuple(sorted((name, rule.labels[name][0]) for name in names))
