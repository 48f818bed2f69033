"""Remedies work: what a finding's Fix says is typed into the config, and the checks run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.checkpoint.facts import ModelFacts
from specserve.config.load import load
from specserve.errors import Change, ConfigError, Problem
from specserve.findings import Finding
from tests.pairs import PAIRS, Pair
from tests.scenarios import GPU, Scenario, edited, known_bad_cases, situation
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
        if change.key.rsplit(".", 1)[-1] not in (finding.fix or ""):
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
