"""A sheet as a commented config file."""

from __future__ import annotations

import json
import re
import textwrap

import yaml
from pydantic import BaseModel, JsonValue

from specserve.app.init.sheet import Sheet
from specserve.config.schema import Settings

MARK = "Written by specserve init"
_WIDTH = 98
_PLAIN = re.compile(r"[A-Za-z/][\w./+-]*")


def render(sheet: Sheet, source: str) -> str:
    """The file, keys in the order of the schema, each with its reason."""
    head = f"{MARK} from {source}. Next: specserve check THIS-FILE"
    out = [*_comment(head)]
    for title, notes in (
        ("Not carried over:", sheet.left),
        ("Differs, or to know:", sheet.said),
    ):
        if notes:
            out += ["#", f"# {title}"]
            for note in notes:
                out += _comment(note, first="# - ", later="#   ")
    sections = dict.fromkeys(key.split(".")[0] for key in sheet.values)
    for section in Settings.model_fields:
        if section in sections:
            out += _section(section, sheet)
    return "\n".join(out) + "\n"


def _comment(text: str, *, first: str = "# ", later: str = "# ") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _section(section: str, sheet: Sheet) -> list[str]:
    out = [f"{section}:"]
    inner: dict[str, list[str]] = {}
    for key in _ordered(section, sheet):
        parts = key.split(".")[1:]
        if len(parts) == 1:
            out += _entry(key, parts[0], sheet, 1)
        else:
            inner.setdefault(parts[0], []).append(key)
    for name, keys in inner.items():
        out.append(f"  {name}:")
        for key in keys:
            out += _entry(key, key.split(".")[2], sheet, 2)
    return out


def _ordered(section: str, sheet: Sheet) -> list[str]:
    order = list(_described(Settings, ""))
    keys = [key for key in sheet.values if key.split(".")[0] == section]
    return sorted(keys, key=order.index)


def _described(model: type[BaseModel], prefix: str) -> dict[str, str]:
    """Dotted key -> its description, in the order of the schema."""
    found: dict[str, str] = {}
    for name, about in model.model_fields.items():
        key = f"{prefix}{name}"
        found[key] = about.description or ""
        for part in (about.annotation, *getattr(about.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= _described(part, f"{key}.")
    return found


def _entry(key: str, name: str, sheet: Sheet, depth: int) -> list[str]:
    pad = "  " * depth
    value = sheet.values[key]
    reason = sheet.reasons.get(key)
    if isinstance(value, dict) and value:
        lines = [f"{pad}{name}:"]
        for inner, item in value.items():
            lines.append(f"{pad}  {_scalar(inner)}: {_flow(item)}")
    else:
        lines = [f"{pad}{name}: {_flow(value)}"]
    if reason is None:
        return lines
    one = f"{lines[0]} # {reason}"
    if len(one) <= _WIDTH + 2:
        return [one, *lines[1:]]
    return [*_comment(reason, first=f"{pad}# ", later=f"{pad}# "), *lines]


def _flow(value: JsonValue) -> str:
    if isinstance(value, str):
        return _scalar(value)
    return json.dumps(value, ensure_ascii=False)


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    return json.dumps(text, ensure_ascii=False)
