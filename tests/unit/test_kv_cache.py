"""Layers to groups, blocks and tokens, for every kind of attention."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.memory import deployment as shapes
from specserve.memory import kv_cache
from specserve.memory import layers as cache_layers
from specserve.memory.blocks import layer_kinds
from specserve.memory.deployment import Processor, Shape
from specserve.memory.kv_cache import CachePlan
from specserve.memory.plan import plan

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128,
          "sliding_window": 1024, "sliding_window_pattern": 6}  # fmt: skip
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "num_nextn_predict_layers": 1}  # fmt: skip
QWEN35 = {
    **LLAMA, "model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_key_value_heads": 4, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
}  # fmt: skip


def shape(config: dict[str, Any], *, version: str = "0.32.0", method: str | None = None, k: int = 5, tp: int = 1,
          length: int = 8192, **engine: Any) -> Shape:  # fmt: skip
    """A deployment on an H100."""
    body: dict[str, Any] = {
        "models": {"target_model": {"path": "t", "tensor_parallel_size": tp}},
        "engine": {"max_model_len": length, **engine},
        "speculative_decoding": {
            "enabled": method is not None,
            "method": method,
            "num_speculative_tokens": k,
        },
    }
    settings, facts = Settings.model_validate(body), ModelFacts("t", config)
    return shapes.resolve(
        settings, facts, backend="gpu", engine_version=version, gpu_bytes=79 * 2**30
    )


def arrange(config: dict[str, Any], made: Shape, draft: dict[str, Any] | None = None) -> CachePlan:
    """The pool's layout of target and draft."""
    layers = cache_layers.of_target(config, made).layers
    layers += cache_layers.of_draft(made.method, config, draft, made).layers
    return kv_cache.arrange(layers, made)


def token_bytes(config: dict[str, Any], **changes: Any) -> int:
    """KV bytes per token on one GPU."""
    made = shape(config, **changes)
    return arrange(config, made).token_bytes(made.max_model_len)


@pytest.mark.parametrize(
    ("tp", "expected"),
    [(1, 131072), (2, 65536), (8, 16384), (16, 16384)],
)
def test_heads_are_shared_among_gpus_and_never_below_one(tp: int, expected: int) -> None:
    """Grouped heads are divided by TP until each GPU holds one; then they are repeated."""
    assert token_bytes(LLAMA, tp=tp) == expected


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_latent_is_not_divided_by_tp(tp: int) -> None:
    """MLA keeps the whole latent on every GPU: 61 layers x 576 values x 2 bytes."""
    assert token_bytes(DEEPSEEK, tp=tp) == 61 * 576 * 2


@pytest.mark.parametrize(
    ("kv_dtype", "per_layer"),
    [
        ("auto", 4096), ("fp8", 2048), ("fp8_e5m2", 2048), ("int8_per_token_head", 2112), ("int4_per_token_head", 1088),
        ("nvfp4", 1152), ("turboquant_k8v4", 1568), ("float32", 8192),
    ],
)  # fmt: skip
def test_cache_types(kv_dtype: str, per_layer: int) -> None:
    """Each cache type packs a token of 8 heads of 128 into its own number of bytes, scales included."""
    assert token_bytes(LLAMA, kv_cache_dtype=kv_dtype) == 32 * per_layer


def test_calibrated_checkpoints_turn_the_fp8_cache_on() -> None:
    """With kv_cache_dtype auto, a checkpoint that brings an fp8 scheme halves the cache."""
    scheme = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    assert token_bytes({**LLAMA, "quantization_config": scheme}) == 65536


def test_a_draft_model_adds_all_its_layers() -> None:
    """Every layer of the draft caches every token."""
    draft = {**LLAMA, "num_hidden_layers": 16}
    assert arrange(LLAMA, shape(LLAMA, method="draft_model"), draft).token_bytes(8192) == 48 * 4096


