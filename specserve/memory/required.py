"""What config.json must state for its sizes to be known: no field that is not there is guessed.

Optional fields, whose absence vLLM reads as something definite, are not listed here: without
``quantization_config`` weights are plain, without ``sliding_window`` every layer is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specserve.checkpoint.fields import Config, at_layer, first_int, layer_count
from specserve.checkpoint.quantization import quantization_section
from specserve.memory.blocks import blocks, expert_count
from specserve.memory.layers import is_mla

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "n_head_kv",
    "num_kv_heads",
    "multi_query_group_num",
    "num_attention_groups",
    "attn_config",
    "multi_query",
    "block_configs",
)
_ALL_HEADS_KEPT = (
    "gpt", "opt", "bloom", "mpt", "phi", "codegen", "stablelm", "persimmon", "pythia", "baichuan",
    "internlm", "chatglm", "qwen", "mimo_audio", "eagle", "medusa", "minimax_text",
)  # fmt: skip
"""Families with configs from before grouped heads: every head has its own keys and values."""
_OWN_HEAD_DIM = (
    "qwen3", "gemma", "glm4_moe", "minimax", "gpt_oss", "mimo_v2", "nemotron_h", "deepseek_v4",
    "deepseek_ref", "llama4", "exaone4", "step3p",
)  # fmt: skip
"""Families whose heads are not as wide as hidden size / heads."""
_GPT2 = ("gpt", "bloom", "mpt", "falcon", "codegen")
"""Families whose MLP is four times as wide as the model where nothing is said."""
_INNER = (
    "intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "d_inner",
)
_EXPERT_INNER = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "moe_ffn_hidden_size",
    "ffn_config",
)
_EXPERTS_AS_WIDE_AS_THE_MLP = (
    "mixtral", "minimax_m2", "gpt_oss", "llama4", "phimoe", "granitemoe", "jamba", "olmoe", "grok",
    "mistral", "flex_olmo", "minimax_text", "arctic", "dbrx",
)  # fmt: skip
_EXPERT_COUNTS = (
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
    "ffn_config",
)
_SIGNS_OF_EXPERTS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "experts_per_token",
    "moe_topk",
    "moe_shared_expert_intermediate_size",
    "top_k_experts",
)
_MLA = ("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_INDEX = ("index_topk", "index_n_heads", "index_head_dim")
_DELTA_NET = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
              "linear_value_head_dim", "linear_conv_kernel_dim")  # fmt: skip
_MAMBA = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
_OF_FAMILY: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": ("n_shared_experts", "first_k_dense_replace"),
    "deepseek_v32": ("n_shared_experts", "first_k_dense_replace"),
    "deepseek_v4": ("n_shared_experts", "compress_ratios", "o_groups", "qk_rope_head_dim"),
    "deepseek_ref": ("n_shared_experts", "compress_ratios", "o_groups", "qk_rope_head_dim"),
    "kimi": ("n_shared_experts", "first_k_dense_replace"),
    "glm_moe_dsa": ("n_shared_experts", "first_k_dense_replace"),
    "glm4_moe": ("n_shared_experts", "first_k_dense_replace"),
    "gemma4_text": ("layer_types", "global_head_dim", "attention_k_eq_v"),
    "mimo_v2": ("moe_layer_freq", "hybrid_layer_pattern", "v_head_dim"),
    "minimax_m3": ("moe_layer_freq", "n_shared_experts", "dense_intermediate_size"),
    "llama4": ("interleave_moe_layer_step", "intermediate_size_mlp"),
    "qwen2_moe": ("shared_expert_intermediate_size",),
    "qwen3_next": ("shared_expert_intermediate_size",),
    "qwen3_5_moe": ("shared_expert_intermediate_size",),
}
"""Families whose code has defaults of its own for these, which this program does not know."""
_NAS = "nemotron-nas"


def missing(whole: Config, config: Config) -> tuple[str, ...]:
    """Fields without which nobody knows the sizes, in the order of their weight.

    >>> missing({}, {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2,
    ...   "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 16})
    ('vocab_size',)
    """
    return tuple(dict.fromkeys(_missing(whole, config)))


def _missing(whole: Config, config: Config) -> Iterator[str]:
    family = str(config.get("model_type") or whole.get("model_type") or "")
    if not family:
        yield "model_type"
    if not first_int(config, *_HIDDEN):
        yield "hidden_size"
    count = layer_count(config)
    if count is None:
        yield "num_hidden_layers"
        return
    if not first_int(config, "vocab_size") and not first_int(whole, "vocab_size"):
        yield "vocab_size"
    yield from _of_family(whole, config, family)
    yield from _precision(whole)
    layers = set(blocks(config, count))
    mixers = {layer.mixer for layer in layers}
    if mixers - {"none", "linear", "state"}:
        yield from _attention(config, family, own_kv=all(layer.kv_heads for layer in layers))
    if "state" in mixers:
        yield from _state(config, family)
    feeds = {layer.feed for layer in layers}
    own = any(layer.inner for layer in layers) or family.startswith(_GPT2)
    if feeds & {"mlp", "both"} and not own and not first_int(at_layer(config, 0), *_INNER):
        yield "intermediate_size"
    if feeds & {"experts", "both"}:
        if not expert_count(config):
            yield "num_experts"
        if not any(key in config for key in _EXPERT_INNER):
            if not family.startswith(_EXPERTS_AS_WIDE_AS_THE_MLP):
                yield "moe_intermediate_size"
            elif not first_int(config, "intermediate_size"):
                yield "intermediate_size"
    elif not any(key in config for key in _EXPERT_COUNTS) and first_int(config, *_SIGNS_OF_EXPERTS):
        yield "num_experts"


def _of_family(whole: Config, config: Config, family: str) -> Iterator[str]:
    for name, keys in _OF_FAMILY.items():
        if family.startswith(name):
            yield from (key for key in keys if key not in config)
    patterns = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    if family == "nemotron_h":
        if not any(key in config for key in patterns):
            yield "layers_block_type"
        if first_int(config, "n_shared_experts"):
            yield from _absent(config, "moe_shared_expert_intermediate_size")
        elif "moe_shared_expert_intermediate_size" in config:
            yield from _absent(config, "n_shared_experts")
    if family == _NAS:
        yield from _absent(config, "block_configs")
    if "linear_num_value_heads" in config and "layer_types" not in config:
        yield from _absent(config, "full_attention_interval")
    vision = whole.get("vision_config")
    if isinstance(vision, Mapping):
        wide = first_int(vision, "hidden_size", "embed_dim")
        deep = first_int(vision, "num_hidden_layers", "depth")
        if wide and not deep:
            yield "vision_config.num_hidden_layers"
        elif deep and not wide:
            yield "vision_config.hidden_size"


def _absent(config: Config, key: str) -> Iterator[str]:
    if key not in config:
        yield key


def _precision(whole: Config) -> Iterator[str]:
    """A section on quantization that does not say to what."""
    section = quantization_section(whole)
    if not section:
        return
    groups = section.get("config_groups")
    named = any(section.get(key) for key in ("quant_method", "quant_algo", "quantized_layers"))
    if not named and not groups:
        yield "quantization_config.quant_method"
    if isinstance(groups, Mapping) and not section.get("quant_algo"):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                yield from _absent(weights, "num_bits")


def _attention(config: Config, family: str, *, own_kv: bool) -> Iterator[str]:
    heads = _HEADS
    if not first_int(at_layer(config, 0), *heads):
        yield "num_attention_heads"
    if is_mla(config):
        yield from (key for key in _MLA if key not in config)
        if "index_topk" in config or "index_n_heads" in config:
            yield from (
                k for k in ("index_topk", "index_n_heads", "index_head_dim") if k not in config
            )
        return
    if any(key in config for key in ("qk_nope_head_dim", "qk_rope_head_dim")) and not (
        first_int(config, "o_lora_rank") and first_int(config, "q_lora_rank")
    ):
        if family.startswith(("deepseek_v4", "deepseek_ref")):
            yield from (key for key in ("o_lora_rank", "q_lora_rank") if key not in config)
        elif "qk_nope_head_dim" in config:
            yield "kv_lora_rank"
    stated = own_kv or any(key in config for key in _KV_HEADS)
    grouped = family.startswith(("gpt_oss", "qwen2", "qwen3"))
    if not stated and (grouped or not family.startswith(_ALL_HEADS_KEPT)):
        yield "num_key_value_heads"
    if family.startswith(_OWN_HEAD_DIM) and not first_int(config, "head_dim"):
        yield "head_dim"


def _state(config: Config, family: str) -> Iterator[str]:
    if any(key in config for key in _DELTA_NET):
        yield from (key for key in _DELTA_NET if key not in config)
    elif family == "nemotron_h" or "mamba_num_heads" in config:
        yield from (key for key in _MAMBA if key not in config)
    elif isinstance(linear := config.get("linear_attn_config"), Mapping):
        yield from (f"linear_attn_config.{k}" for k in ("num_heads", "head_dim") if k not in linear)
