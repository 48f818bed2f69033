"""What engines of several versions state at their start, held against what was asked for.

The lines are public, or of our own CPU engine; an ellipsis of theirs is kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.config.schema import Settings
from specserve.engine.output.stated import Statement, hold, read, summary

READY_CPU = Path(__file__).parents[1] / "data/logs/ready-cpu.txt"
REST = (
    "skip_tokenizer_init=False, tokenizer_mode=auto, revision=None, tokenizer_revision=None, "
    "trust_remote_code=True, dtype=torch.bfloat16, max_seq_len={length}, download_dir=None, "
    "load_format=auto, tensor_parallel_size=1, quantization=compressed-tensors, "
    "quantization_config=None, enforce_eager=False, kv_cache_dtype={kv}, device_config=cuda, "
    "structured_outputs_config=StructuredOutputsConfig(backend='auto', reasoning_parser='qwen3'), "
    "seed=0, served_model_name=m, kernel_config=KernelConfig(ir='x')"
)
NVFP4 = "unsloth/Qwen3.6-27B-NVFP4"
LINES = {
    # vllm-project/vllm#41789
    "0.20 gemma": (
        "(EngineCore pid=129) INFO 05-06 06:05:38 [core.py:109] Initializing a V1 LLM engine "
        "(v0.20.2rc1.dev49+g9b4e83934) with config: model='/model', speculative_config="
        "SpeculativeConfig(method='mtp', model='google/gemma-4-31B-it-assistant', "
        "num_spec_tokens=4), tokenizer='/model', " + REST.format(length=65536, kv="fp8"),
        Statement(
            "0.20.2rc1.dev49+g9b4e83934",
            True,
            "mtp",
            4,
            "google/gemma-4-31B-it-assistant",
            65536,
            "fp8",
        ),
    ),
    # vllm-project/vllm#49011
    "0.25 cuda": (
        "(EngineCore pid=7476) INFO 07-25 13:41:51 [core.py:114] Initializing a V1 LLM engine "
        f"(v0.25.1) with config: model='{NVFP4}', speculative_config=SpeculativeConfig("
        f"method='mtp', model='{NVFP4}', num_spec_tokens=2), tokenizer='{NVFP4}', "
        + REST.format(length=1048576, kv="nvfp4"),
        Statement("0.25.1", True, "mtp", 2, NVFP4, 1048576, "nvfp4"),
    ),
    # SergiioB/intel-arc-pro-b70-inference-cookbook#4
    "0.27 xpu": (
        "(EngineCore pid=316) INFO 08-21 18:34:34 [core.py:122] Initializing a V1 LLM engine "
        "(v0.27.2rc1.dev77+gac7509e2b) with config: model='/model', speculative_config="
        "SpeculativeConfig(method='mtp', model='/model', num_spec_tokens=4), tokenizer='/model', "
        + REST.format(length=100000, kv="fp8"),
        Statement("0.27.2rc1.dev77+gac7509e2b", True, "mtp", 4, "/model", 100000, "fp8"),
    ),
    # A shortened line of 0.28, found in a project that reads it
    "0.28 short": (
        ("(EngineCore pid=20636) INFO [core.py:122] Initializing a V1 LLM engine (v0.28.0) "
        "with config: model='Qwen/Qwen2.5-7B-Instruct', dtype=torch.bfloat16, "
        "max_seq_len=8192, quantization=None, seed=42"),
        Statement("0.28.0", max_model_len=8192),
    ),
    # Cut off in a benchmark's report
    "0.29 cut": (
        ("Initializing a V1 LLM engine (v0.29.0) with config: model='/models/view', "
        "speculative_config=SpeculativeConfig(method='mtp', model='/models/view', "
        "num_spec_tokens=3), tokenizer='/models/view', skip_to"),
        Statement("0.29.0", True, "mtp", 3, "/models/view"),
    ),
    "0.31 alone": (
        ("INFO 10-08 16:50:22 [core.py:129] Initializing a V1 LLM engine (v0.31.0) with config: "
        "model='Qwen/Qwen2.5-7B-Instruct-AWQ', speculative_config=None"),
        Statement("0.31.0", False),
    ),
    "0.31 alone, whole": (
        "Initializing a V1 LLM engine (v0.31.0) with config: model='m', speculative_config=None, "
        "tokenizer='m', " + REST.format(length=4096, kv="auto"),
        Statement("0.31.0", False, max_model_len=4096, kv_cache_dtype="auto"),
    ),
    "ngram": (
        ("Initializing a V1 LLM engine (v0.32.0) with config: model='m', speculative_config="
        "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3), tokenizer='m'"),
        Statement("0.32.0", True, "ngram", 3),
    ),
    "a name that looks like keys": (
        "Initializing a V1 LLM engine (v0.32.0) with config: model='/m, max_seq_len=1, "
        "kv_cache_dtype=fp8, it\\'s (v2)', speculative_config=None, " + REST.format(length=9, kv="auto"),
        Statement("0.32.0", False, max_model_len=9, kv_cache_dtype="auto"),
    ),
    "other words": (
        ("Initializing a V1 LLM engine (v0.40.0) with config: VllmConfig(model=/m, "
        "speculative_config=SpeculativeConfig(how=mtp, k=3), max_seq_len=4096 tokens, seed=0)"),
        Statement("0.40.0", True),
    ),
    "cut in a value": (
        "Initializing a V1 LLM engine (v0.32.0) with config: model='m', max_seq_len=40",
        Statement("0.32.0"),
    ),
    "no such line": ("INFO Starting to load model m...", Statement()),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_what_a_line_states(name: str) -> None:
    """Versions 0.20 to 0.32 on three devices; what is cut off or said otherwise is None."""
    line, expected = LINES[name]
    assert read(["INFO something before", line, "INFO something after"]) == expected


def test_our_own_cpu_engine() -> None:
    """A real start of 0.32, shortened after the revision."""
    said = read(READY_CPU.read_text(encoding="utf-8").splitlines())
    assert said == Statement("0.32.0", True, "draft_model", 3, "draft")


def asked(**more: object) -> Settings:
    base: dict[str, object] = {
        "models": {"target_model": {"path": "org/t"}, "draft_model": {"path": "org/d"}},
        "speculative_decoding": {"method": "eagle3", "num_speculative_tokens": 4},
        "engine": {"max_model_len": 4096, "kv_cache_dtype": "fp8"},
    }
    return Settings.model_validate(base | more)


AS_ASKED = Statement("0.32.0", True, "eagle3", 4, "org/d", 4096, "fp8_e4m3")


def verdicts(settings: Settings, said: Statement, *backends: str) -> dict[str, str]:
    held = hold(settings, said, backends or None)
    return {one.key.rpartition(".")[2]: one.verdict for one in held if one.verdict != "not asked"}


def test_equal() -> None:
    """Every value as asked; fp8 is vLLM's short word for fp8_e4m3."""
    found = verdicts(asked(), AS_ASKED)
    assert set(found.values()) == {"equal"}
    assert len(found) == 5
    assert summary(hold(asked(), AS_ASKED, None)) == (
        "method, num_speculative_tokens, draft, max_model_len, kv_cache_dtype"
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("method", Statement("0", True, "eagle", 4, "org/d", 4096, "fp8")),
        ("method", Statement("0", False, None, 4, "org/d", 4096, "fp8")),
        ("num_speculative_tokens", Statement("0", True, "eagle3", 3, "org/d", 4096, "fp8")),
        ("path", Statement("0", True, "eagle3", 4, "org/t", 4096, "fp8")),
        ("max_model_len", Statement("0", True, "eagle3", 4, "org/d", 2048, "fp8")),
        ("kv_cache_dtype", Statement("0", True, "eagle3", 4, "org/d", 4096, "auto")),
    ],
)
def test_each_difference_is_a_warning(key: str, said: Statement) -> None:
    """It names the key, what was asked for and what the engine says."""
    assert [name for name, verdict in verdicts(asked(), said).items() if verdict != "equal"] == [
        key
    ]
    (warning,) = [one.warning for one in hold(asked(), said, None) if one.warning is not None]
    assert "was asked for, and the engine says" in warning


