"""File, environment and flags to one Settings: lowest first, all problems at once, each with its
place.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from specserve.config import extra_args, legacy, rules
from specserve.config.alerting import Rules
from specserve.config.document import Document, KeyPath, dotted, read, read_value
from specserve.config.schema import Settings
from specserve.config.sentences import known_keys, sentence
from specserve.errors import ConfigError, Problem
from specserve.files import read_small
from specserve.log import is_secret_name, secrets_in

PREFIX = "SPECSERVE_"
MAX_SECRET_BYTES = 64 * 1024
MOST_LISTED = 10
"""Keys that a sentence lists; with more of them it names the page."""
_ITEM = re.compile(r"\[(\d+)\]")
_NOT_OURS = re.compile(
    r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)|=\w+://)|^SPECSERVE_(REPAIRS|CACHE)="
)
"""NAME=VALUE with which Kubernetes describes a Service named ``specserve`` to every pod: they look
like ours.
"""

_SECTIONS = tuple(Settings.model_fields)
_RULES = {name.lower(): name for name in Rules.model_fields}


@dataclass(frozen=True)
class Loaded:
    """A configuration that is valid, and where each value came from."""

    path: Path
    settings: Settings
    sources: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> ``file:line``, ``environment NAME`` or ``--set``; a key that nobody set is
    missing.
    """
    warnings: tuple[Problem, ...] = ()
    overrides: tuple[str, ...] = ()
    """The ``--set`` values that it was loaded with."""

    def secrets(self) -> tuple[str, ...]:
        """Every secret value, for the redaction of logs; of what is passed on to vLLM what its
        names say is one.
        """
        engine, spec = self.settings.engine, self.settings.speculative_decoding
        known = (secret for _, secret in rules.secrets(self.settings))
        return (*known, *secrets_in([engine.env, engine.extra_args, spec.extra_config]))


@dataclass
class _Cascade:
    """Values merged so far, with the place of each leaf."""

    doc: Document
    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def resolve(self, path: Sequence[str]) -> tuple[KeyPath, str | None]:
        """The path with a number where it names an item of a list that is there, or what is wrong
        with it.
        """
        here: Any = self.values
        out: KeyPath = ()
        for part in path:
            if isinstance(here, list) and part not in map(str, range(len(here))):
                held = {0: "nothing", 1: "item 0 alone"}.get(
                    len(here), f"items 0 to {len(here) - 1}"
                )
                return out, f"'{dotted(out)}' is a list with {held}; there is no '{part}' in it"
            out = (*out, int(part) if isinstance(here, list) else part)
            here = _inside(here, out[-1])
        return out, None

    def put(self, path: KeyPath, value: Any, place: str) -> None:
        """Set one value over what is there; a mapping merges into a mapping."""
        here: Any = self.values
        for part, following in pairwise(path):
            nested = _inside(here, part)
            if not isinstance(nested, list if isinstance(following, int) else dict):
                nested = here[part] = {}
            here = nested
        if isinstance(value, dict) and isinstance(_inside(here, path[-1]), dict):
            for key, item in value.items():
                self.put((*path, key), item, place)
            return
        here[path[-1]] = value
        self.places[path] = place

    def place(self, path: KeyPath) -> str:
        """Where the value at this path was set: the longest known prefix wins."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        # A value laid over a scalar, key by key (--set server.port.x=1), has its places further in.
        inside = (place for key, place in self.places.items() if key[: len(path)] == path)
        return next(inside, None) or self.doc.place(path)


def load(path: Path, *, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> Loaded:
    """Load a config file.

    Precedence, lowest first: defaults, file, ``SPECSERVE_*`` of ``environ`` (nested with ``__``),
    ``overrides`` (``a.b=c``). Raises ConfigError with every problem found.
    """
    doc = read(path, environ)
    cascade = _Cascade(doc, doc.values)
    problems = list(doc.problems)
    warnings: list[Problem] = []
    problems += _said_twice(_inside(_inside(doc.values, "engine"), "extra_args"), cascade.place)
    layers = ([*_from_environment(environ, warnings)], [*_from_overrides(overrides, problems)])
    for entry in itertools.chain(*layers):
        key_path, wrong = cascade.resolve(entry.path)
        if wrong is not None:
            problems.append(
                Problem(wrong, entry.place, fix=f"give the whole list as '{dotted(key_path)}'")
            )
            continue
        value, said = read_value(entry.text, key_path, entry.place, environ)
        problems += said.problems
        if value is None and not entry.text.strip() and is_secret_name(entry.path[-1]):
            value = ""  # whoever sets a secret wants one
        cascade.doc.written |= said.written
        if value is not None or not said.problems:
            _drop_other_spellings(cascade, key_path, value)
            cascade.put(key_path, value, entry.place)
    for layer in layers:
        problems += _said_twice_by(layer)
    settings = _validate(cascade, problems)
    if settings is None:
        raise ConfigError(_unique(problems))
    settings = _read_secret_files(settings, (), cascade, problems)
    for complaint in rules.check(settings):
        problem = Problem(complaint.message, cascade.place(complaint.path), fix=complaint.fix)
        (warnings if complaint.is_warning else problems).append(problem)
    if problems:
        raise ConfigError(_unique(problems))
    return Loaded(path, settings, _sources(cascade), tuple(warnings), tuple(overrides))


_EXTRA = ("engine", "extra_args")


def _said_twice(layer: Any, place: Callable[[KeyPath], str]) -> Iterator[Problem]:
    """One layer sets each of vLLM's flags once, whatever the spelling."""
    if isinstance(layer, dict):
        for key, said in extra_args.said_twice(layer):
            yield Problem(said, place((*_EXTRA, key)))


