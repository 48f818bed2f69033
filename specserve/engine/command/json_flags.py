"""Values of flags that vLLM reads as JSON, read before it does.

What each flag takes is asked of the installed version (``json_flags`` of the probe). Numbers and
switches are as lenient as pydantic is with JSON: ``"3"`` is 3 and ``"true"`` is true.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator

from pydantic import JsonValue

from specserve.config.extra_args import read_json
from specserve.engine.command.removed import FLAGS, instead_of
from specserve.engine.installed.introspect import JsonField, JsonFlag
from specserve.errors import Change, Problem, nearest

_IN_WORDS = {
    "object": "an object",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_PAIRS = re.compile(r"[\w.-]+\s*[=:]\s*[^,=]+(,\s*[\w.-]+\s*[=:]\s*[^,=]+)*")
_TRUTHS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off", "y", "n", "t", "f"})


def check(name: str, text: str, flag: JsonFlag, where: str) -> Iterator[Problem]:
    """What vLLM's reader would refuse of the value of one flag; ``where`` is its config key."""
    if flag.optional and text in ("", "None"):
        return
    if flag.text and not re.match(r"(?s)^\s*{.*}\s*$", text):
        return
    try:
        value = read_json(text, sizes=flag.fields is not None)
    except ValueError:
        meant = _meant(text)
        fix = None
        if meant is not None:
            fix = f"write {where}: {json.dumps(meant, ensure_ascii=False)}"
        must = _must(flag.kinds)
        yield Problem(f"'{name}' is {_short(text)}; must be JSON, {must}", where, fix=fix)
        return
    if flag.kinds is not None and not any(_is(kind, value) for kind in flag.kinds):
        said = f"'{name}' is {_short(text)}; must be {_must(flag.kinds)}, as JSON"
        yield Problem(said, where, fix=_wrapped(where, value, flag.kinds))
    elif isinstance(value, dict) and flag.fields is not None:
        for key, inner in value.items():
            yield from _field(name, key, inner, flag, where)


def _field(name: str, key: str, value: JsonValue, flag: JsonFlag, where: str) -> Iterator[Problem]:
    fields = flag.fields or {}
    if key not in fields:
        if flag.closed:
            gone = FLAGS.get(f"{name.removeprefix('--')}.{key}")
            if gone is not None:
                fix = instead_of(f"{where}.{key}", gone)
                yield Problem(
                    f"'{key}' of '{name}' is gone from vLLM: {gone.why}", f"{where}.{key}", fix=fix
                )
                return
            near = nearest(key, fields)
            fix = f"remove {where}.{key}"
            hint = ""
            if near is not None:
                fix = f"write {where}.{near}"
                hint = f"; did you mean '{near}'?"
            changes = () if near else (Change(f"{where}.{key}"),)
            message = f"'{name}' has no key '{key}'{hint}"
            yield Problem(message, f"{where}.{key}", fix=fix, changes=changes)
        return
    field = fields[key]
    if field.kinds is not None and not any(_is(kind, value) for kind in field.kinds):
        shown = _short(json.dumps(value, ensure_ascii=False))
        must = _must(field.kinds)
        yield Problem(f"'{key}' of '{name}' is {shown}; must be {must}", f"{where}.{key}")
    elif field.choices is not None and isinstance(value, str) and value not in field.choices:
        yield _not_a_choice(name, key, value, field, where)


def _not_a_choice(name: str, key: str, value: str, field: JsonField, where: str) -> Problem:
    choices = field.choices or ()
    near = nearest(value, choices)
    fix = None
    if near is not None:
        fix = f"write {where}.{key}: {near}"
    said = f"'{key}' of '{name}' is '{value}'; must be one of {', '.join(choices)}"
    return Problem(said, f"{where}.{key}", fix=fix)


def _is(kind: str, value: JsonValue) -> bool:
    """Whether pydantic takes a value of JSON for this type.

    >>> _is("integer", "3"), _is("integer", 3.5), _is("string", 3), _is("boolean", "yes")
    (True, False, False, True)
    """
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "null":
            return value is None
        case "boolean":
            return str(value).lower() in _TRUTHS
        case "integer" | "number":
            return _is_number(value, whole=kind == "integer")
        case _:
            return True


def _is_number(value: JsonValue, *, whole: bool) -> bool:
    if isinstance(value, dict | list) or value is None:
        return False
    try:
        number = float(value)
    except ValueError:
        return False
    return not whole or number.is_integer()


def _must(kinds: tuple[str, ...] | None) -> str:
    if kinds is None:
        return "an object or a list"
    return " or ".join(_IN_WORDS.get(kind, kind) for kind in sorted(kinds, key="null".__eq__))


def _short(text: str) -> str:
    """A value as it may be shown."""
    if len(text) > 60:
        text = text[:57] + "..."
    return f"'{text}'"


def _meant(text: str) -> JsonValue:
    """What a text that is not JSON was meant for; None where that is not plain.

    >>> _meant("image=0,video=0"), _meant("{'a': True}"), _meant("{a: 1}")
    ({'image': 0, 'video': 0}, {'a': True}, None)
    """
    if _PAIRS.fullmatch(text):
        pairs = (re.split(r"\s*[=:]\s*", pair.strip(), maxsplit=1) for pair in text.split(","))
        return {key: _scalar(value) for key, value in pairs}
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text)
        if isinstance(value, dict | list):
            return read_json(json.dumps(value))
    return None


def _scalar(text: str) -> JsonValue:
    with contextlib.suppress(ValueError):
        return read_json(text)
    return text


def _wrapped(where: str, value: JsonValue, kinds: tuple[str, ...]) -> str | None:
    """A remedy where a list of one was meant."""
    if kinds == ("array",) and isinstance(value, str | int | float):
        return f"write {where}: [{json.dumps(value, ensure_ascii=False)}]"
    return None
