"""What each layer of a model is made of: attention or a recurrent state, an MLP or experts, or one
of them alone. The one reader of layer patterns, for weights and for the KV cache.

Each family's fields as its model code in vLLM 0.32 reads them (``model_executor/models``,
``models/``; 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specserve.checkpoint.fields import Config, at_layer, first_int

if TYPE_CHECKING:
    from pydantic import JsonValue

Feed = Literal["mlp", "experts", "both", "linear", "none"]


@dataclass(frozen=True)
class DecoderLayer:
    """One layer. Layers that are alike are equal."""

    mixer: str
    """Attention that is full, sliding or chunked, a state, state+full, linear, or none."""
    feed: Feed
    inner: int | None = None
    """The MLP's width where the layer has its own."""
    kv_heads: int | None = None
    """KV heads where the layer has its own."""
    indexer: bool = False
    """Sparse attention with an index of its own."""
    compressed: int = 0
    """DeepSeek V4: how many tokens one compressed entry stands for; 0 for none."""


_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global": "full",
    "deepseek_sparse_attention": "full",
    "indexed_attention": "full",
    "minimax_m3_sparse": "full",
    "sparse": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "sliding": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "linear": "state",
    "kda": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "short_conv": "state",
    "recurrent": "state",
    "hybrid": "state+full",
    "mlp": "none",
    "moe": "none",
}
_ALONE: Mapping[str, Feed] = {"mlp": "mlp", "moe": "experts"}
"""Layer types that are an MLP or experts and nothing else; a list with one has no other MLPs."""
_LETTERS = {"M": "state", "*": "full", "E": "none", "-": "none"}
_FEEDS: Mapping[str, Feed] = {"E": "experts", "-": "mlp"}


def blocks(config: Config, count: int) -> list[DecoderLayer]:
    """Every layer of a model of ``count`` layers, in order."""
    if isinstance(pattern := config.get("hybrid_override_pattern"), str) and pattern:
        return of_pattern(pattern)
    for key in ("layers_block_type", "block_types", "layer_types"):
        names = config.get(key)
        if isinstance(names, list) and any(str(n) in _ALONE for n in names):
            return of_names(names)
    if isinstance(listed := config.get("block_configs"), list) and listed:
        return [_pruned(block, config) for block in listed[:count]]
    ratios = config.get("compress_ratios")
    found = []
    for index, kind in enumerate(layer_kinds(config, count)):
        ratio = 0
        if isinstance(ratios, list) and index < len(ratios) and isinstance(ratios[index], int):
            ratio = int(str(ratios[index]))
        own = at_layer(config, index)
        given = own is not config
        found.append(
            DecoderLayer(
                kind,
                feed_of(own, index),
                first_int(own, "intermediate_size") if given else None,
                first_int(own, "num_key_value_heads", "num_kv_heads") if given else None,
                has_indexer(config, index),
                ratio,
            )
        )
    return found


def of_pattern(pattern: str) -> list[DecoderLayer]:
    """Nemotron-H: M mamba, E experts, * attention, - MLP, each a layer of its own."""
    return [DecoderLayer(_LETTERS.get(c, "none"), _FEEDS.get(c, "none")) for c in pattern]


def of_names(names: Sequence[JsonValue]) -> list[DecoderLayer]:
    """The same from a list of names."""
    return [DecoderLayer(_KINDS.get(str(n), str(n)), _ALONE.get(str(n), "none")) for n in names]


