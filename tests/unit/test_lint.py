"""Rules that can never fire are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specserve.alert.lint import problems, series_of
from specserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
OLD = """
groups:
  - name: copied from a guide
    rules:
      - alert: LowAcceptance
        expr: vllm:spec_decode_draft_acceptance_rate < 0.5
      - record: drafted
        expr: sum(rate(vllm:spec_decode_num_draft_tokens[5m]))
      - alert: Quiet
        expr: drafted == 0 and specserve_requests_running > 0
"""


def test_our_own_rules_pass() -> None:
    """The shipped rule file asks for nothing but specserve's families and its own records."""
    shipped = ROOT / "helm/specserve/alerts/specserve.rules.yaml"
    assert list(problems(shipped.read_text(), "rules", ())) == []


def test_names_of_other_versions_are_found() -> None:
    """A series that the server does not export is named with its rule, and with the name that it may have meant."""
    present = {"vllm:spec_decode_num_draft_tokens_total", "vllm:num_requests_running"}
    assert [str(problem) for problem in problems(OLD, "old.yaml", present)] == [
        "old.yaml: LowAcceptance: 'vllm:spec_decode_draft_acceptance_rate' is not exported; the rule can never fire",
        (
            "old.yaml: drafted: 'vllm:spec_decode_num_draft_tokens' is not exported;"
            " did you mean 'vllm:spec_decode_num_draft_tokens_total'?"
        ),
    ]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("up == 0", {"up"}),
        ("absent(specserve_live)", {"specserve_live"}),
        ('a{b="c", d=~"e|f"} > bool 1e3', {"a"}),
        ("max without (x) (a) - ignoring (y) group_left (z) b", {"a", "b"}),
        ("rate(a[5m:1m] offset 1d) or vector(0)", {"a"}),
        ('label_replace(a, "dst", "$1", "src", "(.*)")', {"a"}),
        ("histogram_quantile(0.9, sum by (le) (rate(a_bucket[5m])))", {"a_bucket"}),
        ('a < 1 and on () ALERTS{alertname="x"}', {"a", "ALERTS"}),
        ('rate({__name__="a", b!="c"}[5m])', {"a"}),
        ("1 + Inf * NaN", set()),
    ],
)
def test_series_of_an_expression(expression: str, names: set[str]) -> None:
    """Functions, keywords, labels, strings and durations are not series; a name may stand in braces."""
    assert series_of(expression) == names


def test_what_prometheus_makes_itself_is_there() -> None:
    """up, scrape_* and ALERTS* are exported by nobody and always there."""
    expr = 'up{job="vllm"} == 0 or scrape_duration_seconds > 9 or ALERTS_FOR_STATE{alertname="x"}'
    assert (
        list(
            problems(f"groups: [{{name: g, rules: [{{alert: A, expr: '{expr}'}}]}}]", "x.yaml", ())
        )
        == []
    )


@pytest.mark.parametrize(
    ("expr", "why"),
    [
        ("sum(", "unclosed left parenthesis"),
        ("", "no expression found in input"),
        ("rate(up)", "expected type matrix"),
    ],
)
def test_an_expression_that_is_none(expr: str, why: str) -> None:
    """Prometheus would refuse the file, and so does the linter, in the words of its parser."""
    text = f"groups: [{{name: g, rules: [{{alert: A, expr: '{expr}'}}]}}]"
    (problem,) = problems(text, "x.yaml", ())
    assert str(problem).startswith(f"x.yaml: A: the expression is not PromQL: {why}")


def test_without_the_parser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is an extra; nothing else needs it."""
    monkeypatch.setitem(sys.modules, "promql_parser", None)
    with pytest.raises(ConfigError, match="promql-parser library is not installed") as refused:
        list(problems(OLD, "old.yaml", ()))
    assert refused.value.problems[0].fix == "pip install promql-parser"


@pytest.mark.parametrize("text", ["rules: []", "- a", "{", ""])
def test_not_a_rule_file(text: str) -> None:
    """Something else than a rule file is an error of the user's, with the file's name."""
    with pytest.raises(ConfigError, match=r"x\.yaml: .*a Prometheus rule file is needed"):
        list(problems(text, "x.yaml", ()))
