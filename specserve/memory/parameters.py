"""The tensors that a checkpoint must hold, from config.json alone: for plans without weights or
headers.

Known are attention (heads, MLA, DeepSeek V4's), recurrent layers (gated delta net, Kimi's, Mamba,
short convolution), MLPs, experts, MTP modules and a vision tower. Whatever config.json does not
name that way has no entry here, and the caller says what it assumed. Shapes as in vLLM 0.32's model
code (2026-12-01).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from specserve.checkpoint import schemes
from specserve.checkpoint.fields import MAX_LAYERS, Config, first_int, is_tied, layer_count
from specserve.checkpoint.quantization import quantization_section
from specserve.checkpoint.safetensors import TensorFacts
from specserve.checkpoint.schemes import Quantization
from specserve.memory import blocks
from specserve.memory.blocks import DecoderLayer, expert_count
from specserve.memory.layers import head_geometry, is_mla

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
_INNER = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "ffn_dim",
          "n_inner", "ffn_hidden_size", "d_inner")  # fmt: skip
_MTP = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_NEVER_PACKED = re.compile(r"gate\.weight|conv|eh_proj|A_log|dt_bias|x_proj|_fn$|tid2eid")
"""Matrices that no quantizer touches: routers, convolutions, what joins an MTP module's inputs."""


def of_config(whole: Config, config: Config) -> dict[str, TensorFacts] | None:
    """Tensors by name; None where config.json names no decoder of this kind."""
    hidden, layers = first_int(config, "hidden_size", "n_embd", "d_model"), layer_count(config)
    vocabulary = first_int(config, "vocab_size") or first_int(whole, "vocab_size")
    if not hidden or not layers or not vocabulary:
        return None
    section = quantization_section(whole) or {}
    quantized = schemes.of_section(section, config)
    outside = _outside(config, hidden, vocabulary, layers)
    stored = {name: _half(shape) for name, shape in (*outside, *_tower(whole, hidden))}
    head: Entry = ("lm_head.weight", (vocabulary, hidden))
    if not is_tied(config, whole):
        if "lm_head" in quantized.named:
            stored.update(_packed(*head, quantized.named["lm_head"]))
        else:
            stored[head[0]] = _half(head[1])
    alike: dict[DecoderLayer, list[Entry]] = {}  # each kind of layer is reckoned once
    for index, block in enumerate(blocks.blocks(config, layers)):
        if block not in alike:
            alike[block] = list(_layer(config, hidden, block))
        for name, shape in alike[block]:
            stored.update(_stored(f"model.layers.{index}.{name}", shape, quantized))
    reached = quantized
    if not _reaches_mtp(section, layers):
        reached = Quantization(None)
    for name, shape in _mtp(config, hidden, layers):
        stored.update(_stored(name, shape, reached))
    return stored


def _outside(config: Config, hidden: int, vocabulary: int, layers: int) -> Iterator[Entry]:
    """Embeddings and the last norm."""
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    beside = first_int(config, "hidden_size_per_layer_input")
    if beside:  # Gemma 3n and 4
        rows = first_int(config, "vocab_size_per_layer_input") or vocabulary
        yield "model.embed_tokens_per_layer.weight", (rows, layers * beside)
        yield "model.per_layer_model_projection.weight", (layers * beside, hidden)


def _mtp(config: Config, hidden: int, layers: int) -> Iterator[Entry]:
    """MTP modules as families name them: ``mtp.*``, or layers behind the model's own
    (num_nextn_predict_layers).
    """
    behind = first_int(config, "mtp_num_hidden_layers") is None
    parts = _mtp_blocks(config, layers)
    for index in range(min(first_int(config, *_MTP) or 0, 64)):
        if behind:
            prefix = f"model.layers.{layers + index}."
        else:
            prefix = f"mtp.layers.{index}."
        yield (
            f"{prefix}eh_proj.weight" if behind else f"mtp.fc.{index}.weight",
            (hidden, 2 * hidden),
        )
        for number, block in enumerate(parts):
            own = prefix
            if number:
                own = f"{prefix}{number}."
            yield from ((own + n, s) for n, s in _layer(config, hidden, block))