def test_an_eagle_head_adds_its_one_layer() -> None:
    """EAGLE heads cache one layer; ngram and suffix none."""
    head = {**LLAMA, "num_hidden_layers": 1}
    assert arrange(LLAMA, shape(LLAMA, method="eagle3"), head).token_bytes(8192) == 33 * 4096
    assert arrange(LLAMA, shape(LLAMA, method="ngram")).token_bytes(8192) == 32 * 4096


def test_mtp_adds_one_layer_of_the_targets_kind() -> None:
    """DeepSeek's MTP module caches a latent like any other layer."""
    assert arrange(DEEPSEEK, shape(DEEPSEEK, method="mtp")).token_bytes(8192) == 62 * 576 * 2


def test_windows_and_full_layers_share_one_pool() -> None:
    """Gemma 3: 10 full and 52 sliding layers make seven groups of ten, as vLLM 0.19 printed."""
    made = shape(GEMMA3, version="0.19.0", max_num_batched_tokens=8192)
    plan = arrange(GEMMA3, made)
    assert [g.layers for g in plan.groups] == [10] * 7
    assert plan.request_blocks(8192) == 512 + 6 * 513
    assert plan.tokens(15997, 8192) == 36560
    assert plan.requests(15997, 8192) == pytest.approx(4.456, abs=0.001)


def test_in_flight_tokens_count_twice_since_0_26() -> None:
    """With async scheduling a window also keeps the tokens of two batches in flight."""
    old = arrange(
        GEMMA3, shape(GEMMA3, version="0.25.0", length=131072, max_num_batched_tokens=2048)
    )
    new = arrange(
        GEMMA3, shape(GEMMA3, version="0.26.0", length=131072, max_num_batched_tokens=2048)
    )
    assert old.request_blocks(131072) == 8192 + 6 * (192 + 1)
    assert new.request_blocks(131072) == 8192 + 6 * (320 + 1)


def test_without_the_hybrid_manager_windows_cost_as_much_as_full_layers() -> None:
    """--disable-hybrid-kv-cache-manager puts all 62 layers into one group."""
    made = shape(GEMMA3, extra_args={"disable-hybrid-kv-cache-manager": True})
    assert arrange(GEMMA3, made).token_bytes(8192) == 62 * 8192


def test_states_and_attention_share_a_page() -> None:
    """Qwen3.6-27B with an fp8 cache and one draft token: blocks of 1584 tokens in four groups of 17 layers."""
    made = shape(QWEN35, version="0.20.1", method="mtp", k=1, length=65536, kv_cache_dtype="fp8_e4m3",
                 extra_args={"enable-prefix-caching": True})  # fmt: skip
    plan = arrange(QWEN35, made)
    full = next(g for g in plan.groups if g.layer.kind == "full")
    assert (full.block_tokens, full.layers, len(plan.groups)) == (1584, 17, 4)
    assert plan.request_blocks(65536) == 42 + 3 * 3
    assert plan.tokens(93, 65536) == 36432


@pytest.mark.parametrize(("version", "states"), [("0.27.1", 1), ("0.28.0", 2)])
def test_states_are_kept_for_prefix_caching_since_0_28(version: str, states: int) -> None:
    """Prefix caching of hybrid models is opt-in before 0.28, and costs one more state for every group."""
    made = shape(QWEN35, version=version)
    assert {
        g.blocks(8192, made) for g in arrange(QWEN35, made).groups if g.layer.kind == "state"
    } == {states}


def test_decode_context_parallel_divides_the_latent() -> None:
    """DCP 8 shares the tokens of the cache among eight GPUs."""
    made = shape(DEEPSEEK, tp=8, extra_args={"decode-context-parallel-size": 8})
    assert arrange(DEEPSEEK, made).token_bytes(8192) == round(61 * 576 * 2 / 8)


