"""The built-in alerts as one Prometheus rule file for a fleet, and what Alertmanager inhibits.

The same thresholds, times and minimum samples as on one server. Between the two thresholds an alert
goes on only if it fires already, which a rule learns from Prometheus' own ``ALERTS`` series.
"""

from __future__ import annotations

from typing import TypedDict

import yaml

from specserve.alert.builtin import (
    Definition,
    Fast,
    Thresholds,
    definitions,
    fill,
    runbook_url,
    thresholds,
)
from specserve.alert.rules import SIGNS
from specserve.config.alerting import Alerts
from specserve.metric_families import FAMILIES, window_label

BY = {
    "model": "namespace, job, model_name",
    "instance": "namespace, job, pod, instance, model_name",
}
"""Labels that remain. namespace and pod exist in Kubernetes only; elsewhere they are empty and
harmless."""
_MEMBERS = ("gpu", "engine")
"""Labels of what a replica has several of."""
FAST_SECONDS = 10.0
"""Three looks of the sidecar, for alerts with a quick way."""
_VALUE = '{{ printf "%.3g" $value }}'
_HEADER = """\
# Prometheus alerting rules for a fleet of specserve. Generated: specserve alerts rules
# Thresholds come from the `alerts` section of a config file: specserve alerts rules CONFIG
"""


class RecordingRule(TypedDict):
    record: str
    expr: str


AlertingRule = TypedDict(
    "AlertingRule",
    {
        "alert": str,
        "expr": str,
        "for": str,
        "keep_firing_for": str,
        "labels": dict[str, str],
        "annotations": dict[str, str],
    },
)
"""As Prometheus reads them; ``for`` is a keyword of Python's."""


class AlertRow(TypedDict):
    """A line of ``specserve alerts list --format json``."""

    name: str
    severity: str
    active: bool
    rule: str
    for_seconds: float
    keep_firing_for_seconds: float
    summary: str
    causes: list[str]


_YIELD = (
    "sum by ($by) (rate(specserve_accepted_tokens_total[$window])) / (sum by ($by) "
    "(rate(specserve_draft_tokens_total[$window])) + "
    "sum by ($by) (rate(specserve_drafts_total[$window])))"
)
"""Accepted tokens per verified token. No alert has it; with the number of running requests it says
what load costs."""


def rule_file(alerts: Alerts, *, runbook_base_url: str | None = None) -> str:
    """The YAML text of the rule file."""
    base = runbook_base_url or alerts.runbook_base_url
    shown = [(d, thresholds(alerts, d.name)) for d in definitions()]
    shown = [(definition, limits) for definition, limits in shown if limits.active]
    by_model = fill(_YIELD, {"by": BY["model"], "window": "5m"})
    rules: list[RecordingRule | AlertingRule] = [
        {"record": _record_name(alerts, d), "expr": _fill(alerts, d, d.fleet.value)}
        for d, _ in shown
        if d.fleet.record
    ]
    rules.append({"record": "model:specserve_verified_token_yield:ratio_rate5m", "expr": by_model})
    rules += [_alert(alerts, definition, limits, base) for definition, limits in shown]
    document = {"groups": [{"name": "specserve", "rules": rules}]}
    return _HEADER + yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True
    )


def rows(alerts: Alerts) -> list[AlertRow]:
    """The built-in alerts under these settings, as data."""
    return [_row(definition, thresholds(alerts, definition.name)) for definition in definitions()]


def _row(definition: Definition, limits: Thresholds) -> AlertRow:
    return {
        "name": definition.name,
        "severity": definition.severity,
        "active": limits.active,
        "rule": _rule_text(limits, definition.fast),
        "for_seconds": limits.timing.for_seconds,
        "keep_firing_for_seconds": limits.timing.keep_firing_for_seconds,
        "summary": definition.summary,
        "causes": list(definition.causes),
    }


def _rule_text(limits: Thresholds, fast: Fast | None) -> str:
    if not limits.active:
        return "off"
    wait = "at once"
    if limits.timing.for_seconds:
        wait = f"for {short_duration(limits.timing.for_seconds)}"
    if limits.fire == 0 and limits.resolve == 0:
        return wait
    sign, back = SIGNS[limits.direction]
    said = f"{sign} {limits.fire:g} {wait}, resolves {back} {limits.resolve:g}"
    if fast is not None:
        said += (
            f"; or {sign} {limits.fire:g} and under {fast.share:.0%} of the usual in the last "
            f"minute, at {fast.looks} looks in a row"
        )
    return said


