"""Arguments as vLLM's own parser reads them: which word is a flag, which is its value.

The flags are those of the newest vLLM with a profile. A flag that it does not have takes the word
that follows it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specserve.app.init import template
from specserve.app.init.shell import split
from specserve.config.extra_args import FLAG_ALIASES, read_flag
from specserve.engine.installed import profiles
from specserve.engine.installed.introspect import Flag

_TWO_IN_ONE = re.compile(r"--[\w.-]+\s+\S")
_ONE = ("value", "repeat", "optional")
_OPTION = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True)
class Argument:
    """One flag with its values, or (``name`` empty) words that belong to none."""

    name: str
    """vLLM's long name without dashes, as :func:`read_flag` gives it."""
    path: tuple[str, ...]
    """Keys behind dots."""
    negated: bool
    values: tuple[str, ...]
    written: str
    """The flag as it was written."""
    kind: str | None
    """``value``, ``list``, ``repeat``, ``optional``, ``switch``, ``toggle``; None: not known."""

    @property
    def dotted(self) -> str:
        """Name and path."""
        return ".".join((self.name, *self.path))


@functools.cache
def kinds() -> Mapping[str, str]:
    """Long name -> what the flag takes."""
    flags = profiles.facts(profiles.newest()).flags.values()
    return {flag.options[0].lstrip("-"): _kind(flag) for flag in flags}


def _kind(flag: Flag) -> str:
    if flag.optional_value:
        return "optional"
    return flag.kind


def is_known(word: str) -> bool:
    """Whether vLLM has a flag of this spelling."""
    return read_flag(word.partition("=")[0], None).name in kinds()


def parse(words: Sequence[str]) -> Iterator[Argument]:
    """The arguments in order.

    >>> ([(a.name, a.values) for a in parse(["m", "-tp", "2", "--no-enable-prefix-caching",
    ...  "--served-model-name", "a", "b", "--seed=-1"])])
    ... # doctest: +NORMALIZE_WHITESPACE
    [('', ('m',)), ('tensor-parallel-size', ('2',)), ('enable-prefix-caching', ()),
     ('served-model-name', ('a', 'b')), ('seed', ('-1',))]
    """
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if _TWO_IN_ONE.match(word):
            # A list entry '--port 9000' is one word, which no parser takes; two are meant.
            yield from parse(split(word))
            continue
        if not is_flag(word):
            yield Argument("", (), False, (word,), word, None)
            continue
        option, equals, given = word.partition("=")
        name, path, negated = _named(option)
        kind = kinds().get(name)
        if path:
            kind = "value"
        values: list[str] = []
        if option == "-O" and not equals:
            kind = "value"
        if re.fullmatch(r"-O=?\d", word):
            yield Argument(FLAG_ALIASES["O"], (), False, (word[-1],), word, "value")
            continue
        if equals:
            values = [given]
        if kind in ("list",) or (kind is None and not equals):
            while at < len(words) and not is_flag(words[at]):
                values.append(words[at])
                at += 1
                if kind is None:
                    break
        elif not equals and kind in _ONE and at < len(words) and not is_flag(words[at]):
            values = [words[at]]
            at = _rest_of_json(words, at + 1, values)
        yield Argument(name, path, negated, tuple(values), option, kind)


def _rest_of_json(words: Sequence[str], at: int, values: list[str]) -> int:
    """Take more words where JSON was written without quotes and fell apart at its blanks."""
    start = values[0].lstrip("'\"")
    if not start.startswith("{") or start.count("{") <= start.count("}"):
        return at
    joined = values[0]
    for end in range(at, len(words)):
        joined += f" {words[end]}"
        if joined.count("{") <= joined.count("}"):
            values[0] = joined
            return end + 1
    return at


def is_flag(word: str) -> bool:
    """Whether a word is a flag: ``-1`` is a number."""
    return (
        _OPTION.match(template.resolved(word) or "") is not None
        and " " not in word.partition("=")[0]
    )


def _named(option: str) -> tuple[str, tuple[str, ...], bool]:
    """Long name, path, negation; an abbreviation that only one flag begins with is that flag."""
    flag = read_flag(option, None)
    if flag.name in kinds():
        return flag.name, flag.path, flag.negated
    if option.startswith("--") and not flag.negated:
        longer = [name for name in kinds() if name.startswith(flag.name)]
        if len(longer) == 1:
            return longer[0], flag.path, flag.negated
    return flag.name, flag.path, flag.negated
