"""``specserve plan``: whether the deployment fits, and what it leaves for requests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
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
    from specserve.app.preflight import PreflightReport
    from specserve.app.worth import Worth
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
@click.option(
    "--worth",
    "with_worth",
    is_flag=True,
    help="Add what speculation is worth, by load and acceptance (modelled).",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --worth: correct it by a profile of specserve bench.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="With --worth: tokens of a sequence, prompt and answer so far.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --worth: draw it, as SVG.",
)
def plan(
    loaded: Loaded,
    *,
    output: str,
    version: str | None,
    with_grid: bool,
    skip: tuple[str, ...],
    with_worth: bool,
    profile_path: Path | None,
    context: int | None,
    plot: Path | None,
) -> None:
    """Plan the GPU memory of CONFIG, with the draft and without.

    From metadata alone: weights need not be there. Refuses what `specserve check` refuses, with
    exit code 3.
    """
    from specserve.app import preflight, pricing
    from specserve.app import worth as worthwhile
    from specserve.engine.installed.chosen import choose
    from specserve.engine.installed.introspect import installed
    from specserve.errors import PreflightRefused
    from specserve.memory import text

    if not with_worth and (profile_path or context or plot):
        raise click.UsageError("--profile, --context and --plot belong to --worth.")
    chosen = choose(loaded.settings, here=installed(), version=version).for_memory()
    report = preflight.run(loaded, skip=skip, environ=os.environ, chosen=chosen)
    made, cells = report.plan, list[text.Cell]()
    if with_grid and made is not None and report.planning is not None:
        cells = report.planning.grid(made)
    worth = None
    if with_worth:
        worth = _worth(report, profile_path, context)
        if plot is not None:
            _draw(worth, plot)
    refused = None
    if not report.ok:
        refused = PreflightRefused([f.as_problem() for f in report.errors])
    if output == "json":
        body = report.as_dict()
        if made is not None:
            body["conclusion"] = text.conclusion(made)
        if with_grid:
            body["grid"] = [vars(c) for c in cells]
        if isinstance(worth, str):
            body["worth"] = {"unknown": worth}
        elif worth is not None:
            body["worth"] = worth.as_dict()
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
    if isinstance(worth, str):
        click.echo(f"Worth: cannot say: {worth}")
    elif worth is not None:
        click.echo("\n" + worthwhile.render(worth))
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


def _worth(report: PreflightReport, path: Path | None, context: int | None) -> Worth | str:
    """What speculation is worth, corrected by the profile that is given or configured."""
    from specserve.app import worth
    from specserve.sidecar import speedup

    if report.planning is None or report.plan is None:
        return "no memory plan was made; see the errors"
    configured = report.planning.settings.sidecar.benchmark_profile
    if path is None and configured is not None:
        path = Path(configured)
    profile = None
    if path is not None:
        profile = speedup.load(path)
    return worth.of_plan(report.planning, report.plan, profile=profile, context=context)


def _draw(worth: Worth | str, path: Path) -> None:
    from specserve.app import worth as worthwhile
    from specserve.errors import ConfigError
    from specserve.files import write_whole

    if isinstance(worth, str):
        raise ConfigError(f"nothing to draw: {worth}", where="--plot")
    drawn = worthwhile.svg(worth)
    if drawn is None:
        raise ConfigError(
            "matplotlib is not installed; it draws the plot",
            where="--plot",
            fix="pip install 'specserve[bench]'",
        )
    try:
        write_whole(path, drawn)
    except OSError as error:
        raise ConfigError(f"cannot write the plot: {error.strerror}", where=str(path)) from error
