"""Method and tokens per draft where nobody set them: what the checkpoints name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import pytest

from specserve.app.derive import derived
from specserve.app.preflight import pair_findings
from specserve.checkpoint.facts import ModelFacts
from specserve.config.load import Loaded, load

Config: TypeAlias = dict[str, "str | int | bool | list[str] | Config | list[Config]"]

LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN_MTP: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_nextn_predict_layers": 2,
}
V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dspark_block_size": 5,
}
SPECULATORS: Config = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    },
    "transformer_layer_config": {"model_type": "llama"},
}


def write(
    folder: Path, target: Config, draft: Config | None, speculation: str, name: str = "draft"
) -> Loaded:
    """A config beside checkpoints that have a config.json alone."""
    models = {"target": target}
    if draft is not None:
        models[name] = draft
    text = "models:\n"
    for role, (path, config) in zip(("target_model", "draft_model"), models.items(), strict=False):
        (folder / path).mkdir(parents=True)
        (folder / path / "config.json").write_text(json.dumps(config))
        text += f"  {role}: {{path: {folder / path}}}\n"
    (folder / "config.yaml").write_text(text + f"speculative_decoding: {{{speculation}}}\n")
    return load(folder / "config.yaml", environ={})


@pytest.mark.parametrize(
    ("draft", "name", "method"),
    [
        ({"architectures": ["Gemma4AssistantModel"], "model_type": "gemma4_assistant"}, "d", "mtp"),
        ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "d", "mtp"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "d", "eagle3"),
        (SPECULATORS, "d", "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "d", "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "d", "dspark"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "d", "medusa"),
        (
            {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"},
            "d",
            "mlp_speculator",
        ),
        (LLAMA, "EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        (LLAMA, "EAGLE-LLaMA3-Instruct-8B", "eagle"),
        (LLAMA, "d", "draft_model"),
    ],
)
def test_the_draft_names_its_method(tmp_path: Path, draft: Config, name: str, method: str) -> None:
    """Without a method the draft's config decides, then its path, as in vLLM."""
    loaded, notes = derived(write(tmp_path, LLAMA, draft, "", name), {})
    assert loaded.settings.method == method
    named = [note for note in notes if "speculative_decoding.method" in note]
    assert len(named) == (method != "draft_model")


@pytest.mark.parametrize(
    ("target", "draft", "speculation", "expected"),
    [
        (QWEN_MTP, None, "method: mtp", (2, "the target's config.json")),
        (V4, None, "method: dspark", (5, "the target's config.json")),
        (LLAMA, SPECULATORS, "method: eagle3", (3, "the draft's config.json")),
        (
            LLAMA,
            {**LLAMA, "n_predict": 3},
            "method: mlp_speculator",
            (3, "the draft's config.json"),
        ),
        (LLAMA, {**LLAMA, "medusa_num_heads": 4}, "method: medusa", (4, "the draft's config.json")),
        (LLAMA, {**LLAMA, "block_size": 8}, "method: dflash", (7, "the draft's config.json")),
        (LLAMA, None, "method: suffix", (24, "default")),
        (LLAMA, None, "method: suffix, suffix_decoding_max_tree_depth: 9", (9, "default")),
        (LLAMA, None, "method: ngram", (5, "default")),
        (LLAMA, LLAMA, "", (5, "default")),
        (LLAMA, None, "method: mtp", (5, "default")),
        (
            QWEN_MTP,
            None,
            "method: mtp, schedule: [[1, 8, 4], [9, 64, 0]]",
            (4, "speculative_decoding.schedule"),
        ),
    ],
)
def test_the_checkpoint_gives_the_number(
    tmp_path: Path,
    target: Config,
    draft: Config | None,
    speculation: str,
    expected: tuple[int, str],
) -> None:
    """Without a number it is what the checkpoint names; a default is said where it is none of
    the checkpoint's.
    """
    tokens, source = expected
    loaded, _ = derived(write(tmp_path, target, draft, speculation), {})
    assert loaded.settings.num_speculative_tokens == tokens
    assert loaded.settings.speculative_decoding.num_speculative_tokens == tokens
    assert loaded.sources["speculative_decoding.num_speculative_tokens"] == source


def test_what_is_set_stays(tmp_path: Path) -> None:
    """A method and a number of the config are not asked of the checkpoints, and nothing is said."""
    loaded = write(tmp_path, QWEN_MTP, None, "method: mtp, num_speculative_tokens: 1")
    assert derived(loaded, {}) == (loaded, ())


def test_overrides_count(tmp_path: Path) -> None:
    """hf-overrides are laid over the target's config before it is asked."""
    loaded = write(tmp_path, LLAMA, None, "method: mtp")
    loaded = load(
        loaded.path,
        environ={},
        overrides=["engine.extra_args.hf-overrides={num_nextn_predict_layers: 3}"],
    )
    made, notes = derived(loaded, {})
    assert made.settings.num_speculative_tokens == 3
    assert notes == (
        (
            "speculative_decoding.num_speculative_tokens is not set; "
            "3 is what the target's config.json gives"
        ),
    )


def test_a_checkpoint_that_is_not_there_decides_nothing(tmp_path: Path) -> None:
    """The default is taken and said; the check names what is missing."""
    loaded = write(tmp_path, QWEN_MTP, None, "method: mtp")
    (tmp_path / "target" / "config.json").unlink()
    made, notes = derived(loaded, {})
    assert made.settings.num_speculative_tokens == 5
    assert notes == (
        "speculative_decoding.num_speculative_tokens is not set; 5 is the default of method mtp",
    )


@pytest.mark.parametrize(("tokens", "codes"), [(5, []), (7, ["head-block-size"])])
def test_a_block_inside_the_target_is_a_limit(
    tmp_path: Path, tokens: int, codes: list[str]
) -> None:
    """DSpark inside the target drafts no more than its block, like a head of its own."""
    loaded = write(tmp_path, V4, None, f"method: dspark, num_speculative_tokens: {tokens}")
    verdict = pair_findings(loaded.settings, ModelFacts("target", V4), None)
    assert [f.code for f in verdict.findings if f.code == "head-block-size"] == codes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {**SPECULATORS, "speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-32B"}}},
            "this is an EAGLE3 head for Qwen/Qwen3-32B",
        ),
        (SPECULATORS, "this is an EAGLE3 head, not a model"),
        (
            {"architectures": ["MedusaModel"], "model_type": "medusa"},
            "this is a set of Medusa heads",
        ),
        (LLAMA, None),
        (V4, None),
        (QWEN_MTP, None),
    ],
)
def test_a_head_is_no_target(tmp_path: Path, config: Config, said: str | None) -> None:
    """A head in the target's place is named, with what to write where."""
    loaded = write(tmp_path, config, None, "enabled: false")
    path = str(tmp_path / "target")
    verdict = pair_findings(loaded.settings, ModelFacts(path, config), None)
    found = [f for f in verdict.findings if f.code == "head-as-target"]
    if said is None:
        assert found == []
    else:
        assert said in found[0].message
        assert f"models.draft_model.path: {path}" in str(found[0].fix)
    if said is not None and "Qwen" in said:
        assert "set models.target_model.path: Qwen/Qwen3-32B" in str(found[0].fix)
