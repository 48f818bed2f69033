"""KV tokens as planned against KV tokens as vLLM makes them, for many small architectures on the CPU."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specserve.app.plan import Planning
from specserve.checkpoint.facts import ModelFacts
from specserve.config.load import load
from specserve.config.schema import Settings
from specserve.engine.installed.introspect import installed
from specserve.engine.output import logs
from specserve.memory import calibration
from specserve.memory import plan as vram
from specserve.memory.deployment import Processor
from tests.engine.conftest import DEFAULT, QUICKSTART, ROOT, Launched

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FLAGS = Path("/proc/cpuinfo").read_text()
PROCESSOR = Processor("avx512_bf16" in FLAGS, "amx_tile" in FLAGS)
SPACE = 48 * 1024**2
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 512,
    "query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 256,
    "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) + ["sliding_attention"] * 2,
    "rope_local_base_freq": 10000.0,
}  # fmt: skip
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "rope_scaling": None,
    "topk_method": "greedy",
}  # fmt: skip
DELTA = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "partial_rotary_factor": 0.25, "head_dim": 64,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "float32": {"torch_dtype": "float32"},
    "qwen3": QWEN3,
    "experts": MOE,
    "a window in every layer": MISTRAL,
    "every other layer a window": GEMMA2,
    "five of six layers a window": GEMMA3,
    "latent attention": MLA,
    "gated delta net": DELTA,
}
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft of the same heads": ({}, {"num_hidden_layers": 1}),
    "draft of other heads": ({}, {"num_hidden_layers": 2, "num_key_value_heads": 4}),
    "draft for a window": (GEMMA2, {"num_hidden_layers": 1}),
}
LENGTH = 3000
"""Not a multiple of any block."""


COMMON = {"max_model_len": LENGTH, "kv_cache_memory_bytes": SPACE, "max_num_batched_tokens": 1024}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _cases(root: Path) -> dict[str, dict[str, Any]]:
    """EngineArgs by name."""
    cases: dict[str, dict[str, Any]] = {}
    for name, change in ARCHITECTURES.items():
        folder = _write(root / name.replace(" ", "-"), BASE | change)
        cases[name] = {"model": str(folder)}
    for name, (change, draft) in DRAFTS.items():
        target = _write(root / name.replace(" ", "-") / "target", BASE | change)
        drafting = _write(root / name.replace(" ", "-") / "draft", BASE | draft)
        config = {"model": str(drafting), "num_speculative_tokens": 3, "method": "draft_model"}
        cases[name] = {"model": str(target), "speculative_config": config}
    return {name: arguments | COMMON for name, arguments in cases.items()}


def _planned(arguments: dict[str, Any]) -> vram.MemoryPlan:
    models: dict[str, Any] = {"target_model": {"path": arguments["model"]}}
    body: dict[str, Any] = {
        "models": models,
        "engine": {
            "max_model_len": arguments["max_model_len"],
            "max_num_batched_tokens": arguments["max_num_batched_tokens"],
            "extra_args": {"kv-cache-memory-bytes": str(SPACE)},
        },
        "speculative_decoding": {"enabled": False},
    }
    draft = None
    if spec := arguments.get("speculative_config"):
        models["draft_model"] = {"path": spec["model"]}
        body["speculative_decoding"] = {"num_speculative_tokens": spec["num_speculative_tokens"]}
        draft = _facts(spec["model"])
    engine = installed()
    assert engine is not None
    return vram.plan(
        Settings.model_validate(body),
        _facts(arguments["model"]),
        draft,
        engine_version=engine.version,
        backend="cpu",
        free_ram_bytes=64 * 1024**3,
        processor=PROCESSOR,
    )


def _facts(folder: str) -> ModelFacts:
    return ModelFacts(
        folder, json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    )


def _sized(cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    program = Path(__file__).parent / "kv_sizing.py"
    stdin = json.dumps(list(cases.values()))
    run = subprocess.run(
        [sys.executable, str(program)], input=stdin, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(cases), run.stderr[-4000:]
    return lines


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[vram.MemoryPlan, dict[str, Any]]]:
    """Every case planned, and sized by the real engine, in one process."""
    # Both lanes may come here: xdist hands out a group of tests in parts.
    shared = tmp_path_factory.getbasetemp().parent / "kv-sizing"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cases = _cases(shared / "models")
        answers = shared / "answers.json"
        if not answers.exists():
            answers.write_text(json.dumps(_sized(cases)))
        lines = json.loads(answers.read_text())
    return {name: (_planned(a), line) for (name, a), line in zip(cases.items(), lines, strict=True)}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *DRAFTS])
def test_kv_tokens_are_what_the_engine_makes(
    name: str, results: dict[str, tuple[vram.MemoryPlan, dict[str, Any]]]
) -> None:
    """The planned KV tokens and requests are exactly the engine's, for the same space."""
    plan, engine = results[name]
    assert "error" not in engine, engine["error"]
    assert plan.capacity.kv_cache_tokens == engine["tokens"]
    assert plan.capacity.requests == pytest.approx(engine["concurrency"], rel=1e-9)


PRINTED = [DEFAULT, "tiny-pair.yaml speculative_decoding.enabled=false", QUICKSTART]


@pytest.mark.parametrize("engine_server", PRINTED, indirect=True)
def test_a_served_config_prints_what_was_planned(engine_server: Launched) -> None:
    """Launched for real: tokens and requests of the log are those of `specserve plan`, and reconciling is silent."""
    name, *overrides = engine_server.spec.split()
    loaded = load(ROOT / "configs" / name, environ={}, overrides=overrides)
    plan = Planning.of(loaded, environ={}).plan()
    said = logs.read_report(engine_server.engine_log_path.read_text(errors="replace").splitlines())
    assert said.kv_cache_tokens == plan.capacity.kv_cache_tokens
    assert said.max_concurrency == pytest.approx(plan.capacity.requests, abs=0.005)
    found = calibration.reconcile(plan, said)
    assert found.warning is None
    assert {c.name for c in found.comparisons} >= {"kv_cache_tokens", "max_concurrency"}
