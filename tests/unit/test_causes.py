"""The right word in an incident: causes by evidence, over scripted incidents in virtual time (scripts/incidents plays
all of them)."""

from __future__ import annotations

import copy
import functools

import pytest

from specserve.alert import builtin
from specserve.alert.causes import ServerChange, ServerFacts, find
from specserve.alert.evaluate import Evaluator
from specserve.config.schema import Settings
from specserve.metric_families import key
from specserve.sidecar.baseline import SetupRecord
from specserve.sidecar.changes import Changes
from tests.incidents import HEALTHY, INCIDENTS, MTP, Incident, is_right, play, warm

SLICE = (
    "long prompts and a slow machine",
    "Chinese under load",
    "another model's head",
    "upgrade, worse and slower",
    "a rank's file and a slow machine",
    "damaged and slow",
    "slow under load",
    "high temperature",
    "load",
    "restart",
    "one rank gets code",
    "always long prompts",
)
BY_NAME = {incident.name: incident for incident in (*INCIDENTS, *HEALTHY)}


@functools.cache
def _warm(facts: ServerFacts, ranks: int, usual: str):
    incident = next(
        i for i in BY_NAME.values() if (i.facts, i.ranks, str(i.usual)) == (facts, ranks, usual)
    )
    return warm(incident)


def played(incident: Incident):
    """The causes at its end."""
    scene = _warm(incident.facts, incident.ranks, str(incident.usual))
    return play(incident, copy.deepcopy(scene))


@pytest.mark.parametrize("name", SLICE)
def test_the_right_cause_comes_first(name: str) -> None:
    """By what brought it about; a healthy look-alike has none."""
    causes = played(BY_NAME[name])
    assert is_right(BY_NAME[name], causes), [cause.line for cause in causes]


def test_a_third_of_the_incidents_are_two_at_once() -> None:
    """Thirty, ten of them combined."""
    assert len(INCIDENTS) >= 30
    assert sum(len(incident.happens) > 1 for incident in INCIDENTS) >= 10


def test_a_cause_has_its_numbers() -> None:
    """What supports it and what speaks against it, with the usual value beside each."""
    first, *_ = played(BY_NAME["damaged verification"])
    text = first.line
    assert "take this pod out" in text
    assert "position 0 accepts 8" in text
    assert "usually 8" in text
    shown = first.as_dict()
    assert shown["name"] == "wrong_output"
    assert len(shown["supports"]) >= 3


def test_wrong_output_needs_a_setup_that_did_not_change() -> None:
    """The same fall after an upgrade is the upgrade's."""
    scene = copy.deepcopy(_warm(MTP, 1, str(BY_NAME["nothing"].usual)))
    for rank in scene.server.ranks:
        rank.verifies = 0.3
    for _ in range(30):
        readings = scene.step(15)
    calm = find(readings, MTP)
    upgraded = ServerFacts(
        "mtp", changes=(ServerChange("vLLM 0.31 became 0.32", 500, is_setup=True),)
    )
    assert calm[0].name == "wrong_output"
    assert find(readings, upgraded)[0].name == "engine_changed"
    assert "wrong_output" not in {cause.name for cause in find(readings, upgraded)}


def test_the_alert_carries_the_cause() -> None:
    """The evidence takes the place of what it usually is, in the alerts of its symptom alone."""
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "/m/t"}},
            "speculative_decoding": {"method": "mtp"},
            "alerts": {"rules": {"LatencySLOTPOT": {"fire_above": 0.001, "for_seconds": 0}}},
        }
    )
    causes = played(BY_NAME["damaged verification"])
    readings = {
        key("specserve_output_suspect"): 1.0,
        key("specserve_time_per_output_token_seconds", stat="p90", window="5m"): 0.1,
        key("specserve_window_requests", window="5m"): 100.0,
    }
    rules = Evaluator(builtin.rules(settings))
    rules.evaluate(readings, now=0, at=0, causes=causes)
    found = {
        alert.name: alert for alert in rules.evaluate(readings, now=61, at=61, causes=causes).active
    }
    assert found["OutputSuspect"].causes[0] == causes[0].line
    assert "large batches" in found["LatencySLOTPOT"].causes


def test_nothing_is_named_without_readings() -> None:
    """Unknown is not wrong."""
    assert find({}, ServerFacts("eagle3", 4096, 0.25)) == ()


def test_changes_are_told_over_restarts_of_the_sidecar() -> None:
    """Another version and another configuration than the record's; an unknown version is none."""
    changes = Changes(SetupRecord(setup="a", engine_version="0.31"), "b")
    assert changes.observe(100.0, 0.0, "unknown") == SetupRecord(setup="b", engine_version="0.31")
    assert [change.what for change in changes.now(160.0)] == ["its configuration was changed"]
    changes.observe(200.0, 0.0, "0.32")
    changes.observe(210.0, 1.0, "0.32")
    assert [(c.what, c.seconds_ago, c.is_setup) for c in changes.now(260.0)] == [
        ("its configuration was changed", 160.0, True),
        ("vLLM 0.31 became 0.32", 60.0, True),
        ("the engine restarted", 50.0, False),
    ]
    assert changes.now(100_000.0) == ()
