"""The base of every section: frozen, closed, every key described."""

from __future__ import annotations

import re
from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr


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


Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0), AfterValidator(_seconds)]
Host = Annotated[str, AfterValidator(_host)]
FilePath = Annotated[str, AfterValidator(expanduser)]
"""``~`` is the home folder."""
Secret = Annotated[SecretStr, AfterValidator(lambda s: SecretStr(s.get_secret_value().strip()))]
"""Without the line end that files and Kubernetes' Secrets leave."""


class Section(BaseModel):
    """A section of the config file.

    Unknown keys are an error, values never change after loading.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )
