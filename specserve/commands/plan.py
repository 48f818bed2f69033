"""``specserve plan``: whether the deployment fits, and what it leaves for requests."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from specserve.commands.options import config_command, format_option

if TYPE_CHECKING:
    from specserve.config.load import Loaded


@click.command("plan")
@config_command
@format_option
@click.option(
    "--grid", "with_grid", is_flag=True, help="Add a what-if table: context, draft, GPU share."
)
def plan(loaded: Loaded, output: str, with_grid: bool) -> None:
    """Plan the GPU memory of CONFIG, with the draft and without.

    From metadata alone: weights need not be there. Exit code 3 when it does not fit.
    """
    from specserve.app.plan import Planning
    from specserve.errors import PreflightRefused, Problem
    from specserve.memory import text
    from specserve.memory.findings import of_plan

    planning = Planning.of(loaded, environ=os.environ)
    made = planning.plan()
    if with_grid:
        cells = planning.grid(made)
    else:
        cells = []
    if output == "json":
        body = {
            "vram": made.as_dict(),
            "conclusion": text.conclusion(made),
            "findings": [f.as_dict() for f in of_plan(made)],
        }
        if with_grid:
            body["grid"] = [vars(c) for c in cells]
        click.echo(json.dumps(body, indent=2))
    else:
        click.echo(text.render(made))
        if cells:
            click.echo("\nRequests at once, - where it does not fit\n" + text.render_grid(cells))
    refused = [f for f in of_plan(made) if f.severity == "error"]
    if refused:
        raise PreflightRefused([Problem(f.message, f.where or None, fix=f.fix) for f in refused])
