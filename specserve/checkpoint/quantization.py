"""How a checkpoint says its weights and its KV cache are quantized: the one reader of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.checkpoint.facts import TEXT_CONFIGS

_SECTIONS = ("quantization_config", "compression_config")


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of config.json that speaks of quantization, at its top or in the text model's part.

    >>> quantization_section({"text_config": {"compression_config": {"quant_method": "x"}}})
    {'quant_method': 'x'}
    """
    for part in (config, *(config.get(key) for key in TEXT_CONFIGS)):
        if not isinstance(part, Mapping):
            continue
        for name in _SECTIONS:
            section = part.get(name)
            if isinstance(section, Mapping):
                return section
    return None


def quant_method(config: Mapping[str, Any]) -> str | None:
    """``quant_method`` in lower case; None for a checkpoint whose weights are not quantized.

    >>> quant_method({"compression_config": {"quant_method": "compressed-tensors"}})
    'compressed-tensors'
    """
    section = quantization_section(config)
    if section is None:
        return None
    return str(section.get("quant_method") or "").lower() or None


def kv_cache_dtype(setting: str, config: Mapping[str, Any]) -> str:
    """The type of the KV cache in force: the setting, and where that is ``auto`` what the
    checkpoint's scheme turns on.

    >>> kv_cache_dtype("auto", {"quantization_config": {"kv_cache_quant_algo": "FP8"}})
    'fp8'
    """
    section = quantization_section(config)
    if setting != "auto" or section is None:
        return setting
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8"
    if str(section.get("kv_cache_quant_algo", "")).upper() == "FP8":
        return "fp8"
    return setting
