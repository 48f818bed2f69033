"""Reading config.json without trusting it: whole numbers by whatever name a family gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue

Config = Mapping[str, "JsonValue"]

MAX_LAYERS = 4096
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LAYER_LISTS = ("layers_block_type", "block_types", "layer_types", "block_configs")
"""Lists with one entry per layer."""
PER_LAYER = (
    "intermediate_size",
    "num_key_value_heads",
    "num_kv_heads",
    "num_attention_heads",
    "num_query_heads",
    "moe_intermediate_size",
    "moe_topk",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_shared_expert",
    "sliding_window",
)
"""Numbers for which some families give a list, one entry per layer."""


def first_int(config: Config, *keys: str) -> int | None:
    """The first of these keys that holds a positive whole number."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def layer_count(config: Config) -> int | None:
    """Layers of the model; None where config.json names none, or more than any model has.

    A pattern with a letter per layer, and a list that names every layer, go before the count, as
    in Transformers (``NemotronHConfig``, read 2026-12-01).

    >>> layer_count({"hybrid_override_pattern": "M*-", "num_hidden_layers": 52})
    3
    >>> layer_count({"layers_block_type": ["mamba", "moe"]}), layer_count({"layer_types": 3})
    (2, None)
    """
    pattern, listed = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if isinstance(pattern, str) and pattern:
        count: int | None = len(pattern)
    elif isinstance(listed, list) and config.get("model_type") == "nemotron_h":
        count = len(listed)
    else:
        count = first_int(config, *_COUNTS) or _listed(config)
    if count is not None and 0 < count <= MAX_LAYERS:
        return count
    return None


def _listed(config: Config) -> int | None:
    for key in LAYER_LISTS:
        names = config.get(key)
        if isinstance(names, list) and names:
            return len(names)
    return None


def at_layer(config: Config, index: int) -> Config:
    """The config as one layer sees it: of a list with an entry per layer, that entry.

    >>> at_layer({"num_key_value_heads": [8, 4], "vocab_size": 9}, 1)["num_key_value_heads"]
    4
    """
    own: dict[str, JsonValue] = {}
    for key in PER_LAYER:
        values = config.get(key)
        if isinstance(values, list) and values:
            own[key] = values[min(index, len(values) - 1)]
    if own:
        return {**config, **own}
    return config


def is_tied(config: Config, whole: Config) -> bool:
    """Whether the LM head is the embedding: config.json says so, or leaves it out (Gemma)."""
    for part in (config, whole):
        if isinstance(value := part.get("tie_word_embeddings"), bool):
            return value
    return str(config.get("model_type", "")).startswith(("gemma", "cohere"))