def inhibit_rules() -> str:
    """``inhibit_rules`` for Alertmanager's own configuration, as YAML."""
    sources: dict[str, list[str]] = {}
    for definition in definitions():
        for source in sorted(definition.inhibited_by):
            sources.setdefault(source, []).append(definition.name)
    rules = [
        {
            "source_matchers": [f'alertname="{source}"'],
            "target_matchers": [f'alertname=~"{"|".join(targets)}"'],
            # A dead replica explains its own alerts, which carry its instance, and not those of the
            # whole model.
            "equal": ["namespace", "job", "instance", "model_name"],
        }
        for source, targets in sources.items()
    ]
    return yaml.dump({"inhibit_rules": rules}, Dumper=_Dumper, sort_keys=False, width=110)


def _record_name(alerts: Alerts, definition: Definition) -> str:
    return f"{definition.fleet.by}:" + _fill(alerts, definition, definition.fleet.record or "")


def _fill(alerts: Alerts, definition: Definition, text: str) -> str:
    acceptance_window = {"acceptance_window": window_label(alerts.acceptance_rate.window_seconds)}
    window = fill(definition.fleet.window, acceptance_window)
    return fill(text, {"by": BY[definition.fleet.by], "window": window})


def _alert(alerts: Alerts, definition: Definition, limits: Thresholds, base: str) -> AlertingRule:
    timing = limits.timing
    return {
        "alert": definition.name,
        "expr": _expression(alerts, definition, limits),
        "for": short_duration(_wait(definition, limits)),
        "keep_firing_for": short_duration(timing.keep_firing_for_seconds),
        "labels": {"severity": definition.severity},
        "annotations": {
            "summary": definition.summary,
            "description": _description(definition, limits),
            "runbook_url": runbook_url(base, definition.name),
        },
    }


def _expression(alerts: Alerts, definition: Definition, limits: Thresholds) -> str:
    fleet, by = definition.fleet, BY[definition.fleet.by]
    value = _fill(alerts, definition, fleet.value)
    if fleet.record:
        value = _record_name(alerts, definition)
    sign, _ = SIGNS[limits.direction]
    expression = f"{value} {sign} {limits.fire:g}"
    if fleet.fast:
        # The wait of the slow way is in its expression, so that the quick one has none.
        longest = short_duration(limits.timing.for_seconds)
        expression = f"max_over_time({value}[{longest}]) {sign} {limits.fire:g}"
    if limits.resolve != limits.fire:
        fires = f'ALERTS{{alertname="{definition.name}", alertstate="firing"}}'
        stays = f"{value} {sign} {limits.resolve:g} and on ({_matching(value, by)}) {fires}"
        expression = f"({expression} or ({stays}))"
    if fleet.traffic and limits.min_samples > 0:
        traffic = _fill(alerts, definition, fleet.traffic)
        expression += f" and on ({by}) {traffic} >= {limits.min_samples:g}"
    if fleet.guard:
        expression += f" and on ({by}) {_fill(alerts, definition, fleet.guard)}"
    if fleet.fast:
        quick = _fill(alerts, definition, fleet.fast.replace("$fire", f"{limits.fire:g}"))
        expression = f"({expression}) or ({quick})"
    return expression


def _wait(definition: Definition, limits: Thresholds) -> float:
    """Seconds that the expression must hold."""
    if definition.fleet.fast:
        return FAST_SECONDS
    return limits.timing.for_seconds


def _matching(value: str, by: str) -> str:
    """Labels that tell one alert from another; devices and ranks have one more."""
    for member in _MEMBERS:
        if f"({by}, {member}" in value:
            return f"{by}, {member}"
    return by


def _description(definition: Definition, limits: Thresholds) -> str:
    """Who, the number where it says something, and the usual causes."""
    likely = f"Likely: {'; '.join(definition.causes)}."
    if definition.metric is None:
        return likely
    who = "{{ $labels.model_name }}"
    if definition.fleet.by == "instance":
        who += " on {{ $labels.instance }}"
    for member in _MEMBERS:
        if f"($by, {member}" in definition.fleet.value:
            who += f", {member} {{{{ $labels.{member} }}}}"
    what = ""
    if FAMILIES[definition.metric].unit != "0 or 1":
        what = f": {_VALUE}"
        if limits.fire != 0 or limits.resolve != 0:
            what += f" (fires {limits.direction} {limits.fire:g})"
    elif limits.timing.for_seconds:
        what = f", for at least {short_duration(limits.timing.for_seconds)}"
    return f"{who}{what}. {likely}"


def short_duration(seconds: float) -> str:
    """Seconds as Prometheus writes a duration.

    >>> short_duration(120), short_duration(0), short_duration(1.5)
    ('2m', '0s', '1500ms')
    """
    if seconds != int(seconds):
        return f"{seconds * 1000:.0f}ms"
    if seconds and seconds % 60 == 0:
        return f"{int(seconds) // 60}m"
    return f"{int(seconds)}s"


class _Dumper(yaml.SafeDumper):
    """Indents lists and keeps long expressions readable."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)
