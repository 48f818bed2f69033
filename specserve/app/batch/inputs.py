"""The requests of a batch, read one at a time: OpenAI's batch file, a prompt a line, or a column of
a CSV file."""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, TypeAlias

from pydantic import BaseModel, JsonValue, ValidationError

from specserve.errors import ConfigError, nearest
from specserve.units import KIB, MIB, size

MAX_LINE_BYTES = 32 * MIB
"""Of one request: pictures stand in it as base64."""
_ENDS_BYTES = 64 * KIB
"""Of an input's beginning and end, which tell it from another one."""
InputFormat: TypeAlias = Literal["openai", "prompts", "csv"]
_SUFFIXES: Mapping[str, InputFormat] = {
    ".jsonl": "openai",
    ".ndjson": "openai",
    ".json": "openai",
    ".txt": "prompts",
}
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_URL = re.compile(r"/(v1/)?[a-z][a-z0-9_]*(/[a-z0-9_]+)*", re.ASCII)
_OPENAI = re.compile(rb'\s*\{[^\n]*"(custom_id|body|method)"\s*:')
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


class BadLine(ValueError):
    """Raised for a line that is no request; says why."""


class _BatchLine(BaseModel):
    """A line of OpenAI's batch file (platform.openai.com/docs/guides/batch, read 2026-11)."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, JsonValue]


@dataclass(frozen=True)
class BatchRequest:
    """What is sent, and the name under which the answer is found."""

    custom_id: str
    path: str
    body: Mapping[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class LineShape:
    """How a line becomes a request."""

    format: InputFormat
    csv_column: str | None = None
    delimiter: str = ","
    template: str | None = None
    completions: bool = False
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    """Laid over every body."""
    model: str | None = None
    """In place of what the lines say; None leaves them."""

    @property
    def identity(self) -> str:
        """One text for each way to make requests."""
        facts = [
            self.format,
            self.csv_column,
            self.delimiter,
            self.template,
            self.completions,
            dict(self.extra),
            self.model,
        ]
        return json.dumps(facts, sort_keys=True)


@dataclass(frozen=True)
class Raw:
    """One line or row of the input, not looked into yet."""

    index: int
    """Among the requests: blank lines do not count."""
    line: int
    """Where it begins in the file, from 1."""
    text: bytes | Mapping[str, str] | BadLine
    ends_at: int
    """Bytes of the input up to its end."""


def sniff(path: Path | None, csv_column: str | None) -> InputFormat | None:
    """The form of an input by its name, or None: then its first line has to tell."""
    if csv_column is not None:
        return "csv"
    if path is None:
        return None
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        raise ConfigError(
            "a CSV file, and no column of it is named; must say which holds the prompts",
            where=str(path),
            fix="add --csv-column NAME",
        )
    return _SUFFIXES.get(suffix)


def form_of(first: bytes) -> InputFormat:
    """The form of an input by its first bytes, which may end in the middle of a line.

    >>> form_of(b'{"custom_id": "a", "method": "PO'), form_of(b"{Write} a poem")
    ('openai', 'prompts')
    """
    if _OPENAI.match(first.removeprefix(b"\xef\xbb\xbf")):
        return "openai"
    return "prompts"


def identity(path: Path | None, shape: LineShape) -> str:
    """What tells this batch from another: the input's size and both ends, and the shape."""
    if path is None:
        return shape.identity
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(_ENDS_BYTES))
        length = file.seek(0, 2)
        file.seek(max(0, length - _ENDS_BYTES))
        checksum = zlib.crc32(file.read(_ENDS_BYTES), checksum)
    return f"{length} bytes, {checksum:08x}, {shape.identity}"


# --- lines ---


def lines(file: BinaryIO, shape: LineShape) -> Iterator[Raw]:
    """Every request of the input, in its order; memory holds one at a time.

    Raises ConfigError where a CSV file lacks a column that is asked for.
    """
    if shape.format == "csv":
        return _rows(file, shape)
    return _texts(file)


def _texts(file: BinaryIO) -> Iterator[Raw]:
    index = 0
    for number, line, ends_at in _physical(file):
        if isinstance(line, bytes):
            text = line.strip()
            if not text:
                continue
            yield Raw(index, number, text, ends_at)
        else:
            yield Raw(index, number, line, ends_at)
        index += 1


def _physical(file: BinaryIO) -> Iterator[tuple[int, bytes | BadLine, int]]:
    """Number, text and end of each line; of one that is too long, that it is."""
    number = at = 0
    while True:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        number += 1
        at += len(line)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
                at += len(line)
            yield number, BadLine(f"is longer than {size(MAX_LINE_BYTES)}"), at
            continue
        yield number, line, at


