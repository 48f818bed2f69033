"""``specserve config show|schema``."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import click

from specserve.commands.options import config_command, follows, format_option, same_config

if TYPE_CHECKING:
    from specserve.config.load import Loaded


@click.group()
def config() -> None:
    """Show the resolved configuration, or its schema."""


@config.command()
@functools.partial(config_command, asks_checkpoints=False)
@click.option("--changed", is_flag=True, help="Only what file, environment and --set say.")
@format_option
def show(loaded: Loaded, output: str, changed: bool) -> None:
    """Print every value in force and where it came from.

    Secrets are masked, defaults dimmed.
    """
    from specserve.config.show import rows

    table = rows(loaded)
    if changed:
        table = [row for row in table if not row.is_default]
    if output == "json":
        click.echo(
            json.dumps({r.key: {"value": r.value, "source": r.source} for r in table}, indent=2)
        )
        return
    width = max(len(r.key) for r in table)
    for row in table:
        text = f"{row.key.ljust(width)}  {json.dumps(row.value, ensure_ascii=False)}"
        if row.is_default:
            click.echo(click.style(text, dim=True))
        else:
            click.echo(f"{text}  {click.style('# ' + row.source, fg='cyan')}")
    masked = [row.key for row in table if row.is_masked]
    if masked:
        click.echo(f"Masked above: {', '.join(masked)}", err=True)
    if changed:
        follows(f"specserve check {same_config(loaded)}", err=True)
    else:
        follows(f"specserve config show {same_config(loaded)} --changed", err=True)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the config file."""
    from specserve.config.schema import Settings

    click.echo(json.dumps(Settings.model_json_schema(), indent=2))
    follows("specserve config show CONFIG --changed", err=True)
