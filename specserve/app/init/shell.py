"""Shell text as commands of words.

Nothing is run: a variable that the text itself sets is replaced, any other stays a variable, and
what would have to be executed is marked.

Read as POSIX sh and bash read it (quotes, continuations, comments, ``${X:-y}``, arrays, here
documents), and more leniently where people write what a shell would not take: blanks behind a
backslash, a comment between continued lines, ``<placeholder>``, continuations of other shells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specserve.app.init import template

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_CONTINUATION = re.compile(r"\\[ \t]*\n|\\[ \t]+#[^\n]*\n|(?<=\s)[`^][ \t]*\n")
_FLAG = re.compile(r"\s*--?[A-Za-z]")
_COMMENT = re.compile(r"[ \t]*#[^\n]*\n")
_POWERSHELL = re.compile(r"\$env:([A-Za-z_]\w*)([ \t]*=[ \t]*)?", re.IGNORECASE)
_PERCENT = re.compile(r"%([A-Za-z_]\w*)%")
_PLACEHOLDER = re.compile(r"<[A-Za-z_][\w ./:-]*>")
_HERE = re.compile(r"<<(-?)[ \t]*(['\"]?)([\w.-]+)\2")
_REDIRECTION = re.compile(r"&>>?|>\||[<>]&|<<<|>>?|<>?")
_SHELL_WORDS = frozenset(
    {
        "then",
        "do",
        "else",
        "elif",
        "if",
        "while",
        "until",
        "for",
        "{",
        "}",
        "!",
        "time",
        "exec",
        "command",
        "builtin",
        "fi",
        "done",
        "esac",
    }
)
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


@dataclass
class ShellCommand:
    """One simple command."""

    words: list[str]
    line: int
    env: dict[str, str] = field(default_factory=dict)
    """What stands before the command (``A=1 cmd``)."""


@dataclass
class Script:
    """What a shell text holds."""

    commands: list[ShellCommand] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    """Bodies of here documents."""
    has_conditions: bool = False


def read_script(
    text: str, known: Mapping[str, str] | None = None, positional: Sequence[str] | None = None
) -> Script:
    """The commands of a text, in order.

    ``known``: variables that its environment sets. ``positional``: what ``$1`` and ``"$@"`` are.
    """
    script = Script(values=dict(known or {}))
    if positional is not None:
        script.arrays["@"] = list(positional)
    for words, line in _Lexer(text, script):
        _take(script, words, line)
    return script


def split(text: str) -> list[str]:
    """The words of one command, as a compose file's ``command`` is parted."""
    script = Script()
    return [word for words, _ in _Lexer(text, script) for word in words]


def first_command(text: str) -> str:
    """The text up to where its first command ends."""
    lexer = _Lexer(text, Script())
    for _ in lexer:
        break
    return text[: lexer.at]


def _take(script: Script, words: list[str], line: int) -> None:
    """One command: an assignment for what follows, or a command of its own."""
    while words and words[0] in _SHELL_WORDS:
        if words[0] in ("if", "while", "until", "for"):
            script.has_conditions = True
        words = words[1:]
    if words and words[0] == "case":
        script.has_conditions = True
    env: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.match(words[0])):
        env[match[1]] = _joined(script, match, words[0])
        words = words[1:]
    if not words:
        script.values |= env
        script.exported |= {name: env[name] for name in env if name in script.exported}
        return
    if words[0].lower() == "set" and len(words) > 1 and _ASSIGNMENT.match(words[1]):
        # cmd.exe: everything up to the end of the line, and every program gets it.
        name, _, value = " ".join(words[1:]).partition("=")
        script.values[name] = value
        script.exported[name] = value
        return
    if words[0] in _DECLARE:
        _declare(script, words)
        return
    script.commands.append(ShellCommand(words, line, env))


def _joined(script: Script, match: re.Match[str], word: str) -> str:
    value = word[match.end() :]
    if match[2]:
        return script.values.get(match[1], "") + value
    return value


def _declare(script: Script, words: list[str]) -> None:
    is_exported = words[0] == "export" or any(re.match("-[a-z]*x", word) for word in words[1:])
    for word in words[1:]:
        match = _ASSIGNMENT.match(word)
        if match is None:
            if is_exported and word in script.values:
                script.exported[word] = script.values[word]
            continue
        value = _joined(script, match, word)
        script.values[match[1]] = value
        if is_exported:
            script.exported[match[1]] = value


