"""Remedies work: what a finding's Fix says is typed into the config, and the checks run again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.checkpoint.facts import ModelFacts
from specserve.config.load import load
from specserve.config.schema import Settings
from specserve.config.speculation import NEEDS_DRAFT, WITHOUT_DRAFT
from specserve.engine.installed.introspect import EngineFacts
from specserve.engine.installed.known_bad import entries
from specserve.errors import Change, ConfigError, Problem
from specserve.findings import Finding
from specserve.gpu.devices import Device
from specserve.memory import plan as memory
from specserve.memory.findings import of_plan
from specserve.units import GIB
from tests.pairs import PAIRS, Pair
from tests.scenarios import (
    CPU,
    DRAFT,
    GPU,
    LLAMA,
    Scenario,
    edited,
    known_bad_cases,
    merged,
    situation,
)
from tests.scenarios import engine as of_version
from tests.unit.test_pairs import TYPES

KNOWN_BAD = {name: situation(case["fires"]) for name, case in known_bad_cases().items()}


def broken(scenario: Scenario, folder: Path) -> Iterator[str]:
    """What is wrong with the remedies of one scenario, a line each."""
    before = scenario.findings(folder)
    for finding in before:
        if finding.changes:
            yield from _broken(scenario, before, finding, folder)


def _broken(
    scenario: Scenario, before: list[Finding], finding: Finding, folder: Path
) -> Iterator[str]:
    for change in finding.changes:
        if change.key != finding.where and change.key.rsplit(".", 1)[-1] not in (finding.fix or ""):
            yield f"{finding.code}: {change} is not what the Fix says: {finding.fix}"
    try:
        after = scenario.after(finding).findings(folder)
    except Exception as error:  # noqa: BLE001 - whatever the remedy leads to is its fault
        yield f"{finding.code}: after '{finding.fix}' the config is refused: {error}"
        return
    if (finding.code, finding.where) in {(f.code, f.where) for f in after}:
        yield f"{finding.code}: '{finding.fix}' leaves it as it is"
    known = {f.code for f in before if f.severity == "error"}
    for new in after:
        if new.severity == "error" and new.code not in known:
            yield f"{finding.code}: '{finding.fix}' leads to {new.code}: {new.message}"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_remedies_of_pairs(pair: Pair, tmp_path: Path) -> None:
    """Of checkpoints on disk."""
    scenario = Scenario(pair.name, pair.write(tmp_path), engine=GPU, known_types=lambda: TYPES)
    assert list(broken(scenario, tmp_path)) == []


@pytest.mark.parametrize("row", KNOWN_BAD)
def test_remedies_of_known_defects(row: str, tmp_path: Path) -> None:
    """Of every row of the table."""
    assert list(broken(KNOWN_BAD[row], tmp_path)) == []


# Qwen3.5 of two sizes; discuss.vllm.ai 2447.
TEXT: dict[str, object] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "vocab_size": 248320,
    "full_attention_interval": 4,
}
MODULE = {"mtp_num_hidden_layers": 1}


def qwen(text: dict[str, object]) -> dict[str, object]:
    """A config.json around the config of its language model."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }


BIG = qwen(TEXT | MODULE)
SMALL = qwen(TEXT | MODULE | {"hidden_size": 2560, "num_hidden_layers": 32})


def small_beside_big(method: str, target: dict[str, object]) -> Scenario:
    """A small model of the family as the draft of a big one."""
    config = {
        "models": {"target_model": {"path": "/m/big"}, "draft_model": {"path": "/m/small"}},
        "speculative_decoding": {"method": method, "num_speculative_tokens": 1},
    }
    return Scenario("", config, ModelFacts("/m/big", target), ModelFacts("/m/small", SMALL))


def test_mtp_of_another_width_is_not_offered(tmp_path: Path) -> None:
    """vLLM would load the small model's module beside the big model and die on shapes: the target's own is offered."""
    scenario = small_beside_big("draft_model", BIG)
    [finding] = [f for f in scenario.findings(tmp_path) if f.code == "method-mismatch"]
    assert finding.changes == (
        Change("speculative_decoding.method", "mtp"),
        Change("models.draft_model"),
    )
    assert list(broken(scenario, tmp_path)) == []
    wide = {f.code for f in small_beside_big("mtp", BIG).findings(tmp_path)}
    assert "head-hidden-size" in wide


def test_mtp_is_not_offered_where_nobody_has_a_module_that_fits(tmp_path: Path) -> None:
    """Neither the small model's nor one of the target's own, which dropped them."""
    scenario = small_beside_big("draft_model", qwen(TEXT))
    [finding] = [f for f in scenario.findings(tmp_path) if f.code == "method-mismatch"]
    assert finding.changes == ()
    assert finding.fix == "choose another draft, or a method without one (ngram, suffix)"


