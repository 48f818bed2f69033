"""The errors a user can meet. This file is the table of exit codes.

Text of an error, everywhere: ``<where>: <what is so>; <what must be so>``, then aligned facts, then
``Fix:`` with something to type. Only ``cli.py`` prints it and exits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue


class ExitCode(IntEnum):
    """What the process returns to its caller."""

    OK = 0
    BUG = 1
    """A bug of ours."""
    CONFIG = 2
    """The configuration, or the command line, is wrong."""
    PREFLIGHT = 3
    """Preflight refused: pair, memory or engine support."""
    ENGINE_START = 4
    """The engine failed before it was ready."""
    ENGINE_LOST = 5
    """The engine was lost after it had been ready."""
    UNSOUND = 6
    """A measurement is not sound or a verification failed, so there is no go."""
    INTERRUPTED = 130
    NOT_READ = 141
    """The reader of our output closed the pipe early, as in `... | head`: what SIGPIPE gives."""


@dataclass(frozen=True)
class Change:
    """One edit of the config file that a remedy proposes.

    >>> str(Change("engine.max_model_len", 4096)), str(Change("engine.seed"))
    ('set engine.max_model_len: 4096', 'remove engine.seed')
    >>> str(Change("engine.env.VLLM_USE_V2_MODEL_RUNNER", "0"))
    'set engine.env.VLLM_USE_V2_MODEL_RUNNER: "0"'
    """

    key: str
    """Dotted; what follows ``engine.extra_args.`` and ``extra_config.`` is as the file has it."""
    value: JsonValue = None
    """None takes the key out of the file."""

    def __str__(self) -> str:
        if self.value is None:
            return f"remove {self.key}"
        return f"set {self.key}: {_scalar(self.value)}"


def _scalar(value: JsonValue) -> str:
    """A value as YAML takes it on one line: text bare where it stays text."""
    if isinstance(value, str) and value[:1].isalpha() and value not in ("true", "false", "null"):
        return value
    return json.dumps(value)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, as a sentence, with its place and its remedy."""

    message: str
    where: str | None = None
    """File and line, URL, or a name; None when the sentence needs no place."""
    facts: tuple[tuple[str, ...], ...] = ()
    """Rows of aligned columns shown under the sentence."""
    fix: str | None = None
    """Something to type or to change."""
    code: str | None = None
    """Of the finding that it was (docs/checks.md); None for what has no code."""
    changes: tuple[Change, ...] = ()
    """The edits of the config file that ``fix`` speaks of; empty where it is no such edit, or
    leaves the value to the reader."""

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form; ``code`` and ``facts`` only where there are any."""
        body: dict[str, JsonValue] = {}
        if self.code is not None:
            body["code"] = self.code
        body |= {"where": self.where, "problem": self.message, "fix": self.fix}
        if self.facts:
            body["facts"] = [list(row) for row in self.facts]
        return body

    def __str__(self) -> str:
        if self.where:
            head = f"{self.where}: {self.message}"
        else:
            head = self.message
        return "\n".join([head, *_aligned(self.facts), *([f"Fix: {self.fix}"] if self.fix else [])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as indented lines whose columns line up."""
    if not rows:
        return []
    widths = [max(len(r[i]) for r in rows if len(r) > i) for i in range(max(len(r) for r in rows))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a slip of the fingers makes of ``word``; None when none is that near.

    >>> nearest("tensor_parallel_sise", ["tensor_parallel_size", "pipeline_parallel_size"])
    'tensor_parallel_size'
    >>> nearest("guided-decoding-backend", ["kda-decode-backend"]) is None
    True
    """
    allowed = 1 + (len(word) > 5) + (len(word) > 15)
    near = [(_edits(word.lower(), other.lower(), allowed), other) for other in known]
    least = min(near, default=(allowed + 1, ""))
    if least[0] <= allowed:
        return least[1]
    return None


def _edits(one: str, other: str, most: int) -> int:
    """Letters to insert, delete, replace or swap with the next; any number above ``most`` when
    there are more.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        row = [i + 1]
        for j, theirs in enumerate(other):
            least = min(last[j] + (letter != theirs), last[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and one[i - 1] == theirs:
                least = min(least, before[j - 1] + 1)
            row.append(least)
        if min(row) > most:
            return most + 1
        before, last = last, row
    return last[-1]


class SpecserveError(Exception):
    """Base of every error that a user is meant to read. Carries all problems at once."""

    exit_code = ExitCode.BUG

    def __init__(
        self,
        message: str | Sequence[Problem],
        *,
        where: str | None = None,
        facts: Sequence[Sequence[str]] = (),
        fix: str | None = None,
    ) -> None:
        if isinstance(message, str):
            self.problems: list[Problem] = [
                Problem(message, where, tuple(tuple(r) for r in facts), fix)
            ]
        else:
            self.problems = list(message)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)


class ConfigError(SpecserveError):
    """Raised when the file, the environment or a flag cannot become Settings."""

    exit_code = ExitCode.CONFIG


class PreflightRefused(SpecserveError):
    """Raised when pair, memory or engine support say that this cannot work."""

    exit_code = ExitCode.PREFLIGHT


class EngineStartError(SpecserveError):
    """Raised when the engine died, hung or misbehaved before it was ready."""

    exit_code = ExitCode.ENGINE_START


class EngineLost(SpecserveError):
    """Raised when an engine that had been ready is gone."""

    exit_code = ExitCode.ENGINE_LOST


class Unsound(SpecserveError):
    """Raised when what was measured does not support a verdict, or says that the server is not
    fit."""

    exit_code = ExitCode.UNSOUND


class Interrupted(SpecserveError):
    """Raised when the user stopped the program before it had finished."""

    exit_code = ExitCode.INTERRUPTED
