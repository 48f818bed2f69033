"""What is generated from the alerts is current, refers to what exists, and can be typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from specserve.alert import prometheus
from specserve.alert.builtin import definitions
from specserve.cli import program
from specserve.config.alerting import Alerts
from specserve.config.schema import Settings
from specserve.metric_families import FAMILIES

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
NAMES = [definition.name for definition in definitions()]


def rules(alerts: Alerts | None = None) -> list[dict[str, str]]:
    (group,) = yaml.safe_load(prometheus.rule_file(alerts or Alerts()))["groups"]
    return list(group["rules"])


def test_the_charts_rule_file_is_current() -> None:
    """helm/specserve/alerts/specserve.rules.yaml is what `specserve alerts rules` prints."""
    shipped = (ROOT / "helm/specserve/alerts/specserve.rules.yaml").read_text()
    assert CliRunner().invoke(program, ["alerts", "rules"]).stdout == shipped


def test_rules_name_only_exported_families() -> None:
    """Every series in a rule is a family of the sidecar's or a recording rule of the same file."""
    made = rules()
    records = {rule["record"] for rule in made if "record" in rule}
    for rule in made:
        names = set(re.findall(r"(?<![\w:])(?:\w+:)?specserve_\w+(?::\w+)?", rule["expr"]))
        assert names <= FAMILIES.keys() | records, rule


def test_rates_are_of_counters_and_nothing_is_averaged() -> None:
    """rate() and increase() take counters only, and no rule averages ratios."""
    for rule in rules():
        for counter in re.findall(r"(?:rate|increase)\((\w+)", rule["expr"]):
            assert FAMILIES[counter].kind == "counter"
        assert not re.search(r"\bavg\b|avg_over_time|quantile", rule["expr"])


def test_settings_reach_the_rules() -> None:
    """Window, thresholds, times, switches and the base of the runbooks are those of the config."""
    low = {
        "window_seconds": 90,
        "fire_below": 0.3,
        "resolve_above": 0.3,
        "for_seconds": 45,
        "min_draft_tokens": 7,
    }
    alerts = Alerts.model_validate(
        {"acceptance_rate": low, "rules": {"EngineDown": {"enabled": False}}}
    )
    by_name = {rule.get("alert"): rule for rule in rules(alerts)}
    made = by_name["AcceptanceRateLow"]
    by = "namespace, job, model_name"
    assert made["expr"] == (
        f"model:specserve_acceptance_rate:ratio_rate90s < 0.3 and on ({by})"
        f" sum by ({by}) (increase(specserve_draft_tokens_total[90s])) >= 7"
    )
    assert made["for"] == "45s"
    assert "EngineDown" not in by_name
    text = (
        CliRunner()
        .invoke(program, ["alerts", "rules", "--runbook-base-url", "https://example.org/r/"])
        .output
    )
    assert "runbook_url: https://example.org/r/EngineDown.md" in text


def test_inhibition_names_both_sides() -> None:
    """Alertmanager's inhibit_rules hold each pair of the table and nothing else."""
    made = yaml.safe_load(prometheus.inhibit_rules())["inhibit_rules"]
    pairs = {
        (re.findall(r'"(.*)"', rule["source_matchers"][0])[0], target)
        for rule in made
        for target in re.findall(r'"(.*)"', rule["target_matchers"][0])[0].split("|")
    }
    assert pairs == {(source, d.name) for d in definitions() for source in d.inhibited_by}


def test_list_as_json() -> None:
    """The table as JSON says what is on, under the settings of a file when one is given."""
    rows = json.loads(CliRunner().invoke(program, ["alerts", "list", "--format", "json"]).output)
    assert [row["name"] for row in rows] == NAMES
    assert {row["name"] for row in rows if not row["active"]} == {
        "LatencySLOTTFT",
        "LatencySLOTPOT",
        "GPUPowerHigh",
    }


def test_metrics_lists_what_a_custom_rule_may_use() -> None:
    """One line for each family, with its labels."""
    lines = CliRunner().invoke(program, ["alerts", "metrics"]).stdout.splitlines()
    assert len(lines) == len(FAMILIES)
    assert "specserve_acceptance_rate{window}" in lines


def test_every_alert_has_a_runbook() -> None:
    """One page for each alert and no other, each with the same four questions."""
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(NAMES)
    for name in NAMES:
        text = (RUNBOOKS / f"{name}.md").read_text()
        headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
        assert headings == [
            name,
            "What it means",
            "Likely causes",
            "What to look at",
            "What to type",
        ]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_runbook_says_exists(name: str) -> None:
    """Metrics, commands, options, config keys and examples in a runbook are real; causes are those of the table."""
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert set(re.findall(r"\bspecserve_\w+", text)) <= FAMILIES.keys()
    (definition,) = (d for d in definitions() if d.name == name)
    for cause in definition.causes:
        assert f"- {cause[0].upper()}{cause[1:]}." in text
    for block in re.findall(r"```yaml\n(.*?)```", text, re.S):
        Settings.model_validate(
            {"models": {"target_model": {"path": "x"}}, **yaml.safe_load(block)}
        )
    for line in re.findall(r"^specserve .*", text, re.M):
        check_command(shlex.split(line)[1:])


def check_command(words: list[str]) -> None:
    """The command, its options and its config keys exist."""
    group = program
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    options = {option for parameter in group.params for option in parameter.opts}
    assert group is not program, words
    for word, value in zip(words, [*words[1:], ""], strict=True):
        assert not word.startswith("-") or word in options, words
        if word == "--set":
            keys, _, setting = value.partition("=")
            tree: object = yaml.safe_load(setting)
            for part in reversed(keys.split(".")):
                tree = {part: tree}
            Settings.model_validate({"models": {"target_model": {"path": "x"}}, **tree})
