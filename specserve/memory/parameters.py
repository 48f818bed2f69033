"""The tensors that a checkpoint must hold, from config.json alone: for plans without weights or
headers.

Only the common decoder is known: attention (heads or MLA), gated MLP, experts, gated delta net, a
vision tower. Whatever config.json does not name that way has no entry here, and the caller says
what it assumed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from specserve.checkpoint.fields import MAX_LAYERS, Config, first_int, is_tied, layer_count
from specserve.checkpoint.quantization import quantization_section
from specserve.checkpoint.safetensors import TensorFacts
from specserve.memory.layers import head_geometry, is_mla, layer_kinds

Entry = tuple[str, tuple[int, ...]]

_UNGATED = {
    "opt",
    "gpt2",
    "gpt_neox",
    "gptj",
    "falcon",
    "phi",
    "starcoder2",
    "bloom",
    "mpt",
    "nemotron",
    "nemotron_h",
    "gpt_bigcode",
    "persimmon",
    "codegen",
}
"""Families whose MLP has two matrices instead of three."""


def of_config(whole: Mapping[str, Any], config: Config) -> dict[str, TensorFacts] | None:
    """Tensors by name; None where config.json names no decoder of this kind."""
    hidden, layers = first_int(config, "hidden_size", "n_embd", "d_model"), layer_count(config)
    vocabulary = first_int(config, "vocab_size") or first_int(whole, "vocab_size")
    if not hidden or not layers or not vocabulary:
        return None
    entries: list[Entry] = [
        ("model.embed_tokens.weight", (vocabulary, hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    if not is_tied(config, whole):
        entries.append(("lm_head.weight", (vocabulary, hidden)))
    for index, kind in enumerate(layer_kinds(config, layers)):
        entries += (
            (f"model.layers.{index}.{n}", s) for n, s in _layer(config, hidden, index, kind)
        )
    entries += _tower(whole, hidden)
    quantized = quantization_section(whole) or {}
    stored = {name: facts for entry in entries for name, facts in _stored(*entry, quantized)}
    mtp = list(_mtp(config, hidden, layers))
    if _reaches_mtp(quantized, layers):
        reached = quantized
    else:
        reached = {}
    return stored | {name: facts for entry in mtp for name, facts in _stored(*entry, reached)}


def _mtp(config: Config, hidden: int, layers: int) -> Iterator[Entry]:
    """MTP modules as families name them: ``mtp.*``, or layers behind the model's own
    (num_nextn_predict_layers).
    """
    behind = first_int(config, "mtp_num_hidden_layers") is None
    for index in range(
        min(first_int(config, "mtp_num_hidden_layers", "num_nextn_predict_layers") or 0, 64)
    ):
        if behind:
            prefix = f"model.layers.{layers + index}."
        else:
            prefix = f"mtp.layers.{index}."
        yield (
            f"{prefix}eh_proj.weight" if behind else f"mtp.fc.{index}.weight",
            (hidden, 2 * hidden),
        )
        yield from ((prefix + n, s) for n, s in _layer(config, hidden, 10**6, "full"))


def _reaches_mtp(quantized: Mapping[str, Any], layers: int) -> bool:
    """Whether MTP modules are quantized, but for what the list of exceptions names.

    Checkpoints that were released in FP8 are so in whole (DeepSeek, Qwen; public headers read
    2026-11-30). Quantizers that go through Transformers do not see MTP and copy it (vLLM #44333,
    AutoAWQ #736), unless their list names parts of it, as GLM's does.
    """
    named = (re.search(r"mtp|\blayers\.(\d{1,6})\b", text) for text in _exceptions(quantized))
    return quantized.get("quant_method") == "fp8" or any(
        n and (not n[1] or int(n[1]) >= layers) for n in named
    )


def _layer(config: Config, hidden: int, index: int, kind: str) -> Iterator[Entry]:
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if kind == "state" and "linear_num_value_heads" in config:
        yield from _delta_net(config, hidden)
    elif kind != "none":
        yield from _mla(config, hidden) if is_mla(config) else _attention(config, hidden, kind)
    if is_moe_layer(config, index):
        yield from _experts(config, hidden)
    else:
        names = (
            "intermediate_size_mlp",
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "ffn_hidden_size",
        )
        inner = first_int(config, *names) or 4 * hidden  # GPT-2 leaves it out
        yield from _mlp("mlp.", hidden, inner, gated=str(config.get("model_type")) not in _UNGATED)


def _tower(whole: Mapping[str, Any], hidden: int) -> Iterator[Entry]:
    """A vision transformer and its projector, by the usual names; nothing where config.json names
    none.
    """
    vision = whole.get("vision_config")
    if not isinstance(vision, Mapping):
        return
    width, depth = (
        first_int(vision, "hidden_size", "embed_dim"),
        first_int(vision, "num_hidden_layers", "depth"),
    )
    if not width or not depth or depth > MAX_LAYERS:
        return
    inner = first_int(vision, "intermediate_size") or 4 * width
    if vision.get("model_type") == "pixtral":
        gates = 2
    else:
        gates = 1
    for index in range(depth):
        yield f"vision_tower.layers.{index}.self_attn.qkv.weight", (3 * width, width)
        yield f"vision_tower.layers.{index}.self_attn.o_proj.weight", (width, width)
        yield f"vision_tower.layers.{index}.mlp.fc1.weight", (gates * inner, width)
        yield f"vision_tower.layers.{index}.mlp.fc2.weight", (width, inner)
    yield "multi_modal_projector.linear_1.weight", (hidden, width)
    yield "multi_modal_projector.linear_2.weight", (hidden, hidden)


def _attention(config: Config, hidden: int, kind: str) -> Iterator[Entry]:
    kv, dim, value_dim = head_geometry(config, kind)
    heads = first_int(config, "num_attention_heads", "n_head") or 1
    if config.get("attn_output_gate") or "linear_num_value_heads" in config:
        gate = 2
    else:
        gate = 1
    bias = bool(config.get("attention_bias")) or str(config.get("model_type")).startswith("qwen2")
    for name, n in (
        ("q_proj", heads * dim * gate),
        ("k_proj", kv * dim),
        ("v_proj", kv * value_dim),
    ):
        yield f"self_attn.{name}.weight", (n, hidden)
        if bias:
            yield f"self_attn.{name}.bias", (n,)
    yield "self_attn.o_proj.weight", (hidden, heads * value_dim)


def _mla(config: Config, hidden: int) -> Iterator[Entry]:
    heads, latent = (
        first_int(config, "num_attention_heads") or 1,
        first_int(config, "kv_lora_rank") or 512,
    )
    rope, nope = (
        first_int(config, "qk_rope_head_dim") or 64,
        first_int(config, "qk_nope_head_dim") or 128,
    )
    value = first_int(config, "v_head_dim") or 128
    if rank := first_int(config, "q_lora_rank"):
        yield "self_attn.q_a_proj.weight", (rank, hidden)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), rank)
    else:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * value)


def _delta_net(config: Config, hidden: int) -> Iterator[Entry]:
    names = (
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_value_head_dim",
        "linear_key_head_dim",
        "linear_conv_kernel_dim",
    )
    values, keys, value_dim, key_dim, taps = (first_int(config, name) or 1 for name in names)
    width = 2 * keys * key_dim + values * value_dim
    yield "linear_attn.in_proj_qkv.weight", (width, hidden)
    yield "linear_attn.in_proj_z.weight", (values * value_dim, hidden)
    yield "linear_attn.in_proj_ba.weight", (2 * values, hidden)
    yield "linear_attn.conv1d.weight", (width, 1, taps)
    yield "linear_attn.out_proj.weight", (hidden, values * value_dim)


def is_moe_layer(config: Config, index: int) -> bool:
    """Whether a layer has experts: all, all but the first few, or every n-th."""
    dense = config.get("mlp_only_layers")
    first = first_int(config, "first_k_dense_replace") or 0
    if not expert_count(config) or index < first or (isinstance(dense, list) and index in dense):
        return False
    if every := first_int(config, "moe_layer_freq"):
        return index % every == 0
    return (index + 1) % (
        first_int(config, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    ) == 0


def expert_count(config: Config) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    return first_int(config, "n_routed_experts", "num_local_experts", "num_experts") or 0


def _experts(config: Config, hidden: int) -> Iterator[Entry]:
    count = expert_count(config)
    inner = first_int(config, "moe_intermediate_size", "intermediate_size") or 0
    yield "mlp.gate.weight", (count, hidden)
    yield "mlp.experts.gate_up_proj", (count, 2 * inner, hidden)
    yield "mlp.experts.down_proj", (count, hidden, inner)
    shared = first_int(config, "shared_expert_intermediate_size") or inner * (
        first_int(config, "n_shared_experts") or int("llama4" in str(config.get("model_type")))
    )
    if shared:
        yield from _mlp("mlp.shared_experts.", hidden, shared)


def _mlp(prefix: str, hidden: int, inner: int, *, gated: bool = True) -> Iterator[Entry]:
    if gated:
        yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)


def _stored(
    name: str, shape: tuple[int, ...], quantized: Mapping[str, Any]
) -> Iterator[tuple[str, TensorFacts]]:
    """A tensor as a quantized checkpoint stores it: packed weight and scales; others in half
    precision.
    """
    mxfp4, elements = str(quantized.get("quant_method")) == "mxfp4", prod(shape)
    bits, group = _bits(quantized)
    matrix = (
        len(shape) > 1 and ".layers." in name and not re.search(r"gate\.weight|conv|eh_proj", name)
    )
    if (
        not matrix
        or bits is None
        or name.startswith("vision")
        or _ignored(name, quantized)
        or (mxfp4 and "experts." not in name)
    ):
        yield name, TensorFacts("BF16", shape, elements * 2, "")
        return
    if mxfp4:
        packed, scale, stem = ("_blocks", "_scales", name)
    else:
        packed, scale, stem = (".weight_packed", ".weight_scale", name.removesuffix(".weight"))
    if mxfp4:
        scale_bytes = elements // 32
    elif group:
        scale_bytes = elements * 2 // group
    else:
        scale_bytes = 4 * shape[-2]
    yield stem + packed, TensorFacts("U8", shape, elements * bits // 8, "")
    yield stem + scale, TensorFacts("U8" if mxfp4 else "BF16", shape, scale_bytes, "")


def _ignored(name: str, quantized: Mapping[str, Any]) -> bool:
    """Whether the quantization leaves a module alone: names of it or of what holds it, globs or
    ``re:`` patterns.

    >>> (_ignored("model.layers.3.self_attn.o_proj.weight", {"ignore": ["re:.*self_attn.*",
    ...  "lm_head"]}))
    True
    >>> _ignored("mtp.layers.0.mlp.gate_proj.weight", {"ignore": ["mtp.layers.0.mlp.gate"]})
    False
    """
    module = name.removesuffix(".weight")
    for text in _exceptions(quantized):
        with contextlib.suppress(re.error):
            if text.startswith("re:"):
                patterns = [text[3:]]
            else:
                patterns = [fnmatch.translate(text), fnmatch.translate(f"{text}.*")]
            if any(re.match(pattern, module) for pattern in patterns):
                return True
    return False


def _exceptions(quantized: Mapping[str, Any]) -> Iterator[str]:
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        listed = quantized.get(key)
        yield from map(str, listed if isinstance(listed, list) else ())


def _bits(quantized: Mapping[str, Any]) -> tuple[int | None, int]:
    """Bits of a packed weight and how many share a 16-bit scale (0: a row)."""
    if not quantized:
        return None, 0
    named = str(quantized.get("quant_method", "")) + str(quantized.get("quant_algo", "")).lower()
    groups = quantized.get("config_groups")
    if isinstance(groups, Mapping):
        first = next(iter(groups.values()), None)
    else:
        first = None
    if isinstance(first, Mapping):
        weights = first.get("weights")
    else:
        weights = None
    if isinstance(weights, Mapping):
        source = weights
    else:
        source = quantized
    bits = first_int(source, "num_bits", "bits", "w_bit")
    if bits is not None:
        group = first_int(source, "group_size") or 0
        return bits, 2 * group if source.get("type") == "float" and bits == 4 else group
    if "fp4" in named or quantized.get("load_in_4bit"):
        return 4, 32  # one fp8 scale for 16 weights weighs as a 16-bit one for 32
    return 8, 8192 if quantized.get("weight_block_size") else 0