def _mtp_blocks(config: Config, layers: int) -> list[DecoderLayer]:
    """The layers of one MTP module: one like the model's last; Nemotron-H names its own."""
    pattern, names = config.get("mtp_hybrid_override_pattern"), config.get("mtp_layers_block_type")
    if isinstance(pattern, str) and pattern:
        return blocks.of_pattern(pattern[:64])
    if isinstance(names, list) and names:
        return blocks.of_names(names[:64])
    if config.get("model_type") == "nemotron_h":
        return blocks.of_pattern("*E")
    return [
        DecoderLayer("full", blocks.feed_of(config, 10**6), indexer=blocks.has_indexer(config, 0))
    ]


def _reaches_mtp(section: Config, layers: int) -> bool:
    """Whether MTP modules are quantized, but for what the list of exceptions names.

    Checkpoints that were released in FP8 are so in whole (DeepSeek, Qwen; public headers read
    2026-11-30). Quantizers that go through Transformers do not see MTP and copy it (vLLM #44333,
    AutoAWQ #736), unless their list names parts of it, as GLM's does.
    """
    if section.get("quant_method") == "fp8":
        return True
    for text in schemes.exceptions(section):
        named = re.search(r"mtp|\blayers\.(\d{1,6})\b", text)
        if named and (not named[1] or int(named[1]) >= layers):
            return True
    return False


def _layer(config: Config, hidden: int, block: DecoderLayer) -> Iterator[Entry]:
    yield "input_layernorm.weight", (hidden,)
    if block.mixer != "none" and block.feed != "none":
        yield "post_attention_layernorm.weight", (hidden,)
    alone = block.feed == "none" or block.mixer == "none"
    if block.mixer == "linear":
        yield "self_attn.linear_attn.weight", (hidden, hidden)
    elif block.mixer in {"state", "state+full"} and (state := list(_state(config, hidden))):
        yield from state
        if block.mixer == "state+full":
            yield from _attention(config, hidden, block)
    elif block.mixer != "none":
        if is_mla(config):
            yield from _mla(config, hidden, block)
        elif first_int(config, "o_lora_rank") and first_int(config, "q_lora_rank"):
            yield from _grouped_latent(config, hidden, block)
        else:
            own = _attention(config, hidden, block)
            if alone and config.get("model_type") == "nemotron_h":
                own = ((n.replace("self_attn.", "mixer."), s) for n, s in own)
            yield from own
    prefix = "mlp."
    if alone and config.get("model_type") == "nemotron_h":
        prefix = "mixer."
    if block.feed in {"experts", "both"}:
        yield from _experts(config, hidden, prefix)
    if block.feed == "linear":
        yield "mlp.linear_mlp.weight", (hidden, hidden)
    if block.feed in {"mlp", "both"}:
        inner = block.inner or first_int(config, *_INNER) or 4 * hidden  # GPT-2 leaves it out
        yield from _mlp(prefix, hidden, inner, gated=_gated(config))
    if beside := first_int(config, "hidden_size_per_layer_input"):
        yield "per_layer_input_gate.weight", (beside, hidden)
        yield "per_layer_projection.weight", (hidden, beside)


def _gated(config: Config) -> bool:
    return str(config.get("model_type")) not in _UNGATED


def _tower(whole: Config, hidden: int) -> Iterator[Entry]:
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


def _attention(config: Config, hidden: int, block: DecoderLayer) -> Iterator[Entry]:
    kind = block.mixer
    if kind == "state+full":
        kind = "full"
    kv, dim, value_dim = head_geometry(config, kind)
    kv = block.kv_heads or kv
    heads = first_int(config, "num_attention_heads", "n_head", "n_heads") or 1
    if kind == "sliding":
        heads = first_int(config, "swa_num_attention_heads") or heads
    if config.get("attn_output_gate") or "linear_num_value_heads" in config:
        gate = 2
    else:
        gate = 1
    bias = bool(config.get("attention_bias")) or str(config.get("model_type")).startswith("qwen2")
    parts = [("q_proj", heads * dim * gate), ("k_proj", kv * dim)]
    if kind != "full" or not config.get("attention_k_eq_v"):  # Gemma 4: keys are the values
        parts.append(("v_proj", kv * value_dim))
    for name, n in parts:
        yield f"self_attn.{name}.weight", (n, hidden)
        if bias:
            yield f"self_attn.{name}.bias", (n,)
    yield "self_attn.o_proj.weight", (hidden, heads * value_dim)