def test_layers_that_share_anothers_cache_have_none() -> None:
    """num_kv_shared_layers (Gemma 3n, Gemma 4) drops the last layers."""
    assert token_bytes({**LLAMA, "num_kv_shared_layers": 12}) == 20 * 4096


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, ["full"] * 4),
        ({"model_type": "mistral", "sliding_window": 4096}, ["sliding"] * 4),
        ({"model_type": "gemma2", "sliding_window": 4096}, ["sliding", "full"] * 2),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, ["chunked"] * 3 + ["full"]),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*-"}, ["state", "none", "full", "none"]),
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2}, ["state"] * 2 + ["full", "state"]),
        ({"layer_types": ["linear_attention", "full_attention"]}, ["state", "full"] * 2),
        ({"block_configs": [{"attention": {"no_op": True}}] + [{"attention": {"n_heads_in_group": 8}}] * 3},
         ["none"] + ["full"] * 3),
    ],
)  # fmt: skip
def test_kinds_of_layers(change: dict[str, Any], kinds: list[str]) -> None:
    """Each family says in its own way which layers attend to what."""
    assert layer_kinds({**LLAMA, **change}, 4) == kinds


def test_unknown_layers_are_counted_and_named() -> None:
    """A layer of a kind nobody knows counts as full attention, and the plan says so."""
    model = cache_layers.of_target(
        {**LLAMA, "layer_types": ["full_attention", "hyena"]}, shape(LLAMA)
    )
    assert len(model.layers) == 32
    assert model.assumed == (
        "KV cache: the state of 'hyena' layers is not known here, counted as full attention",
    )


@given(
    layers=st.integers(1, 100),
    heads=st.integers(1, 64),
    length=st.integers(1, 100_000),
    pool=st.integers(0, 2**36),
)
def test_what_fits_is_monotonous(layers: int, heads: int, length: int, pool: int) -> None:
    """The longest request that fits does fit, and one more token does not (or is the limit)."""
    config = {
        **LLAMA,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "num_attention_heads": heads,
    }
    plan = arrange(config, shape(config))
    longest = plan.longest(pool, length)
    usable = plan.blocks(pool) - 1
    assert longest == 0 or plan.request_blocks(longest) <= usable
    assert longest == length or plan.request_blocks(longest + 1) > usable


def cpu_tokens(config: dict[str, Any], processor: Processor) -> int:
    """KV tokens that the CPU engine makes of 48 MiB."""
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "t"}},
            "engine": {
                "max_model_len": 3000,
                "max_num_batched_tokens": 1024,
                "extra_args": {"kv-cache-memory-bytes": str(48 * 1024**2)},
            },
            "speculative_decoding": {"enabled": False},
        }
    )
    made = plan(
        settings,
        ModelFacts("t", config),
        engine_version="0.32.0",
        backend="cpu",
        free_ram_bytes=64 * 1024**3,
        processor=processor,
    )
    return made.capacity.kv_cache_tokens


@pytest.mark.parametrize(
    ("has_avx512_bf16", "tokens"),
    [(True, 41727), (False, 54857)],
)
def test_recurrent_states_of_the_cpu_engine(has_avx512_bf16: bool, tokens: int) -> None:
    """The CPU engine keeps a delta net's matrices in float32 only where it has fast kernels for them.

    Both figures are vLLM 0.32's own, the second with its test of the processor made to fail.
    """
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    assert cpu_tokens(config, Processor(has_avx512_bf16)) == tokens


@pytest.mark.parametrize("key", ["full_attention_interval", "attn_layer_period"])
def test_an_interval_of_zero_is_no_interval(key: str) -> None:
    """A config whose interval is 0 is planned as one without it."""
    config = {**QWEN35, key: 0}
    without = {name: value for name, value in config.items() if name != key}
    assert layer_kinds(config, 64) == layer_kinds(without, 64)


@pytest.mark.parametrize(("has_amx_tile", "tokens"), [(False, 14521), (True, 14125)])
def test_blocks_of_latent_attention_on_the_cpu_engine(has_amx_tile: bool, tokens: int) -> None:
    """Without AMX the CPU engine's only MLA kernel takes blocks of 16 tokens, with it those of 128.

    Both figures are vLLM 0.32's own, on processors with and without AMX.
    """
    config = {
        "model_type": "deepseek_v2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert cpu_tokens(config, Processor(has_amx_tile=has_amx_tile)) == tokens
