"""What several commands share: the CONFIG argument, ``--set``, ``--format``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specserve.errors import Problem


def config_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the CONFIG argument and ``--set``; it receives ``loaded`` (config.load.Loaded).

    Warnings of the config are printed to stderr before the command runs.
    """

    @functools.wraps(function)
    def wrapper(config: str, overrides: tuple[str, ...], **kwargs: Any) -> Any:
        from specserve.config.load import load

        loaded = load(Path(config), environ=os.environ, overrides=overrides)
        for warning in loaded.warnings:
            warn(warning)
        return function(loaded=loaded, **kwargs)

    wrapper = click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key, e.g. --set server.port=9000."
    )(wrapper)
    return click.argument("config", type=click.Path(dir_okay=True))(wrapper)


def format_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--format text|json`` as ``output``."""
    return click.option(
        "--format",
        "output",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Output form.",
    )(function)


def warn(problem: Problem) -> None:
    """Print a warning to stderr, in the shape of an error."""
    click.echo(click.style("Warning: ", fg="yellow") + str(problem), err=True)
