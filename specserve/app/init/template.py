"""Text with variables in it, between what was read and what is written.

Inside a text a variable stands as one run of characters of Unicode's private use area, which no
input keeps, so that quoting, splitting and JSON of the forms that are read cannot tear it apart.
"""

from __future__ import annotations

import re

_REF, _END, _DEFAULT, _COMMAND, _ARRAY = (
    "\ue000",
    "\ue001",
    "\ue002",
    "\ue003",
    "\ue004",
)
BREAK = "\ue005"
"""Where the value of an unquoted variable parts words."""

_ANY_REF = re.compile(f"{_REF}([^{_END}{_DEFAULT}]*)(?:{_DEFAULT}([^{_END}]*))?{_END}")
_ANY_COMMAND = re.compile(f"{_COMMAND}([^{_END}]*){_END}")
_ANY_ARRAY = re.compile(f"{_ARRAY}([^{_END}]*){_END}")
_ANY_MARK = re.compile("[\ue000-\ue005]")
_IN_QUOTES = re.compile(r'"(?:[^"\\]|\\.)*"')


def without_marks(text: str) -> str:
    """What was read, with nothing in it that could be taken for a variable of ours."""
    return _ANY_MARK.sub("?", text)


def variable(name: str, default: str | None = None) -> str:
    """A variable, with what it is when nobody sets it."""
    if default is None:
        return f"{_REF}{name}{_END}"
    return f"{_REF}{name}{_DEFAULT}{resolved(default)}{_END}"


def command(text: str) -> str:
    """What only running something could tell."""
    return f"{_COMMAND}{shown(text)}{_END}"


def array(name: str) -> str:
    """All words of a shell array."""
    return f"{_ARRAY}{name}{_END}"


def array_name(word: str) -> str | None:
    """The array that a word stands for; None for other words."""
    match = _ANY_ARRAY.fullmatch(word)
    if match is None:
        return None
    return match[1]


def commands_in(text: str) -> list[str]:
    """What would have to be run to know the text."""
    return [
        *_ANY_COMMAND.findall(text),
        *(f"${{{name}[@]}}" for name in _ANY_ARRAY.findall(text)),
    ]


def variables_in(text: str) -> dict[str, str | None]:
    """Names of variables -> their defaults."""
    return {match[1]: match[2] for match in _ANY_REF.finditer(text)}


def resolved(text: str) -> str:
    """Every variable that has a default replaced by it, the others by nothing.

    >>> resolved(f"a{variable('X', 'b')}c")
    'abc'
    """
    return _ANY_REF.sub(lambda match: match[2] or "", text)


def config_text(text: str) -> str:
    """As a config says it: ``${NAME}``, ``${NAME:-default}``, and ``$$`` for a dollar.

    >>> config_text(f"a$b{variable('X', 'c')}")
    'a$$b${X:-c}'
    """
    out, at = "", 0
    for match in _ANY_REF.finditer(text):
        out += text[at : match.start()].replace("$", "$$")
        name, default = match[1], match[2]
        if default is None:
            out += f"${{{name}}}"
        elif "}" in default:
            # A config's default ends at the first brace.
            out += default.replace("$", "$$")
        else:
            out += f"${{{name}:-{default}}}"
        at = match.end()
    return out + text[at:].replace("$", "$$")


def shown(text: str) -> str:
    """For a person to read."""
    plain = _ANY_COMMAND.sub(lambda match: match[1], text)
    plain = _ANY_ARRAY.sub(lambda match: f"${{{match[1]}[@]}}", plain)
    plain = _ANY_REF.sub(
        lambda match: f"${{{match[1]}}}" if match[2] is None else f"${{{match[1]}:-{match[2]}}}",
        plain,
    )
    return plain.replace(BREAK, " ")


def quoted_variables(text: str) -> str:
    """JSON in which a variable stands for a number or a whole value, with quotes around it.

    >>> quoted_variables('{"k": ' + variable("K") + "}").count('"')
    4
    """
    out, at = "", 0
    for match in _IN_QUOTES.finditer(text):
        out += _ANY_REF.sub(lambda found: f'"{found[0]}"', text[at : match.start()])
        out += match[0]
        at = match.end()
    return out + _ANY_REF.sub(lambda found: f'"{found[0]}"', text[at:])
