"""What each layer of a model keeps per token or per request, on one GPU, read from config.json
alone.

Field names are those of the Hub's config.json files; which of them vLLM reads, and how, was read in
vLLM 0.32 (transformers_utils/model_arch_config_convertor.py,
model_executor/layers/mamba/mamba_utils.py; 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specserve.checkpoint.fields import DTYPE_BYTES, Config, first_int, layer_count
from specserve.memory import blocks as layout
from specserve.memory.blocks import DecoderLayer
from specserve.memory.deployment import Shape
from specserve.memory.states import state_bytes

LayerKind = Literal["full", "sliding", "chunked", "state"]


@dataclass(frozen=True)
class CacheLayer:
    """One layer's share of the KV cache on one GPU."""

    kind: LayerKind
    token_bytes: int = 0
    """Keys and values of one token; 0 for a state."""
    window: int | None = None
    """Tokens that a sliding or chunked layer still needs."""
    state_bytes: int = 0
    """The state of one sequence; 0 for attention."""
    mla: bool = False
    draft: bool = False


@dataclass(frozen=True)
class CacheModel:
    """All caching layers of a model, in order, and what had to be assumed to name them."""

    layers: tuple[CacheLayer, ...]
    """One entry per layer that caches; layers that share another layer's cache have none."""
    assumed: tuple[str, ...] = ()
    unknown: str | None = None
    """Why the cache's size is not known; then ``layers`` lacks some."""


_MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")


def of_target(config: Config, shape: Shape) -> CacheModel:
    """The target's caching layers. ``config`` is the language model's part of config.json."""
    return _layers(config, shape)


def of_draft(method: str | None, target: Config, draft: Config | None, shape: Shape) -> CacheModel:
    """What the proposer caches: all layers of a draft model, one per EAGLE layer, one per MTP
    layer, else none.
    """
    if not shape.drafts_with_a_model or method in {"medusa", "mlp_speculator"}:
        return CacheModel(())
    own = replace(shape, kv_dtype=shape.draft_kv_dtype)
    if draft is None:
        model = _modules(target, own)
    elif method == "mtp" and first_int(draft, *_MTP_COUNTS):  # of its folder nothing else is loaded
        model = _modules(draft, replace(own, tp=shape.draft_tp))
    else:
        model = _layers(draft, replace(own, tp=shape.draft_tp))
    layers = tuple(replace(layer, draft=True) for layer in model.layers)
    return replace(model, layers=layers)


def _modules(config: Config, shape: Shape) -> CacheModel:
    """MTP modules: full attention with the model's heads, or MLA with its index where it has it."""
    count = first_int(config, *_MTP_COUNTS) or 1
    module = DecoderLayer("full", "none", indexer=layout.has_indexer(config, 0))
    return CacheModel(tuple(_one_layer(module, config, shape, [])) * min(count, 64))


def _layers(config: Config, shape: Shape) -> CacheModel:
    count = layer_count(config)
    if count is None:
        return CacheModel((), unknown="config.json names no plausible number of layers")
    assumed: list[str] = []
    found = layout.blocks(config, count)
    shared = config.get("num_kv_shared_layers") or 0
    if isinstance(shared, int) and 0 < shared <= len(found):
        found = found[: len(found) - shared]
    alike = {block: _one_layer(block, config, shape, assumed) for block in dict.fromkeys(found)}
    layers = [layer for block in found for layer in alike[block]]
    if (
        config.get("use_cla")
        and isinstance(factor := config.get("cla_share_factor"), int)
        and factor > 1
    ):
        layers = layers[::factor]
    if config.get("compress_ratios"):
        assumed.append(
            "KV cache: compressed attention is not known here, counted as if each layer kept "
            "every token"
        )
    return CacheModel(tuple(layers), tuple(dict.fromkeys(assumed)))


