"""pydantic's errors as sentences a user can act on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pydantic_core import ErrorDetails

from specserve.config.document import KeyPath, Yaml, dotted, inside
from specserve.config.schema import Settings
from specserve.errors import nearest

_KINDS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
}
_UNION_KINDS = frozenset({"string_type", "list_type", "dict_type"})
_SECRETS = re.compile(r"notify|secret|(^|_)key$|(^|_)token$")
_BOUNDS = {
    "greater_than": "gt",
    "greater_than_equal": "ge",
    "less_than": "lt",
    "less_than_equal": "le",
}
_ALIASES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "standalone": "draft_model",
    "draft": "draft_model",
    "nextn": "mtp",
    "prompt_lookup": "ngram",
}
"""Values of other servers and of everyday speech (SGLang's STANDALONE and NEXTN) -> ours."""
_SIGNS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


def one_per_union(
    errors: Sequence[tuple[KeyPath, ErrorDetails]],
) -> Iterator[tuple[KeyPath, ErrorDetails, tuple[str, ...]]]:
    """Each error, and the kinds of value that its key takes.

    Every member of a union that refuses a value has an error: where one member takes this kind of
    value the others are left out, and where none does they are one error.
    """
    said: set[KeyPath] = set()
    for path, error in errors:
        if error["type"] not in _UNION_KINDS:
            yield path, error, ()
            continue
        here = [other for at, other in errors if at[: len(path)] == path]
        kinds = [other["type"] for other in here if other["type"] in _UNION_KINDS]
        if len(kinds) == len(here) and path not in said:
            said.add(path)
            yield path, error, tuple(kinds)


def sentence(
    path: KeyPath, error: ErrorDetails, kinds: Sequence[str] = ()
) -> tuple[str, str | None]:
    """(sentence, fix) for one error of pydantic; never shows the value of a secret.

    ``kinds``: pydantic's names of the kinds that a union takes.
    """
    key, kind, context = dotted(path), error["type"], error.get("ctx", {})
    if kind == "missing" and isinstance(path[-1], int):
        return f"'{dotted(path[:-1])}' has too few items; must be [first, last, tokens]", None
    if kind == "missing":
        parent = dotted(path[:-1])
        return (
            f"'{key}' is missing; must be set",
            f"add '{path[-1]}:' to {repr(parent) if parent else 'the file'}",
        )
    if kind in ("literal_error", "union_tag_invalid"):
        return _choice(path, error, context)
    if kind == "union_tag_not_found":
        return (
            f"'{key}' has no 'type'; must be one of alertmanager, webhook, slack",
            f"add 'type:' to '{key}'",
        )
    shown = _shown(path, error.get("input"))
    if kind in _KINDS:
        must = " or ".join(_KINDS[one] for one in kinds or (kind,))
        return f"'{key}' is {shown}; must be {must}", _example(path, kind, error.get("input"))
    if kind in _BOUNDS:
        bound = _BOUNDS[kind]
        message = f"'{key}' is {shown}; must be {_SIGNS[bound]} {context[bound]}"
    elif kind == "string_pattern_mismatch" and context.get("pattern") == "^https?://":
        message = f"'{key}' is {shown}; must be an http or https URL"
    elif kind == "string_pattern_mismatch" and path[:2] == ("engine", "env"):
        message = (
            f"{str(path[-1])!r} in 'engine.env' names no variable; must be "
            "letters, digits and underscores"
        )
    elif kind == "too_short":
        message = f"'{key}' is an empty list; must have an item, or be left out"
    elif kind == "string_too_short":
        message = f"'{key}' is empty; must be set"
    else:
        message = f"'{key}': " + str(context.get("error") or error["msg"]).removeprefix(
            "Value error, "
        )
    return message, _share(error.get("input")) if key.endswith(
        ("utilization", "ratio", "below", "above")
    ) else None


def _share(value: Yaml) -> str | None:
    """What a percentage is as a share of one; None where the value can be none.

    >>> _share(90)
    'write 0.9 for 90 %'
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 1 < value <= 100:
        return f"write {value / 100:g} for {value:g} %"
    return None


def _choice(path: KeyPath, error: ErrorDetails, context: dict[str, Yaml]) -> tuple[str, str | None]:
    expected = (
        str(context.get("expected") or context.get("expected_tags"))
        .replace("'", "")
        .replace(" or ", ", ")
    )
    choices = [c.strip() for c in expected.split(",")]
    given = error.get("input")
    is_tag = error["type"] == "union_tag_invalid"
    if is_tag and isinstance(given, dict):
        value = given.get("type")
    else:
        value = given
    key = dotted((*path, "type") if is_tag else path)
    word = str(value).lower()
    near = _ALIASES.get(word)
    if near not in choices:
        near = nearest(word, choices)
    must = f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"
    return (
        f"'{key}' is {_shown(() if is_tag else path, value)}; must be {must}",
        f"did you mean '{near}'?" if near else None,
    )


def _shown(path: KeyPath, value: Yaml) -> str:
    """A value as it may be shown: short, and never where a secret may stand."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and any(_SECRETS.search(str(part)) for part in path):
        return "a text"
    text = repr(value)
    if len(text) <= 60:
        return text
    return text[:57] + "..."


def _example(path: KeyPath, kind: str, value: Yaml) -> str | None:
    """What to write where a section was expected."""
    if kind not in ("model_type", "model_attributes_type") or not path:
        return None
    key = path[-1]
    if isinstance(key, int):
        return "write its keys after the dash, e.g. '- type: webhook'"
    if isinstance(value, str) and "path" in known_keys(path):
        return f"write '{key}: {{path: {value}}}'"
    if isinstance(value, bool) and "enabled" in known_keys(path):
        return f"write '{key}: {{enabled: {str(value).lower()}}}'"
    return f"write its keys below '{key}:', one level further in" + (
        ", or remove it" if value is None else ""
    )


def known_keys(path: KeyPath) -> list[str]:
    """The keys that the schema knows at a path, sorted; empty where any key goes."""
    node: Yaml = Settings.model_json_schema()
    definitions = inside(node, "$defs")
    for part in path:
        if isinstance(part, int):
            node = inside(node, "items")
        else:
            node = inside(inside(node, "properties"), part)
        node = _resolve(node, definitions)
    names = _properties(node)
    options = inside(node, "oneOf")
    if isinstance(options, list):
        for option in options:
            names |= _properties(_resolve(option, definitions))
    return sorted(names)


def _properties(node: Yaml) -> set[str]:
    known = inside(node, "properties")
    if isinstance(known, dict):
        return set(known)
    return set()


def _resolve(node: Yaml, definitions: Yaml) -> Yaml:
    """The definition that a schema refers to, itself or in one of its options."""
    options = [node]
    union = inside(node, "anyOf")
    if isinstance(union, list):
        options += union
    for option in options:
        reference = inside(option, "$ref")
        if isinstance(reference, str):
            return inside(definitions, reference.rsplit("/", 1)[-1])
    return node
