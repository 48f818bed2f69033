"""Rules that can never fire: they ask for a series that nobody exports, or their brackets do not close.

A rule copied from a guide for another version of vLLM is silent for ever, and Prometheus accepts it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

from specserve.errors import ConfigError, Problem
from specserve.metric_families import FAMILIES

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`|#[^\n]*')
"""And comments."""
_MATCHERS = re.compile(r"\{[^}]*\}")
_GROUPINGS = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", re.IGNORECASE
)
_RANGES = re.compile(r"\[[^\]]*\]|\boffset\s+-?\w+")
_NAMES = re.compile(r"(?<![\w.:])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])")
_WORDS = frozenset(
    re.findall(
        r"\w+",
        "and or unless by without on ignoring group_left group_right bool offset inf nan start end alerts",
    )
)
_PROMETHEUS = {
    "up", "ALERTS", "ALERTS_FOR_STATE", "scrape_duration_seconds", "scrape_samples_scraped", "scrape_series_added",
    "scrape_samples_post_metric_relabeling", "scrape_timeout_seconds", "scrape_sample_limit", "scrape_body_size_bytes",
}  # fmt: skip
"""Series that Prometheus makes itself (its docs on jobs and instances, and on alerting rules; read 2026-11-30)."""
_OPENING = {")": "(", "]": "[", "}": "{"}


def series_of(expression: str) -> set[str]:
    """The names of the series that a PromQL expression asks for.

    >>> sorted(series_of('sum by (job) (rate(a_total{x="b"}[5m])) / on (job) c offset 1h > 0 unless ALERTS'))
    ['a_total', 'c']
    """
    bare = expression
    for noise in (_STRINGS, _MATCHERS, _RANGES, _GROUPINGS):
        bare = noise.sub(" ", bare)
    return {name for name in _NAMES.findall(bare) if name.lower() not in _WORDS}


def fault(expression: str) -> str | None:
    """Why an expression cannot be PromQL, as far as brackets and quotes tell; the rest is promtool's.

    >>> fault("sum("), fault("a)"), fault('a{b="c'), fault(" "), fault('a{b=")"} # (')
    ("'(' is not closed", "')' closes nothing", 'a string is not closed', 'it is empty', None)
    """
    bare, opened = _STRINGS.sub(" ", expression), list[str]()
    for sign in bare:
        if sign in "\"'`":
            return "a string is not closed"
        if sign in "([{":
            opened.append(sign)
        elif sign in _OPENING and (not opened or opened.pop() != _OPENING[sign]):
            return f"'{sign}' closes nothing"
    if opened:
        return f"'{opened[-1]}' is not closed"
    return None if bare.strip() else "it is empty"


def exported(exposition: str) -> set[str]:
    """The names of the series in a page of metrics.

    >>> sorted(exported('# TYPE a counter\\na_total{x="1"} 2\\nb 3\\n'))
    ['a_total', 'b']
    """
    lines = (line for line in exposition.splitlines() if line and not line.startswith("#"))
    return {re.split(r"[{\s]", line, maxsplit=1)[0] for line in lines}


def problems(text: str, where: str, present: Collection[str]) -> Iterable[Problem]:
    """What no server exports, by rule. ``present`` is what was scraped; specserve's own families come on top.

    An idle server leaves out what it does not know, so its families count as present by their table.
    """
    rules = [rule for group in _groups(text, where) for rule in group["rules"]]
    known = {
        *present,
        *FAMILIES,
        *_PROMETHEUS,
        *(rule["record"] for rule in rules if "record" in rule),
    }
    for rule in rules:
        name, expression = rule.get("alert") or rule.get("record"), str(rule.get("expr", ""))
        if (wrong := fault(expression)) is not None:
            yield Problem(f"the expression is not PromQL: {wrong}", where=f"{where}: {name}")
            continue
        for series in sorted(series_of(expression) - known):
            near = difflib.get_close_matches(series, known, n=1, cutoff=0.75)
            hint = f"; did you mean '{near[0]}'?" if near else "; the rule can never fire"
            yield Problem(f"'{series}' is not exported{hint}", where=f"{where}: {name}")


def _groups(text: str, where: str) -> list[Mapping[str, Any]]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("not YAML; a Prometheus rule file is needed", where=where) from error
    groups = document.get("groups") if isinstance(document, dict) else None
    if not isinstance(groups, list):
        raise ConfigError("no 'groups'; a Prometheus rule file is needed", where=where)
    for group in groups:
        rules = group.get("rules") if isinstance(group, dict) else None
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise ConfigError(
                "a group without a list of 'rules'; a Prometheus rule file is needed", where=where
            )
    return groups
