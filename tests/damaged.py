"""Public configs with a field removed or spoilt, and what a plan must never say of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from specserve.checkpoint.facts import CheckpointRefused, ModelFacts
from specserve.checkpoint.quantization import with_quant_file
from specserve.checkpoint.read import config_faults
from specserve.config.schema import Settings
from specserve.memory.plan import plan
from specserve.memory.result import MemoryPlan

DATA = Path(__file__).parent / "data" / "model_configs.jsonl"
OPTIONAL = frozenset({
    # Absent, each of these means something definite to vLLM, which takes it as we do: plain weights, no exceptions,
    # a KV cache in 16 bits, one precision for all, an LM head of its own, experts as wide as the model, states
    # in the model's type, a short rope table.
    "quantization_config", "quantization", "ignore", "modules_to_not_convert", "exclude_modules", "kv_cache_scheme",
    "kv_cache_quant_algo", "quantized_layers", "quant_algo", "group_0", "group_1", "config_groups", "weights",
    "moe_quant_algo", "expert_dtype", "type", "quant_method", "weight_block_size", "targets",
    "num_bits", "mamba_ssm_dtype", "mamba_ssm_cache_dtype", "max_position_embeddings",
    "tie_word_embeddings", "moe_latent_size", "vision_config", "text_config",
    # Full attention in every layer, no MTP: more KV cache, fewer weights that are not used.
    "sliding_window", "use_sliding_window", "attention_chunk_size", "no_rope_layers",
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "index_topk_freq", "moe_layer_freq", "mlp_layer_types",
})  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, 0, 1, -1, 2**31, 2**40, 1e308, float("nan"), "", "x", "FP8", [], [None], ["x"], [1, 2], {}, {"x": 1}, True, False,
)  # fmt: skip


@cache
def intact() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Id and config of every model, with what hf_quant_config.json adds."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return tuple(
        (row["id"], dict(with_quant_file(row["config"], row.get("hf_quant_config") or {})))
        for row in rows
    )


def planned(config: dict[str, Any]) -> MemoryPlan:
    """On eight GPUs of 1 TB, which hold every one of these models. Raises CheckpointRefused as reading does."""
    if faults := list(config_faults("config.json", config)):
        raise CheckpointRefused(faults)
    body = {
        "models": {"target_model": {"path": "t", "tensor_parallel_size": 8}},
        "speculative_decoding": {"enabled": False},
        "engine": {"max_model_len": 8192},
        "hardware": {"gpu_memory_gib": 1000, "gpu_count": 8},
    }
    return plan(Settings.model_validate(body), ModelFacts("t", config))


def sections(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every mapping with each of its keys, the nested ones too."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict) and key not in {"id2label", "label2id", "quantized_layers"}:
            yield from sections(value)


@cache
def size_of(name: str) -> tuple[int, int]:
    """Weights and KV bytes a token of an intact model."""
    made = planned(dict(intact())[name])
    return made.gpus[0].target_weights_bytes, made.kv_bytes_per_token


def run(seed: int, cases: int) -> Iterator[str]:
    """A line for each damaged config that a plan was wrong about."""
    chance = random.Random(seed)
    for _ in range(cases):
        name, original = chance.choice(intact())
        config = copy.deepcopy(original)
        where, key = chance.choice(list(sections(config)))
        removed = chance.random() < 0.5
        if removed:
            del where[key]
            what = f"without {key}"
        else:
            where[key] = copy.deepcopy(chance.choice(VALUES))
            what = f"{key}: {where[key]!r}"
        try:
            made = planned(config)
        except CheckpointRefused:
            continue
        except Exception as e:  # noqa: BLE001
            yield f"{name} {what}: raised {e!r}"
            continue
        if removed and key not in OPTIONAL and made.fits and _differs(name, made):
            yield f"{name} {what}: fits, with {made.gpus[0].target_weights_bytes} and {made.kv_bytes_per_token}"


def _differs(name: str, made: MemoryPlan) -> bool:
    now = (made.gpus[0].target_weights_bytes, made.kv_bytes_per_token)
    if any("unknown size" in note for note in made.assumed):
        return False
    pairs = zip(size_of(name), now, strict=True)
    return any(abs(a - b) > 0.01 * a for a, b in pairs)
