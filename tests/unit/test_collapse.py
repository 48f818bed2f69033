"""How soon a collapse of acceptance is told, and what is taken for none: in virtual time, by drafts drawn at random."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from specserve.alert import builtin
from specserve.alert.evaluate import Evaluator
from specserve.config.schema import Settings
from specserve.metric_families import key
from tests.replay import WALL, observe
from tests.virtual_engine import VirtualEngine

INTERVAL = 5.0
SETTINGS = Settings.model_validate(
    {"models": {"target_model": {"path": "/m/t"}}, "speculative_decoding": {"method": "mtp"}}
)


def traffic(
    seed: int, *phases: tuple[float, float, float], interval: float = INTERVAL
) -> Iterator[tuple[float, str]]:
    """Reads of (seconds, acceptance at position 0, drafts a minute), one phase after the other."""
    rng, engine, at, due = random.Random(seed), VirtualEngine(), 0.0, 0.0
    engine.running = 4
    for seconds, first, per_minute in phases:
        end = at + seconds
        while at < end:
            at += interval
            due += per_minute / 60 * interval
            drafts, due = int(due), due % 1
            for _ in range(drafts):
                accepted = float(rng.random() < first)
                further = accepted * float(rng.random() < 0.8)
                engine.work(drafts=1, rates=(accepted, further, 0.0))
            engine.finished["stop"] += drafts / 50
            yield at, engine.text()


def alarms(reads: Iterator[tuple[float, str]]) -> list[tuple[float, str]]:
    """(second, state) of each change of AcceptanceCollapsed."""
    rules, out = Evaluator(builtin.rules(SETTINGS)), []
    listed = list(reads)
    for (now, _), seen in zip(listed, observe(listed), strict=True):
        for alert in rules.evaluate(seen.readings, now=now, at=WALL + now).changed:
            if alert.name == "AcceptanceCollapsed":
                out.append((now, alert.state.value))
    return out


@pytest.mark.parametrize(
    ("good_seconds", "usual", "per_minute"),
    [(600, 0.35, 60), (600, 0.9, 60), (600, 0.35, 600), (600, 0.9, 600), (3600, 0.6, 120)],
)
def test_a_collapse_under_load_is_told_in_75_seconds(
    good_seconds: float, usual: float, per_minute: float
) -> None:
    """At least 50 drafts a minute, after ten minutes as after hours: the window of a minute is enough."""
    reads = traffic(1, (good_seconds, usual, per_minute), (120, 0.01, per_minute))
    (began, state), *_ = alarms(reads)
    assert state == "firing"
    assert good_seconds < began <= good_seconds + 75


@pytest.mark.parametrize("per_minute", [6, 12, 30, 45])
def test_little_traffic_is_told_a_minute_after_the_fiftieth_draft(per_minute: float) -> None:
    """With fewer drafts than 50 a minute the last 50 are what counts."""
    fiftieth = 50 / per_minute * 60
    good = 1800.0
    reads = traffic(1, (good, 0.8, per_minute), (fiftieth + 120, 0.0, per_minute))
    (began, state), *_ = alarms(reads)
    assert state == "firing"
    assert good < began <= good + fiftieth + 60


def test_it_ends_when_five_minutes_are_good_again() -> None:
    """One good minute does not end it; the slow window does."""
    reads = traffic(0, (1200, 0.8, 300), (300, 0.01, 300), (900, 0.8, 300))
    (_, fired), (ended, resolved) = alarms(reads)
    assert (fired, resolved) == ("firing", "resolved")
    assert 1500 + 60 < ended < 1500 + 420


def test_what_is_low_by_nature_does_not_collapse_quickly() -> None:
    """A lookup that is accepted one time in ten has not lost anything when it is one in twenty for two minutes."""
    reads = traffic(0, (1200, 0.12, 300), (120, 0.05, 300), (600, 0.12, 300))
    assert alarms(reads) == []


def test_one_look_is_not_enough() -> None:
    """Three looks in a row: a hole of a minute in which nothing fits is over before."""
    reads = traffic(0, (1200, 0.8, 300), (50, 0.0, 300), (600, 0.8, 300))
    assert alarms(reads) == []


def test_the_alert_names_the_window_that_it_looked_at() -> None:
    """A number of one minute is not shown as one of five."""
    rules = Evaluator(builtin.rules(SETTINGS))
    listed = list(traffic(0, (1200, 0.8, 300), (80, 0.0, 300)))
    for (now, _), seen in zip(listed, observe(listed), strict=True):
        found = rules.evaluate(seen.readings, now=now, at=WALL + now)
    (alert,) = [a for a in found.active if a.name == "AcceptanceCollapsed"]
    assert alert.state.value == "firing"
    assert "specserve_recent_position0_acceptance_rate is 0" in alert.description
    assert "under 25% of the usual" in alert.description


def test_without_a_draft_in_the_last_minute_there_is_no_newest_rate() -> None:
    """What was an hour ago is not now."""
    seen = observe(traffic(0, (600, 0.8, 300), (180, 0.8, 0)))
    assert key("specserve_recent_position0_acceptance_rate") not in seen[-1].readings
    assert seen[-1].readings[key("specserve_usual_position0_acceptance_rate")] > 0.7


@pytest.fixture(scope="module")
def healthy_day() -> ModuleType:
    """scripts/healthy-day as a module."""
    path = Path(__file__).parents[2] / "scripts" / "healthy-day"
    loader = importlib.machinery.SourceFileLoader("healthy_day", str(path))
    spec = importlib.util.spec_from_loader("healthy_day", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["healthy_day"] = module
    loader.exec_module(module)
    return module


def test_an_hour_of_healthy_bursts_alarm_nobody(healthy_day: ModuleType) -> None:
    """A slice of the day that scripts/healthy-day simulates."""
    assert healthy_day.fired(healthy_day.Day(seed=3, hours=1)) == {}
