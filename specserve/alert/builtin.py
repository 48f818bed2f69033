"""The built-in alerts as data (``builtin.yaml``), and the sidecar's rules made from them and the
settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Literal

import yaml
from pydantic import TypeAdapter

from specserve.alert.causes import Symptom
from specserve.alert.rules import FastPath, Guard, Rule
from specserve.config.alerting import (
    Above,
    AcceptanceRate,
    Alerts,
    Below,
    CustomRule,
    Severity,
    Timing,
)
from specserve.config.base import Section
from specserve.config.schema import Settings
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.metric_families import FAMILIES, key, window_label


class Fleet(Section):
    """The alert over a fleet: PromQL with ``$by`` and ``$window``."""

    value: str
    by: Literal["model", "instance"] = "instance"
    window: str = "5m"
    record: str | None = None
    traffic: str | None = None
    """The sample size, compared with min_samples."""
    guard: str | None = None
    fast: str | None = None
    """The quick way's condition beyond the threshold (``$fire``)."""


class Fast(Section):
    """The alert's quick way to fire on one server."""

    metric: str
    usual: str
    share: float
    looks: int


class Definition(Section):
    """One built-in alert."""

    name: str
    severity: Severity
    summary: str
    causes: tuple[str, ...]
    symptom: Symptom | None = None
    metric: str | None = None
    """None: only Prometheus can see it."""
    labels: Mapping[str, tuple[str, ...]] = {}
    sample: str | None = None
    """Family of the sample size, in the same window."""
    guards: tuple[Guard, ...] = ()
    fast: Fast | None = None
    when_absent: float | None = None
    inhibited_by: frozenset[str] = frozenset()
    fleet: Fleet


@functools.cache
def definitions() -> tuple[Definition, ...]:
    """Every built-in alert, in the order of the documentation."""
    text = resources.files("specserve.alert").joinpath("builtin.yaml").read_text("utf-8")
    return TypeAdapter(tuple[Definition, ...]).validate_python(yaml.safe_load(text))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the settings say about one alert, whatever its kind."""

    timing: Timing
    direction: Literal["below", "above"]
    fire: float | None
    """None: the alert is off until it is set."""
    resolve: float
    min_samples: float

    @property
    def active(self) -> bool:
        """Whether the alert can fire at all."""
        return self.timing.enabled and self.fire is not None


def thresholds(alerts: Alerts, name: str) -> Thresholds:
    """The settings of one built-in alert. Those without a number watch something that is 0 while
    all is well."""
    timing: Timing = alerts.acceptance_rate
    if name != "AcceptanceRateLow":
        timing = getattr(alerts.rules, name)
    match timing:
        case AcceptanceRate(fire_below=fire, resolve_above=resolve, min_draft_tokens=samples):
            return Thresholds(timing, "below", fire, resolve, samples)
        case Below(fire_below=fire, resolve_above=resolve, min_samples=samples):
            return Thresholds(timing, "below", fire, _or(resolve, fire), samples)
        case Above(fire_above=fire, resolve_below=resolve, min_samples=samples):
            return Thresholds(timing, "above", fire, _or(resolve, fire), samples)
        case _:
            return Thresholds(timing, "above", 0.0, 0.0, 0.0)


def _or(resolve: float | None, fire: float | None) -> float:
    """Without a threshold to resolve at, that to fire at."""
    if resolve is not None:
        return resolve
    return fire or 0.0


def rules(settings: Settings) -> tuple[Rule, ...]:
    """The rules of one server: the built-in ones that are switched on, then the user's own."""
    built_in = [_rule(definition, settings) for definition in definitions()]
    custom = [_custom(rule) for rule in settings.alerts.custom if rule.enabled]
    return tuple(rule for rule in built_in + custom if rule is not None)


def windows(alerts: Alerts) -> frozenset[float]:
    """Windows in seconds that the rules need beyond the sidecar's own."""
    return frozenset({alerts.acceptance_rate.window_seconds})


def _rule(definition: Definition, settings: Settings) -> Rule | None:
    alerts = settings.alerts
    limits = thresholds(alerts, definition.name)
    if not limits.active or limits.fire is None or definition.metric is None:
        return None
    if definition.name == "DraftPositionsWasted" and not drafts_are_full(settings):
        return None
    values = {
        "acceptance_window": window_label(alerts.acceptance_rate.window_seconds),
        "last_position": str(settings.num_speculative_tokens - 1),
    }
    labels = {
        name: tuple(fill(v, values) for v in wanted) for name, wanted in definition.labels.items()
    }
    sample = None
    if definition.sample is not None:
        sample = key(definition.sample, window=labels["window"][0])
    fast = None
    if definition.fast is not None:
        fast = FastPath(**definition.fast.model_dump())
    return Rule(
        definition.name,
        definition.metric,
        limits.direction,
        limits.fire,
        limits.resolve,
        definition.severity,
        definition.summary,
        definition.causes,
        symptom=definition.symptom,
        labels=labels,
        for_seconds=limits.timing.for_seconds,
        keep_firing_for_seconds=limits.timing.keep_firing_for_seconds,
        sample=sample,
        min_samples=limits.min_samples,
        guards=tuple(_guards(definition, settings)),
        fast=fast,
        when_absent=definition.when_absent,
        inhibited_by=definition.inhibited_by,
        runbook_url=runbook_url(alerts.runbook_base_url, definition.name),
    )


def _guards(definition: Definition, settings: Settings) -> Iterable[Guard]:
    yield from definition.guards
    limit = settings.largest_drafting_batch
    if definition.name == "SpeculationInactive" and limit is not None:
        # Above this batch size silence is what the config asks for.
        yield Guard("specserve_requests_running", at_most=limit)


def drafts_are_full(settings: Settings) -> bool:
    """Whether every draft has num_speculative_tokens, so that a rare last position is a poor
    one."""
    lengths = {tokens for _, _, tokens in settings.schedule or () if tokens > 0}
    return settings.method not in WITHOUT_DRAFT and lengths <= {settings.num_speculative_tokens}


def _custom(custom: CustomRule) -> Rule | None:
    direction: Literal["below", "above"] = "above"
    fire, resolve = custom.fire_above, custom.resolve_below
    if custom.fire_below is not None:
        direction, fire, resolve = "below", custom.fire_below, custom.resolve_above
    return Rule(
        custom.name,
        custom.metric,
        direction,
        fire or 0.0,
        _or(resolve, fire),
        custom.severity,
        custom.summary or FAMILIES[custom.metric].help,
        labels={name: (value,) for name, value in custom.labels.items()},
        for_seconds=custom.for_seconds,
        keep_firing_for_seconds=custom.keep_firing_for_seconds,
        inhibited_by=frozenset({"EngineDown"}) - {custom.name},
        runbook_url=custom.runbook_url,
    )


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text of the table with its ``$names`` replaced.

    >>> fill("rate(x[$window])", {"window": "5m"})
    'rate(x[5m])'
    """
    return Template(text).substitute(values)


def runbook_url(base_url: str, name: str) -> str:
    """Where the page of an alert is.

    >>> runbook_url("https://example.org/runbooks/", "EngineDown")
    'https://example.org/runbooks/EngineDown.md'
    """
    return f"{base_url.rstrip('/')}/{name}.md"
