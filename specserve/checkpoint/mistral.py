"""Mistral's own format: ``params.json`` as the config.json that it stands for.

As vLLM 0.32 does it (``transformers_utils/configs/mistral.py``, read 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specserve.checkpoint.fields import MAX_LAYERS, Config, first_int

if TYPE_CHECKING:
    from pydantic import JsonValue

PARAMS = "params.json"
INDEX = "consolidated.safetensors.index.json"
_NAMES = {
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
_EXPERTS = {
    "route_every_n": "moe_layer_freq",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
}
_DEFAULT_LENGTH = 128_000
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}


def config_of(params: Config) -> Config:
    """config.json of these parameters.

    >>> made = config_of({"dim": 5120, "n_layers": 40, "n_heads": 32, "vocab_size": 131072})
    >>> made["hidden_size"], made["architectures"], made["max_position_embeddings"]
    (5120, ['MistralForCausalLM'], 128000)
    """
    config: dict[str, JsonValue] = {_NAMES.get(key, key): value for key, value in params.items()}
    config.setdefault("tie_word_embeddings", False)
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = _DEFAULT_LENGTH
    config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
    _windows(config)
    _experts(config)
    _yarn(config)
    _quantization(config)
    vision = _vision(config)
    if vision is None:
        return config
    whole: dict[str, JsonValue] = {
        "architectures": ["PixtralForConditionalGeneration"],
        "model_type": "pixtral",
        "text_config": config,
        "vision_config": dict(vision),
    }
    if "quantization_config" in config:
        whole["quantization_config"] = config["quantization_config"]
    return whole


def _windows(config: dict[str, JsonValue]) -> None:
    """A list of windows repeats over the layers; null is full attention."""
    windows, count = config.get("sliding_window"), first_int(config, "num_hidden_layers")
    if not windows or count is None or count > MAX_LAYERS:
        return
    if isinstance(windows, list):
        kinds: list[JsonValue] = [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ]
        config["layer_types"] = kinds * (count // len(windows))
        config["sliding_window"] = next((w for w in windows if w is not None), None)
    elif config.get("layer_types") is None:
        config["layer_types"] = ["sliding_attention"] * count


def _experts(config: dict[str, JsonValue]) -> None:
    """Experts, and latent attention, which vLLM runs as DeepSeek V3 does."""
    experts, latent = config.pop("moe", None), bool(config.get("qk_nope_head_dim"))
    if isinstance(experts, Mapping) and experts:
        config |= {_EXPERTS[key]: n for key, n in experts.items() if key in _EXPERTS}
        if first_int(experts, "num_shared_experts") or latent:
            config["model_type"] = "deepseek_v3"
            config["architectures"] = ["MistralLarge3ForCausalLM"]
        else:
            config["architectures"] = ["MixtralForCausalLM"]
    elif latent:
        config["model_type"] = "deepseek_v3"
        config["architectures"] = ["MistralLarge3ForCausalLM"]


def _yarn(config: dict[str, JsonValue]) -> None:
    yarn = config.pop("yarn", None)
    if isinstance(yarn, Mapping) and yarn:
        rope: dict[str, JsonValue] = {"rope_type": "yarn"}
        rope |= {_YARN[key]: value for key, value in yarn.items() if key in _YARN}
        config["rope_parameters"] = rope


def _quantization(config: dict[str, JsonValue]) -> None:
    section = config.pop("quantization", None)
    if not isinstance(section, Mapping) or not section:
        return
    if section.get("qformat_weight") == "fp8_e4m3":
        config["quantization_config"] = {"quant_method": "fp8"}
        return
    method = str(section.get("quant_method", "")).lower().replace("_", "-")
    config["quantization_config"] = {**section, "quant_method": method}


def _vision(config: dict[str, JsonValue]) -> Config | None:
    found = config.pop("vision_encoder", None)
    several = config.pop("multimodal", None)
    if isinstance(several, Mapping):
        found = several.get("vision_encoder_args")
    if isinstance(found, Mapping) and found:
        return {"model_type": "pixtral", **found}
    return None
