"""``specserve alerts``: the table of alerts, and the rule file for Prometheus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specserve.commands.options import answer, follows, format_option, http_url

if TYPE_CHECKING:
    from specserve.config.alerting import Alerts

_CONFIG = click.argument("config", required=False, type=click.Path(dir_okay=False))


@click.group()
def alerts() -> None:
    """Alerts: what fires when, and the same as Prometheus rules."""


def _settings(config: str | None) -> Alerts:
    """The ``alerts`` section of the file; the defaults without one."""
    from specserve.config.alerting import Alerts
    from specserve.config.load import load

    if not config:
        return Alerts()
    return load(Path(config), environ=os.environ).settings.alerts


@alerts.command("list")
@_CONFIG
@format_option
def list_(config: str | None, output: str) -> None:
    """Print the built-in alerts and their thresholds."""
    from specserve.alert.prometheus import rows as all_rows

    rows = all_rows(_settings(config))
    if output == "json":
        import json

        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']:22} {row['severity']:9} {row['rule']:40} {row['summary']}")
    follows("specserve alerts rules > specserve.rules.yaml")


@alerts.command()
@_CONFIG
@click.option(
    "--runbook-base-url",
    metavar="URL",
    help="Where the runbook pages are; default alerts.runbook_base_url.",
)
def rules(config: str | None, runbook_base_url: str | None) -> None:
    """Print the Prometheus rule file for a fleet."""
    from specserve.alert.prometheus import rule_file

    click.echo(rule_file(_settings(config), runbook_base_url=runbook_base_url), nl=False)
    follows("specserve alerts inhibit > inhibit.yaml", err=True)


@alerts.command()
def inhibit() -> None:
    """Print inhibit_rules for Alertmanager's configuration."""
    from specserve.alert.prometheus import inhibit_rules

    click.echo(inhibit_rules(), nl=False)
    follows("specserve alerts list", err=True)


@alerts.command()
@format_option
def metrics(output: str) -> None:
    """Print the metrics that a custom rule may use, with their labels."""
    from specserve.metric_families import FAMILIES

    if output == "json":
        answer({"metrics": {f.name: list(f.labels) for f in FAMILIES.values()}})
        return
    for family in FAMILIES.values():
        labels = ""
        if family.labels:
            labels = "{" + ", ".join(family.labels) + "}"
        click.echo(family.name + labels)
    follows("specserve alerts lint RULES.yaml", err=True)


@alerts.command()
@click.argument("rules_file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--url",
    "urls",
    multiple=True,
    callback=http_url,
    help="Server whose /metrics to read; may be repeated.",
)
@format_option
def lint(rules_file: str, urls: tuple[str, ...], output: str) -> None:
    """Check that every series in a rule file is exported.

    By specserve, or by the servers at --url.
    """
    from specserve.alert.lint import exported, problems
    from specserve.engine.http.client import EngineClient
    from specserve.errors import ConfigError

    present = {name for url in urls for name in exported(EngineClient(url).metrics_text())}
    try:
        text = Path(rules_file).read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(
            "is not UTF-8 text; must be a Prometheus rule file", where=rules_file
        ) from None
    found = list(problems(text, rules_file, present))
    if found:
        raise ConfigError(found)
    if output == "json":
        answer({"file": rules_file})
        return
    click.echo(f"{rules_file}: every series is exported")
    follows(f"promtool check rules {rules_file}")
