"""Reading config.json without trusting it: whole numbers by whatever name a family gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

MAX_LAYERS = 4096
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


def first_int(config: Config, *keys: str) -> int | None:
    """The first of these keys that holds a positive whole number."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def layer_count(config: Config) -> int | None:
    """Layers of the model; None where config.json names none, or more than any model has."""
    count = first_int(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is not None and count <= MAX_LAYERS:
        return count
    return None


def is_tied(config: Config, whole: Config) -> bool:
    """Whether the LM head is the embedding: config.json says so, or leaves it out (Gemma)."""
    for part in (config, whole):
        if isinstance(value := part.get("tie_word_embeddings"), bool):
            return value
    return str(config.get("model_type", "")).startswith(("gemma", "cohere"))
