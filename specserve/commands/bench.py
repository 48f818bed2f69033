"""``specserve bench``, ``specserve report`` and ``specserve trace``: measure, show, and make a
trace fit to share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specserve.commands.options import (
    answer,
    config_command,
    follows,
    format_option,
    http_url,
    interruptible,
    same_config,
)

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.app.bench import BenchProgress
    from specserve.bench.judge import BenchVerdict
    from specserve.config.load import Loaded
    from specserve.errors import Unsound

_WORKLOADS = ", ".join(
    sorted(p.stem for p in (Path(__file__).parents[1] / "bench" / "workloads").glob("*.yaml"))
)


@click.command()
@config_command
@format_option
@click.option(
    "--workload", "names", multiple=True, help=f"Built-in workload; may be repeated: {_WORKLOADS}."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Your own requests, one JSON object or prompt a line.",
)
@click.option(
    "--concurrency",
    default="1,4,16",
    show_default=True,
    help="Requests in flight, comma-separated.",
)
@click.option(
    "--arms",
    default="baseline,speculative",
    show_default=True,
    help="baseline, speculative, or config files; the first is compared with each of the others. "
    "--set is for all.",
)
@click.option(
    "--prompts",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Requests in one block.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Tokens of an answer; default: the workload's."
)
@click.option(
    "--repeat",
    default=1,
    show_default=True,
    type=click.IntRange(1, 20),
    help="How often to repeat the off-on-on-off sequence.",
)
@click.option(
    "--together",
    is_flag=True,
    help="Keep both arms running, on two ports; both must fit side by side.",
)
@click.option("--seed", default=0, show_default=True, help="Picks the prompts.")
@click.option(
    "--completions",
    is_flag=True,
    help="Send plain completions: for models without a chat template.",
)
@click.option(
    "--url-baseline",
    callback=http_url,
    help="Measure a server that already runs, without speculation.",
)
@click.option(
    "--url-speculative",
    callback=http_url,
    help="Measure a server that already runs, with speculation.",
)
@click.option(
    "--slo", help="Also search the highest load within these, e.g. ttft_p99=200ms,tpot_p99=30ms."
)
@click.option(
    "--slo-seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Length of one probe.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("bench"),
    show_default=True,
    help="Output folder.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Add what --out lacks: after an interruption, or with a higher --repeat.",
)
@interruptible
def bench(loaded: Loaded, output: str, out: Path, resume: bool, **options: Any) -> None:
    """Measure whether speculation makes CONFIG faster.

    For this traffic, at this load, with the same answers? Starts each arm as `specserve launch`
    would, in the order off, on, on, off. Writes result.json, profile.json, report.md and
    report.html. Exit code 6 when nothing sound could be said.
    """
    import os

    from specserve.app import bench_setup
    from specserve.app import report as reports

    run = bench_setup.prepare(
        loaded, bench_setup.BenchOptions(**options), out, resume=resume, environ=os.environ
    )
    with _Display() as display:
        result = run.run(display.progress())
    (verdicts,) = reports.write([result], out)
    unsound = reports.unsound(verdicts, out)
    _say(verdicts, out, output, unsound, config=same_config(loaded))
    if unsound is not None:
        raise unsound


def _say(
    verdicts: Sequence[BenchVerdict],
    out: Path,
    output: str,
    unsound: Unsound | None,
    *,
    config: str,
) -> None:
    from dataclasses import asdict

    from specserve.bench import advice

    if output == "json":
        cells: list[JsonValue] = [asdict(cell) for verdict in verdicts for cell in verdict.cells]
        answer({"result": str(out / "result.json"), "cells": cells}, unsound)
        return
    for verdict in verdicts:
        if len(verdicts) > 1:
            click.echo(f"\n{verdict.result.arms[1].name}:")
        for sentence in advice.conclusion(verdict):
            click.echo(sentence)
    click.echo(f"\nReport: {out / 'report.html'}")
    if unsound is None:
        follows(f"specserve launch {config}")


@click.command()
@format_option
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder for report.md and report.html.",
)
@click.option(
    "--max-drop",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Exit code 6 when the last result's speedup or acceptance length is lower than the "
    "first's by more than this.",
)
def report(files: tuple[Path, ...], output: str, out: Path, max_drop: float | None) -> None:
    """Render benchmark results as Markdown and HTML.

    One result, or several side by side: files, or folders that bench wrote.
    """
    from specserve.app import report as reports

    out.mkdir(parents=True, exist_ok=True)
    judged = reports.write(reports.read(files), out)
    dropped = None
    if max_drop is not None:
        dropped = reports.dropped(judged[0], judged[-1], max_drop / 100, files[-1])
    if output == "json":
        answer({"files": [str(out / "report.md"), str(out / "report.html")]}, dropped)
        return
    click.echo(f"{out / 'report.md'}\n{out / 'report.html'}")
    if dropped is not None:
        raise dropped
    follows(f"python3 -m webbrowser {out / 'report.html'}")


@click.group()
def trace() -> None:
    """Recorded traffic for the benchmark."""


@trace.command()
@format_option
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--keep-text", is_flag=True, help="Keep prompts as they are; drop only who sent them."
)
def redact(source: Path, destination: Path, output: str, keep_text: bool) -> None:
    """Drop user ids and content from a trace.

    Lengths, repetition and times of what `bench --trace` sends stay; it sends no tools.
    """
    from specserve.bench import workload

    count = workload.redact_file(source, destination, keep_text=keep_text)
    if output == "json":
        answer({"requests": count, "file": str(destination)})
        return
    click.echo(f"{count} requests written to {destination}")
    follows(f"specserve bench CONFIG --trace {destination}")


class _Display:
    """A bar with the time left on a terminal, plain lines otherwise; both on stderr."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self) -> BenchProgress:
        """The callables that the benchmark wants."""
        from specserve.app.bench import BenchProgress

        return BenchProgress(step=self._step, note=self._note)

    def _step(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=what)
        else:
            click.echo(f"{done}/{total} {what}", err=True)

    def _note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            click.echo(text, err=True)
