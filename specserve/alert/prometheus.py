"""The built-in alerts as one Prometheus rule file for a fleet, and what Alertmanager inhibits.

The same thresholds, times and minimum samples as on one server. Between the two thresholds an alert goes on
only if it fires already, which a rule learns from Prometheus' own ``ALERTS`` series.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from specserve.alert.builtin import (
    Definition,
    Thresholds,
    definitions,
    fill,
    runbook_url,
    thresholds,
)
from specserve.config.alerting import Alerts
from specserve.metric_families import window_label

BY = {
    "model": "namespace, job, model_name",
    "instance": "namespace, job, pod, instance, model_name",
}
"""Labels that remain. namespace and pod exist in Kubernetes only; elsewhere they are empty and harmless."""
_MEMBERS = ("gpu", "engine")
"""Labels of what a replica has several of."""
_VALUE = '{{ printf "%.3g" $value }}'
_HEADER = """\
# Prometheus alerting rules for a fleet of specserve. Generated: specserve alerts rules
# Thresholds come from the `alerts` section of a config file: specserve alerts rules CONFIG
"""


_YIELD = (
    "sum by ($by) (rate(specserve_accepted_tokens_total[$window])) / (sum by ($by) "
    "(rate(specserve_draft_tokens_total[$window])) + sum by ($by) (rate(specserve_drafts_total[$window])))"
)
"""Accepted tokens per verified token. No alert has it; with the number of running requests it says what load costs."""


def rule_file(alerts: Alerts, *, runbook_base_url: str | None = None) -> str:
    """The YAML text of the rule file."""
    base = runbook_base_url or alerts.runbook_base_url
    shown = [(d, limits) for d in definitions() if (limits := thresholds(alerts, d.name)).active]
    measured = {"record": "model:specserve_verified_token_yield:ratio_rate5m"}
    measured["expr"] = fill(_YIELD, {"by": BY["model"], "window": "5m"})
    rules = [
        *_records(alerts, shown),
        measured,
        *(_alert(alerts, d, limits, base) for d, limits in shown),
    ]
    document = {"groups": [{"name": "specserve", "rules": rules}]}
    return _HEADER + yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True
    )


def rows(alerts: Alerts) -> list[dict[str, Any]]:
    """The built-in alerts under these settings, as data."""
    return [
        {
            "name": definition.name,
            "severity": definition.severity,
            "active": limits.active,
            "rule": _rule_text(limits),
            "for_seconds": limits.timing.for_seconds,
            "keep_firing_for_seconds": limits.timing.keep_firing_for_seconds,
            "summary": definition.summary,
            "causes": list(definition.causes),
        }
        for definition in definitions()
        for limits in [thresholds(alerts, definition.name)]
    ]


def _rule_text(limits: Thresholds) -> str:
    if not limits.active:
        return "off"
    wait = (
        f"for {short_duration(limits.timing.for_seconds)}"
        if limits.timing.for_seconds
        else "at once"
    )
    if limits.fire == 0 and limits.resolve == 0:
        return wait
    sign, back = ("<", ">=") if limits.direction == "below" else (">", "<=")
    return f"{sign} {limits.fire:g} {wait}, ends {back} {limits.resolve:g}"


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
            # A dead replica explains its own alerts, which carry its instance, and not those of the whole model.
            "equal": ["namespace", "job", "instance", "model_name"],
        }
        for source, targets in sources.items()
    ]
    return yaml.dump({"inhibit_rules": rules}, Dumper=_Dumper, sort_keys=False, width=110)


def _records(
    alerts: Alerts, shown: Iterable[tuple[Definition, Thresholds]]
) -> Iterable[dict[str, Any]]:
    for definition, _ in shown:
        if definition.fleet.record:
            yield {
                "record": _record_name(alerts, definition),
                "expr": _fill(alerts, definition, definition.fleet.value),
            }


def _record_name(alerts: Alerts, definition: Definition) -> str:
    return f"{definition.fleet.by}:" + _fill(alerts, definition, definition.fleet.record or "")


def _fill(alerts: Alerts, definition: Definition, text: str) -> str:
    acceptance_window = {"acceptance_window": window_label(alerts.acceptance_rate.window_seconds)}
    window = fill(definition.fleet.window, acceptance_window)
    return fill(text, {"by": BY[definition.fleet.by], "window": window})


def _alert(alerts: Alerts, definition: Definition, limits: Thresholds, base: str) -> dict[str, Any]:
    timing = limits.timing
    return {
        "alert": definition.name,
        "expr": _expression(alerts, definition, limits),
        "for": short_duration(timing.for_seconds),
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
    value = (
        _record_name(alerts, definition) if fleet.record else _fill(alerts, definition, fleet.value)
    )
    sign = "<" if limits.direction == "below" else ">"
    expression = f"{value} {sign} {limits.fire:g}"
    if limits.resolve != limits.fire:
        fires = f'ALERTS{{alertname="{definition.name}", alertstate="firing"}}'
        expression = f"({expression} or ({value} {sign} {limits.resolve:g} and on ({_matching(value, by)}) {fires}))"
    if fleet.traffic and limits.min_samples > 0:
        expression += (
            f" and on ({by}) {_fill(alerts, definition, fleet.traffic)} >= {limits.min_samples:g}"
        )
    if fleet.guard:
        expression += f" and on ({by}) {_fill(alerts, definition, fleet.guard)}"
    return expression


def _matching(value: str, by: str) -> str:
    """Labels that tell one alert from another; devices and ranks have one more."""
    return next((f"{by}, {one}" for one in _MEMBERS if f"({by}, {one}" in value), by)


def _description(definition: Definition, limits: Thresholds) -> str:
    limit = (
        ""
        if limits.fire == 0 and limits.resolve == 0
        else f" (fires {limits.direction} {limits.fire:g})"
    )
    where = "{{ $labels.model_name }}" + (
        "" if definition.fleet.by == "model" else " on {{ $labels.instance }}"
    )
    where += "".join(
        f", {one} {{{{ $labels.{one} }}}}"
        for one in _MEMBERS
        if f"($by, {one}" in definition.fleet.value
    )
    value = f"{where}: {_VALUE}{limit}. " if definition.metric else ""
    return f"{value}Likely: {'; '.join(definition.causes)}."


def short_duration(seconds: float) -> str:
    """Seconds as Prometheus writes a duration.

    >>> short_duration(120), short_duration(0), short_duration(1.5)
    ('2m', '0s', '1500ms')
    """
    if seconds != int(seconds):
        return f"{seconds * 1000:.0f}ms"
    return f"{int(seconds) // 60}m" if seconds and seconds % 60 == 0 else f"{int(seconds)}s"


class _Dumper(yaml.SafeDumper):
    """Indents lists and keeps long expressions readable."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)
