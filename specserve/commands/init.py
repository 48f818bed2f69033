"""``specserve init``: a config from a command, a compose file, a manifest, or from checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specserve.commands.options import answer, format_option

if TYPE_CHECKING:
    from specserve.app.init.run import Written


@click.command("init")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Shell text, compose file, Kubernetes manifest or unit to read; - is stdin.",
)
@click.option("--target", metavar="PATH", help="The served model: a folder or a Hub id.")
@click.option("--draft", metavar="PATH", help="The draft model or head.")
@click.option("--gpu", metavar="NAME", help="GPU to plan for, e.g. 'NVIDIA H100 80GB HBM3'.")
@click.option("--out", metavar="FILE", default="-", help="File to write; - is stdout, the default.")
@format_option
def init(
    *,
    source: str | None,
    target: str | None,
    draft: str | None,
    gpu: str | None,
    out: str,
    output: str,
) -> None:
    """Write a commented config from what you have.

    With --from, from the command that starts your server today (vLLM, also in docker, compose or
    Kubernetes; SGLang, TGI, llama.cpp). Nothing in it is executed, and no secret is copied. Without
    it, from the checkpoints and the GPUs here.
    """
    from specserve.app.init.run import Wishes, from_text, proposed

    wishes = Wishes(target, draft, gpu)
    if source is None:
        written = proposed(wishes, os.environ)
    else:
        written = from_text(_read(source), source, wishes)
    _give(written, out, output)


def _read(source: str) -> str:
    """The text, as it is to the byte. Raises ConfigError."""
    from specserve.config.document import MAX_BYTES
    from specserve.errors import ConfigError
    from specserve.files import read_bytes

    if source == "-":
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        try:
            raw = read_bytes(Path(source), MAX_BYTES + 1)
        except IsADirectoryError:
            raise ConfigError("is a folder; must be a file", where=source) from None
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", where=source) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES} bytes", where=source)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text; must be UTF-8", where=source) from None


def _refuse_other(path: Path, written: Written) -> None:
    """A file that somebody wrote by hand is not replaced. Raises ConfigError."""
    from specserve.app.init.write import MARK
    from specserve.errors import ConfigError
    from specserve.files import read_bytes

    try:
        start = read_bytes(path, len(written.text.encode()) + 1)
    except FileNotFoundError:
        return
    if start == written.text.encode() or start.startswith(f"# {MARK}".encode()):
        return
    raise ConfigError(
        "exists already and is not a file that init wrote",
        where=str(path),
        fix="name another file with --out",
    )


def _give(written: Written, out: str, output: str) -> None:
    """The file where it is wanted, and on stderr what a person has to know."""
    from specserve.files import write_whole

    if out != "-":
        _refuse_other(Path(out), written)
        write_whole(Path(out), written.text)
    if output == "json":
        answer({**written.as_dict(), "file": None if out == "-" else out})
        return
    if out == "-":
        click.echo(written.text, nl=False)
    for line in written.left:
        click.echo(f"Not carried over: {line}", err=True)
    for line in written.said:
        click.echo(f"Note: {line}", err=True)
    if written.variables:
        click.echo(f"Set in the environment: {', '.join(written.variables)}", err=True)
    if out != "-":
        click.echo(f"Wrote {out}\nNext: specserve check {out}", err=True)