def _mla(config: Config, hidden: int, block: DecoderLayer) -> Iterator[Entry]:
    heads, latent = (
        first_int(config, "num_attention_heads") or 1,
        first_int(config, "kv_lora_rank") or 512,
    )
    rope, nope = (
        first_int(config, "qk_rope_head_dim") or 64,
        first_int(config, "qk_nope_head_dim") or 128,
    )
    value = first_int(config, "v_head_dim") or 128
    rank = first_int(config, "q_lora_rank")
    if rank:
        yield "self_attn.q_a_proj.weight", (rank, hidden)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), rank)
    else:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * value)
    if block.indexer:
        yield from _indexer(config, hidden, rank or hidden)
        yield "self_attn.indexer.wk.weight", (first_int(config, "index_head_dim") or 0, hidden)


def _indexer(config: Config, hidden: int, rank: int) -> Iterator[Entry]:
    heads, dim = first_int(config, "index_n_heads") or 1, first_int(config, "index_head_dim") or 0
    yield "self_attn.indexer.wq_b.weight", (heads * dim, rank)
    yield "self_attn.indexer.weights_proj.weight", (heads, hidden)


def _grouped_latent(config: Config, hidden: int, block: DecoderLayer) -> Iterator[Entry]:
    """DeepSeek V4: queries and outputs of low rank, one KV head, and what compresses it."""
    heads, dim = first_int(config, "num_attention_heads") or 1, first_int(config, "head_dim") or 128
    rank, out = first_int(config, "q_lora_rank") or 1, first_int(config, "o_lora_rank") or 1
    groups = first_int(config, "o_groups") or 1
    yield "attn.wq_a.weight", (rank, hidden)
    yield "attn.wq_b.weight", (heads * dim, rank)
    yield "attn.wkv.weight", (dim, hidden)
    yield "attn.wo_a.weight", (groups * out, heads * dim // groups)
    yield "attn.wo_b.weight", (hidden, groups * out)
    if block.compressed:
        overlap = 2 if block.compressed == 4 else 1
        yield "attn.compressor.wkv_gate.weight", (2 * overlap * dim, hidden)
    if block.compressed == 4:
        own = first_int(config, "index_head_dim") or 0
        yield from ((n.replace("self_attn", "attn"), s) for n, s in _indexer(config, hidden, rank))
        yield "attn.indexer.compressor.wkv_gate.weight", (4 * own, hidden)


def _state(config: Config, hidden: int) -> Iterator[Entry]:
    """A layer with a recurrent state; nothing where its family is not known here."""
    number = partial(first_int, config)
    linear = config.get("linear_attn_config")
    heads = number("mamba_num_heads", "mamba_n_heads")
    size = number("ssm_state_size", "mamba_d_state", "state_size")
    expand = number("mamba_expand")
    if "linear_num_value_heads" in config:
        yield from _delta_net(config, hidden)
    elif isinstance(linear, Mapping):
        yield from _kimi_delta(linear, hidden)
    elif heads and size:
        inner = heads * (number("mamba_head_dim", "mamba_d_head") or 64)
        groups = number("n_groups", "mamba_n_groups") or 1
        taps = number("conv_kernel", "mamba_d_conv") or 4
        width = inner + 2 * groups * size
        yield "mixer.in_proj.weight", (inner + width + heads, hidden)
        yield "mixer.conv1d.weight", (width, 1, taps)
        yield "mixer.out_proj.weight", (hidden, inner)
    elif expand and size:  # Jamba's first kind of Mamba
        inner, narrow = expand * hidden, number("mamba_dt_rank") or -(-hidden // 16)
        yield "mamba.in_proj.weight", (2 * inner, hidden)
        yield "mamba.conv1d.weight", (inner, 1, number("mamba_d_conv") or 4)
        yield "mamba.x_proj.weight", (narrow + 2 * size, inner)
        yield "mamba.dt_proj.weight", (inner, narrow)
        yield "mamba.A_log", (inner, size)
        yield "mamba.out_proj.weight", (hidden, inner)
    elif number("conv_L_cache"):  # LFM2
        taps = number("conv_L_cache") or 1
        width = number("conv_dim") or hidden
        yield "conv.in_proj.weight", (3 * width, hidden)
        yield "conv.conv.weight", (width, 1, taps)
        yield "conv.out_proj.weight", (hidden, width)
    elif isinstance(config.get("attn_type_list"), list):  # MiniMax-01
        inner = (number("num_attention_heads") or 1) * (number("head_dim") or 128)
        yield "self_attn.qkv_proj.weight", (3 * inner, hidden)
        yield "self_attn.output_gate.weight", (inner, hidden)
        yield "self_attn.out_proj.weight", (hidden, inner)


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


def _kimi_delta(linear: Config, hidden: int) -> Iterator[Entry]:
    heads, dim = first_int(linear, "num_heads") or 1, first_int(linear, "head_dim") or 128
    inner, taps = heads * dim, first_int(linear, "short_conv_kernel_size") or 4
    for name in ("q", "k", "v"):
        yield f"self_attn.{name}_proj.weight", (inner, hidden)
        yield f"self_attn.{name}_conv1d.weight", (inner, 1, taps)
    for name in ("f", "g"):
        yield f"self_attn.{name}_a_proj.weight", (dim, hidden)
        yield f"self_attn.{name}_b_proj.weight", (inner, dim)
    yield "self_attn.b_proj.weight", (heads, hidden)
    yield "self_attn.o_proj.weight", (hidden, inner)


def _experts(config: Config, hidden: int, prefix: str) -> Iterator[Entry]:
    """Router, routed experts and shared ones; with a latent size the routed ones work in it."""
    count = expert_count(config)
    inner = _expert_width(config)
    width = first_int(config, "moe_latent_size") or hidden
    gates = 2 if _gated(config) else 1
    yield f"{prefix}gate.weight", (count, hidden)
    yield f"{prefix}experts.gate_up_proj", (count, gates * inner, width)
    yield f"{prefix}experts.down_proj", (count, width, inner)
    if width != hidden:
        yield f"{prefix}fc1_latent_proj.weight", (width, hidden)
        yield f"{prefix}fc2_latent_proj.weight", (hidden, width)
    shared = _shared_width(config, inner)
    if shared:
        yield from _mlp(f"{prefix}shared_experts.", hidden, shared, gated=gates == 2)


def _expert_width(config: Config) -> int:
    names = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
    found = first_int(config, *names)
    listed = config.get("moe_intermediate_size")
    if found is None and isinstance(listed, list):
        found = next((n for n in listed if isinstance(n, int) and n > 0), None)
    if found is None and isinstance(inner := config.get("ffn_config"), Mapping):  # DBRX
        found = first_int(inner, "ffn_hidden_size")
    return found or first_int(config, "intermediate_size", "ffn_dim") or 0


def _shared_width(config: Config, inner: int) -> int:
    count = first_int(
        config,
        "n_shared_experts",
        "num_shared_experts",
        "moe_num_shared_experts",
        "num_shared_expert",
    )
    one = first_int(config, "moe_shared_expert_intermediate_size")
    if one:
        return one * (count or 0)
    whole = first_int(
        config, "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"
    )
    if whole:
        return whole
    if count is None and "llama4" in str(config.get("model_type")):
        count = 1
    return inner * (count or 0)


def _mlp(prefix: str, hidden: int, inner: int, *, gated: bool = True) -> Iterator[Entry]:
    if gated:
        yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)


def _half(shape: tuple[int, ...]) -> TensorFacts:
    return TensorFacts("BF16", shape, prod(shape) * 2, "")


def _stored(
    name: str, shape: tuple[int, ...], quantized: Quantization
) -> Iterator[tuple[str, TensorFacts]]:
    """A layer's tensor as a quantized checkpoint stores it: packed weight and scales; others in
    half precision.
    """
    scheme = None
    if len(shape) > 1 and not _NEVER_PACKED.search(name):
        scheme = quantized.scheme(name.removesuffix(".weight"), expert=".experts." in name)
    if scheme is None:
        yield name, _half(shape)
    else:
        yield from _packed(name, shape, scheme)


def _packed(
    name: str, shape: tuple[int, ...], scheme: schemes.Scheme
) -> Iterator[tuple[str, TensorFacts]]:
    elements = prod(shape)
    if scheme.mxfp4:
        packed, scale, stem = ("_blocks", "_scales", name)
    else:
        packed, scale, stem = (".weight_packed", ".weight_scale", name.removesuffix(".weight"))
    if scheme.group:
        scale_bytes = elements * 2 // scheme.group
    else:
        scale_bytes = 4 * shape[-2]
    yield stem + packed, TensorFacts("U8", shape, elements * scheme.bits // 8, "")
    yield stem + scale, TensorFacts("U8" if scheme.mxfp4 else "BF16", shape, scale_bytes, "")
