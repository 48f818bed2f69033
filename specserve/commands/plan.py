"""``specserve plan``: whether the deployment fits, and what it leaves for requests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from specserve.commands.options import answer, config_command, engine_option, format_option

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.config.load import Loaded


@click.command("plan")
@config_command
@format_option
@engine_option
@click.option(
    "--grid", "with_grid", is_flag=True, help="Add a what-if table: context, draft, GPU share."
)
def plan(loaded: Loaded, output: str, version: str | None, with_grid: bool) -> None:
    """Plan the GPU memory of CONFIG, with the draft and without.

    From metadata alone: weights need not be there. Exit code 3 when it does not fit.
    """
    from specserve.app.plan import Planning
    from specserve.engine.installed.chosen import choose
    from specserve.engine.installed.introspect import installed
    from specserve.errors import PreflightRefused
    from specserve.memory import text
    from specserve.memory.findings import of_plan

    chosen = choose(loaded.settings, here=installed(), version=version)
    planning = Planning.of(loaded, environ=os.environ, chosen=chosen)
    made = planning.plan()
    if with_grid:
        cells = planning.grid(made)
    else:
        cells = []
    errors = [f.as_problem() for f in of_plan(made) if f.severity == "error"]
    refused = None
    if errors:
        refused = PreflightRefused(errors)
    if output == "json":
        findings: list[JsonValue] = [f.as_dict() for f in (*of_plan(made), *chosen.findings)]
        body: dict[str, JsonValue] = {
            "judged_for": chosen.as_dict(),
            "vram": made.as_dict(),
            "conclusion": text.conclusion(made),
            "findings": findings,
        }
        if with_grid:
            body["grid"] = [vars(c) for c in cells]
        answer(body, refused)
        return
    click.echo(text.render(made))
    for found in chosen.findings:
        click.echo(f"{found.severity} {found.code}: {found.where}: {found.message}")
        if found.fix:
            click.echo(f"  Fix: {found.fix}")
    if cells:
        click.echo("\nRequests at once, - where it does not fit\n" + text.render_grid(cells))
    if refused is not None:
        raise refused
