"""What a config will say, collected key by key, with what could not be carried."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pydantic import JsonValue

from specserve.app.init import template
from specserve.log import is_secret_name, masked

_SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{8,})|//[^/@\s:]+:[^/@\s]+@")


@dataclass
class Sheet:
    """Keys of a config with their values and reasons."""

    values: dict[str, JsonValue] = field(default_factory=dict)
    """Dotted key -> value, as the file says it (``${X}`` for a variable)."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Dotted key -> why it has this value."""
    left: list[str] = field(default_factory=list)
    """What was not carried, and why."""
    said: list[str] = field(default_factory=list)
    """What was carried in another form, and what differs."""

    def put(self, key: str, value: JsonValue, reason: str | None = None) -> None:
        """Set a key."""
        self.values[key] = value
        self.reasons.pop(key, None)
        if reason is not None:
            self.reasons[key] = reason

    def leave(self, what: str, why: str) -> None:
        """Note what is not carried; a secret in it is not shown."""
        self._note(self.left, f"{hidden_text(what)}: {why}")

    def say(self, sentence: str) -> None:
        """Note what differs."""
        self._note(self.said, sentence)

    def _note(self, notes: list[str], sentence: str) -> None:
        line = " ".join(sentence.split())
        if line not in notes:
            notes.append(line)


def hidden_text(text: str) -> str:
    """For a person to read, without secrets."""
    shown = _SECRET.sub("***", template.shown(text))
    shown = re.sub(
        r"(--?[\w-]*(?:token|key|secret|password)[= ])\S+",
        r"\1***",
        shown,
        flags=re.IGNORECASE,
    )
    return str(masked(shown))


def hide(name: str, value: JsonValue, sheet: Sheet) -> JsonValue:
    """The value with every secret in it as a variable, and with variables as a config writes them.

    >>> hide("token", "abc", Sheet()), hide("x", {"api_key": "k", "n": 1}, Sheet())
    ('${TOKEN}', {'api_key': '${API_KEY}', 'n': 1})
    """
    match value:
        case dict():
            return {key: hide(key, item, sheet) for key, item in value.items()}
        case list():
            return [hide(name, item, sheet) for item in value]
        case str():
            return hide_text(name, value, sheet)
        case _:
            return value


def hide_text(name: str, value: str, sheet: Sheet) -> str:
    """One text; a secret is what its name says is one, or what looks like one."""
    is_variable = template.variables_in(value) and template.resolved(value).strip() == ""
    is_secret = is_secret_name(name) or _SECRET.search(template.shown(value)) is not None
    if not is_secret or value == "" or is_variable:
        return template.config_text(value)
    variable = re.sub(r"\W", "_", name.strip("-")).upper()
    sheet.say(f"a secret was not copied; set the variable {variable}")
    return f"${{{variable}}}"
