"""How a checkpoint says its weights and its KV cache are quantized: the one reader of it.

As vLLM 0.32 reads it (``transformers_utils/config.py``, ``get_kv_cache_quant_algo_string`` in
``utils/torch_utils.py``, ``model_arch_config_convertor.py``; 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Mapping

from specserve.checkpoint.facts import TEXT_CONFIGS
from specserve.checkpoint.fields import Config

QUANT_FILE = "hf_quant_config.json"
"""ModelOpt's own file, read where config.json says nothing of quantization."""
_SECTIONS = ("quantization_config", "compression_config")


def with_quant_file(config: Config, separate: Config) -> Config:
    """config.json with what ``hf_quant_config.json`` adds: the whole section where it has none at
    its top, else only the precision of single layers.

    >>> with_quant_file({}, {"quantization": {"quant_algo": "FP8"}})
    {'quantization_config': {'quantization': {'quant_algo': 'FP8'}}}
    """
    if not separate:
        return config
    own = config.get("quantization_config")
    if own is None:
        return {**config, "quantization_config": dict(separate)}
    inner = separate.get("quantization")
    if not isinstance(own, Mapping) or not isinstance(inner, Mapping):
        return config
    layers = inner.get("quantized_layers")
    mixed = str(own.get("quant_algo")).upper() == "MIXED_PRECISION"
    if layers is None or not mixed or "quantized_layers" in own:
        return config
    return {**config, "quantization_config": {**own, "quantized_layers": layers}}


def unquantized(config: Config) -> Config:
    """config.json as it would be without quantization, at its top and in the text model's part.

    >>> unquantized({"a": 1, "text_config": {"b": 2, "compression_config": {"quant_method": "x"}}})
    {'a': 1, 'text_config': {'b': 2}}
    """
    plain = {key: value for key, value in config.items() if key not in _SECTIONS}
    for key in TEXT_CONFIGS:
        part = plain.get(key)
        if isinstance(part, Mapping):
            plain[key] = dict(unquantized(part))
    return plain


def quantization_section(config: Config) -> Config | None:
    """The part of config.json that speaks of quantization, at its top or in the text model's part.

    ModelOpt's older shape, nested in ``quantization``, is read as the flat one.

    >>> quantization_section({"text_config": {"compression_config": {"quant_method": "x"}}})
    {'quant_method': 'x'}
    """
    for part in (config, *(config.get(key) for key in TEXT_CONFIGS)):
        if not isinstance(part, Mapping):
            continue
        for name in _SECTIONS:
            section = part.get(name)
            if isinstance(section, Mapping):
                inner = section.get("quantization")
                if isinstance(inner, Mapping):
                    return {**section, **inner}
                return section
    return None


def quant_method(config: Config) -> str | None:
    """``quant_method`` in lower case; None for a checkpoint whose weights are not quantized.

    >>> quant_method({"compression_config": {"quant_method": "compressed-tensors"}})
    'compressed-tensors'
    >>> quant_method({"quantization_config": {"quantization": {"quant_algo": "NVFP4"}}})
    'modelopt_fp4'
    """
    section = quantization_section(config)
    if section is None:
        return None
    stated = str(section.get("quant_method") or "").lower()
    if stated:
        return stated
    algorithm = str(section.get("quant_algo") or "").upper()
    if not algorithm:
        return None
    if algorithm == "NVFP4":
        return "modelopt_fp4"
    if algorithm == "MIXED_PRECISION":
        return "modelopt_mixed"
    return "modelopt"


def kv_cache_dtype(setting: str, config: Config) -> str:
    """The type of the KV cache in force: the setting, and where that is ``auto`` what the
    checkpoint's scheme turns on.

    >>> kv_cache_dtype("auto", {"quantization_config": {"kv_cache_quant_algo": "FP8"}})
    'fp8'
    >>> kv_cache_dtype("auto", {"quantization_config": {"kv_cache_scheme": "FP8"}})
    'fp8'
    """
    section = quantization_section(config)
    if setting != "auto" or section is None:
        return setting
    scheme = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        if scheme.get("num_bits") == 8:
            return "fp8"
        if scheme.get("num_bits") == 4 and scheme.get("type") == "float":
            return "nvfp4"
        return setting
    named = str(scheme).lower()
    if named in {"fp8", "nvfp4"}:
        return named
    return setting
