"""Rules that can never fire: they ask for a series that nothing exports, or they are not PromQL at
all.

A rule copied from a guide for another version of vLLM is silent for ever, and Prometheus accepts
it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from specserve.errors import ConfigError, Problem
from specserve.metric_families import FAMILIES

if TYPE_CHECKING:
    from promql_parser import Expr

_PROMETHEUS = {
    "up",
    "ALERTS",
    "ALERTS_FOR_STATE",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
    "scrape_series_added",
    "scrape_samples_post_metric_relabeling",
    "scrape_timeout_seconds",
    "scrape_sample_limit",
    "scrape_body_size_bytes",
}
"""Series that Prometheus makes itself (its docs on jobs and instances, and on alerting rules; read
2026-11-30)."""


class _Rule(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    alert: str | None = None
    record: str | None = None
    expr: str = ""


class _Group(BaseModel):
    rules: tuple[_Rule, ...]


class _RuleFile(BaseModel):
    groups: tuple[_Group, ...]


def _parser() -> ModuleType:
    try:
        import promql_parser
    except ImportError:
        raise ConfigError(
            "the promql-parser library is not installed; it is needed to read rules",
            where="alerts lint",
            fix="pip install promql-parser",
        ) from None
    return promql_parser


def series_of(expression: str) -> set[str]:
    """The names of the series that a PromQL expression asks for. Raises ValueError for what is not
    PromQL.

    >>> sorted(series_of('sum by (job) (rate(a_total{x="b"}[5m])) / on (job) c offset 1h unless d'))
    ['a_total', 'c', 'd']
    """
    promql = _parser()
    names: set[str] = set()

    def visit(node: Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            if node.name is not None:
                names.add(node.name)
            for matcher in node.matchers.matchers:
                if matcher.name == "__name__" and matcher.op == promql.MatchOp.Equal:
                    names.add(matcher.value)

    promql.walk(promql.parse(expression), visit)
    return names


def exported(exposition: str) -> set[str]:
    """The names of the series in a page of metrics.

    >>> sorted(exported('# TYPE a counter\\na_total{x="1"} 2\\nb 3\\n'))
    ['a_total', 'b']
    """
    lines = (line for line in exposition.splitlines() if line and not line.startswith("#"))
    return {re.split(r"[{\s]", line, maxsplit=1)[0] for line in lines}


def problems(text: str, where: str, present: Collection[str]) -> Iterable[Problem]:
    """What no server exports, by rule. ``present`` is what was scraped; specserve's own families
    come on top.

    An idle server leaves out what it does not know, so its families count as present by their
    table.
    """
    rules = [rule for group in _read(text, where).groups for rule in group.rules]
    recorded = {rule.record for rule in rules if rule.record is not None}
    known = recorded.union(present, FAMILIES, _PROMETHEUS)
    for rule in rules:
        place = f"{where}: {rule.alert or rule.record}"
        try:
            asked = series_of(rule.expr)
        except ValueError as error:
            yield Problem(f"the expression is not PromQL: {error}", where=place)
            continue
        for series in sorted(asked - known):
            hint = "the rule can never fire"
            for near in difflib.get_close_matches(series, known, n=1, cutoff=0.75):
                hint = f"did you mean '{near}'?"
            yield Problem(f"'{series}' is not exported; {hint}", where=place)


def _read(text: str, where: str) -> _RuleFile:
    try:
        return _RuleFile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError("not YAML; a Prometheus rule file is needed", where=where) from error
    except ValidationError as error:
        what = "a group without a list of 'rules'"
        if len(error.errors()[0]["loc"]) < 2:
            what = "no 'groups'"
        raise ConfigError(f"{what}; a Prometheus rule file is needed", where=where) from error