def _pruned(block: JsonValue, config: Config) -> DecoderLayer:
    """A block of a model pruned by NAS: it may lack attention or MLP, or have a matrix instead
    (vLLM's ``nemotron_nas.py``).
    """
    if not isinstance(block, Mapping):
        return DecoderLayer("full", "mlp")
    attention, feed = block.get("attention"), block.get("ffn")
    mixer, kv, mlp, inner = "full", None, "mlp", None
    if isinstance(attention, Mapping):
        heads = first_int(config, "num_attention_heads")
        group = first_int(attention, "n_heads_in_group")
        kv = first_int(attention, "num_key_value_heads")
        if group and heads and kv is None:
            kv = heads // group
        if attention.get("no_op"):
            mixer = "none"
        elif attention.get("replace_with_linear"):
            mixer = "linear"
        elif first_int(attention, "window_length"):
            mixer = "sliding"
    if isinstance(feed, Mapping):
        inner = first_int(feed, "intermediate_size") or _width(feed.get("ffn_mult"), config)
        if feed.get("no_op"):
            mlp = "none"
        elif feed.get("replace_with_linear"):
            mlp = "linear"
    if mlp == "none":
        return DecoderLayer(mixer, "none", None, kv)
    if mlp == "linear":
        return DecoderLayer(mixer, "linear", None, kv)
    return DecoderLayer(mixer, "mlp", inner, kv)


def _width(multiple: JsonValue, config: Config) -> int | None:
    """``ffn_mult`` of the hidden size, two thirds of it, rounded up to 256.

    >>> _width(2.625, {"hidden_size": 8192}), _width(None, {})
    (14336, None)
    """
    hidden = first_int(config, "hidden_size")
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or hidden is None:
        return None
    if not 0 < multiple < 1000:
        return None
    return -(-int(2 * multiple * hidden / 3) // 256) * 256


def has_indexer(config: Config, index: int) -> bool:
    """Whether a layer of sparse attention has its own index: with ``index_topk_freq`` only some
    do, the others use that of a layer before (vLLM's ``deepseek_v2.py``).
    """
    if not first_int(config, "index_head_dim") or not config.get("index_topk"):
        return False
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str | list) and index < len(pattern):
        return pattern[index] != "S"
    every = first_int(config, "index_topk_freq") or 1
    offset = config.get("index_skip_topk_offset")
    if not isinstance(offset, int):
        offset = 2
    return max(index - offset + 1, 0) % every == 0


def feed_of(config: Config, index: int) -> Feed:
    """What a layer has besides its attention."""
    if not expert_count(config):
        return "mlp"
    if config.get("enable_moe_block"):  # Gemma 4 runs both, side by side
        return "both"
    if is_moe_layer(config, index):
        return "experts"
    return "mlp"


def expert_count(config: Config) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    found = first_int(config, *names)
    if found is None and isinstance(inner := config.get("ffn_config"), Mapping):  # DBRX
        found = first_int(inner, "moe_num_experts")
    listed = config.get("moe_num_experts")
    if found is None and isinstance(listed, list):  # ERNIE VL: of text, of images
        found = sum(n for n in listed if isinstance(n, int))
    return found or 0


