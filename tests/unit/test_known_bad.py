"""The table of known defects: each row finds its config, and none of its near misses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specserve.engine.installed import known_bad
from specserve.engine.installed.changes import CHANGES
from specserve.engine.installed.conditions import CONDITIONS, Situation
from specserve.engine.installed.introspect import release
from specserve.engine.installed.known_bad import Entry, entries
from specserve.findings import Finding
from tests.scenarios import known_bad_cases, known_bad_near, situation

ROWS = {entry.id: entry for entry in entries()}
CASES = known_bad_cases()
NEAR = list(known_bad_near())


def found(case: dict[str, Any], folder: Path) -> dict[str, Finding]:
    """Code -> finding of one case, through every check."""
    return {f.code: f for f in situation(case).findings(folder)}


@pytest.mark.parametrize("row", ROWS)
def test_a_known_defect_is_found(row: str, tmp_path: Path) -> None:
    """The config of each row gets its finding, with the report it rests on and what to do."""
    entry = ROWS[row]
    finding = found(CASES[row]["fires"], tmp_path)[entry.code]
    assert finding.severity == entry.severity
    assert finding.message.endswith(f"({entry.reference})")
    assert finding.fix


@pytest.mark.parametrize(("row", "case"), NEAR, ids=[row for row, _ in NEAR])
def test_a_near_miss_is_not_found(row: str, case: dict[str, Any], tmp_path: Path) -> None:
    """One condition less, an exempting one more, or the version beside the range: nothing."""
    assert ROWS[row].code not in found(case, tmp_path)


def test_every_row_has_its_config_and_a_near_miss_for_each_of_its_edges() -> None:
    """No row is untested; both ends of its versions are tried."""
    assert CASES.keys() == ROWS.keys()
    for row, entry in ROWS.items():
        near = CASES[row]["near"]
        assert near
        versions = {case["version"] for case in near if "version" in case}
        assert len(versions) == bool(entry.first_bad) + bool(entry.last_bad)


@pytest.mark.parametrize("entry", entries(), ids=lambda e: e.id)
def test_a_row_is_sound(entry: Entry) -> None:
    """Its range is not empty, its conditions exist, and what it rests on can be opened."""
    if entry.first_bad and entry.last_bad:
        assert release(entry.first_bad) <= release(entry.last_bad)
    assert entry.when or entry.methods
    assert entry.when | entry.unless <= CONDITIONS.keys()
    assert entry.urls
    assert entry.change or entry.fix
    assert not re.search(r"\.$", entry.says)


def test_the_whole_of_a_release_is_in_its_range() -> None:
    """The last bad version counts with its patch releases and candidates, and no version is none."""
    entry = ROWS["wide-draft-all-reduce"]
    inside = ["0.26", "0.28.1", "0.28.2rc0"]
    outside = ["0.25.9", "0.29.0rc1", "dev", ""]
    assert [v for v in inside + outside if entry.in_range(v)] == inside


def test_every_condition_and_every_edit_is_used() -> None:
    """The code beside the table has nothing that no row asks for."""
    assert set().union(*(e.when | e.unless for e in entries())) == CONDITIONS.keys()
    assert {e.change for e in entries() if isinstance(e.change, str)} == CHANGES.keys()


def test_ids_are_unique() -> None:
    """A code names one row."""
    assert len(ROWS) == len(entries())


def test_connectors_inside_a_connector_are_seen(tmp_path: Path) -> None:
    """MultiConnector's parts count, in JSON text as in YAML."""
    text = (
        '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": '
        '[{"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector", '
        '"kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}]}}]}}'
    )
    case = CASES["nixl-mtp-hybrid"]["fires"]
    case = {**case, "set": {"engine.extra_args.kv_transfer_config": text}}
    codes = found(case, tmp_path)
    assert {"known-bad-nixl-mtp-hybrid", "known-bad-offloading-tiers-mtp"} <= codes.keys()


def test_nothing_is_said_without_speculation(tmp_path: Path) -> None:
    """The table is about speculation."""
    settings = situation({"method": "ngram", "version": "0.32.0"}).load(tmp_path).settings
    off = settings.model_copy(
        update={
            "speculative_decoding": settings.speculative_decoding.model_copy(
                update={"enabled": False}
            )
        }
    )
    assert known_bad.findings(Situation(off), "0.27.0") == []