class _Lexer:
    """Characters to words, command by command; values that earlier commands set are known."""

    def __init__(self, text: str, script: Script) -> None:
        self.text, self.script = text, script
        self.at, self.line = 0, 1
        self.words: list[str] = []
        self.word: str | None = None
        self.quoted = False
        self.array: tuple[str, bool, list[str]] | None = None
        """Name, whether it is added to, and the words before it, while an array is read."""
        self.here: list[tuple[str, bool]] = []

    def __iter__(self) -> Iterator[tuple[list[str], int]]:
        began = 1
        while self.at < len(self.text):
            if not self.words and self.word is None:
                began = self._line()
            if self._step():
                self._end_word()
                if self.array is not None:
                    continue
                words, self.words = self.words, []
                if words:
                    yield words, began
        self._end_word()
        if self.words:
            yield self.words, began

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _step(self) -> bool:
        """Read one thing; whether a command ends here."""
        text, char = self.text, self.text[self.at]
        continuation = _CONTINUATION.match(text, self.at)
        if continuation:
            self._end_word_if(char == "\\" and text[self.at - 1 : self.at].isspace())
            self.at = continuation.end()
            self._skip_comments()
            return False
        match char:
            case "\n":
                self.at += 1
                if self.here:
                    self._read_here()
                return self.array is None and not self._goes_on()
            case " " | "\t" | "\r":
                self.at += 1
                self._end_word()
            case "\\":
                self._add(text[self.at + 1 : self.at + 2], quoted=True)
                self.at += 2
            case "'":
                end = _find(text, "'", self.at + 1)
                self._add(text[self.at + 1 : end], quoted=True)
                self.at = end + 1
            case '"':
                self._double()
            case "`":
                end = _find(text, "`", self.at + 1)
                self._add(template.command(text[self.at : end + 1]))
                self.at = end + 1
            case "$":
                self._add(self._dollar(in_quotes=False))
            case "%" if _PERCENT.match(text, self.at):
                self._percent()
            case "#" if self.word is None:
                self.at = _find(text, "\n", self.at)
            case "(" if self.word is not None and _ASSIGNMENT.fullmatch(self.word):
                name = self.word.rstrip("+=")
                self.array = (name, self.word.endswith("+="), self.words)
                self.words, self.word = [], None
                self.at += 1
            case ")" if self.array is not None:
                self._end_array()
            case "<" | ">":
                self._redirect()
            case "&" if text.startswith("&>", self.at):
                self._redirect()
            case ";" | "&" | "|" | "(" | ")":
                self.at += 1
                return True
            case _:
                self._add(char)
                self.at += 1
        return False

    def _end_word_if(self, wanted: bool) -> None:
        if wanted:
            self._end_word()

    def _add(self, part: str, *, quoted: bool = False) -> None:
        self.word = (self.word or "") + part
        self.quoted = self.quoted or quoted

    def _end_word(self) -> None:
        word, quoted = self.word, self.quoted
        self.word, self.quoted = None, False
        if word is None:
            return
        name = template.array_name(word)
        if name is not None and name in self.script.arrays:
            self.words += self.script.arrays[name]
        elif _ASSIGNMENT.match(word):
            self.words.append(word.replace(template.BREAK, " "))
        else:
            parts = [part for part in word.split(template.BREAK) if part or quoted]
            self.words += parts

    def _end_array(self) -> None:
        self._end_word()
        self.at += 1
        if self.array is None:
            return
        name, is_more, before = self.array
        if is_more:
            self.words = self.script.arrays.get(name, []) + self.words
        self.script.arrays[name] = self.words
        self.words, self.array = before, None

    def _skip_comments(self) -> None:
        """Behind a continuation people put comments and blank lines; they mean the command to go
        on, though a shell ends it there."""
        match = _COMMENT.match(self.text, self.at)
        while match:
            self.at = match.end()
            match = _COMMENT.match(self.text, self.at)

    def _goes_on(self) -> bool:
        """Whether the next line can only be more of this command: it begins with a flag."""
        has_words = bool(self.words) or self.word is not None
        return has_words and _FLAG.match(self.text, self.at) is not None

    def _double(self) -> None:
        self._add("", quoted=True)
        self.at += 1
        text = self.text
        while self.at < len(text) and text[self.at] != '"':
            char = text[self.at]
            following = text[self.at + 1 : self.at + 2]
            if char == "\\" and following in ("$", "`", '"', "\\", "\n"):
                if following != "\n":
                    self._add(following)
                self.at += 2
            elif char == "$":
                self._add(self._dollar(in_quotes=True))
            elif char == "`":
                end = _find(text, "`", self.at + 1)
                self._add(template.command(text[self.at : end + 1]))
                self.at = end + 1
            else:
                self._add(char)
                self.at += 1
        self.at += 1

    def _dollar(self, *, in_quotes: bool) -> str:
        """What begins with a dollar at this place."""
        text, start = self.text, self.at
        following = text[start + 1 : start + 2]
        if following == "(":
            self.at = _matching(text, start + 1, "(", ")") + 1
            return template.command(text[start : self.at])
        if following == "{":
            self.at = _matching(text, start + 1, "{", "}") + 1
            return self._braces(text[start + 2 : self.at - 1], in_quotes=in_quotes)
        if following == "'" and not in_quotes:
            return self._ansi()
        powershell = _POWERSHELL.match(text, start)
        if powershell and powershell[2]:
            # $env:NAME = "value"
            self.at = powershell.end()
            self.script.exported.setdefault(powershell[1], "")
            return f"{powershell[1]}="
        if powershell:
            self.at = powershell.end()
            return self._value(powershell[1], None, in_quotes=in_quotes)
        match = _NAME.match(text, start + 1)
        if match:
            self.at = match.end()
            return self._value(match[0], None, in_quotes=in_quotes)
        self.at += 1
        if following and following in "0123456789@*#?!":
            self.at += 1
            given = self.script.arrays.get("@")
            if given is not None and following in "@*":
                return template.array("@")
            if given is not None and following in "123456789":
                return "".join(given[int(following) - 1 : int(following)])
            return template.command(f"${following}")
        return "$"

    def _percent(self) -> None:
        """``%NAME%`` of cmd.exe."""
        match = _PERCENT.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            self._add(self._value(match[1], None, in_quotes=True))

    def _ansi(self) -> str:
        out, self.at = "", self.at + 2
        while self.at < len(self.text) and self.text[self.at] != "'":
            if self.text[self.at] == "\\":
                self.at += 1
                out += _ESCAPES.get(self.text[self.at : self.at + 1], "")
            else:
                out += self.text[self.at]
            self.at += 1
        self.at += 1
        self.quoted = True
        return out

    def _braces(self, inner: str, *, in_quotes: bool) -> str:
        """``${...}`` without the braces."""
        array = re.match(r"!?(\w+)\[[@*]\]", inner)
        if array:
            return template.array(array[1])
        match = re.match(r"([A-Za-z_]\w*|\d+)", inner)
        if match is None:
            return template.command(f"${{{inner}}}")
        name, rest = match[0], inner[match.end() :]
        operator = re.match(r":?[-=?+]", rest)
        if not rest or (operator and operator[0][-1] == "?"):
            return self._value(name, None, in_quotes=in_quotes)
        if operator is None:
            return template.command(f"${{{inner}}}")
        other = self._inline(rest[operator.end() :])
        if operator[0][-1] == "+":
            if self.script.values.get(name):
                return other
            return ""
        return self._value(name, other, in_quotes=in_quotes)

    def _inline(self, text: str) -> str:
        """The default inside ``${X:-...}``: quotes removed, variables taken as they are."""
        lexer = _Lexer(text, self.script)
        out = ""
        while lexer.at < len(text):
            if text[lexer.at] in " \t\n;&|()<>#":
                out += text[lexer.at]
                lexer.at += 1
                continue
            out += lexer.part()
        return out.replace(template.BREAK, " ")

    def part(self) -> str:
        """The next part of a word alone."""
        self.word = ""
        self._step()
        parts, self.words = self.words, []
        return "".join([*parts, self.word or ""])

    def _value(self, name: str, default: str | None, *, in_quotes: bool) -> str:
        known = self.script.values.get(name)
        if known is None and name in self.script.arrays:
            known = " ".join(self.script.arrays[name][:1])
        if known is None or (known == "" and default is not None):
            given = self.script.arrays.get("@")
            if name.isdigit() and given is not None and given[int(name) - 1 : int(name)]:
                return given[int(name) - 1]
            if name.isdigit() and default is None:
                return template.command(f"${name}")
            if name.isdigit():
                return default or ""
            return template.variable(name, default)
        if in_quotes:
            return known
        return re.sub(r"\s+", template.BREAK, known)

    def _redirect(self) -> None:
        """A redirection and its file are nobody's argument; ``<placeholder>`` is one."""
        placeholder = _PLACEHOLDER.match(self.text, self.at)
        if placeholder:
            self._add(placeholder[0])
            self.at = placeholder.end()
            return
        here = _HERE.match(self.text, self.at)
        if here:
            self._drop_number()
            self.here.append((here[3], here[1] == "-"))
            self.at = here.end()
            return
        self._drop_number()
        operator = _REDIRECTION.match(self.text, self.at)
        if operator is None:
            self.at += 1
            return
        self.at = operator.end()
        if operator[0] == "<" and self.text.startswith("(", self.at):
            self.at = _matching(self.text, self.at, "(", ")") + 1
            self._add(template.command("<(...)"))
            return
        count, self.word = len(self.words), None
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;|&()<>":
            self._step()
        if self.text[self.at : self.at + 1] == "&" and operator[0] in (">", "<"):
            self.at += 1
        self.word = None
        del self.words[count:]

    def _drop_number(self) -> None:
        """The ``2`` of ``2>``."""
        if self.word is not None and self.word.isdigit():
            self.word = None
        self._end_word()

    def _read_here(self) -> None:
        for end, tabs in self.here:
            body: list[str] = []
            while self.at < len(self.text):
                stop = _find(self.text, "\n", self.at)
                line = self.text[self.at : stop]
                self.at = stop + 1
                if tabs:
                    line = line.lstrip("\t")
                if line.rstrip() == end:
                    break
                body.append(line)
            self.script.documents.append("\n".join(body) + "\n")
        self.here = []


def _find(text: str, what: str, start: int) -> int:
    """Where it is; the end of the text where it is not."""
    found = text.find(what, start)
    if found < 0:
        return len(text)
    return found


def _matching(text: str, start: int, opening: str, closing: str) -> int:
    """Where the bracket at ``start`` ends, brackets inside quotes left out."""
    depth, at = 0, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opening == "(":
            at = _find(text, "'", at + 1)
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return len(text) - 1