def is_moe_layer(config: Config, index: int) -> bool:
    """Whether a layer has experts: all, those of a list, all but the first few, or every n-th."""
    if not expert_count(config):
        return False
    named = config.get("mlp_layer_types")
    if isinstance(named, list) and index < len(named):
        return named[index] == "sparse"
    switched = config.get("moe_layer_freq")
    if isinstance(switched, list):
        return index < len(switched) and bool(switched[index])
    for key in ("moe_layers", "moe_layers_enum"):
        chosen = config.get(key)
        if isinstance(chosen, str) and chosen:
            return str(index) in chosen.split(",")
        if isinstance(chosen, list) and chosen:
            return index in chosen
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and index in dense:
        return False
    first = first_int(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    if index < (first or 0):
        return False
    if every := first_int(config, "moe_layer_freq"):
        return index % every == 0
    if every := first_int(config, "expert_layer_period"):  # Jamba
        return index % every == (first_int(config, "expert_layer_offset") or 0)
    steps = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
    return (index + 1) % (first_int(config, *steps) or 1) == 0


def layer_kinds(config: Config, count: int) -> list[str]:
    """What each layer is: full, sliding, chunked, state, state+full, linear, or none."""
    if isinstance(pattern := config.get("hybrid_override_pattern"), str) and pattern:
        return [block.mixer for block in of_pattern(pattern)]
    for key in ("layer_types", "layers_block_type", "block_types"):
        if isinstance(names := config.get(key), list) and names:
            return [_KINDS.get(str(n), str(n)) for n in _cycle(names, count)]
    if isinstance(listed := config.get("block_configs"), list) and listed:
        return [_pruned(block, config).mixer for block in listed]
    return _hybrid_kinds(config, count) or _attention_kinds(config, count)


def _hybrid_kinds(config: Config, count: int) -> list[str] | None:
    """Layers of a model with recurrent states, by the fields of each family;
    None for a model without.
    """
    interval = first_int(config, "full_attention_interval")
    period = first_int(config, "attn_layer_period")
    attention_types = config.get("attn_type_list")
    linear = config.get("linear_attn_config")
    listed = config.get("attn_layer_indices")
    if interval and "linear_num_value_heads" in config:  # Qwen3-Next, Qwen3.5
        full = {i for i in range(count) if (i + 1) % interval == 0}
    elif period:  # Jamba
        offset = first_int(config, "attn_layer_offset") or 0
        full = {i for i in range(count) if i % period == offset}
    elif isinstance(listed, list):  # Bamba
        full = {i for i in listed if isinstance(i, int)}
    elif isinstance(attention_types, list):  # MiniMax: 0 linear, 1 full
        full = {i for i, kind in enumerate(attention_types) if kind}
        count = len(attention_types)
    elif isinstance(linear, Mapping):  # Kimi Linear counts from one
        given = linear.get("full_attn_layers")
        if not isinstance(given, list):
            given = []
        full = {i for i in range(count) if i + 1 in given}
    elif config.get("model_type") == "falcon_h1":
        return ["state+full"] * count
    else:
        return None
    return ["full" if i in full else "state" for i in range(count)]


def _attention_kinds(config: Config, count: int) -> list[str]:
    """Layers of a model that has attention everywhere: where a window or chunk applies."""
    kind = str(config.get("model_type", ""))
    if first_int(config, "attention_chunk_size") and "llama4" in kind:
        rope = config.get("no_rope_layers")
        if not isinstance(rope, list) or not rope:
            rope = [
                (i + 1) % (first_int(config, "no_rope_layer_interval") or 4) for i in range(count)
            ]
        return ["chunked" if r else "full" for r in rope]
    windows = config.get("sliding_window")
    if isinstance(windows, list) and windows:  # Mistral: a window or null for each layer
        return ["sliding" if w else "full" for w in _cycle(windows, count)]
    if (
        not first_int(config, "sliding_window", "sliding_window_size")
        or config.get("use_sliding_window") is False
    ):
        return ["full"] * count
    switched = config.get("hybrid_layer_pattern")
    if isinstance(switched, list) and switched:  # MiMo-V2: 1 slides
        return ["sliding" if s else "full" for s in _cycle(switched, count)]
    letters = config.get("sliding_window_pattern")
    if isinstance(letters, str) and letters:  # EXAONE 4: L slides, G is full
        return ["sliding" if c == "L" else "full" for c in _cycle(letters, count)]
    pattern = first_int(config, "sliding_window_pattern", "_sliding_window_pattern") or {
        "gemma2": 2,
        "gpt_oss": 2,
        "gemma3": 6,
        "gemma3_text": 6,
        "cohere2": 4,
    }.get(kind)
    if pattern:
        return ["full" if (i + 1) % pattern == 0 else "sliding" for i in range(count)]
    if kind.startswith("qwen2") and isinstance(first := config.get("max_window_layers"), int):
        return ["full" if i < first else "sliding" for i in range(count)]
    return ["sliding"] * count


def _cycle(names: Sequence[JsonValue], count: int) -> list[JsonValue]:
    return [names[i % len(names)] for i in range(count)]