def _one_layer(
    block: DecoderLayer, config: Config, shape: Shape, assumed: list[str]
) -> list[CacheLayer]:
    kind = block.mixer
    if block.kv_heads:
        config = {**config, "num_key_value_heads": block.kv_heads}
    window = first_int(config, "sliding_window", "sliding_window_size", "window_size")
    if kind in {"none", "linear"}:
        return []
    if kind == "sliding" and window:
        return [_attention(config, shape, "sliding", window)]
    if kind == "chunked":
        return [_attention(config, shape, "chunked", first_int(config, "attention_chunk_size"))]
    layers = [_attention(config, shape, "full")]
    indexer = first_int(config, "index_head_dim")
    if block.indexer and indexer:
        layers.append(CacheLayer("full", token_bytes=indexer + 4 * -(-indexer // 128), mla=True))
    if kind in {"full", "sliding"}:
        return layers
    state = state_bytes(config, shape)
    if state is None:
        assumed.append(
            f"KV cache: the state of '{kind}' layers is not known here, counted as full attention"
        )
        return layers
    return [CacheLayer("state", state_bytes=state), *(layers if kind == "state+full" else ())]


def _attention(
    config: Config, shape: Shape, kind: LayerKind, window: int | None = None
) -> CacheLayer:
    if is_mla(config):
        return CacheLayer(kind, _mla_token_bytes(config, shape), window, mla=True)
    heads, key_dim, value_dim = head_geometry(config, kind)
    one = _packed(key_dim, value_dim, shape.kv_dtype, shape.dtype_bytes)
    return CacheLayer(kind, max(1, heads // shape.tp) * one, window)


def _packed(key_dim: int, value_dim: int, kv_dtype: str, model_bytes: int) -> int:
    """Bytes of one token's keys and values in one head.

    >>> (_packed(128, 128, "auto", 2), _packed(128, 128, "fp8", 2), _packed(128, 128,
    ...  "int4_per_token_head", 2))
    (512, 256, 136)
    """
    values = key_dim + value_dim
    if kv_dtype == "int4_per_token_head":
        return values // 2 + 8  # two float32 scales, inline
    if kv_dtype in {"int8_per_token_head", "fp8_per_token_head"}:
        return values + 8
    if kv_dtype.startswith("nvfp4"):
        return values // 2 + values // 16  # one fp8 scale for 16 values
    # Packed key, its norm, packed value, scale and zero; rounded up to even.
    if kv_dtype.startswith("turboquant_"):
        key_bits, value_bits = {"k8v4": (8, 4), "4bit": (4, 4), "k3v4": (3, 4)}.get(
            kv_dtype.split("_")[1], (3, 3)
        )
        if key_bits == 8:
            key = key_dim
        else:
            key = -(-key_dim * key_bits // 8) + 2
        return -(-(key - (-key_dim * value_bits // 8) + 4) // 2) * 2
    return values * cache_bytes(kv_dtype, model_bytes)


def cache_bytes(kv_dtype: str, model_bytes: int) -> int:
    """Bytes of one cached value.

    >>> cache_bytes("auto", 2), cache_bytes("fp8_e5m2", 2), cache_bytes("float32", 2)
    (2, 1, 4)
    """
    if kv_dtype.startswith(("fp8", "int8")):
        return 1
    return DTYPE_BYTES.get(kv_dtype, model_bytes)


def _mla_token_bytes(config: Config, shape: Shape) -> int:
    """The latent and its rope part, once per GPU: TP does not divide it.

    The sparse kernels' fp8 packs 656 bytes.
    """
    kv_dtype, rank = shape.kv_dtype, first_int(config, "kv_lora_rank") or 0
    rope = first_int(config, "qk_rope_head_dim") or 0
    if kv_dtype == "fp8_ds_mla" or (kv_dtype.startswith("fp8") and config.get("index_topk")):
        return rank + 16 + 2 * rope
    if kv_dtype in {"int8_per_token_head", "fp8_per_token_head"}:
        return rank + rope + 8
    return (rank + rope) * cache_bytes(kv_dtype, shape.dtype_bytes)


def is_mla(config: Config) -> bool:
    """Whether vLLM keeps a latent instead of heads (MiniCPM3 has the fields, yet runs heads)."""
    return first_int(config, "kv_lora_rank") is not None and config.get("model_type") != "minicpm3"


def head_geometry(config: Config, kind: str = "full") -> tuple[int, int, int]:
    """KV heads of the whole model, head dimension of keys, of values, for one kind of layer."""
    heads = first_int(config, "num_attention_heads", "n_head", "n_heads") or 1
    hidden = first_int(config, "hidden_size", "n_embd", "d_model") or 0
    dim = (
        first_int(config, "head_dim", "hidden_size_per_head", "attention_head_dim")
        or hidden // heads
    )
    kv = first_int(
        config,
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    )
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv = 1
    attention = config.get("attn_config")
    if kv is None and isinstance(attention, Mapping):
        kv = first_int(attention, "kv_n_heads")
    if kv is None:
        kv = heads
    if kind == "full" and (wide := first_int(config, "global_head_dim")):  # Gemma 4
        return first_int(config, "num_global_key_value_heads") or kv, wide, wide
    if kind == "sliding" and (swa := first_int(config, "swa_num_key_value_heads")):  # MiMo-V2
        dim = first_int(config, "swa_head_dim") or dim
        return swa, dim, first_int(config, "swa_v_head_dim") or dim
    if str(config.get("model_type")) in {"mimo_v2_flash", "mimo_v2"}:
        return kv, dim, first_int(config, "v_head_dim") or dim
    return kv, dim, dim
