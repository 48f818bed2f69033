"""58 public model configs, as they are: sizes from config.json and hf_quant_config.json alone.

tests/data/model_configs.jsonl: ``source`` names where each was published, ``published_gb`` is the size that
vllm-project/recipes states (on disk, or its vram_minimum_gb / 1.2), where it states one.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from specserve.app import preflight
from specserve.checkpoint.context import native_length
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.fields import layer_count
from specserve.checkpoint.mistral import config_of
from specserve.checkpoint.quantization import kv_cache_dtype, with_quant_file
from specserve.checkpoint.read import read
from specserve.config.schema import Settings
from specserve.engine.inside.economics import break_even_chance
from specserve.memory import layers as cache_layers
from specserve.memory import parameters, required
from specserve.memory.blocks import blocks
from specserve.memory.plan import plan
from specserve.memory.result import MemoryPlan
from specserve.pair import heads, match, mtp
from tests import damaged

DATA = Path(__file__).parents[1] / "data" / "model_configs.jsonl"
ROUNDED = {
    "nvidia/DeepSeek-V3.1-NVFP4": "half a byte for each of 671 G parameters: no scales, no 16-bit attention",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "30 G parameters, rounded; the layers sum up to 31.6 G",
}
"""Published sizes that are round numbers of another kind, and what kind."""


@dataclass(frozen=True)
class Public:
    """One line of the file."""

    id: str
    facts: ModelFacts
    published_gb: float | None


@cache
def everything() -> dict[str, Public]:
    """All models by their Hub id."""
    found = {}
    for line in DATA.read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        config = with_quant_file(raw["config"], raw.get("hf_quant_config") or {})
        facts = ModelFacts(raw["id"], config)
        found[raw["id"]] = Public(raw["id"], facts, raw.get("published_gb"))
    return found


def gigabytes(name: str) -> float:
    """Weights of one model, reckoned from its config."""
    facts = everything()[name].facts
    found = parameters.of_config(facts.config, facts.text_config)
    assert found is not None
    return sum(t.nbytes for t in found.values()) / 1e9


STATED = [model for model in everything().values() if model.published_gb is not None]


@pytest.mark.parametrize("model", STATED, ids=lambda model: model.id)
def test_weights_are_as_large_as_published(model: Public) -> None:
    """Within 5 % of the published size; within 25 % where that is a round number of parameters."""
    assert model.published_gb is not None
    off = abs(gigabytes(model.id) / model.published_gb - 1)
    assert off < (0.25 if model.id in ROUNDED else 0.05)


@pytest.mark.parametrize(
    ("wide", "narrow", "ratio"),
    [
        # Of 32.76 G parameters 1.56 G are embedding and head, which stay in 16 bits.
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8", 65.5 / 34.3),
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8-Static-PerTensor", 65.5 / 34.3),
        # 235.09 G, 1.24 G of them embedding and head.
        ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-FP8", 470.2 / 236.4),
        ("zai-org/GLM-5.1", "zai-org/GLM-5.1-FP8", 1.994),
        ("zai-org/GLM-5.2", "zai-org/GLM-5.2-FP8", 1.994),
        ("meta-llama/Meta-Llama-3.1-70B", "nvidia/Llama-3.1-70B-Instruct-FP8", 141.1 / 72.7),
        # 1,121 GB as published in 16 bits, 575 GB in FP8.
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", 1.952),
        # 4.25 bits for MXFP4's experts, 4.5 for NVFP4's.
        ("nvidia/DeepSeek-V4-Flash-NVFP4", "deepseek-ai/DeepSeek-V4-Flash", 1.06),
    ],
)  # fmt: skip
def test_twins_of_another_precision_keep_their_ratio(wide: str, narrow: str, ratio: float) -> None:
    """The same architecture in another precision: the bytes differ by what the bits say."""
    assert gigabytes(wide) / gigabytes(narrow) == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("model", everything().values(), ids=lambda model: model.id)
def test_every_public_config_is_planned(model: Public) -> None:
    """No crash, layers and weights known: the plan of every one has a size and a KV cache."""
    body = {
        "models": {"target_model": {"path": "t", "tensor_parallel_size": 8}},
        "engine": {"max_model_len": 8192},
        "hardware": {"gpu_name": "NVIDIA H200", "gpu_count": 8},
    }
    made = plan(Settings.model_validate(body), model.facts)
    assert layer_count(model.facts.text_config)
    assert made.kv_bytes_per_token > 0
    assert made.gpus[0].target_weights_bytes > 0
    assert made.fits is not None


@pytest.mark.parametrize(
    ("name", "layers", "attending"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 52, 6),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 108, 12),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 80, 49),
        ("Qwen/Qwen3.5-27B", 64, 16),
        ("XiaomiMiMo/MiMo-V2-Flash", 48, 9),
    ],
)
def test_which_layers_attend_to_everything(name: str, layers: int, attending: int) -> None:
    """Patterns, lists and pruned blocks: as many full attention layers as the config says."""
    config = everything()[name].facts.text_config
    found = blocks(config, layer_count(config) or 0)
    assert len(found) == layers
    assert sum(block.mixer == "full" for block in found) == attending


def test_pruned_blocks_keep_their_own_kv_heads() -> None:
    """A NAS model states no KV heads: each block groups 8 heads, so 8 of 64 are cached."""
    facts = everything()["nvidia/Llama-3_3-Nemotron-Super-49B-v1"].facts
    made = plan(Settings.model_validate({"models": {"target_model": {"path": "t"}}}), facts)
    found = cache_layers.of_target(facts.text_config, made.shape).layers
    assert {layer.token_bytes for layer in found} == {2 * 8 * 128 * 2}


@pytest.mark.parametrize(
    ("config", "separate", "expected"),
    [
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": "FP8", "quant_algo": "FP8"}}, {}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, {}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}}, {}, "nvfp4"),
        ({"text_config": {"quantization_config": {"kv_cache_scheme": "fp8"}}}, {}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": None}}, {}, "auto"),
        ({"quantization_config": {"quant_method": "fp8"}},
         {"quantization": {"kv_cache_quant_algo": "FP8"}}, "auto"),
    ],
)  # fmt: skip
def test_the_kv_cache_that_a_checkpoint_turns_on(
    config: dict[str, Any], separate: dict[str, Any], expected: str
) -> None:
    """Objects and text, in config.json or, where that is silent, in hf_quant_config.json."""
    assert kv_cache_dtype("auto", with_quant_file(config, separate)) == expected


def test_a_pattern_for_each_expert_leaves_the_experts_alone() -> None:
    """Thousands of regular expressions: each is met by the tensors of its own layer alone."""
    facts = everything()["Qwen/Qwen3-235B-A22B-FP8"].facts
    listed = [f"re:.*layers\\.{n}\\.mlp\\.experts\\.{e}\\..*" for n in range(94) for e in range(20)]
    config = {**facts.config, "quantization_config": {"quant_method": "fp8", "ignore": listed}}
    found = parameters.of_config(config, config)
    assert found is not None
    assert sum(t.nbytes for t in found.values()) > 460e9


def deployed(
    target: ModelFacts, draft: ModelFacts, method: str, *, length: int = 4096, k: int = 3
) -> MemoryPlan:
    """The plan of a pair on eight H200."""
    body = {
        "models": {"target_model": {"path": "t"}, "draft_model": {"path": "d"}},
        "speculative_decoding": {"method": method, "num_speculative_tokens": k},
        "engine": {"max_model_len": length},
        "hardware": {"gpu_name": "NVIDIA H200", "gpu_count": 8},
    }
    return plan(Settings.model_validate(body), target, draft)


@pytest.mark.parametrize("wrapper", ["transformer_layer_config", "model"])
def test_a_wrapped_head_is_read_like_a_plain_one(wrapper: str) -> None:
    """Speculators' format and vLLM's own EAGLE format: the same KV cache and context as unwrapped."""
    target = everything()["Qwen/Qwen3-32B"].facts
    layer = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8,
             "head_dim": 128, "hidden_size": 5120, "vocab_size": 151936, "max_position_embeddings": 2048}  # fmt: skip
    plain = deployed(target, ModelFacts("d", {**layer, "draft_vocab_size": 32000}), "eagle3")
    head = ModelFacts("d", {"draft_vocab_size": 32000, wrapper: layer})
    assert deployed(target, head, "eagle3").capacity == plain.capacity
    assert native_length(head) == 2048
    assert not any("number of layers" in note for note in plain.assumed)


def test_an_assistant_has_no_kv_cache_of_its_own() -> None:
    """Gemma 4's assistant reads the target's cache: a token costs the same with it and without."""
    target = everything()["google/gemma-4-26B-A4B"].facts
    text = {
        **target.text_config,
        "num_hidden_layers": 4,
        "enable_moe_block": False,
        "num_experts": None,
    }
    draft = ModelFacts("d", {"model_type": "gemma4_assistant", "text_config": text})
    made = deployed(target, draft, "mtp")
    assert made.kv_bytes_per_token == deployed(target, draft, "ngram").kv_bytes_per_token
    assert made.gpus[0].draft_weights_bytes > 0


def test_modules_in_a_folder_of_their_own_cache_no_more_than_they_run() -> None:
    """MTP from another folder: its modules' attention alone, not every layer that its config counts."""
    target = everything()["Qwen/Qwen3.5-27B"].facts
    found = cache_layers.of_draft(
        "mtp", target.text_config, target.text_config, deployed(target, target, "mtp").shape
    )
    assert len(found.layers) == 1


