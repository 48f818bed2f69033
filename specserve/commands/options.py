"""What several commands share: the CONFIG argument, ``--set``, ``--format``."""

from __future__ import annotations

import functools
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from specserve.errors import Problem

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.config.load import Loaded
    from specserve.errors import SpecserveError

NOT_A_SIDECAR = "what listens there is not a sidecar of specserve"
_MAX_ANSWER_BYTES = 16 * 1024**2

CommandFunction: TypeAlias = Callable[..., Any]
"""What click decorates: each command has parameters of its own."""


def config_command(function: CommandFunction, *, asks_checkpoints: bool = True) -> CommandFunction:
    """Give a command the CONFIG argument and ``--set``; it receives ``loaded``
    (config.load.Loaded).

    Warnings of the config are printed to stderr before the command runs, and so is what the
    checkpoints decide because nobody set it; a command that is about the file alone does not ask.
    """

    @functools.wraps(function)
    def wrapper(config: str, overrides: tuple[str, ...], **kwargs: Any) -> Any:
        loaded = loaded_from(config, overrides, asks_checkpoints=asks_checkpoints)
        return function(loaded=loaded, **kwargs)

    return click.argument("config", type=click.Path(dir_okay=True))(set_option(wrapper))


def set_option(function: CommandFunction) -> CommandFunction:
    """Give a command ``--set KEY=VALUE`` as ``overrides``."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override one key, e.g. --set server.port=9000.",
    )(function)


def loaded_from(config: str, overrides: tuple[str, ...], *, asks_checkpoints: bool) -> Loaded:
    """The config, its warnings and notes printed."""
    from specserve.config.load import load

    loaded = load(Path(config), environ=os.environ, overrides=overrides)
    for warning in loaded.warnings:
        warn(warning)
    if asks_checkpoints:
        from specserve.app.derive import derived

        loaded, notes = derived(loaded, os.environ)
        for note in notes:
            click.echo(f"Note: {note}", err=True)
    return loaded


def format_option(function: CommandFunction) -> CommandFunction:
    """Give a command ``--format text|json`` as ``output``."""
    return click.option(
        "--format",
        "output",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Output form.",
    )(function)


def skip_option(function: CommandFunction) -> CommandFunction:
    """Give a command ``--skip CODE`` as ``skip``."""
    return click.option(
        "--skip",
        multiple=True,
        metavar="CODE",
        help="Leave out a finding by its code (docs/checks.md).",
    )(function)


def answer(body: Mapping[str, JsonValue], error: SpecserveError | None = None) -> None:
    """Print the one JSON document of a command. Where it ends in ``error``, that is part of it, and
    the command ends with the error's exit code.
    """
    import json

    document: dict[str, JsonValue] = {"ok": error is None, **body}
    if error is not None:
        document["errors"] = [problem.as_dict() for problem in error.problems]
    click.echo(json.dumps(document, indent=2))
    if error is not None:
        raise click.exceptions.Exit(error.exit_code)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also one that click cannot read.

    >>> wants_json(["plan", "--format", "json"]), wants_json(["plan", "--", "--format=json"])
    (True, False)
    """
    wanted = False
    for at, word in enumerate(arguments):
        if word == "--":
            break
        if word == "--format":
            wanted = arguments[at + 1 : at + 2] == ["json"]
        elif word.startswith("--format="):
            wanted = word == "--format=json"
    return wanted


def engine_option(function: CommandFunction) -> CommandFunction:
    """Give a command ``--engine VERSION`` as ``version``."""
    return click.option(
        "--engine",
        "version",
        metavar="VERSION",
        help="Judge for this vLLM, e.g. 0.29, instead of engine.version or the installed one.",
    )(function)


def interruptible(function: CommandFunction) -> CommandFunction:
    """Give a command that starts servers one way to end: SIGTERM (CI, systemd, Kubernetes) and
    SIGHUP act as Ctrl-C.

    A signal that was ignored before, as under ``nohup``, stays so.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        numbers = [
            n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
        ]
        previous = [(n, signal.signal(n, signal.default_int_handler)) for n in numbers]
        try:
            return function(*args, **kwargs)
        finally:
            for number, handler in previous:
                signal.signal(number, handler)

    return wrapper


def http_url(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Callback of an option that takes base URLs: refuses what no request can go to.

    A base URL of clients (``/v1``) or of a scraper (``/metrics``) is taken as the server's.
    """
    from urllib.parse import urlsplit

    if value is None or isinstance(value, tuple):
        return value and tuple(http_url(context, option, one) for one in value)
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, half an IPv6 address
        usable = False
    if not usable:
        raise click.BadParameter(f"'{value}' is no URL; must be like http://127.0.0.1:8000")
    return value.rstrip("/").removesuffix("/v1").removesuffix("/metrics")


def color() -> bool | None:
    """False with NO_COLOR (no-color.org), which click does not ask for; None: whatever the stream
    can show."""
    if os.environ.get("NO_COLOR"):
        return False
    return None


def ask(url: str, timeout: float, token: str | None = None) -> Mapping[str, Any] | str:
    """The JSON object at ``url``, whatever its HTTP status, or why there is none.

    ``token`` is what `sidecar.token_file` asks for.
    """
    import json
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            request = urllib.request.Request(url)  # noqa: S310 - http_url lets no other scheme by
            if token:
                # Not one of the headers that a redirect takes along.
                request.add_unredirected_header("Authorization", f"Bearer {token}")
            answer = opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:  # 503 carries a verdict
            if error.code == 401:
                return "it asks for its token: --token-file FILE"
            answer = error
        with answer:
            found = json.loads(answer.read(_MAX_ANSWER_BYTES))
    except OSError as error:
        cause = getattr(error, "reason", error)
        return str(getattr(cause, "strerror", None) or cause)
    except (ValueError, HTTPException, RecursionError):  # another protocol, half a body, no JSON
        return NOT_A_SIDECAR
    if isinstance(found, dict):
        return found
    return NOT_A_SIDECAR


def secret_in(file: Path, option: str) -> str:
    """The secret that a file given by an option holds. Raises ConfigError."""
    from specserve.errors import ConfigError
    from specserve.files import read_small

    try:
        return read_small(file).strip()
    except UnicodeDecodeError:
        raise ConfigError(
            "is not UTF-8 text; must hold the secret alone", where=f"{option} {file}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            where=f"{option} {file}",
            fix="name a file that you may read",
        ) from None


def follows(command: str, *, err: bool = False) -> None:
    """End with the next command to type; on stderr where stdout is a file for somebody else."""
    click.echo(f"Next: {command}", err=err)


def same_config(loaded: Loaded) -> str:
    """The CONFIG and the ``--set`` of this command, as the next one takes them; values that are
    secret are left for the user to fill in.
    """
    words = [shlex.quote(str(loaded.path))]
    secrets = loaded.secrets()
    for override in loaded.overrides:
        shown = override
        if any(secret in override for secret in secrets):
            shown = override.partition("=")[0] + "=..."
        words.append(f"--set {shlex.quote(shown)}")
    return " ".join(words)


def warn(problem: Problem) -> None:
    """Print a warning to stderr, in the shape of an error."""
    click.echo(click.style("Warning: ", fg="yellow") + str(problem), err=True)
