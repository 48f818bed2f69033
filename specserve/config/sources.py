"""The layers of the config as sources of pydantic-settings, which merges them: defaults, file,
environment, ``--set``, lowest first.

Each source reads its layer, with the place of every value, and says what is wrong with it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from specserve.config import extra_args
from specserve.config.alerting import Rules
from specserve.config.document import Document, KeyPath, Yaml, dotted, inside, put, read_value
from specserve.config.schema import Settings
from specserve.errors import Problem
from specserve.log import is_secret_name

PREFIX = "SPECSERVE_"
_ITEM = re.compile(r"\[(\d+)\]")
_NOT_OURS = re.compile(
    r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)|=\w+://)"
    r"|^SPECSERVE_(REPAIRS|CACHE|RUN|API_KEYS)="
)
"""NAME=VALUE with which Kubernetes describes a Service named ``specserve`` to every pod: they look
like ours.
"""
_SECTIONS = tuple(Settings.model_fields)
_RULES = {name.lower(): name for name in Rules.model_fields}
_EXTRA = ("engine", "extra_args")


class Merged(BaseSettings):
    """What pydantic-settings makes of the sources: mappings merged, the highest layer first.

    It has no fields of its own. The whole is validated afterwards, as :class:`Settings`, so that
    every mistake is found at once and named with its place.
    """

    model_config = SettingsConfigDict(
        extra="allow", env_prefix=PREFIX, env_nested_delimiter="__", case_sensitive=True
    )


def merged(layers: Sequence[PydanticBaseSettingsSource]) -> dict[str, Yaml]:
    """The values of all layers, highest first, merged by pydantic-settings."""

    class Layered(Merged):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(layers)

    return Layered().model_extra or {}


@dataclass(frozen=True)
class LayerEntry:
    """One value that the environment or ``--set`` gives."""

    path: list[str]
    text: str
    place: str


class FileSource(PydanticBaseSettingsSource):
    """The YAML file."""

    def __init__(self, doc: Document) -> None:
        super().__init__(Merged)
        self.doc = doc
        self.replaced: set[KeyPath] = set()
        """Where a higher layer puts something else than a mapping."""
        self.flags_above: list[extra_args.FlagPath] = []
        """vLLM's flags that a higher layer sets."""
        self.problems = [*doc.problems, *_said_twice(doc.values, doc.place)]

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Yaml, str, bool]:
        """The section of the file."""
        return self.doc.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Yaml]:
        """The file's values, but for flags that a higher layer spells differently."""
        kept = _without_mappings(self.doc.values, self.replaced)
        return _without_other_spellings(kept, self.flags_above)