def _said_twice_by(layer: Sequence[_Entry]) -> Iterator[Problem]:
    """The same of the environment, and of the ``--set`` values."""
    entries = {
        ".".join(entry.path[2:]): entry
        for entry in layer
        if tuple(entry.path[:2]) == _EXTRA and len(entry.path) > 2
    }
    for key, said in extra_args.said_twice(dict.fromkeys(entries)):
        yield Problem(said, entries[key].place)


def _drop_other_spellings(cascade: _Cascade, path: KeyPath, value: Any) -> None:
    """A later layer overrides an earlier one also where it spells a flag otherwise."""
    if path[:2] != _EXTRA:
        return
    held = _inside(_inside(cascade.values, "engine"), "extra_args")
    if not isinstance(held, dict):
        return
    if len(path) > 2:
        later = [[str(part) for part in path[2:]]]
    elif isinstance(value, dict):
        later = [[str(key)] for key in value]
    else:
        later = []
    for parts in later:
        for key in list(extra_args.overridden(list(held), parts)):
            del held[key]


@dataclass(frozen=True)
class _Entry:
    path: list[str]
    text: str
    place: str


def _from_environment(environ: Mapping[str, str], warnings: list[Problem]) -> Iterator[_Entry]:
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        parts = name[len(PREFIX) :].split("__")
        if len(parts) > 1 or parts[0].lower() in _SECTIONS:
            yield _Entry(_spelled(parts), environ[name], f"environment {name}")
        elif not _NOT_OURS.search(f"{name}={environ[name]}"):
            warnings.append(
                Problem(
                    "is ignored; a config key has its section in front, with two underscores",
                    f"environment {name}",
                    fix="e.g. SPECSERVE_SERVER__PORT=9000",
                )
            )


def _spelled(parts: Sequence[str]) -> list[str]:
    """A path from a variable's name, which is in capitals mostly: keys in lower case, the user's
    own as they are.

    >>> _spelled(["ENGINE", "ENV", "A__B"]), _spelled(["ALERTS", "RULES", "ENGINEDOWN", "ENABLED"])
    (['engine', 'env', 'A__B'], ['alerts', 'rules', 'EngineDown', 'enabled'])
    """
    path = [part.lower() for part in parts]
    if (own := _own_name(path)) < len(path):
        return [*path[:own], "__".join(parts[own:])]
    if path[:2] == ["alerts", "rules"]:
        path[2:3] = [_RULES.get(part, part) for part in path[2:3]]
    return path


def _own_name(path: Sequence[str]) -> int:
    """How many parts of a path stand before a name of the user's that may hold any character."""
    if list(path[:2]) == ["engine", "env"]:
        free = 2
    elif path[0] == "models" and path[2:3] == ["sha256"]:
        free = 3
    else:
        free = 99
    return min(free, len(path))


def _from_overrides(overrides: Sequence[str], problems: list[Problem]) -> Iterator[_Entry]:
    for text in overrides:
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            problems.append(
                Problem("is not KEY=VALUE", f"--set {text}", fix="e.g. --set server.port=9000")
            )
            continue
        own = _own_name(path)
        keys = _ITEM.sub(r".\1", ".".join(path[:own])).split(".")
        yield _Entry([*keys, *filter(None, [".".join(path[own:])])], value, f"--set {key.strip()}")


def _validate(cascade: _Cascade, problems: list[Problem]) -> Settings | None:
    """Settings, or None with the problems added.

    A text field takes what was written: revision 0123 is not 83.
    """
    settings, errors = _attempt(cascade.values)
    if settings is None and _restore_text(cascade, errors):
        settings, errors = _attempt(cascade.values)
    for item in errors:
        loc = _clean(item["loc"], cascade.values)
        where = cascade.place(loc)
        if item["type"] == "extra_forbidden":
            problems.append(_unknown_key(loc, where))
        else:
            message, fix = sentence(loc, item)
            problems.append(Problem(message, where, fix=fix))
    for path, said in _no_numbers(cascade.values, settings.model_dump() if settings else None):
        problems.append(Problem(f"'{dotted(path)}' {said}", cascade.place(path)))
    return settings


