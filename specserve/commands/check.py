"""``specserve check``: prove before launch that the pair can work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specserve.commands.options import (
    config_command,
    engine_option,
    format_option,
    skip_option,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from specserve.app.preflight import PreflightReport
    from specserve.checkpoint import lock as integrity
    from specserve.config.load import Loaded
    from specserve.config.schema import Settings

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.command("check")
@config_command
@format_option
@engine_option
@skip_option
@click.option(
    "--sample",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Count the tokens of a text that a head with a pruned vocabulary can draft.",
)
def check(
    loaded: Loaded, output: str, version: str | None, skip: tuple[str, ...], sample: Path | None
) -> None:
    """Prove from files alone that CONFIG can work and fit.

    Target against draft, what vLLM supports, memory: each fits, does not fit, or is not checked,
    and why. No GPU is needed. Exit code 3 when refused.
    """
    from specserve.app import preflight
    from specserve.engine.installed.chosen import choose
    from specserve.engine.installed.introspect import installed
    from specserve.errors import ExitCode

    chosen = choose(loaded.settings, here=installed(), version=version)
    with hashing() as progress:
        report = preflight.run(
            loaded,
            skip=skip,
            environ=os.environ,
            chosen=chosen,
            progress=progress,
            sample=sample,
        )
    if output == "json":
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        show = _lines
        if sys.stdout.isatty():
            show = _table
        show(report)
        work(report)
        click.echo(_verdict(report, loaded.settings))
    if not report.ok:
        raise click.exceptions.Exit(ExitCode.PREFLIGHT)


def _lines(report: PreflightReport) -> None:
    """One line a finding, never broken: for files, pipes and CI."""
    for f in report.findings:
        click.echo(f"{f.severity} {f.code}: {f.where}: {f.message}")
        if f.fix:
            click.echo(f"  Fix: {f.fix}")


def _table(report: PreflightReport) -> None:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    if not report.findings:
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for f in report.findings:
        left = Text.assemble((f.severity, f"bold {_COLOURS[f.severity]}"), "\n", (f.code, "dim"))
        lines = [Text.assemble((f.where, "dim"), ": ", f.message)]
        if f.fix:
            lines.append(Text.assemble(("Fix: ", "bold"), f.fix))
        table.add_row(left, Group(*lines))
    Console(highlight=False, soft_wrap=False).print(table)


def _verdict(report: PreflightReport, settings: Settings) -> str:
    models = [settings.models.target_model, settings.models.draft_model]
    if not settings.uses_draft_model:
        models.pop()
    names = []
    for model in models:
        if model is not None and model.revision:
            names.append(f"{model.path}@{model.revision[:12]}")
        elif model is not None:
            names.append(model.path)
    said = " + ".join(names)
    if report.ok:
        head = click.style("OK", fg="green", bold=True)
        said += f" ({settings.method or 'no speculation'})"
    else:
        head = click.style("REFUSED", fg="red", bold=True)
        said += f": {_count(len(report.errors), 'error')}"
    warnings = sum(f.severity == "warning" for f in report.findings)
    if warnings:
        said += f", {_count(warnings, 'warning')}"
    return f"{head} {said}{unsaid(report)}"


def work(report: PreflightReport) -> None:
    """What was proven, what was not looked at, what the draft costs, what to type next."""
    for line in report.proven:
        click.echo(f"{click.style('proven', fg='green')}       {line}")
    for line in report.unproven:
        click.echo(f"{click.style('not checked', fg='yellow')}  {line}")
    if report.price is not None:
        click.echo(f"price        {report.price}")
    if report.next_command is not None:
        click.echo(f"next         {report.next_command}")


def unsaid(report: PreflightReport) -> str:
    """The verdicts that are not "fits", for the last line: what passed unseen has not passed."""
    from specserve.app import evidence

    parts = []
    match report.verdicts.pair:
        case "unknown":
            parts.append(evidence.pair_unsaid(report.findings))
        case "does not fit" if report.ok:
            parts.append("pair does not fit, as was skipped")
    match report.verdicts.engine:
        case "unknown":
            parts.append(evidence.engine_unsaid(report.findings, report.judged_for))
        case "does not fit" if report.ok:
            parts.append("engine refuses, as was skipped")
    match report.verdicts.memory:
        case "unknown":
            parts.append(evidence.memory_unsaid(report.plan))
        case "does not fit" if report.ok:
            parts.append("memory does not fit, as was skipped")
    return "".join(f"; {part}" for part in parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


@contextmanager
def hashing(total_bytes: int | None = None) -> Iterator[integrity.Progress]:
    """A progress bar on stderr that appears with the first hashed bytes, and only on a terminal.

    With ``total_bytes``, the size of all that is to be hashed, it also says how far it is.
    """
    bars: list[Progress] = []

    def advance(name: str, n: int) -> None:
        if not bars and sys.stderr.isatty():
            bars.append(_bar(name, total_bytes))
        for bar in bars:
            bar.update(bar.task_ids[0], description=name, advance=n)

    try:
        yield advance
    finally:
        for bar in bars:
            bar.stop()


def _bar(name: str, total_bytes: int | None) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        FileSizeColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}")]
    if total_bytes is None:
        columns += [FileSizeColumn(), TransferSpeedColumn()]
    else:
        columns += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    bar.add_task(name, total=total_bytes)
    return bar