@pytest.mark.parametrize("said", [Statement(), Statement("0.40.0", True)])
def test_what_is_not_seen_is_never_equal(said: Statement) -> None:
    """A line that is missing, or in other words, says nothing."""
    assert set(verdicts(asked(), said).values()) == {"not seen"}


def test_what_was_left_to_the_engine_is_not_held_against_it() -> None:
    """Context and cache type were not asked for."""
    free = asked(engine={})
    assert set(verdicts(free, AS_ASKED)) == {"method", "num_speculative_tokens", "path"}


def test_a_draft_where_none_was_asked_for() -> None:
    """The target alone is asked for as well."""
    alone = asked(speculative_decoding={"enabled": False}, engine={})
    assert verdicts(alone, AS_ASKED) == {"method": "different"}
    assert verdicts(alone, Statement("0", False)) == {"method": "equal"}


@pytest.mark.parametrize(
    ("method", "draft", "said"),
    [
        ("mtp", None, Statement("0", True, "deepseek_mtp", 4, "org/t")),
        ("eagle3", "org/d", Statement("0", True, "eagle3", 4, "/hub/models--org--d/snapshots/abc")),
        ("ngram", None, Statement("0", True, "ngram", 4)),
    ],
)
def test_other_words_for_the_same(method: str, draft: str | None, said: Statement) -> None:
    """Older names of mtp, the cached snapshot of an offline start, lookup methods without a path."""
    models: dict[str, object] = {"target_model": {"path": "org/t"}}
    if draft is not None:
        models["draft_model"] = {"path": draft}
    spec = {"method": method, "num_speculative_tokens": 4}
    found = verdicts(asked(models=models, speculative_decoding=spec, engine={}), said)
    assert set(found.values()) == {"equal"}


def test_attention_kernels() -> None:
    """The first that the log names is the target's, the second the draft's."""
    models = {
        "target_model": {"path": "org/t"},
        "draft_model": {"path": "org/d", "attention_backend": "TRITON_ATTN"},
    }
    engine = {"extra_args": {"attention-backend": "flashinfer"}}
    settings = asked(models=models, engine=engine)

    def found(*backends: str) -> tuple[str, str]:
        held = verdicts(settings, AS_ASKED, *backends)
        return held["attention-backend"], held["attention_backend"]

    assert found("FLASHINFER", "TRITON_ATTN") == ("equal", "equal")
    assert found("FLASH_ATTN", "FLASH_ATTN_X") == ("different", "different")
    assert found("FLASHINFER") == ("equal", "not seen")
    assert found() == ("not seen", "not seen")
