"""Bytes of weights on one GPU, from headers: what is shared, what is repeated, what loading changes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.safetensors import DTYPE_BITS, TensorFacts
from specserve.config.schema import Settings
from specserve.memory import deployment as shapes
from specserve.memory import parameters, weights
from specserve.memory.deployment import Shape
from specserve.memory.weights import Weights

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 1,
}  # fmt: skip
ROPE = 8192 * 128 * 2
"""Cosines and sines of 8192 positions in 16 bits."""


def tensor(shape: tuple[int, ...], dtype: str = "BF16") -> TensorFacts:
    """A header entry."""
    return TensorFacts(dtype, shape, prod(shape) * DTYPE_BITS[dtype] // 8, "model.safetensors")


def shape(config: dict[str, Any], *, tp: int = 1, pp: int = 1, dtype: str = "auto", quantization: str | None = None,
          **extra: Any) -> Shape:  # fmt: skip
    """A deployment of 8192 tokens."""
    target = {"path": "t", "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "dtype": dtype,
              "quantization": quantization}  # fmt: skip
    body = {
        "models": {"target_model": target},
        "engine": {"max_model_len": 8192, "extra_args": extra},
    }
    facts = ModelFacts("t", config)
    return shapes.resolve(
        Settings.model_validate(body), facts, backend="gpu", engine_version="0.32.0", gpu_bytes=None
    )


def weigh(
    tensors: dict[str, TensorFacts], config: dict[str, Any] = CONFIG, **changes: Any
) -> Weights:
    """The weights of a checkpoint with these tensors, without its rope table."""
    made = shape(config, **changes)
    return weights.of_model(
        ModelFacts("t", config, tensors=tensors), made, online=made.quantization
    )


def of_stage(found: Weights, stage: int = 0) -> int:
    """Bytes without the rope table."""
    return found.stage_bytes[stage] - ROPE


@pytest.mark.parametrize(
    ("name", "rows_columns", "tp", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (1024, 1024), 4, 1024 * 1024 * 2 // 4),
        ("model.layers.0.self_attn.k_proj.weight", (256, 1024), 4, 128 * 1024 * 2),
        ("model.layers.0.self_attn.o_proj.weight", (1024, 1024), 4, 1024 * 1024 * 2 // 4),
        ("model.layers.0.mlp.down_proj.weight", (1024, 4096), 4, 1024 * 1024 * 2),
        ("model.layers.0.mlp.gate.weight", (64, 1024), 4, 64 * 1024 * 2),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 1024), 4, 576 * 1024 * 2),
        ("model.layers.0.self_attn.q_a_proj.weight", (1536, 1024), 4, 1536 * 1024 * 2),
        ("model.layers.0.self_attn.q_b_proj.weight", (1024, 1536), 4, 1024 * 1536 * 2 // 4),
        ("model.layers.0.input_layernorm.weight", (1024,), 4, 2048),
        ("model.embed_tokens.weight", (32000, 256), 4, 8000 * 256 * 2),
        ("lm_head.weight", (32003, 256), 4, 8016 * 256 * 2),
        ("vision_tower.layers.0.mlp.fc1.weight", (4096, 1024), 4, 4096 * 1024 * 2 // 4),
    ],
)
def test_what_is_shared_and_what_is_repeated(
    name: str, rows_columns: tuple[int, ...], tp: int, expected: int
) -> None:
    """Column and row parallel layers are cut, heads down to one, the vocabulary in padded rows; others are repeated."""
    assert of_stage(weigh({name: tensor(rows_columns)}, tp=tp)) == expected


def test_a_tower_can_be_repeated() -> None:
    """--mm-encoder-tp-mode data keeps the whole vision tower on every GPU."""
    name = {"vision_tower.layers.0.mlp.fc1.weight": tensor((4096, 1024))}
    assert of_stage(weigh(name, tp=4, **{"mm-encoder-tp-mode": "data"})) == 4096 * 1024 * 2
    assert of_stage(weigh(name, tp=4, **{"language-model-only": True})) == 0


def test_experts_are_cut_by_tp_or_handed_out_whole() -> None:
    """With expert parallelism a GPU holds whole experts: 3 of 10 at EP 4."""
    config = {**CONFIG, "num_experts": 10}
    tensors = {
        f"model.layers.0.mlp.experts.{i}.up_proj.weight": tensor((4096, 1024)) for i in range(10)
    }
    one = 4096 * 1024 * 2
    assert of_stage(weigh(tensors, config, tp=4)) == 10 * one // 4
    assert of_stage(weigh(tensors, config, tp=4, **{"enable-expert-parallel": True})) == 3 * one


def test_tied_embeddings_count_once_per_stage_that_needs_them() -> None:
    """A tied LM head is no second matrix, but with PP the last stage needs its own copy of the embedding."""
    tensors = {
        "model.embed_tokens.weight": tensor((32000, 1024)),
        "lm_head.weight": tensor((32000, 1024)),
    }
    one = 32000 * 1024 * 2
    assert of_stage(weigh(tensors)) == 2 * one
    assert of_stage(weigh(tensors, {**CONFIG, "tie_word_embeddings": True})) == one
    staged = weigh(tensors, {**CONFIG, "tie_word_embeddings": True}, pp=2)
    assert [of_stage(staged, i) for i in (0, 1)] == [one, one]


def test_the_fullest_stage_decides() -> None:
    """Layers go to stages in order; embedding to the first, LM head to the last."""
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": tensor((1024, 4096)) for i in range(2)}
    tensors |= {
        "model.embed_tokens.weight": tensor((32000, 1024)),
        "lm_head.weight": tensor((64000, 1024)),
    }
    found = weigh(tensors, pp=2)
    assert [of_stage(found, i) for i in (0, 1)] == [2**23 + 65_536_000, 2**23 + 132_120_576]
    assert max(found.stage_bytes) == found.stage_bytes[1]


def test_mtp_modules_are_apart() -> None:
    """Layers beyond num_hidden_layers, and mtp.*, are the draft's, not the target's."""
    tensors = {
        "model.layers.1.mlp.down_proj.weight": tensor((1024, 4096)),
        "model.layers.2.mlp.down_proj.weight": tensor((1024, 4096)),
        "mtp.fc.weight": tensor((1024, 2048)),
    }
    found = weigh(tensors)
    assert of_stage(found) == 1024 * 4096 * 2
    assert found.mtp_bytes == 1024 * 4096 * 2 + 1024 * 2048 * 2


@pytest.mark.parametrize("prefix", ["mtp.layers.0.", "model.layers.2."])
def test_experts_of_an_mtp_module_are_cut(prefix: str) -> None:
    """By TP, or handed out whole with EP, as those of any layer; so is its projection where it is column-parallel."""
    experts = {f"{prefix}mlp.experts.{i}.up_proj.weight": tensor((4096, 1024)) for i in range(8)}
    one, config = 4096 * 1024 * 2, {**CONFIG, "num_experts": 8}
    assert weigh(experts, config, tp=4).mtp_bytes == 2 * one
    assert weigh(experts, config, tp=4, **{"enable-expert-parallel": True}).mtp_bytes == 2 * one
    assert weigh({"mtp.fc.weight": tensor((1024, 2048))}, tp=4).mtp_bytes == 1024 * 512 * 2
    assert (
        weigh({"model.mtp_layers.0.mlp.down_proj.weight": tensor((1024, 4096))}).mtp_bytes
        == 1024 * 4096 * 2
    )


@pytest.mark.parametrize(
    ("quantized", "eight_bit"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.2.mlp"]}, False),
        (
            {"quant_method": "compressed-tensors", "ignore": ["lm_head", "model.layers.2.eh_proj"]},
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head", "model.layers.1.mlp.gate"],
            },
            False,
        ),
        ({"quant_method": "gptq", "bits": 8}, False),
    ],
)
def test_which_quantized_checkpoints_have_a_quantized_mtp_module(
    quantized: dict[str, Any], eight_bit: bool
) -> None:
    """From config.json alone: FP8 releases and lists that know the module; other quantizers copy it as it was."""
    config = {**CONFIG, "num_nextn_predict_layers": 1, "quantization_config": quantized}
    found = parameters.of_config(config, config)
    assert found is not None
    down = sum(
        t.nbytes for n, t in found.items() if n.startswith("model.layers.2.mlp.down_proj.weight")
    )
    assert (down < 1024 * 4096 * 1.1) is eight_bit
    assert found["model.layers.2.eh_proj.weight"].dtype == "BF16"


@pytest.mark.parametrize(
    ("dtype", "setting", "expected"),
    [
        ("F32", "auto", 2),
        ("BF16", "float32", 4),
        ("F8_E4M3", "auto", 1),
        ("U8", "auto", 1),
        ("I32", "auto", 4),
    ],
)
def test_floats_are_loaded_in_the_models_dtype(dtype: str, setting: str, expected: int) -> None:
    """float32 weights are halved on loading, packed and 8-bit weights stay as they are."""
    found = weigh(
        {"model.layers.0.mlp.down_proj.weight": tensor((1024, 4096), dtype)}, dtype=setting
    )
    rope = 8192 * 128 * (4 if setting == "float32" else 2)
    assert found.stage_bytes[0] - rope == 1024 * 4096 * expected


def test_scales_keep_their_dtype() -> None:
    """float32 scales of a quantized weight are not converted."""
    assert (
        of_stage(weigh({"model.layers.0.mlp.down_proj.weight_scale_inv": tensor((8, 32), "F32")}))
        == 1024
    )


def test_online_quantization_shrinks_linear_layers_only() -> None:
    """quantization: fp8 on a plain checkpoint halves matrices in layers; embedding, head and norms stay."""
    tensors = {
        "model.layers.0.mlp.down_proj.weight": tensor((1024, 4096)),
        "model.layers.0.input_layernorm.weight": tensor((1024,)),
        "model.embed_tokens.weight": tensor((32000, 512)),
    }
    assert (
        of_stage(weigh(tensors, quantization="fp8"))
        == 1024 * 4096 + 2048 + 32000 * 512 * 2 + 2**18 * 3
    )


def test_fused_parameters_are_rounded_as_pytorch_allocates() -> None:
    """gate and up of Qwen2.5-7B together are 129.5 steps of 2 MiB: a whole step is taken."""
    tensors = {f"model.layers.0.mlp.{n}_proj.weight": tensor((18944, 3584)) for n in ("gate", "up")}
    assert of_stage(weigh(tensors)) == 130 * 2 * 2**20


def test_latent_attention_keeps_absorbed_matrices() -> None:
    """MLA multiplies kv_b_proj out once more for decoding: the same size again in 16 bits, divided by TP."""
    config = {
        **CONFIG,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "qk_rope_head_dim": 64,
    }
    found = weigh({"model.norm.weight": tensor((1024,))}, config, tp=2)
    assert found.stage_bytes[0] == 2048 + 8192 * 64 * 2 + 2 * 512 * 4 * 256 * 2


def test_an_index_gives_the_total_and_the_config_the_split() -> None:
    """Without headers the index's total size is split as the config's layers say."""
    made = shape(CONFIG, tp=2)
    counted = weights.of_model(ModelFacts("t", CONFIG), made)
    known = weights.of_model(ModelFacts("t", CONFIG, total_size_bytes=10**9), made)
    found = parameters.of_config(CONFIG, CONFIG)
    assert found is not None
    computed = sum(t.nbytes for t in found.values())
    assert known.stage_bytes[0] == pytest.approx(counted.stage_bytes[0] * 10**9 / computed, abs=1)
    assert "index" in known.source


def test_an_unknown_architecture_says_what_it_assumes() -> None:
    """A config that names nothing known: an even split of the total, or a stated unknown; never a crash."""
    config = {"model_type": "mystery"}
    found = weights.of_model(ModelFacts("t", config, total_size_bytes=10**9), shape(config, tp=2))
    assert found.stage_bytes == (505_000_000,)
    assert found.assumed
    assert found.unknown is None
    nothing = weights.of_model(ModelFacts("t", config), shape(config))
    assert nothing.unknown


def test_parameters_counted_from_a_config_are_the_checkpoints() -> None:
    """Llama-3.1-8B has 8,030,261,248 parameters; config.json alone gives the same bytes."""
    config = {**CONFIG, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
    found = parameters.of_config(config, config)
    assert found is not None
    assert sum(t.nbytes for t in found.values()) == 2 * 8_030_261_248


def test_gpt2_counts_two_matrices_of_four_times_its_width() -> None:
    """GPT-2's config leaves the MLP's width out; 124,439,808 parameters without its learned positions and biases."""
    config = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257,
              "tie_word_embeddings": True}  # fmt: skip
    found = parameters.of_config(config, config)
    assert found is not None
    matrices = sum(t.nbytes for t in found.values() if len(t.shape) == 2) // 2
    assert matrices == 50257 * 768 + 12 * 12 * 768**2