BAD = sorted((Path(__file__).parents[1] / "data/configs/bad").glob("*.yaml"))


def problems(config: dict[str, Any], folder: Path) -> list[Problem]:
    """What loading a config complains of."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        return list(load(path, environ={}).warnings)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_remedies_of_mistakes_in_the_config(path: Path, tmp_path: Path) -> None:
    """A mistake whose Fix is an edit is gone after it, and no other has come."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError):
        return
    if not isinstance(config, dict):
        return
    before = problems(config, tmp_path)
    for problem in before:
        if problem.changes:
            after = {p.message for p in problems(edited(config, problem.changes), tmp_path)}
            assert problem.message not in after
            assert after <= {p.message for p in before}


COMMIT = "0123456789abcdef" * 2 + "01234567"


def scene(
    name: str,
    method: str,
    settings: dict[str, Any] | None = None,
    *,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    revision: str | None = None,
    engine: EngineFacts = GPU,
) -> Scenario:
    """A small Llama, with a draft where one is described."""
    case = {"method": method, "set": settings or {}, "target": target or {}, "version": "0.32.0"}
    if draft is not None:
        case["draft"] = draft
    made = situation(case)
    assert made.target is not None
    return replace(made, name=name, engine=engine, target=replace(made.target, revision=revision))


K, SCHEDULE = "speculative_decoding.num_speculative_tokens", "speculative_decoding.schedule"
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 1024,
    "target_hidden_size": 1024,
}
BLOCK = {"architectures": ["DFlashDraftModel"], "hidden_size": 1024, "block_size": 4} | {
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 6]}
}
TP = "models.target_model.tensor_parallel_size"
BIG_LLAMA = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64} | {
    "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072
}  # fmt: skip
H100 = {"hardware.gpu_name": "NVIDIA H100 80GB HBM3", "hardware.gpu_count": 8}
TUNED = {"engine.max_num_seqs": 64, "engine.max_num_batched_tokens": 8192}

