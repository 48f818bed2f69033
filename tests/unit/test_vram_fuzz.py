"""Configs that nobody wrote: the plan says what it assumed, and never falls over."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.memory import plan as vram
from specserve.memory import text as vram_text
from specserve.memory.findings import of_plan
from tests import vram_cases

HYBRIDS: dict[str, dict[str, Any]] = {
    "nemotron": {"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "n_groups": 8,
                 "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4},
    "kimi": {"model_type": "kimi_linear", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
             "linear_attn_config": {"full_attn_layers": [4], "num_heads": 8, "head_dim": 128}},
    "falcon": {"model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_state": 128},
    "jamba": {"model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
              "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
             "conv_L_cache": 3, "conv_dim": 512},
    "minimax": {"model_type": "minimax", "num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1], "head_dim": 128},
}  # fmt: skip
COMMON = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
          "vocab_size": 1000, "max_position_embeddings": 4096}  # fmt: skip
CONFIGS: dict[str, Any] = {k: v["config"] for k, v in vram_cases.load()[0].items()}
CONFIGS |= {k: COMMON | v for k, v in HYBRIDS.items()}
ODD = st.sampled_from([None, "x", 0, -1, 1.5, True, 3, 10**9, [], {}, [None], {"a": 1}])


def _plan(config: dict[str, Any], method: str | None = None, tp: int = 1) -> vram.MemoryPlan:
    speculation = {"enabled": method is not None, "method": method}
    body = {
        "models": {"target_model": {"path": "t", "tensor_parallel_size": tp}},
        "hardware": {"gpu_name": "NVIDIA H100 80GB HBM3"},
        "speculative_decoding": speculation,
    }
    return vram.plan(Settings.model_validate(body), ModelFacts("t", config))


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_known(name: str) -> None:
    """Every family of recurrent layers has its state: nothing is assumed about the cache, one request takes blocks."""
    made = _plan(COMMON | HYBRIDS[name])
    assert not [note for note in made.assumed if "KV cache" in note]
    assert made.request_bytes > 0


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A real config with up to three keys gone or replaced by nonsense."""
    config = copy.deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(0, 3))):
        place = config
        nested = [k for k, v in place.items() if isinstance(v, dict) and v]
        if nested and draw(st.booleans()):
            place = place[draw(st.sampled_from(nested))]
        if place:
            key = draw(st.sampled_from(sorted(place)))
            if draw(st.booleans()):
                del place[key]
            else:
                place[key] = copy.deepcopy(
                    draw(ODD)
                )  # what is drawn may be shared, and changed in the next round
    return config


@settings(max_examples=60, deadline=None)
@given(configs(), st.sampled_from([None, "mtp", "ngram"]), st.sampled_from([1, 2, 8]))
def test_no_config_crashes_the_plan(config: dict[str, Any], method: str | None, tp: int) -> None:
    """Whatever config.json says, there is a plan with JSON, findings and text."""
    made = _plan(config, method, tp)
    json.dumps(made.as_dict())
    assert vram_text.render(made)
    assert isinstance(of_plan(made), list)