@pytest.mark.parametrize(("k", "codes"), [(5, []), (7, ["head-block-size"])])
def test_a_block_inside_the_target_limits_the_tokens(k: int, codes: list[str]) -> None:
    """DSpark without a draft: dspark_block_size of the target's own config is the most it drafts."""
    facts = everything()["deepseek-ai/DeepSeek-V4-Flash"].facts
    target = ModelFacts("t", {**facts.config, "dspark_block_size": 5})
    body = {
        "models": {"target_model": {"path": "t"}},
        "speculative_decoding": {"method": "dspark", "num_speculative_tokens": k},
    }
    found = preflight.pair_findings(Settings.model_validate(body), target, None).findings
    assert [f.code for f in found if f.code == "head-block-size"] == codes


def test_an_assistant_is_not_warned_about_reuse() -> None:
    """Gemma 4's assistant runs all its layers for each token: several tokens are what it is for."""
    assistant = ModelFacts("d", {"model_type": "gemma4_assistant"})
    assert not list(mtp.check(assistant, 4, "models.draft_model.path"))


def mistral(folder: Path, *, eagle: bool = False, **params: Any) -> ModelFacts:
    """A folder in Mistral's own format: params.json, consolidated.safetensors and its index."""
    folder.mkdir()
    body = {"dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2,
            "vocab_size": 320, "max_position_embeddings": 4096, **params}  # fmt: skip
    shapes = {"tok_embeddings.weight": [320, 64], "norm.weight": [64], "output.weight": [320, 64]}
    if eagle:
        shapes = {"eagle_linear.weight": [64, 128]}
    for n in range(body["n_layers"]):
        shapes |= {f"layers.{n}.attention.wq.weight": [64, 64], f"layers.{n}.attention.wk.weight": [32, 64],
                   f"layers.{n}.attention.wv.weight": [32, 64], f"layers.{n}.attention.wo.weight": [64, 64],
                   f"layers.{n}.feed_forward.w1.weight": [128, 64], f"layers.{n}.feed_forward.w2.weight": [64, 128],
                   f"layers.{n}.feed_forward.w3.weight": [128, 64]}  # fmt: skip
    header, end = {}, 0
    for name, dims in shapes.items():
        size = 2 * prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    (folder / "params.json").write_text(json.dumps(body))
    (folder / "consolidated.safetensors").write_bytes(
        struct.pack("<Q", len(raw)) + raw + bytes(end)
    )
    index = {"weight_map": dict.fromkeys(shapes, "consolidated.safetensors")}
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    return read(str(folder))