def _no_numbers(given: Any, taken: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Where pydantic took ``true`` for 1, and numbers that no machine counts in: arithmetic with
    floats overflows.
    """
    if isinstance(given, dict) and isinstance(taken, dict):
        for key, value in given.items():
            yield from _no_numbers(value, taken.get(key), (*path, key))
    elif isinstance(given, list) and isinstance(taken, list | tuple):
        for i, (value, result) in enumerate(zip(given, taken, strict=False)):
            yield from _no_numbers(value, result, (*path, i))
    elif isinstance(given, bool) and type(taken) in (int, float):
        yield path, "is true or false; must be a number"
    elif type(taken) in (int, float) and abs(taken) >= 2**63:
        yield path, "is too large; must be less than 2**63"


def _attempt(values: Mapping[str, Any]) -> tuple[Settings | None, list[ErrorDetails]]:
    try:
        return Settings.model_validate(values), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _restore_text(cascade: _Cascade, errors: Sequence[ErrorDetails]) -> bool:
    """Give text fields the scalar as it was written; whether anything changed."""
    changed = False
    for item in errors:
        loc = _clean(item["loc"], cascade.values)
        written = cascade.doc.written.get(loc)
        if item["type"] != "string_type" or written is None or item.get("input") is None:
            continue
        holder: Any = cascade.values
        for part in loc[:-1]:
            holder = holder[part]
        holder[loc[-1]] = written
        changed = True
    return changed


def _clean(loc: Sequence[str | int], values: Any) -> KeyPath:
    """pydantic's location without the names of union members, which are no keys of the file."""
    out: list[str | int] = []
    here = values
    for i, part in enumerate(loc):
        if isinstance(here, dict) and (part in here or i == len(loc) - 1):
            out.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            out.append(part)
            here = here[part]
        elif here is None or not isinstance(here, dict | list):
            break
    return tuple(out)


def _unknown_key(path: KeyPath, where: str) -> Problem:
    key = str(path[-1])
    advice = legacy.advice(path)
    if advice is not None:
        return Problem(f"'{dotted(path)}' is not a key here; {advice}", where)
    choices = known_keys(path[:-1])
    near = difflib.get_close_matches(key.replace("-", "_").lower(), choices, n=1, cutoff=0.6)
    if near:
        tail = f"did you mean '{near[0]}'?"
    elif path[:-1] == ("engine",):
        tail = "vLLM's flags that have no key here go into 'engine.extra_args'"
    elif len(choices) > MOST_LISTED:
        tail = f"docs/config.md lists the keys of '{dotted(path[:-1])}'"
    else:
        tail = f"known here: {', '.join(choices)}"
    return Problem(f"unknown key '{dotted(path)}'; {tail}", where)


def _read_secret_files(
    section: BaseModel, path: KeyPath, cascade: _Cascade, problems: list[Problem]
) -> Any:
    """The section with every ``X_file`` read into its ``X``."""
    update: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        here = (*path, name)
        if isinstance(value, BaseModel):
            update[name] = _read_secret_files(value, here, cascade, problems)
        elif isinstance(value, list) and any(isinstance(v, BaseModel) for v in value):
            update[name] = [
                _read_secret_files(v, (*here, i), cascade, problems) for i, v in enumerate(value)
            ]
        elif (
            name.endswith("_file") and name[:-5] in type(section).model_fields and value is not None
        ):
            secret = _secret(
                value, getattr(section, name[:-5]), here, cascade.place(here), problems
            )
            if secret is not None:
                update[name[:-5]] = secret
    if update:
        return section.model_copy(update=update)
    return section


def _secret(
    file: str, inline: SecretStr | None, path: KeyPath, where: str, problems: list[Problem]
) -> SecretStr | None:
    key = dotted(path)
    if inline is not None:
        problems.append(Problem(f"both '{key[:-5]}' and '{key}' are set; keep one", where))
        return None
    try:
        text = read_small(Path(file), limit=MAX_SECRET_BYTES).strip()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            reason = error.strerror
        else:
            reason = "it is not UTF-8 text"
        problems.append(Problem(f"'{key}' names {file}, which cannot be read: {reason}", where))
        return None
    if not text:
        problems.append(
            Problem(f"'{key}' names {file}, which is empty; must hold the secret", where)
        )
        return None
    return SecretStr(text)


def _sources(cascade: _Cascade) -> dict[str, str]:
    out: dict[str, str] = {}

    def walk(value: Any, path: KeyPath) -> None:
        if isinstance(value, dict | list) and value:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                walk(item, (*path, key))
        else:
            out[dotted(path)] = cascade.place(path)

    walk(cascade.values, ())
    return out


def _inside(values: Any, key: str | int) -> Any:
    """What a mapping or a list holds at a key; None where it has none."""
    if isinstance(values, list):
        if isinstance(key, int):
            return values[key]
        return None
    if isinstance(values, dict):
        return values.get(key)
    return None


def _unique(problems: Sequence[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
