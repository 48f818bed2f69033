"""Numbers behind the checks of one checkpoint and of two: lengths, types, ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.read import read
from specserve.config.schema import Settings
from specserve.engine.inside.economics import break_even_chance
from specserve.pair import consistency, match
from specserve.pair.consistency import Role
from tests import checkpoints as make


def settings(**engine: Any) -> Settings:
    """A target and a draft."""
    return Settings.model_validate(
        {"models": {"target_model": {"path": "t"}, "draft_model": {"path": "d"}}, "engine": engine}
    )


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 8192, "seq_length": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4}}, 8192),
        (
            {
                "max_position_embeddings": 2048,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            32768,
        ),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": "x"}},
            2048,
        ),
        ({}, None),
    ],
)
def test_native_length(config: dict[str, Any], length: int | None) -> None:
    """The longest sequence, as vLLM derives it."""
    assert match.native_length(ModelFacts("m", config)) == length


def test_gemma3_is_scaled_already() -> None:
    """vLLM leaves Gemma 3's length alone."""
    config = {"model_type": "gemma3_text", "max_position_embeddings": 131072}
    scaled = config | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert match.native_length(ModelFacts("m", scaled)) == 131072


def test_long_context_can_be_forced() -> None:
    """vLLM's own switch turns the refusal off."""
    target = ModelFacts("t", {"max_position_embeddings": 2048})
    assert [f.code for f in match.target_length(settings(max_model_len=4096), target, {})] == [
        "context-too-long"
    ]
    forced = settings(max_model_len=4096, env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert list(match.target_length(forced, target, {})) == []


def role(config: dict[str, Any], tp: int) -> Role:
    """A target under tensor parallelism."""
    return Role(
        ModelFacts("t", config), settings().models.target_model, "models.target_model", tp, False
    )


@pytest.mark.parametrize(
    ("config", "tp", "fix"),
    [
        (
            {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 11008},
            8,
            None,
        ),
        ({"num_attention_heads": 32, "num_key_value_heads": 2}, 8, None),
        (
            {"num_attention_heads": 14, "num_key_value_heads": 2},
            4,
            "set models.target_model.tensor_parallel_size: 2",
        ),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 6},
            8,
            "set models.target_model.tensor_parallel_size: 6",
        ),
        (
            {"num_attention_heads": 8, "intermediate_size": 100},
            8,
            "set models.target_model.tensor_parallel_size: 4",
        ),
        ({}, 8, None),
    ],
)
def test_heads_are_shared_equally(config: dict[str, Any], tp: int, fix: str | None) -> None:
    """Attention heads, key/value heads and the inner width, with the next smaller size that works."""
    assert [f.fix for f in consistency.tensor_parallel([role(config, tp)])] == (
        [fix] if fix else []
    )


def test_the_proposed_number_of_gpus_divides_both_models() -> None:
    """Six heads and four: each alone could be shared by more than two."""
    roles = [role({"num_attention_heads": heads}, 8) for heads in (6, 4)]
    assert [f.fix for f in consistency.tensor_parallel(roles)] == [
        "set models.target_model.tensor_parallel_size: 2"
    ] * 2


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((1000, 250), False),
        ((1000, 251), True),
        ((1000, 20), False),
        ((1000, 19), True),
        ((1000, 0), False),
    ],
)
def test_size_ratio(sizes: tuple[int, int], said: bool) -> None:
    """A quarter and a fiftieth are still fine."""
    target, draft = (
        ModelFacts(n, {}, total_size_bytes=s) for n, s in zip("td", sizes, strict=True)
    )
    codes = [
        f.code
        for f in match.check(settings(), target, draft, is_head=False, break_even=break_even_chance)
    ]
    assert ("size-ratio" in codes) is said


def test_draft_types_are_told(tmp_path: Path) -> None:
    """The draft's dtype and quantization are information, with both names."""
    draft = read(str(make.write(tmp_path / "d", make.small_llama(dtype="F16"))))
    target = read(
        str(make.write(tmp_path / "t", make.llama(quantization_config={"quant_method": "fp8"})))
    )
    found = {
        f.code: f
        for f in match.check(settings(), target, draft, is_head=False, break_even=break_even_chance)
    }
    assert {c: f.severity for c, f in found.items()} == {
        "draft-dtype": "info",
        "draft-quantization": "info",
    }
    assert (
        found["draft-quantization"].message
        == "the target is quantized with fp8, the draft is not (float16)"
    )
    assert (
        found["draft-dtype"].message
        == "the draft is stored as float16 and runs as bfloat16, the target's dtype"
    )


def test_fine_tune_of_the_same_shape_is_not_the_same_model(tmp_path: Path) -> None:
    """Equal configs and headers with other weights are two models; a copy is one."""
    target = make.write(tmp_path / "t", make.llama())
    other = make.write(tmp_path / "o", make.llama())
    one, two = read(str(target)), read(str(other))
    assert "draft-is-target" in [
        f.code
        for f in match.check(settings(), one, two, is_head=False, break_even=break_even_chance)
    ]
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 + 100] = 1
    weights.write_bytes(bytes(data))
    assert "draft-is-target" not in [
        f.code
        for f in match.check(settings(), one, two, is_head=False, break_even=break_even_chance)
    ]
