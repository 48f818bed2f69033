"""Remedies work: what a finding's Fix says is typed into the config, and the checks run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.findings import Finding
from tests.pairs import PAIRS, Pair
from tests.scenarios import GPU, Scenario, known_bad_cases, situation
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