class Layer:
    """The entries of one layer over what lies below it."""

    def __init__(
        self, entries: Sequence[LayerEntry], below: dict[str, Yaml], environ: Mapping[str, str]
    ) -> None:
        self.values: dict[str, Yaml] = {}
        self.places: dict[KeyPath, str] = {}
        self.written: dict[KeyPath, str] = {}
        self.replaced: set[KeyPath] = set()
        """Where something else than a mapping was put: a mapping of a lower layer ends there, also
        if a later entry sets keys below a null.
        """
        self.problems: list[Problem] = []
        self._below = below
        for entry in entries:
            self._add(entry, environ)
        self.problems += _said_twice(
            self.values, lambda path: self.place(path) or self.placeinside(path) or ""
        )

    def place(self, path: KeyPath) -> str | None:
        """Where this layer sets the value, or the longest prefix of its path that it sets."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return None

    def placeinside(self, path: KeyPath) -> str | None:
        """Where this layer first sets something inside the value, key by key."""
        for key, place in self.places.items():
            if key[: len(path)] == path:
                return place
        return None

    def flag_paths(self) -> Iterator[extra_args.FlagPath]:
        """Where this layer sets vLLM's flags; a mapping that it gives whole is one place."""
        for path in self.places:
            if path == _EXTRA:
                given = inside(inside(self.values, "engine"), "extra_args")
                if isinstance(given, dict):
                    yield from ((str(key),) for key in given)
            elif path[:2] == _EXTRA:
                yield tuple(str(part) for part in path[2:])

    def _add(self, entry: LayerEntry, environ: Mapping[str, str]) -> None:
        path, wrong = self._resolve(entry.path)
        if wrong is not None:
            fix = f"give the whole list as '{dotted(path)}'"
            self.problems.append(Problem(wrong, entry.place, fix=fix))
            return
        value, said = read_value(entry.text, path, entry.place, environ)
        self.problems += said.problems
        if value is None and not entry.text.strip() and is_secret_name(entry.path[-1]):
            value = ""  # whoever sets a secret wants one
        self.written |= said.written
        if value is not None or not said.problems:
            self._put(path, value, entry.place)

    def _resolve(self, path: Sequence[str]) -> tuple[KeyPath, str | None]:
        """The path with a number where it names an item of a list that is there, or what is wrong
        with it.
        """
        out: KeyPath = ()
        for part in path:
            here = self._at(out)
            if not isinstance(here, list):
                out = (*out, part)
                continue
            if part not in map(str, range(len(here))):
                held = {0: "nothing", 1: "item 0 alone"}.get(
                    len(here), f"items 0 to {len(here) - 1}"
                )
                return out, f"'{dotted(out)}' is a list with {held}; there is no '{part}' in it"
            out = (*out, int(part))
        return out, None

    def _at(self, path: KeyPath) -> Yaml:
        """What is there, in this layer or below it."""
        own: Yaml = self.values
        below: Yaml = self._below
        for end, part in enumerate(path, start=1):
            own = inside(own, part)
            below = inside(below, part)
            if path[:end] in self.replaced:
                below = None  # a null of this layer hides what lies below it
        if own is None:
            return below
        return own

    def _put(self, path: KeyPath, value: Yaml, place: str) -> None:
        """Set one value; a mapping merges into a mapping, and a list comes up whole from below.

        Each key of a mapping over a mapping has its own place: the others keep theirs.
        """
        if isinstance(value, dict) and isinstance(self._at(path), dict):
            for key, item in value.items():
                self._put((*path, key), item, place)
            return
        here: Yaml = self.values
        for end, part in enumerate(path[:-1], start=1):
            nested = inside(here, part)
            wants_list = isinstance(path[end], int)
            if wants_list and not isinstance(nested, list):
                nested = copy.deepcopy(self._at(path[:end]))
                put(here, part, nested)
            elif not wants_list and not isinstance(nested, dict):
                nested = {}
                put(here, part, nested)
            here = nested
        put(here, path[-1], value)
        self.places[path] = place
        if not isinstance(value, dict):
            self.replaced.add(path)


class EnvironmentSource(EnvSettingsSource):
    """``SPECSERVE_SECTION__KEY=value``."""

    def __init__(self, environ: Mapping[str, str], below: FileSource) -> None:
        self._environ = environ
        super().__init__(Merged)
        self.warnings: list[Problem] = []
        self.replaced: set[KeyPath] = set()
        """Where ``--set`` puts something else than a mapping."""
        self.flags_above: list[extra_args.FlagPath] = []
        """vLLM's flags that ``--set`` sets."""
        self.layer = Layer([*self._entries()], below.doc.values, environ)

    def _load_env_vars(self) -> Mapping[str, str]:
        """Ours of the environment that the caller gives, which is not always this process's."""
        return {k: self._environ[k] for k in sorted(self._environ) if k.startswith(PREFIX)}

    def _entries(self) -> Iterator[LayerEntry]:
        delimiter = self.env_nested_delimiter or "__"
        for name, value in self.env_vars.items():
            parts = name.removeprefix(self.env_prefix).split(delimiter)
            if len(parts) > 1 or parts[0].lower() in _SECTIONS:
                yield LayerEntry(spelled(parts), value or "", f"environment {name}")
            elif not _NOT_OURS.search(f"{name}={value}"):
                self.warnings.append(
                    Problem(
                        "is ignored; a config key has its section in front, with two underscores",
                        f"environment {name}",
                        fix="e.g. SPECSERVE_SERVER__PORT=9000",
                    )
                )

    def __call__(self) -> dict[str, Yaml]:
        """The environment's values, but for flags that ``--set`` spells differently."""
        kept = _without_mappings(self.layer.values, self.replaced)
        return _without_other_spellings(kept, self.flags_above)


class OverrideSource(PydanticBaseSettingsSource):
    """The values of ``--set a.b=c``."""

    def __init__(
        self, overrides: Sequence[str], below: dict[str, Yaml], environ: Mapping[str, str]
    ) -> None:
        super().__init__(Merged)
        self.problems: list[Problem] = []
        self.layer = Layer([*self._entries(overrides)], below, environ)

    def _entries(self, overrides: Sequence[str]) -> Iterator[LayerEntry]:
        for text in overrides:
            key, equals, value = text.partition("=")
            path = key.strip().split(".")
            if not equals or not all(path):
                problem = Problem(
                    "is not KEY=VALUE", f"--set {text}", fix="e.g. --set server.port=9000"
                )
                self.problems.append(problem)
                continue
            own = _own_name(path)
            keys = _ITEM.sub(r".\1", ".".join(path[:own])).split(".")
            rest = [part for part in [".".join(path[own:])] if part]
            yield LayerEntry([*keys, *rest], value, f"--set {key.strip()}")

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Yaml, str, bool]:
        """What is set of a section."""
        return self.layer.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Yaml]:
        """What was set."""
        return self.layer.values


class Cascade:
    """All layers, their values merged by pydantic-settings, and where each value comes from."""

    def __init__(self, doc: Document, environ: Mapping[str, str], overrides: Sequence[str]) -> None:
        file = FileSource(doc)
        environment = EnvironmentSource(environ, file)
        file.replaced |= environment.layer.replaced
        file.flags_above += environment.layer.flag_paths()
        lower = merged([environment, file])
        sets = OverrideSource(overrides, lower, environ)
        file.flags_above += sets.layer.flag_paths()
        environment.flags_above += sets.layer.flag_paths()
        file.replaced |= sets.layer.replaced
        environment.replaced |= sets.layer.replaced
        self.doc = doc
        self.overrides = tuple(overrides)
        self.values = merged([sets, environment, file])
        self.warnings = environment.warnings
        self._layers = (sets.layer, environment.layer)
        self.written = doc.written | environment.layer.written | sets.layer.written
        self.problems = [
            *file.problems,
            *environment.layer.problems,
            *sets.problems,
            *sets.layer.problems,
        ]

    def place(self, path: KeyPath) -> str:
        """Where the value at this path was set: the highest layer, in it the longest prefix."""
        # A value laid over a scalar, key by key (--set server.port.x=1), has its places further in.
        found = (
            *(layer.place(path) for layer in self._layers),
            *(layer.placeinside(path) for layer in self._layers),
        )
        return next((place for place in found if place is not None), self.doc.place(path))


def spelled(parts: Sequence[str]) -> list[str]:
    """A path from a variable's name, which is in capitals mostly: keys in lower case, the user's
    own as they are.

    >>> spelled(["ENGINE", "ENV", "A__B"]), spelled(["ALERTS", "RULES", "ENGINEDOWN", "ENABLED"])
    (['engine', 'env', 'A__B'], ['alerts', 'rules', 'EngineDown', 'enabled'])
    """
    path = [part.lower() for part in parts]
    own = _own_name(path)
    if own < len(path):
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


def _said_twice(values: dict[str, Yaml], place: Callable[[KeyPath], str]) -> Iterator[Problem]:
    """One layer sets each of vLLM's flags once, whatever the spelling."""
    given = inside(inside(values, "engine"), "extra_args")
    if isinstance(given, dict):
        for key, sentence in extra_args.said_twice(given):
            yield Problem(sentence, place((*_EXTRA, key)))


def _without_other_spellings(
    values: dict[str, Yaml], above: Sequence[extra_args.FlagPath]
) -> dict[str, Yaml]:
    """The values of a layer without the flags that a higher layer sets in another spelling."""
    engine = inside(values, "engine")
    held = inside(engine, "extra_args")
    if not isinstance(engine, dict) or not isinstance(held, dict) or not above:
        return values
    kept = extra_args.without(held, above)
    return {**values, "engine": {**engine, "extra_args": kept}}


def _without_mappings(values: dict[str, Yaml], paths: set[KeyPath]) -> dict[str, Yaml]:
    """The values of a layer without the mappings at these paths."""
    kept = copy.deepcopy(values)
    for path in paths:
        here: Yaml = kept
        for part in path[:-1]:
            here = inside(here, part)
        if isinstance(here, dict) and isinstance(inside(here, path[-1]), dict):
            del here[str(path[-1])]
    return kept
