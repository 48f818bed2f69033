"""``specserve completion``: shell completion, printed or installed."""

from __future__ import annotations

import os
from pathlib import Path

import click

from specserve.commands.options import follows

_NAME = "specserve"
_PLACES = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/specserve"),
    "zsh": ("XDG_DATA_HOME", ".local/share", "zsh/site-functions/_specserve"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/specserve.fish"),
}
"""Shell -> the variable of the folder, its default below home, and the file: where each shell (with
bash-completion 2) looks by itself, but for zsh, whose ``fpath`` has no folder of the user's."""


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_PLACES)))
@click.option("--install", is_flag=True, help="Write it where the shell looks, for this user.")
def completion(shell: str, install: bool) -> None:
    """Print the shell's completion of specserve, or install it."""
    from specserve.files import write_whole

    source = _source(shell)
    if not install:
        click.echo(source)
        follows(f"specserve completion {shell} --install", err=True)
        return
    path = _place(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, source + "\n")
    click.echo(f"wrote {path}")
    if shell == "zsh":
        line = f"fpath=({path.parent} $fpath); autoload -U compinit; compinit"
        click.echo(f"zsh looks there once ~/.zshrc has: {line}", err=True)
    follows(f"exec {shell}")


def _source(shell: str) -> str:
    """Click's own script."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click knows the three shells
    program = click.get_current_context().find_root().command
    return found(program, {}, _NAME, "_SPECSERVE_COMPLETE").source()


def _place(shell: str) -> Path:
    variable, default, file = _PLACES[shell]
    folder = os.environ.get(variable)
    if folder:
        return Path(folder) / file
    return Path.home() / default / file
