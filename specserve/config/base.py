"""The base of every section: frozen, closed, every key described."""

from __future__ import annotations

import re
from os.path import expanduser
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    WithJsonSchema,
)

from specserve.config.extra_args import human_number


def _seconds(value: float) -> float:
    """Waiting takes no more than 292 years (``threading.TIMEOUT_MAX``)."""
    if value > 1e9:
        raise ValueError(f"{value:g} seconds are too many; must be at most 1e9")
    return value


def _host(text: str) -> str:
    """An address as a socket takes it: IPv6 without brackets."""
    bare = text.strip()
    if re.match(r"\w+://", bare):
        raise ValueError(f"{text!r} is a URL; must be an address alone")
    if re.fullmatch(r"[^:]+:\d*|\[.*\]:\d*", bare):
        raise ValueError(
            f"{text!r} has a port, which has a key of its own; must be an address alone"
        )
    if not bare or re.search(r"[\s/]", bare):
        raise ValueError(f"{text!r} is not a valid address; must be an IP address or a host name")
    return bare.removeprefix("[").removesuffix("]")


def _human(value: JsonValue) -> JsonValue:
    """``8k`` and ``8K`` as numbers, as vLLM's flags take them."""
    if not isinstance(value, str):
        return value
    number = human_number(value)
    if number is None:
        raise ValueError(
            f"{value!r} is not a number of tokens; must be a whole number, "
            "or one with k (1000), K (1024), m or M"
        )
    return number


def _length(value: JsonValue) -> JsonValue:
    """``auto`` and -1 are the same to vLLM: as long as fits into memory."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return FITTING
    return _human(value)


def _is_length(value: int) -> int:
    if value < 1 and value != FITTING:
        raise ValueError(f"{value} is not a length; must be at least 1, or auto (-1)")
    return value


FITTING = -1
"""The length that stands for as much as fits into memory."""
_NUMBER_TEXT = r"^\s*\d+(\.\d+)?[kmgtKMGT]?\s*$"
_LENGTH_TEXT = r"^\s*(\d+(\.\d+)?[kmgtKMGT]?|-1|[aA][uU][tT][oO])\s*$"
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Tokens = Annotated[
    Positive,
    BeforeValidator(_human),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _NUMBER_TEXT}]}
    ),
]
"""A number of tokens, or a text like 8k."""
Length = Annotated[
    int,
    BeforeValidator(_length),
    AfterValidator(_is_length),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"const": -1},
                {"type": "string", "pattern": _LENGTH_TEXT},
            ]
        }
    ),
]
"""A length in tokens, or :data:`FITTING`."""
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0), AfterValidator(_seconds)]
Host = Annotated[str, AfterValidator(_host)]
FilePath = Annotated[str, AfterValidator(expanduser)]
"""``~`` is the home folder."""
Secret = Annotated[SecretStr, AfterValidator(lambda s: SecretStr(s.get_secret_value().strip()))]
"""Without the line end that files and Kubernetes' Secrets leave."""


def lines_of(secret: SecretStr) -> tuple[str, ...]:
    """The secrets of a text that holds one a line."""
    lines = (line.strip() for line in secret.get_secret_value().splitlines())
    return tuple(line for line in lines if line)


class Section(BaseModel):
    """A section of the config file.

    Unknown keys are an error, values never change after loading.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )
