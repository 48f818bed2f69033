"""The program: its commands, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import traceback
from typing import Any

import click

from specserve import __version__
from specserve.commands import (
    alerts,
    bench,
    check,
    config,
    launch,
    models,
    plan,
    sidecar,
    status,
    verify,
)
from specserve.commands.options import color
from specserve.errors import ExitCode, SpecserveError


class _InOrder(click.Group):
    """Lists its commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print our version, the engine beside us, and the repairs we carry for it; no vLLM is
    imported.
    """
    if not wanted or context.resilient_parsing:
        return
    from specserve.engine.inside.repairs import available_repairs
    from specserve.engine.installed.introspect import installed

    click.echo(f"specserve {__version__}")
    click.echo(
        f"engine    {installed() or 'none here; pip install specserve[gpu] or specserve[cpu]'}"
    )
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
    help="Version, engine and repairs.",
)
@click.pass_context
def program(context: click.Context, debug: bool) -> None:
    """Speculative decoding on vLLM that is safe to run in production."""
    context.obj = {"debug": debug}
    context.color = color()


COMMANDS = (
    check.check,
    plan.plan,
    launch.launch,
    verify.verify,
    bench.bench,
    bench.report,
    bench.trace,
    status.status,
    sidecar.sidecar,
    sidecar.probe,
    alerts.alerts,
    models.models,
    config.config,
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
    if debug := "--debug" in arguments:  # wherever it stands
        arguments = ["--debug", *(a for a in arguments if a != "--debug")]
    try:
        result: Any = program.main(arguments, prog_name="specserve", standalone_mode=False)
    except SystemExit:  # of click and rich, when the reader of our output went away
        return ExitCode.NOT_READ
    except click.exceptions.Abort:
        _tell("Interrupted.")
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        with contextlib.suppress(BrokenPipeError):
            error.show()
        return ExitCode.CONFIG
    except Exception as error:
        code = _told(error)
        if debug and code == ExitCode.BUG:
            raise
        if debug:
            traceback.print_exc()
        return code
    if isinstance(result, int):
        return result
    return ExitCode.OK


def _told(error: Exception) -> int:
    """Say what went wrong on stderr; the exit code for it."""
    if isinstance(error, SpecserveError):
        for problem in error.problems:
            _tell(click.style("Error: ", fg="red", bold=True) + str(problem))
        return error.exit_code
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        # Expected errors were caught where they arise; what is left is a file or disk of the user.
        _tell(f"Error: {error.filename or 'output'}: {error.strerror or error}")
        _tell("Fix: name another file or folder, or free some space and give access there")
        return ExitCode.CONFIG
    # A Ctrl-C while pydantic built a schema comes as its own error.
    if "KeyboardInterrupt" in str(error):
        _tell("Interrupted.")
        return ExitCode.INTERRUPTED
    # The last resort: what arrives here is a bug of ours.
    _tell(f"Error: a bug in specserve: {type(error).__name__}: {error}")
    _tell("Fix: run again as 'specserve --debug COMMAND ...' and report the traceback")
    return ExitCode.BUG


def _tell(text: str) -> None:
    """To stderr; where nobody reads it (`2>&1 | head`), the exit code still stands."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(text, err=True, color=color())
