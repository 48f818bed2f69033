"""Logging: text for a terminal, a JSON object per line for everything else, without secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
SECRET_SHAPES = re.compile(r"\b(hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,})|(?i:(bearer\s+)\S+)")

_LOGIN = re.compile(r"//[^/@\s]+@")
_PARAMETER = re.compile(r"([?&;])([\w.-]+)=([^\s&;#'\"]+)")
SECRET_NAME = re.compile(
    r"(^|[._-])((TOKEN|(API)?KEY|PAT|DSN)\d*|CRED(ENTIAL)?S?|PWD|AUTH|JWT|SALT|COOKIES?)$"
    r"|(^|[._-])(TOKENS|(API)?KEYS|HEADERS|WEBHOOK(_URL)?)$|(^|[._-])(AUTH|PWD|JWT)[._-]"
    r"|PASS$|PASSW|PASSPHRASE|ACCESS_KEY|PRIVATE_KEY|SECRET|AUTHORIZATION|COOKIE|CREDENTIAL",
    re.IGNORECASE,
)
COUNT_NAME = re.compile(r"(TOKENS|KEYS)$", re.IGNORECASE)
"""Names that as often count something (``max-num-batched-tokens``)."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, as far as names can tell.

    >>> ([is_secret_name(name) for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID",
    ...  "TOKENIZERS_PARALLELISM")])
    [True, True, False]
    """
    return SECRET_NAME.search(name) is not None


def hides(name: str, value: Any) -> bool:
    """Whether the name hides this value: a number of tokens is none."""
    if value is None or isinstance(value, bool):
        return False
    if COUNT_NAME.search(name) and str(value).replace(".", "", 1).isdigit():
        return False
    return is_secret_name(name)


def masked(value: Any) -> Any:
    """The value with secrets, known by their names or by their place in a URL, as ``***``: at any
    depth, also in JSON that is a text.

    >>> masked({"API_KEY": "x", "HTTPS_PROXY": "http://me:pass@proxy:3128"})
    {'API_KEY': '***', 'HTTPS_PROXY': 'http://***@proxy:3128'}
    >>> masked({"store": [{"token": "x", "size": 1}]})
    {'store': [{'token': '***', 'size': 1}]}
    >>> masked("https://h/hook?access_token=x&a=1"), masked('{"secret_key": "x"}')
    ('https://h/hook?access_token=***&a=1', '{"secret_key": "***"}')
    """
    match value:
        case Mapping():
            shown = {name: masked(item) for name, item in value.items()}
            hidden = {name: "***" for name, item in value.items() if hides(str(name), item)}
            return shown | hidden
        case list() | tuple():
            return type(value)(masked(item) for item in value)
        case str():
            inside = _json(value)
            clean = masked(inside)
            if clean != inside:
                return json.dumps(clean, ensure_ascii=False)
            return _masked_urls(value)
        case _:
            return value


def secrets_in(value: Any, *, secret: bool = False) -> Iterator[str]:
    """The texts that `masked` hides because of a name.

    ``secret``: whether the name of this value is one that hides it.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_in(item, secret=secret or hides(str(name), item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, secret=secret)
    elif isinstance(value, str):
        inside = _json(value)
        if inside is not None:
            yield from secrets_in(inside, secret=secret)
        elif secret:
            yield value


def _json(text: str) -> Any:
    """The object or list that a text is in JSON; None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _masked_urls(text: str) -> str:
    text = _PARAMETER.sub(lambda m: f"{m[1]}{m[2]}=***" if is_secret_name(m[2]) else m[0], text)
    return _LOGIN.sub("//***@", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """The text as a terminal may have it: without colors, other control characters written out.

    What an engine, a server or a file says must not move the cursor, name the window or hide text.

    >>> printable("\\x1b[31mred\\x1b[0m \\x1b]0;owned\\x07")
    'red \\\\x1b]0;owned\\\\x07'
    """
    return _CONTROL.sub(lambda m: repr(m[0])[1:-1], _COLOR.sub("", text))


class Redactor(logging.Filter):
    """Replaces known secrets, and strings of a secret's shape, before a record is formatted."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(s for s in secrets if len(s) >= 4)

    def redact(self, text: str) -> str:
        """The text with every secret as ``***``.

        >>> Redactor(["tops3cret"]).redact("key tops3cret, Bearer abc")
        'key ***, Bearer ***'
        """
        for secret in self._secrets:
            text = text.replace(secret, "***")
        clean = printable(text)
        return SECRET_SHAPES.sub(lambda m: (m.group(2) or "") + "***", _masked_urls(clean))

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.redact(record.getMessage()), None
        for key, value in list(vars(record).items()):
            if key not in _STANDARD and isinstance(value, str):
                setattr(record, key, self.redact(value))
        return True


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname.lower():7} {record.getMessage()}"
        extra = _extra(record)
        if extra:
            line += "  " + " ".join(f"{name}={value}" for name, value in extra.items())
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        body: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str, ensure_ascii=False)


def setup(
    *,
    debug: bool = False,
    json_lines: bool | None = None,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Configure the ``specserve`` logger once, on stderr.

    ``json_lines`` None chooses by the stream: text on a terminal, JSON otherwise.
    """
    out = stream or sys.stderr
    if json_lines is None:
        json_lines = not out.isatty()
    formatter: logging.Formatter = _Text()
    if json_lines:
        formatter = _Json()
    level = logging.INFO
    if debug:
        level = logging.DEBUG
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    handler.addFilter(Redactor(secrets))
    logger = logging.getLogger("specserve")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
