"""The program: its commands, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from specserve import __version__
from specserve.commands import (
    alerts,
    batch,
    bench,
    check,
    completion,
    config,
    doctor,
    gpus,
    init,
    launch,
    models,
    plan,
    sidecar,
    status,
    verify,
)
from specserve.commands.examples import GROUPS, PROGRAM, SHOWN
from specserve.commands.options import color, wants_json
from specserve.errors import ExitCode, Problem, SpecserveError

_INTERRUPTED = Problem("Interrupted.")


class _InOrder(click.Group):
    """Lists its commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Under the headings of `GROUPS`; a command in none of them under the last."""
        left = dict(self.commands)
        sections = {
            heading: [left.pop(name) for name in names if name in left]
            for heading, names in GROUPS.items()
        }
        sections["More"] = list(left.values())
        for heading, commands in sections.items():
            limit = formatter.width - 6 - max((len(c.name or "") for c in commands), default=0)
            rows = [(c.name or "", c.get_short_help_str(limit)) for c in commands if not c.hidden]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def _pages() -> str | None:
    """Where the documentation is published, by the package's own metadata."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("specserve").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    for entry in urls:
        label, _, url = str(entry).partition(", ")
        if label == "Documentation":
            return url
    return None


def _show_examples(command: click.Command, words: tuple[str, ...], pages: str | None) -> None:
    """Give a command, and those below it, the end of their help."""
    shown = SHOWN.get(" ".join(words))
    if not words:
        shown = PROGRAM
    if shown is not None:
        command.epilog = shown.epilog(pages)
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            _show_examples(below, (*words, name), pages)


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print our version, the engine beside us, and the repairs we carry for it; no vLLM is
    imported.
    """
    if not wanted or context.resilient_parsing:
        return
    from specserve.engine.inside.repairs import available_repairs
    from specserve.engine.installed.introspect import installed

    click.echo(f"specserve {__version__}")
    missing = "none here; pip install vllm, or without a GPU scripts/setup engine in a clone"
    click.echo(f"engine    {installed() or missing}")
    from specserve.app.environment import surroundings

    for name, said in surroundings():
        click.echo(f"{name:9} {said}")
    for name, defect in available_repairs().items():
        click.echo(f"repair    {name}: {defect}")
    context.exit()


@click.group(
    cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option("--debug", is_flag=True, help="Verbose log, and the traceback of an error.")
@click.option(
    "--version",
    is_flag=True,
    callback=_version,
    expose_value=False,
    is_eager=True,
    help="Version, engine, Python, GPUs, extras and repairs: for a report of a bug.",
)
@click.pass_context
def program(context: click.Context, debug: bool) -> None:
    """Speculative decoding on vLLM that is safe to run in production."""
    context.obj = {"debug": debug}
    context.color = color()


COMMANDS = (
    init.init,
    check.check,
    plan.plan,
    launch.launch,
    verify.verify,
    bench.bench,
    bench.report,
    bench.trace,
    batch.batch,
    doctor.doctor,
    status.status,
    sidecar.sidecar,
    sidecar.probe,
    alerts.alerts,
    models.models,
    gpus.gpus,
    config.config,
    completion.completion,
)
for command in COMMANDS:
    program.add_command(command)


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with a code from the table in ``errors.py``."""
    if argv is None:
        arguments = sys.argv[1:]
    else:
        arguments = argv
    # A name of a model that the terminal's encoding does not have.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    as_json = wants_json(arguments)
    if not {"-h", "--help"}.isdisjoint(arguments) or not arguments:
        _show_examples(program, (), _pages())
    if debug := "--debug" in arguments:  # wherever it stands
        arguments = ["--debug", *(a for a in arguments if a != "--debug")]
    try:
        result: Any = program.main(arguments, prog_name="specserve", standalone_mode=False)
    except SystemExit:  # of click and rich, when the reader of our output went away
        return ExitCode.NOT_READ
    except click.exceptions.Abort:
        _tell_all([_INTERRUPTED], as_json=as_json)
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        if as_json:
            _tell_all([_misused(error)], as_json=True)
            return ExitCode.CONFIG
        with contextlib.suppress(BrokenPipeError):
            error.show()
        return ExitCode.CONFIG
    except Exception as error:
        code = _told(error, as_json=as_json)
        if debug and code == ExitCode.BUG:
            raise
        if debug:
            traceback.print_exc()
        return code
    if isinstance(result, int):
        return result
    return ExitCode.OK


def _told(error: Exception, *, as_json: bool = False) -> ExitCode:
    """Say what went wrong; the exit code for it."""
    code, problems = _judged(error)
    _tell_all(problems, as_json=as_json)
    return code


def _judged(error: Exception) -> tuple[ExitCode, Sequence[Problem]]:
    """What went wrong, and the exit code for it."""
    if isinstance(error, SpecserveError):
        return error.exit_code, error.problems
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        # Expected errors were caught where they arise; what is left is a file or disk of the user.
        where = str(error.filename or "output")
        fix = "name another file or folder, or free some space and give access there"
        return ExitCode.CONFIG, [Problem(error.strerror or str(error), where, fix=fix)]
    # A Ctrl-C while pydantic built a schema comes as its own error.
    if "KeyboardInterrupt" in str(error):
        return ExitCode.INTERRUPTED, [_INTERRUPTED]
    # The last resort: what arrives here is a bug of ours.
    message = f"a bug in specserve: {type(error).__name__}: {error}"
    fix = "run again as 'specserve --debug COMMAND ...' and report the traceback"
    return ExitCode.BUG, [Problem(message, fix=fix)]


def _misused(error: click.ClickException) -> Problem:
    """A command line that click refused."""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        path = error.ctx.command_path
        return Problem(error.format_message(), path, fix=f"{path} --help")
    return Problem(error.format_message())


def _tell_all(problems: Sequence[Problem], *, as_json: bool) -> None:
    """Where a script reads JSON, one document on stdout; else sentences on stderr.

    Where nobody reads it (`2>&1 | head`), the exit code still stands.
    """
    with contextlib.suppress(BrokenPipeError):
        if as_json:
            errors = [problem.as_dict() for problem in problems]
            click.echo(json.dumps({"ok": False, "errors": errors}))
            return
        for problem in problems:
            head = click.style("Error: ", fg="red", bold=True)
            if problem == _INTERRUPTED:
                head = ""
            click.echo(f"{head}{problem}", err=True, color=color())