class _CsvLines:
    """The lines of a CSV file as text, with the place up to which they were read."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = self.ends_at = 0
        self.problem: BadLine | None = None
        self._lines = _physical(file)

    def __iter__(self) -> Iterator[str]:
        for number, line, ends_at in self._lines:
            self.number, self.ends_at = number, ends_at
            if isinstance(line, bytes):
                yield line.decode("utf-8", "surrogateescape")
            else:
                self.problem = line
                yield "\n"


def _rows(file: BinaryIO, shape: LineShape) -> Iterator[Raw]:
    csv.field_size_limit(MAX_LINE_BYTES)
    source = _CsvLines(file)
    reader = csv.reader(iter(source), strict=True, delimiter=shape.delimiter)
    try:
        header = next(reader)
    except (StopIteration, csv.Error):
        raise ConfigError("has no first line that names its columns", where="INPUT") from None
    _require_columns(header, shape)
    index = 0
    while True:
        begins = source.number + 1
        text: Mapping[str, str] | BadLine
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            text = BadLine(f"no CSV: {error}")
        else:
            if not row and source.problem is None:
                continue
            text = _columns(header, row)
        if source.problem is not None:
            text, source.problem = source.problem, None
        yield Raw(index, begins, text, source.ends_at)
        index += 1


def _columns(header: list[str], row: list[str]) -> Mapping[str, str] | BadLine:
    if len(row) != len(header):
        return BadLine(f"has {len(row)} columns; the first line names {len(header)}")
    if any("\udc80" <= letter <= "\udcff" for cell in row for letter in cell):
        return BadLine("is not UTF-8")
    return dict(zip(header, row, strict=True))


def _require_columns(header: list[str], shape: LineShape) -> None:
    wanted = {shape.csv_column or ""} | set(_names(shape.template or ""))
    for name in sorted(wanted - set(header)):
        near = nearest(name, header)
        hint = ""
        if near is not None:
            hint = f"; did you mean '{near}'?"
        columns = ", ".join(header)[:300]
        raise ConfigError(
            f"there is no column '{name}'{hint}",
            where="INPUT",
            fix=f"name one of its columns: {columns}",
        )


def require_template(shape: LineShape) -> None:
    """Raises ConfigError for a template that takes nothing of the line, or what is not there."""
    if shape.template is None:
        return
    if shape.format == "openai":
        raise ConfigError(
            "is for prompts and CSV; the lines of an OpenAI batch file are whole requests",
            where="--template",
            fix="leave --template out",
        )
    names = list(_names(shape.template))
    if not names:
        place = shape.csv_column or "prompt"
        raise ConfigError(
            "has no place for the prompt, so that all requests would be equal",
            where="--template",
            fix=f"write {{{place}}} where it goes",
        )
    if shape.format == "prompts" and set(names) != {"prompt"}:
        raise ConfigError(
            f"names {', '.join(sorted(set(names) - {'prompt'}))}; a line of prompts has only "
            "{prompt}",
            where="--template",
            fix="write {prompt} where it goes, and {{ }} for braces",
        )


def _names(template: str) -> Iterator[str]:
    for match in _PLACE.finditer(template):
        if match[1] is not None:
            yield match[1]


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with each ``{name}`` replaced; ``{{`` and ``}}`` are braces.

    >>> fill("{{Sum up}} {text}", {"text": "a {b} c"})
    '{Sum up} a {b} c'
    """

    def replaced(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return values[match[1]]

    return _PLACE.sub(replaced, template)


# --- requests ---


def request(raw: Raw, shape: LineShape) -> BatchRequest:
    """What one line asks for. Raises BadLine."""
    if isinstance(raw.text, BadLine):
        raise raw.text
    if isinstance(raw.text, bytes):
        text = _decoded(raw.text)
        if shape.format == "openai":
            return _openai(text, shape)
        return _prompt(f"line-{raw.line}", {"prompt": text}, "prompt", shape)
    assert shape.csv_column is not None
    if not raw.text[shape.csv_column].strip():
        raise BadLine(f"column '{shape.csv_column}' is empty")
    return _prompt(f"row-{raw.index + 1}", raw.text, shape.csv_column, shape)


def custom_id(raw: Raw) -> str | None:
    """The name that a bad line has all the same; None where it has none."""
    if not isinstance(raw.text, bytes):
        return None
    try:
        found = json.loads(raw.text).get("custom_id")
    except (ValueError, AttributeError, RecursionError):
        return None
    if isinstance(found, str):
        return found
    return None


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise BadLine("is not UTF-8") from None


def _openai(text: str, shape: LineShape) -> BatchRequest:
    try:
        document = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        line = _BatchLine.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if not place:
            raise BadLine("is not a JSON object") from None
        raise BadLine(f"{place}: {first['msg'][:200]}") from None
    except RecursionError:
        raise BadLine("no JSON: nested too deeply") from None
    except ValueError as error:
        raise BadLine(f"no JSON: {str(error)[:200]}") from None
    if not _URL.fullmatch(line.url):
        raise BadLine("url: must be a path of the API, such as /v1/chat/completions")
    if line.body.get("stream"):
        raise BadLine("body.stream: a batch has no streams; must be false or absent")
    return BatchRequest(line.custom_id, line.url, _laid_over(line.body, shape))


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(word: str) -> float:
    number = float(word)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{word[:20]} is too large")
    return number


def _prompt(name: str, values: Mapping[str, str], column: str, shape: LineShape) -> BatchRequest:
    text = values[column]
    if shape.template is not None:
        text = fill(shape.template, values)
    if shape.completions:
        return BatchRequest(name, _COMPLETIONS, _laid_over({"prompt": text}, shape))
    messages: list[JsonValue] = [{"role": "user", "content": text}]
    return BatchRequest(name, _CHAT, _laid_over({"messages": messages}, shape))


def _laid_over(body: Mapping[str, JsonValue], shape: LineShape) -> Mapping[str, JsonValue]:
    whole = {**body, **shape.extra}
    if shape.model is not None:
        whole["model"] = shape.model
    return whole
