"""``specserve batch``: a file of requests through one server."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from specserve.commands.options import (
    answer,
    format_option,
    http_url,
    interruptible,
    loaded_from,
    secret_in,
    set_option,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from specserve.app.batch.job import BatchOutcome
    from specserve.app.batch.run import BatchProgress
    from specserve.config.load import Loaded

REPORT_SECONDS = 10.0
"""Between two lines of progress; a terminal is painted more often."""
_PAINT_SECONDS = 0.5


def _body(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Callback of ``--body JSON``."""
    import json

    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter("must be an object, such as '{\"max_tokens\": 256}'")
    if found.get("stream"):
        raise click.BadParameter("a batch has no streams; leave 'stream' out")
    return found


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="[CONFIG] INPUT OUTPUT")
@set_option
@click.option(
    "--url", callback=http_url, help="A server that already runs; CONFIG may be left out."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File with the key of --url; default: the config's.",
)
@click.option(
    "--input-format",
    "form",
    type=click.Choice(["openai", "prompts", "csv"]),
    help="Form of INPUT; default: by its name, else by its first line.",
)
@click.option("--csv-column", metavar="NAME", help="INPUT is CSV, and this column the prompt.")
@click.option(
    "--template",
    metavar="TEXT",
    help="Text around each prompt: {prompt}, or the columns of CSV by name.",
)
@click.option("--completions", is_flag=True, help="Send prompts to /v1/completions, not as chats.")
@click.option(
    "--body",
    "extra",
    callback=_body,
    metavar="JSON",
    help='Laid over every request, e.g. \'{"max_tokens": 256, "temperature": 0}\'.',
)
@click.option("--model", help="Ask for this model, whatever the lines say.")
@click.option("--unordered", is_flag=True, help="Write answers as they come, not in INPUT's order.")
@click.option("--resume", is_flag=True, help="Go on with an OUTPUT that is begun, or begin it.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    help="Requests in flight; default: as many as make more tokens a second, up to 256.",
)
@click.option("--yield", "yields", is_flag=True, help="Step back while others wait for the server.")
@click.option(
    "--yield-ttft",
    "yield_ttft_seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="With --yield: also while TTFT is longer than this, in seconds.",
)
@click.option(
    "--retries",
    default=5,
    show_default=True,
    type=click.IntRange(0, 100),
    help="Of a request whose connection broke or that got a 5xx.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    default=1800.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds for one answer.",
)
@click.option(
    "--patience",
    "patience_seconds",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds to wait for a server that is gone or refuses everything.",
)
@format_option
@interruptible
def batch(
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    output: str,
    api_key_file: Path | None,
    unordered: bool,
    **options: Any,
) -> None:
    """Answer a file of requests through one server.

    INPUT is OpenAI batch JSONL, a prompt a line, or CSV with --csv-column; OUTPUT has OpenAI's
    batch form, a line for each request. Either may be -. The server is that of --url, or one that
    is launched from CONFIG and ended afterwards. Exit code 0 when all was answered, 6 when requests
    failed, 2 when lines of INPUT are no requests.
    """
    from specserve.app.batch import job
    from specserve.errors import ConfigError

    if len(files) not in (2, 3):
        raise click.UsageError("needs [CONFIG] INPUT OUTPUT")
    source, target = files[-2:]
    if target == "-" and output == "json":
        raise ConfigError(
            "is standard output, where JSON goes as well; must be a file",
            where="OUTPUT",
            fix="name a file, or leave --format json out",
        )
    loaded = None
    if len(files) == 3:
        loaded = loaded_from(files[0], overrides, asks_checkpoints=options["url"] is None)
    key = None
    if api_key_file is not None:
        key = secret_in(api_key_file, "--api-key-file")
    chosen = job.BatchOptions(
        source=_path(source),
        output=_path(target),
        again=_again(click.get_current_context(), files),
        api_key=key,
        ordered=not unordered,
        **options,
    )
    outcome = _shown(loaded, chosen, os.environ)
    _say(outcome, output, to_stderr=target == "-")


def _shown(loaded: Loaded | None, options: Any, environ: Mapping[str, str]) -> BatchOutcome:
    from specserve.app.batch import job

    with _Bar() as bar:
        return job.run(loaded, options, environ, job.BatchReport(bar.show, bar.seconds))


def _say(outcome: BatchOutcome, output: str, *, to_stderr: bool) -> None:
    error = outcome.error()
    if output == "json":
        answer(outcome.as_dict(), error)
        return
    click.echo(outcome.sentence(), err=to_stderr)
    if error is not None:
        raise error


def _path(name: str) -> Path | None:
    if name == "-":
        return None
    return Path(name)


def _again(context: click.Context, files: tuple[str, ...]) -> str:
    """The command line that goes on: what was typed, with --resume."""
    words = ["specserve", "batch", *files]
    for parameter in context.command.params:
        name = parameter.name or ""
        typed = context.get_parameter_source(name)
        if not isinstance(parameter, click.Option) or typed is None:
            continue
        if typed.name != "COMMANDLINE" or name == "resume":
            continue
        words += _typed(parameter, context)
    return shlex.join([*words, "--resume"])


def _typed(option: click.Option, context: click.Context) -> list[str]:
    import json

    value = context.params[option.name or ""]
    if option.is_flag:
        return [option.opts[0]]
    if option.multiple:
        return [word for one in value for word in (option.opts[0], str(one))]
    if isinstance(value, dict):
        return [option.opts[0], json.dumps(value)]
    return [option.opts[0], str(value)]


class _Bar:
    """A bar with rate and time left on a terminal, plain lines otherwise; both on stderr."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @property
    def seconds(self) -> float:
        """Between two reports."""
        if self._progress is not None:
            return _PAINT_SECONDS
        return REPORT_SECONDS

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=Console(stderr=True))
            self._progress.start()
            self._task = self._progress.add_task("starting", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, now: BatchProgress) -> None:
        """One report."""
        text = _sentence(now)
        if self._progress is None or self._task is None:
            click.echo(text, err=True)
            return
        total = None
        if now.done_ratio is not None:
            total = 1.0
        self._progress.update(
            self._task, completed=now.done_ratio or 0.0, total=total, description=text
        )


def _sentence(now: BatchProgress) -> str:
    from specserve.units import duration

    done = f"{now.done:,} done"
    if now.done_ratio is not None:
        done += f" ({now.done_ratio * 100:.0f} %)"
    parts = [done, f"{now.requests_per_second:.1f} requests/s"]
    if now.tokens_per_second:
        parts.append(f"{now.tokens_per_second:,.0f} tokens/s")
    parts.append(f"{now.in_flight} in flight")
    if now.failed:
        parts.append(f"{now.failed:,} failed")
    if now.left_seconds is not None:
        parts.append(f"{duration(now.left_seconds)} left")
    text = ", ".join(parts)
    if now.holds is not None:
        text += f"; {now.holds}"
    return text
