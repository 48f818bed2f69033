"""What a checkpoint's own files say: config, tensors, tokenizer. Read, never loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPE_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits per element of safetensors' dtype names."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a safetensors header."""

    dtype: str
    """safetensors' name, e.g. ``BF16``."""
    shape: tuple[int, ...]
    nbytes: int
    file: str
    """File name inside the checkpoint."""


@dataclass(frozen=True)
class ModelFacts:
    """One checkpoint, as its files describe it. What was not found is None or empty, never a guess."""

    path: str
    """As configured: a folder or a Hub id."""
    config: Mapping[str, Any]
    """config.json, whole."""
    folder: Path | None = None
    """Where the files lie on this machine; None when only metadata was read."""
    revision: str | None = None
    """The resolved Hub commit; None for a plain folder."""
    tensors: Mapping[str, TensorFacts] | None = None
    """Name -> header entry; None when no header was at hand (index only, or nothing)."""
    total_size_bytes: int | None = None
    """Bytes of all tensors: sum of headers, else the index's ``metadata.total_size``."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    """Names of all files seen in the checkpoint."""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json: ``text_config`` (or alike) where nested, else the whole."""
        for key in ("text_config", "llm_config", "language_config", "thinker_config"):
            nested = self.config.get(key)
            if isinstance(nested, Mapping):
                inner = nested.get("text_config")
                return inner if isinstance(inner, Mapping) else nested
        return self.config

    @property
    def architectures(self) -> tuple[str, ...]:
        """``architectures`` of config.json."""
        names = self.config.get("architectures")
        return tuple(str(n) for n in names) if isinstance(names, list) else ()
