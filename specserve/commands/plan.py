"""``specserve plan``: whether the deployment fits, and what it leaves for requests."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from specserve.commands.options import (
    answer,
    config_command,
    engine_option,
    format_option,
    skip_option,
)

if TYPE_CHECKING:
    from specserve.config.load import Loaded

_NO_FIT = "does-not-fit"


@click.command("plan")
@config_command
@format_option
@engine_option
@skip_option
@click.option(
    "--grid", "with_grid", is_flag=True, help="Add a what-if table: context, draft, GPU share."
)
def plan(
    loaded: Loaded, output: str, version: str | None, with_grid: bool, skip: tuple[str, ...]
) -> None:
    """Plan the GPU memory of CONFIG, with the draft and without.

    From metadata alone: weights need not be there. Refuses what `specserve check` refuses, with
    exit code 3.
    """
    from specserve.app import preflight, pricing
    from specserve.engine.installed.chosen import choose
    from specserve.engine.installed.introspect import installed
    from specserve.errors import PreflightRefused
    from specserve.memory import text

    chosen = choose(loaded.settings, here=installed(), version=version).for_memory()
    report = preflight.run(loaded, skip=skip, environ=os.environ, chosen=chosen)
    made, cells = report.plan, list[text.Cell]()
    if with_grid and made is not None and report.planning is not None:
        cells = report.planning.grid(made)
    refused = None
    if not report.ok:
        refused = PreflightRefused([f.as_problem() for f in report.errors])
    if output == "json":
        body = report.as_dict()
        if made is not None:
            body["conclusion"] = text.conclusion(made)
        if with_grid:
            body["grid"] = [vars(c) for c in cells]
        answer(body, refused)
        return
    if made is not None:
        click.echo(text.render(made))
    if report.price is not None:
        click.echo(f"Price of the draft: {report.price}")
    for found in chosen.findings:
        click.echo(f"{found.severity} {found.code}: {found.where}: {found.message}")
        if found.fix:
            click.echo(f"  Fix: {found.fix}")
    if cells:
        click.echo("\nRequests at once, - where it does not fit\n" + text.render_grid(cells))
    if refused is None:
        if report.next_command is not None:
            click.echo(f"Next: {report.next_command}")
        return
    if made is None or made.refusal != "memory":
        raise refused
    # The table is on stdout already.
    rows = pricing.table(report.remedies)
    raise PreflightRefused(
        [
            replace(p, message=p.message.splitlines()[0], facts=rows) if p.code == _NO_FIT else p
            for p in refused.problems
        ]
    )
