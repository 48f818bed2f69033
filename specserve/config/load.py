"""File, environment and flags to one Settings: lowest first, all problems at once, each with its
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from specserve.config import legacy, rules
from specserve.config.document import KeyPath, Yaml, dotted, inside, put, read, read_text
from specserve.config.harmless import hidden_texts
from specserve.config.schema import Settings
from specserve.config.sentences import known_keys, one_per_union, sentence
from specserve.config.sources import Cascade
from specserve.config.speculation import FORMER_MTP
from specserve.errors import ConfigError, Problem, nearest
from specserve.files import read_small
from specserve.log import secrets_in

MAX_SECRET_BYTES = 64 * 1024
MOST_LISTED = 10
"""Keys that a sentence lists; with more of them it names the page."""


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
        """Every secret value, for the redaction of logs; of what is passed on to vLLM also what is
        not known to be harmless.
        """
        engine, spec = self.settings.engine, self.settings.speculative_decoding
        known = (secret for _, secret in rules.secrets(self.settings))
        passed_on = {**engine.flags.values, "speculative-config": spec.extra_config}
        named = secrets_in([engine.env, engine.extra_args, spec.extra_config])
        return tuple(dict.fromkeys((*known, *named, *hidden_texts(engine.env, passed_on))))


def load(path: Path, *, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> Loaded:
    """Load a config file.

    Precedence, lowest first: defaults, file, ``SPECSERVE_*`` of ``environ`` (nested with ``__``),
    ``overrides`` (``a.b=c``). Raises ConfigError with every problem found.
    """
    return _loaded(path, Cascade(read(path, environ), environ, overrides))


def load_text(
    text: str, name: str, *, environ: Mapping[str, str], overrides: Sequence[str] = ()
) -> Loaded:
    """The same for a config that stands in no file; ``name`` is what problems are placed at."""
    return _loaded(Path(name), Cascade(read_text(text, name, environ), environ, overrides))


def _loaded(path: Path, cascade: Cascade) -> Loaded:
    problems = cascade.problems
    warnings = cascade.warnings
    settings = _validate(cascade, problems)
    if settings is None:
        raise ConfigError(_unique(problems))
    warnings += _former_names(cascade)
    settings = _read_secret_files(settings, (), cascade, problems)
    for complaint in rules.check(settings):
        problem = Problem(
            complaint.message,
            cascade.place(complaint.path),
            fix=complaint.fix,
            changes=complaint.changes,
        )
        if complaint.is_warning:
            warnings.append(problem)
        else:
            problems.append(problem)
    if problems:
        raise ConfigError(_unique(problems))
    return Loaded(path, settings, _sources(cascade), tuple(warnings), cascade.overrides)


def _former_names(cascade: Cascade) -> Iterator[Problem]:
    """A note for each value that has another name today."""
    section = cascade.values.get("speculative_decoding")
    if not isinstance(section, dict):
        return
    method = section.get("method")
    if isinstance(method, str) and method in FORMER_MTP:
        path = ("speculative_decoding", "method")
        yield Problem(
            f"'{dotted(path)}' is {method!r}, an older name of 'mtp'; it is taken as mtp",
            cascade.place(path),
            fix=f"write '{dotted(path)}: mtp'",
        )


def _validate(cascade: Cascade, problems: list[Problem]) -> Settings | None:
    """Settings, or None with the problems added.

    A text field takes what was written: revision 0123 is not 83.
    """
    settings, errors = _attempt(cascade.values)
    if settings is None and _restore_text(cascade, errors):
        settings, errors = _attempt(cascade.values)
    for loc, item, kinds in one_per_union(
        [(_clean(e, cascade.values), e) for e in errors],
    ):
        where = cascade.place(loc)
        if item["type"] == "extra_forbidden":
            problems.append(_unknown_key(loc, where))
        else:
            message, fix = sentence(loc, item, kinds)
            problems.append(Problem(message, where, fix=fix))
    for path, said in _no_numbers(cascade.values, settings.model_dump() if settings else None):
        problems.append(Problem(f"'{dotted(path)}' {said}", cascade.place(path)))
    return settings


def _no_numbers(given: Yaml, taken: Yaml, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
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
    elif isinstance(taken, int | float) and abs(taken) >= 2**63:
        yield path, "is too large; must be less than 2**63"


def _attempt(values: Mapping[str, Yaml]) -> tuple[Settings | None, list[ErrorDetails]]:
    try:
        return Settings.model_validate(values), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _restore_text(cascade: Cascade, errors: Sequence[ErrorDetails]) -> bool:
    """Give text fields the scalar as it was written; whether anything changed."""
    changed = False
    for item in errors:
        loc = _clean(item, cascade.values)
        written = cascade.written.get(loc)
        if item["type"] != "string_type" or written is None or item.get("input") is None:
            continue
        holder: Yaml = cascade.values
        for part in loc[:-1]:
            holder = inside(holder, part)
        put(holder, loc[-1], written)
        changed = True
    return changed


def _clean(error: ErrorDetails, values: Yaml) -> KeyPath:
    """pydantic's location without the names of union members, which are no keys of the file."""
    out: list[str | int] = []
    here = values
    loc = error["loc"]
    for i, part in enumerate(loc):
        absent = error["type"] == "missing" and i == len(loc) - 1
        if isinstance(here, dict) and isinstance(part, str) and (part in here or absent):
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
    near = nearest(key.replace("-", "_").lower(), choices)
    if near:
        tail = f"did you mean '{near}'?"
    elif path[:-1] == ("engine",):
        tail = "vLLM's flags that have no key here go into 'engine.extra_args'"
    elif len(choices) > MOST_LISTED:
        tail = f"docs/config.md lists the keys of '{dotted(path[:-1])}'"
    else:
        tail = f"known here: {', '.join(choices)}"
    return Problem(f"unknown key '{dotted(path)}'; {tail}", where)


def _read_secret_files(
    section: BaseModel, path: KeyPath, cascade: Cascade, problems: list[Problem]
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


def _sources(cascade: Cascade) -> dict[str, str]:
    out: dict[str, str] = {}

    def walk(value: Yaml, path: KeyPath) -> None:
        if isinstance(value, dict | list) and value:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                walk(item, (*path, key))
        else:
            out[dotted(path)] = cascade.place(path)

    walk(cascade.values, ())
    return out


def _unique(problems: Sequence[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