SCENES: list[tuple[str, Scenario]] = [
    ("argument-conflict", scene("method-twice", "ngram", {"speculative_decoding.extra_config.method": "suffix"})),
    ("argument-conflict", scene("filled-in", "ngram", {"speculative_decoding.extra_config.target_model_config": {}})),
    ("argument-conflict", scene("nodes", "ngram", {
        "engine.node_count": 2, "engine.node_rank": 1, "engine.leader_address": "a", TP: 2}, engine=CPU)),
    ("flag-unsupported", scene("no-such-flag", "ngram", {"engine.extra_args.frobnicate": 1})),
    ("flag-unsupported", scene("no-such-flag-so-spelt", "ngram", {"engine.extra_args.--frobnicate_it": 1})),
    ("flag-unsupported", scene("not-negated", "ngram", {"engine.extra_args.no-seed": True})),
    ("flag-unsupported", scene("inside", "ngram", {"engine.extra_args.compilation_config": {"frobnicate": 3}})),
    ("flag-unsupported", scene("inside-text", "ngram", {"engine.extra_args.cc": '{"frobnicate": 3, "mode": 3}'})),
    ("flag-unsupported", scene("inside-dots", "ngram", {"engine.extra_args.compilation-config.frobnicate": 3})),
    ("key-unsupported", scene("no-such-key", "ngram", {"speculative_decoding.extra_config.frobnicate": 1})),
    ("model-runner", scene("forced", "suffix", {"engine.env.VLLM_USE_V2_MODEL_RUNNER": "1"})),
    ("synthetic-acceptance", scene("synthetic", "eagle3", {
        "speculative_decoding.extra_config.rejection_sample_method": "synthetic"}, draft=EAGLE3)),
    ("step-budget", scene("no-room", "draft_model", {"engine.max_num_batched_tokens": 1}, draft={})),
    ("step-budget", scene("lora", "draft_model", {
        "engine.max_num_batched_tokens": 300, "engine.max_num_seqs": 64, "engine.extra_args.enable-lora": True},
        draft={})),
    ("step-budget", scene("default-batch", "draft_model", {"engine.max_num_batched_tokens": 100}, draft={}, engine=CPU)),
    ("environment-unknown", scene("misspelt", "ngram", {"engine.env.VLLM_LOGGING_LEVL": "DEBUG"})),
    ("environment-unknown", scene("nobody-reads", "ngram", {"engine.env.VLLM_FROBNICATE_EVERYTHING": "1"})),
    ("revision-unpinned", scene("unpinned", "ngram", revision=COMMIT)),
    ("remote-code-unpinned", scene("unpinned-code", "ngram", {
        "models.target_model.trust_remote_code": True}, revision=COMMIT, target={
            "auto_map": {"AutoConfig": "configuration_my.MyConfig"}})),
    ("head-block-size", scene("block", "dflash", {K: 8}, draft=BLOCK)),
    ("head-block-size", scene("block-of-schedule", "dflash", {K: 8, SCHEDULE: [[1, 4, 8], [5, 64, 4]]}, draft=BLOCK)),
    ("mtp-multiple", scene("modules", "mtp", {K: 5, SCHEDULE: [[1, 4, 5]]}, target={"num_nextn_predict_layers": 3})),
    ("mtp-module-reuse", scene("reuse", "mtp", {K: 3, SCHEDULE: [[1, 4, 3]]}, target={"num_nextn_predict_layers": 1})),
    ("context-too-long", scene("draft-limit", "draft_model", {
        "engine.max_model_len": 8192, "models.draft_model.max_model_len": 8192}, draft={
            "max_position_embeddings": 8192})),
    ("tp-divisible", scene("tp-of-draft", "eagle3", {TP: 5, "models.draft_model.tensor_parallel_size": 5},
                           draft=EAGLE3)),
    ("head-as-model", scene("keys-of-drafts", "draft_model", {
        "speculative_decoding.use_heterogeneous_vocab": True}, draft=EAGLE3)),
    ("model-as-head", scene("wide", "eagle3", draft={})),
    ("head-kind", scene("eagle-as-medusa", "medusa", draft=EAGLE3)),
    ("method-mismatch", scene("named-mtp", "draft_model", draft={
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 1024,
        "num_nextn_predict_layers": 1})),
    ("does-not-fit", scene("long", "ngram", {**H100, TP: 4, **TUNED, "engine.max_model_len": 131072,
                                             "hardware.gpu_count": 4, "engine.gpu_memory_utilization": 0.54},
                           target=BIG_LLAMA)),
    ("does-not-fit", scene("three-ways", "ngram", {**H100, TP: 3}, target=BIG_LLAMA)),
    ("does-not-fit", scene("too-few", "ngram", {**H100, TP: 8, "hardware.gpu_count": 4, **TUNED}, target=BIG_LLAMA)),
    ("memory-tight", scene("tight", "draft_model", {**H100, TP: 4, "engine.gpu_memory_utilization": 0.95, **TUNED},
                           target=BIG_LLAMA, draft={"vocab_size": 128256})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "scenario"), SCENES, ids=[f"{code}-{scenario.name}" for code, scenario in SCENES]
)
def test_remedies_of_the_engine_and_of_memory(
    code: str, scenario: Scenario, tmp_path: Path
) -> None:
    """Of what an engine refuses and what does not fit; the finding that the scenario is for has a remedy."""
    found = [f for f in scenario.findings(tmp_path) if f.code == code]
    assert found
    assert list(broken(scenario, tmp_path)) == []
    assert all(f.changes or "alone that leads to" in (f.fix or "") for f in found)


# -- several at once --------------------------------------------------------------------------------------------------

METHODS = (
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
    "medusa",
    "ngram",
    "ngram_gpu",
    "suffix",
)
VERSIONS = ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.32.0")
COMBINATIONS = 80


def spelt(key: str, value: Any, chance: random.Random) -> tuple[str, Any]:
    """A flag in one of the ways that people write it."""
    name = key.removeprefix("engine.extra_args.")
    if name == key:
        return key, value
    if isinstance(value, dict) and chance.random() < 0.4:
        value = json.dumps(value)
    if isinstance(value, bool) and not name.startswith("no-") and chance.random() < 0.4:
        name, value = f"no-{name}", not value
    if chance.random() < 0.4:
        name = name.replace("-", "_")
    return f"engine.extra_args.{chance.choice(['', '--'])}{name}", value


def combination(seed: int) -> Scenario:
    """Up to three known defects at once, under any method and version."""
    chance, cases = random.Random(seed), known_bad_cases()
    case: dict[str, Any] = {"method": chance.choice(METHODS), "version": chance.choice(VERSIONS)}
    for name in chance.sample(sorted(cases), chance.choice([1, 2, 3])):
        fires = cases[name]["fires"]
        case = merged(case, {k: v for k, v in fires.items() if k not in ("method", "version")})
    if case["method"] in WITHOUT_DRAFT:
        case.pop("draft", None)
    elif case["method"] in NEEDS_DRAFT:
        case.setdefault("draft", {})
    case["set"] = dict(spelt(key, value, chance) for key, value in case.get("set", {}).items())
    return situation(case)


