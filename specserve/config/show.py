"""The resolved configuration as rows: what is in force, and who said so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from specserve.config.load import Loaded
from specserve.log import masked

DEFAULT = "default"


@dataclass(frozen=True)
class Row:
    """One key of the configuration."""

    key: str
    value: Any
    """JSON value; a secret is ``***``."""
    source: str
    """``file:line``, ``environment NAME``, ``--set KEY`` or ``default``."""
    is_masked: bool = False
    """Whether ``value`` is not what the configuration holds."""

    @property
    def is_default(self) -> bool:
        """Whether nobody set it."""
        return self.source == DEFAULT


def rows(loaded: Loaded) -> list[Row]:
    """Every key in the order of the schema."""
    out: list[Row] = []
    _walk(loaded, loaded.settings, "", out)
    return out


def _walk(loaded: Loaded, section: BaseModel, prefix: str, out: list[Row]) -> None:
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            _walk(loaded, value, f"{key}.", out)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for i, item in enumerate(value):
                _walk(loaded, item, f"{key}[{i}].", out)
        else:
            shown = _plain(value)
            # Teams and Discord have their secret in the path, gateways before Alertmanager may.
            if name == "url" and isinstance(shown, str):
                shown = re.sub(r"(//[^/?#]*)[/?#].+", r"\1/***", shown)
            out.append(Row(key, shown, _source(loaded, key), is_masked=shown != value))


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return "***"
    return masked(value)


def _source(loaded: Loaded, key: str) -> str:
    """The key's source; for a mapping or list, the source of its first item; for a secret, that of
    its file.
    """
    for candidate in (key, f"{key}_file"):
        if candidate in loaded.sources:
            return loaded.sources[candidate]
    return next(
        (s for k, s in loaded.sources.items() if k.startswith((f"{key}.", f"{key}["))), DEFAULT
    )
