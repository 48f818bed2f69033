"""A YAML document as plain values, with the line of every key: what error messages need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from specserve.errors import ConfigError, Problem
from specserve.files import read_bytes

KeyPath = tuple[str | int, ...]
Yaml: TypeAlias = "bool | int | float | str | list[Yaml] | dict[str, Yaml] | None"
"""A value as YAML gives it, dates and times left as text."""

MAX_BYTES = 1024 * 1024
MAX_VALUES = 50_000
"""Values after aliases are expanded: a few lines of nested aliases can stand for billions."""
MAX_CHARACTERS = 4 * MAX_BYTES
"""Characters of all values after aliases are expanded."""
MAX_NUMBER = 1000
"""Characters of a number: the time to read one grows with the square of its length."""
MAX_DEPTH = 50

_TEXT = tuple("&*!%@`|>#")
"""What begins with one of these means something else in YAML, or nothing; as a value on its own it
is a text.
"""
_TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp")
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a character beyond the basic plane: YAML can write it, and nothing can encode it."""
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass
class Document:
    """What a YAML file says, where it says it, and what is wrong with it."""

    name: str
    values: dict[str, Yaml] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Key path -> 1-based line of the key."""
    written: dict[KeyPath, str] = field(default_factory=dict)
    """Key path -> a scalar as it was written, before YAML gave it a type (``0123`` is not 83)."""
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """``file:line`` of the key, or of the nearest enclosing key that stands in the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
        return self.name


def dotted(path: KeyPath) -> str:
    """A key path as people write it.

    >>> dotted(("alerts", "notify", 0, "url"))
    'alerts.notify[0].url'
    """
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else (f".{part}" if out else part)
    return out


def inside(values: Yaml, key: str | int) -> Yaml:
    """What a mapping or a list holds at a key; None where it has none."""
    if isinstance(values, list) and isinstance(key, int) and key < len(values):
        return values[key]
    if isinstance(values, dict) and isinstance(key, str):
        return values.get(key)
    return None


def put(values: Yaml, key: str | int, value: Yaml) -> None:
    """Set what a mapping or a list holds at a key."""
    if isinstance(values, dict):
        values[str(key)] = value
    elif isinstance(values, list) and isinstance(key, int):
        values[key] = value


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """``${VAR}`` and ``${VAR:-default}`` replaced, ``$$`` as ``$``; with the names that are not
    set.

    >>> expand("/data/${M}/${R:-main}$$", {"M": "qwen"})
    ('/data/qwen/main$', [])
    """
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if name is None:
            return "$"
        if name in environ:
            return environ[name]
        if default is None:
            unset.append(name)
            return match.group(0)
        return default

    return _VARIABLE.sub(value, text), unset


def read(path: Path, environ: Mapping[str, str]) -> Document:
    """Read and walk a YAML file.

    Raises ConfigError when there is nothing to walk (no file, not YAML); everything else is
    collected in ``problems``.
    """
    doc = Document(str(path))
    _Walk(doc, environ).top(_compose(_text(path), doc.name))
    return doc


def read_text(text: str, name: str, environ: Mapping[str, str]) -> Document:
    """The same for a text that stands in no file; ``name`` is what places are told with."""
    doc = Document(name)
    _Walk(doc, environ).top(_compose(text, name))
    return doc


def read_value(
    text: str, path: KeyPath, place: str, environ: Mapping[str, str]
) -> tuple[Yaml, Document]:
    """One value that stands alone, as in ``--set KEY=VALUE``: YAML, variables replaced as in a
    file.

    A plain text is taken whole, and so is one that YAML cannot read (``a: b: c``); quotes around it
    are YAML's. The document has the problems, and what was written at each path.
    """
    doc, bare = Document(place), text.strip()
    node: yaml.Node | None = yaml.ScalarNode("tag:yaml.org,2002:str", bare)
    if not bare.startswith(_TEXT):
        try:
            node = yaml.compose(bare, Loader=_Loader)
        except (yaml.YAMLError, RecursionError):
            if bare.startswith(("{", "[", "'", '"')):
                doc.problems.append(
                    Problem("has a value that is not valid YAML", place, fix="quote the value")
                )
                return None, doc
    is_quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
    if isinstance(node, yaml.ScalarNode) and node.tag in _TEXTS and not is_quoted:
        node.value = bare  # with what YAML takes for a comment
    if node is None:
        value = None
    else:
        value = _Walk(doc, environ, place).value(node, path)
    if is_quoted:
        doc.written[path] = str(value)
    else:
        doc.written[path] = expand(bare, environ)[0]
    return value, doc


class _Loader(yaml.SafeLoader):
    """Gives up on a text with more nodes than a config can have, before it has read them all."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise yaml.MarkedYAMLError(
                problem="more values than a config file has", problem_mark=self.get_mark()
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _text(path: Path) -> str:
    name = str(path)
    try:
        raw = _bytes(path)
    except FileNotFoundError:
        raise ConfigError(
            "no such file", where=name, fix="give the path of a config file"
        ) from None
    except IsADirectoryError:
        raise ConfigError("is a folder; must be a YAML file", where=name) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=name) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES} bytes; must be a config file", where=name)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8 text; must be UTF-8", where=f"{name}:{line}") from None


def _bytes(path: Path) -> bytes:
    """Raises OSError, also for a device or a pipe, unless it is one that the shell hands over."""
    # `specserve check <(make-config)` and /dev/stdin are pipes on purpose.
    if re.match(r"/dev/(stdin$|fd/)|/proc/self/fd/", str(path)):
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    return read_bytes(path, MAX_BYTES + 1)


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"character {error.character!r} is not allowed in YAML", where=f"{name}:{line}"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        if "\\t" in what:
            hint = "indent with spaces, not tabs"
        else:
            hint = "check indentation, colons and quotes near this line"
        raise ConfigError(
            f"not valid YAML: {what}", where=f"{name}:{mark.line + 1}" if mark else name, fix=hint
        ) from None
    except RecursionError:
        raise ConfigError("is nested too deeply to read", where=name) from None


class _Walk:
    """One pass over the nodes: values, lines, and problems."""

    def __init__(self, doc: Document, environ: Mapping[str, str], place: str | None = None) -> None:
        self.doc = doc
        self.environ = environ
        self.fixed_place = place
        self.count = 0
        self.characters = 0
        self.scalars = yaml.SafeLoader("")

    def top(self, node: yaml.Node | None) -> None:
        if node is None:
            raise ConfigError(
                "is empty; must name at least models.target_model.path",
                where=self.doc.name,
                fix="start from configs/quickstart.yaml",
            )
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                (
                    "holds no sections; must be a mapping such as 'models: {target_model: {path: "
                    "...}}'"
                ),
                where=f"{self.doc.name}:{node.start_mark.line + 1}",
            )
        self.doc.values = self.mapping(node, ())

    def problem(self, node: yaml.Node, message: str, fix: str | None = None) -> None:
        place = self.fixed_place or f"{self.doc.name}:{node.start_mark.line + 1}"
        self.doc.problems.append(Problem(message, place, fix=fix))

    def value(self, node: yaml.Node, path: KeyPath) -> Yaml:
        self.count += 1
        if isinstance(node, yaml.ScalarNode):
            self.characters += len(node.value)
        is_too_much = self.count > MAX_VALUES or self.characters > MAX_CHARACTERS
        if is_too_much or len(path) > MAX_DEPTH:
            raise ConfigError(
                "expands to too many or too deeply nested values; must be a config file",
                where=self.doc.place(path),
            )
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self.doc.lines[(*path, i)] = item.start_mark.line + 1
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Yaml]:
        out: dict[str, Yaml] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if key is None:
                continue
            here = (*path, key)
            if key in out:
                self.problem(
                    key_node,
                    f"key '{dotted(here)}' is given twice; first on line {self.doc.lines[here]}",
                )
                continue
            self.doc.lines[here] = key_node.start_mark.line + 1
            out[key] = self.value(value_node, here)
        return out

    def key(self, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self.problem(node, "a key is a list or a mapping; keys must be words")
            return None
        if node.tag == "tag:yaml.org,2002:merge":
            self.problem(node, "merge keys ('<<') are not supported; repeat the keys")
            return None
        if _HALF.search(node.value):
            self.problem(node, "a key has half a character (a surrogate)")
            return None
        return str(node.value)

    def scalar(self, node: yaml.Node, path: KeyPath) -> Yaml:
        text = str(node.value)
        if node.tag in _TEXTS:
            expanded, unset = expand(text, self.environ)
            for name in unset:
                self.problem(
                    node,
                    f"'{dotted(path)}' uses ${{{name}}}, which is not set in the environment",
                    fix=f"export {name}=..., or write ${{{name}:-default}}",
                )
            if "\0" in expanded:
                self.problem(node, f"'{dotted(path)}' has a NUL character; must have none")
            if _HALF.search(expanded):
                self.problem(node, f"'{dotted(path)}' has half a character (a surrogate)")
                return _HALF.sub("?", expanded)
            return expanded
        if node.tag.removeprefix("tag:yaml.org,2002:") not in ("int", "float", "bool", "null"):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.problem(node, f"'{dotted(path)}' has the YAML tag '{tag}'; must be a plain value")
            return None
        self.doc.written[path] = text
        if len(text) > MAX_NUMBER:
            self.problem(
                node, f"'{dotted(path)}' is a number of {len(text)} characters; quote a text"
            )
            return None
        try:
            value: Yaml = self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError, IndexError, KeyError):
            self.problem(
                node,
                (
                    f"'{dotted(path)}' is {text!r}, which YAML cannot read as "
                    f"{node.tag.rsplit(':', 1)[-1]}"
                ),
            )
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self.problem(
                node,
                f"'{dotted(path)}' is {text}; must be a finite number",
                f"quote it where '{text}' is a text",
            )
            return None
        return value