@pytest.mark.parametrize("seed", range(COMBINATIONS))
def test_remedies_of_several_defects_at_once(seed: int, tmp_path: Path) -> None:
    """A remedy of one does not end in another, whatever else the config has and however its flags are spelt."""
    scenario = combination(seed)
    if not problems(scenario.config, tmp_path):
        assert list(broken(scenario, tmp_path)) == []


SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"async-scheduling": True}, {}),
    ({"--async_scheduling": True, "seed": 1}, {"seed": 1}),
    ({"no-async-scheduling": False}, {}),
]


@pytest.mark.parametrize(("written", "left"), SPELLINGS, ids=str)
def test_an_edit_has_the_spelling_of_the_file(
    written: dict[str, Any], left: dict[str, Any], tmp_path: Path
) -> None:
    """'remove engine.extra_args.async-scheduling' names the key that is there."""
    scenario = scene("", "ngram", {f"engine.extra_args.{k}": v for k, v in written.items()})
    [finding] = [f for f in scenario.findings(tmp_path) if f.code == "known-bad-async-scheduling"]
    after = scenario.after(finding).config
    assert after.get("engine", {}).get("extra_args", {}) == left


# -- all of them ------------------------------------------------------------------------------------------------------

EDIT = re.compile(
    r"\b(?:set|remove|lower|raise) (?:models|engine|speculative_decoding|server|sidecar|hardware)\.\w"
)
LEFT_TO_THE_READER = {
    "draft-is-target": "another checkpoint",
    "head-as-target": "where the head's own model lies",
    "vocab-overlap": "how much overlap is enough",
    "low-concurrency": "how much context requests need",
    "logits-buffer-large": "the batch to speculate for",
    "does-not-fit": "what to give up",
}
"""Fixes that name a key and not its value, and what the reader decides with it."""


def everything(folder: Path) -> Iterator[tuple[str, Finding]]:
    """Every finding of every scenario here."""
    scenarios = [*KNOWN_BAD.values(), *(scenario for _, scenario in SCENES)]
    for i, scenario in enumerate(scenarios):
        yield from ((f"{i} {scenario.name}", f) for f in scenario.findings(folder))
    for pair in PAIRS:
        below = folder / pair.name
        below.mkdir()
        made = Scenario(pair.name, pair.write(below), engine=GPU, known_types=lambda: TYPES)
        yield from ((pair.name, f) for f in made.findings(below))


def test_a_fix_that_reads_as_an_edit_is_one(tmp_path: Path) -> None:
    """No sentence names a key of the config without the edit that was tried, or a reason why the reader decides."""
    codes = set()
    for name, finding in everything(tmp_path):
        fix = finding.fix or ""
        if finding.changes:
            codes.add(finding.code)
        elif EDIT.search(fix) and "alone that leads to" not in fix:
            assert finding.code in LEFT_TO_THE_READER, (name, finding.code, fix)
    assert {entry.code for entry in entries() if entry.change} <= codes
    assert len(codes) >= 65


ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "tests/data/golden/argv").glob("*.yaml")]
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}-{p.stem}")
@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
def test_remedies_of_shipped_configs(path: Path, version: str, tmp_path: Path) -> None:
    """The configs that we ship and record, on a hybrid mixture of experts, the target with most known defects."""
    config = yaml.safe_load(re.sub(r"\$\{[^}]*\}", "x", path.read_text(encoding="utf-8")))
    target = ModelFacts("/m/target", LLAMA | {"num_experts": 64, "full_attention_interval": 4})
    draft = ModelFacts("/m/draft", DRAFT)
    scenario = Scenario(path.stem, config, target, draft, of_version(version))
    if not any(problem.fix is None for problem in problems(config, tmp_path)):
        assert list(broken(scenario, tmp_path)) == []


def test_the_share_that_others_leave_is_one_that_starts() -> None:
    """Memory that other processes hold refuses; the utilization in the Fix does not."""
    settings = situation({"method": "ngram", "version": "0.32.0"})
    busy = Device(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 * GIB, 30 * GIB, GIB // 2)
    assert settings.target is not None

    def refusals(config: dict[str, Any]) -> list[Finding]:
        plan = memory.plan(
            Settings.model_validate(config),
            settings.target,
            None,
            devices=[busy],
            engine_version="0.32.0",
        )
        return [f for f in of_plan(plan) if f.severity == "error"]

    [refused] = refusals(settings.config)
    assert refused.code == "other-processes"
    assert refused.changes
    assert refusals(edited(settings.config, refused.changes)) == []