def test_mistrals_own_format_is_planned(tmp_path: Path) -> None:
    """params.json and consolidated.safetensors: KV heads, context, and weights as their headers say."""
    facts = mistral(tmp_path / "m", sliding_window=[None, 1024])
    made = deployed(facts, facts, "ngram")
    layers = cache_layers.of_target(facts.text_config, made.shape).layers
    assert [layer.kind for layer in layers] == ["full", "sliding"]
    assert native_length(facts) == 4096
    assert facts.total_size_bytes == 2 * (2 * 320 * 64 + 64 + 2 * (12288 + 24576))


def test_a_head_in_mistrals_format_is_an_eagle_head(tmp_path: Path) -> None:
    """eagle_linear joins what the head reads: no whole model, and its one layer is cached."""
    target = mistral(tmp_path / "m")
    head = mistral(tmp_path / "h", eagle=True, n_layers=1)
    assert heads.kind_of(head) == "eagle"
    assert (
        deployed(target, head, "eagle").kv_bytes_per_token
        > deployed(target, head, "ngram").kv_bytes_per_token
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, {"quantization_config": {"quant_method": "fp8"}}),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2}},
         {"n_routed_experts": 8, "architectures": ["MixtralForCausalLM"]}),
        ({"moe": {"num_experts": 128, "expert_hidden_dim": 96, "num_shared_experts": 1}, "qk_nope_head_dim": 64},
         {"moe_intermediate_size": 96, "model_type": "deepseek_v3"}),
        ({"yarn": {"factor": 8, "beta": 32}}, {"rope_parameters": {"rope_type": "yarn", "factor": 8, "beta_fast": 32}}),
        ({"moe": "x", "yarn": 3, "quantization": [], "sliding_window": "w"}, {"model_type": "mistral"}),
    ],
)  # fmt: skip
def test_what_params_json_stands_for(params: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each part of params.json under the name that config.json has for it."""
    made = config_of({"n_layers": 2, "dim": 64, **params})
    assert {key: made[key] for key in expected} == expected


def test_a_vision_model_in_mistrals_format_is_nested() -> None:
    """With a vision encoder the language model is a part, as for any other multimodal model."""
    facts = ModelFacts("m", config_of({"n_layers": 2, "vision_encoder": {"hidden_size": 8}}))
    assert facts.text_config["num_hidden_layers"] == 2
    assert facts.config["vision_config"]["hidden_size"] == 8


@pytest.mark.parametrize("seed", [1, 2])
def test_a_damaged_config_never_raises_and_never_fits_for_want_of_a_field(seed: int) -> None:
    """A slice of scripts/fuzz-configs: fields removed or spoilt anywhere in public configs."""
    assert list(damaged.run(seed, 60)) == []


@pytest.mark.parametrize("model", everything().values(), ids=lambda model: model.id)
def test_a_public_config_lacks_nothing(model: Public) -> None:
    """What is required is what every real config of its family has."""
    assert required.missing(model.facts.config, model.facts.text_config) == ()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Qwen/Qwen3-32B", "num_key_value_heads"),
        ("Qwen/Qwen3-0.6B", "head_dim"),
        ("meta-llama/Meta-Llama-3.1-70B", "intermediate_size"),
        ("deepseek-ai/DeepSeek-V3.2", "n_routed_experts"),
        ("deepseek-ai/DeepSeek-V3.2", "kv_lora_rank"),
        ("sgl-project/DeepSeek-V4-Flash-FP8", "head_dim"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "hybrid_override_pattern"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "block_configs"),
        ("MiniMaxAI/MiniMax-M2.5", "num_local_experts"),
    ],
)
def test_a_size_that_needs_a_missing_field_is_unknown(name: str, field: str) -> None:
    """No default is put in its place: the weights' size is unknown, and that is said."""
    config = {key: value for key, value in everything()[name].facts.config.items() if key != field}
    facts = ModelFacts("t", config)
    assert required.missing(config, facts.text_config)
    made = plan(Settings.model_validate({"models": {"target_model": {"path": "t"}}}), facts)
    assert made.terms[0].source == "unknown"


@pytest.mark.parametrize(
    ("draft_gb", "k", "severity", "said"),
    [
        (20, 3, "info", "reads 30.3 % of the target's bytes, 3 of them 90.9 % a step; with 3 drafts it pays above"),
        (34, 5, "info", "51.5 %"),
        (64, 5, "warning", "97.0 %"),
        (70, 5, "warning", "never paid back"),
    ],
)  # fmt: skip
def test_the_target_as_its_own_draft_is_judged_by_bytes(
    draft_gb: int, k: int, severity: str, said: str
) -> None:
    """Another precision of the same network: what it reads, and the acceptance above which it pays."""
    target = replace(everything()["Qwen/Qwen3-32B"].facts, total_size_bytes=66 * 10**9)
    draft = replace(everything()["Qwen/Qwen3-32B-FP8"].facts, total_size_bytes=draft_gb * 10**9)
    body = {
        "models": {"target_model": {"path": "t"}, "draft_model": {"path": "d"}},
        "speculative_decoding": {"method": "draft_model", "num_speculative_tokens": k},
    }
    settings = Settings.model_validate(body)
    (found,) = [
        f
        for f in match.check(settings, target, draft, is_head=False, break_even=break_even_chance)
        if f.code == "own-draft"
    ]
    assert found.severity == severity
    assert said in found.message
    other = replace(everything()["Qwen/Qwen3-1.7B"].facts, total_size_bytes=4 * 10**9)
    codes = {
        f.code
        for f in match.check(settings, target, other, is_head=False, break_even=break_even_chance)
    }
    assert "own-draft" not in codes
