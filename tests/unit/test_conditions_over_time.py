"""What is told over time: requests that are never scheduled, restarts in a row, growth on the host."""

from __future__ import annotations

import os

from specserve.alert import builtin
from specserve.alert.evaluate import Evaluator
from specserve.config.schema import Settings
from specserve.engine.http.metrics import parse
from specserve.metric_families import Readings, key
from specserve.sidecar.growth import Growth
from specserve.sidecar.observer import Observer
from specserve.sidecar.probe import Context, Scrape
from specserve.supervise.processes import host_use
from tests.virtual_engine import VirtualEngine

SETTINGS = Settings.model_validate({"models": {"target_model": {"path": "/m/t"}}})


def look(observer: Observer, now: float, engine: VirtualEngine, *, start: float = 1.0) -> Readings:
    """One read."""
    snapshot = parse(engine.text(start=start), at_seconds=now)
    return observer.observe(now, now, Scrape("ok", snapshot=snapshot)).readings


def firing(rules: Evaluator, readings: Readings, now: float) -> set[str]:
    """The alerts that fire now."""
    active = rules.evaluate(readings, now=now, at=now).active
    return {alert.name for alert in active if alert.state.value == "firing"}


def test_requests_that_wait_from_the_start_are_told_beside_a_sidecar_alone() -> None:
    """Nothing ever ran and nothing ever finished; an engine that schedules resolves it."""
    observer, rules, engine = Observer(), Evaluator(builtin.rules(SETTINGS)), VirtualEngine()
    engine.waiting = 3
    found = {now: firing(rules, look(observer, now, engine), now) for now in range(0, 180, 15)}
    assert "RequestsNeverScheduled" not in found[120]
    assert "RequestsNeverScheduled" in found[135]
    engine.running, engine.waiting = 3, 0
    engine.work(drafts=10, rates=(0.5, 0.0, 0.0))
    assert look(observer, 195, engine)[key("specserve_unscheduled_seconds")] == 0


def test_a_queue_that_moves_or_sleeps_is_none_that_is_never_scheduled() -> None:
    """Tokens between two reads, or an engine that was put to sleep."""
    observer, engine = Observer(), VirtualEngine()
    engine.waiting = 3
    for now in range(0, 300, 15):
        engine.work(plain=1)
        assert look(observer, now, engine)[key("specserve_unscheduled_seconds")] == 0
    engine.awake = 0
    for now in range(300, 600, 15):
        assert look(observer, now, engine)[key("specserve_unscheduled_seconds")] == 0


def test_restarts_in_a_row_are_told_and_forgotten_after_an_hour() -> None:
    """Three in an hour; one crash that shows as a lost engine and as another process counts once."""
    observer, rules, engine = Observer(), Evaluator(builtin.rules(SETTINGS)), VirtualEngine()
    for number in range(4):
        now = 600.0 * number
        readings = look(observer, now, engine, start=1000.0 * (number + 1))
        assert readings[key("specserve_recent_restarts")] == number
        lost = Scrape("unreachable", "refused")
        observer.observe(now + 300, now + 300, lost, Context("backoff"))
        observer.observe(now + 310, now + 310, lost, Context("running"))
    assert "EngineRestarting" in firing(rules, readings, now)
    later = look(observer, now + 7200, engine, start=4000.0)
    assert later[key("specserve_recent_restarts")] == 0


def test_growth_is_told_of_a_line_and_not_of_a_sawtooth() -> None:
    """A tenth an hour after two hours; garbage that is collected, and another process, are none."""
    line, saw = Growth(), Growth()
    for minute in range(150):
        grown = line.observe(60.0 * minute, 1e9 * (1 + 0.2 * minute / 60), [7])
        steady = saw.observe(60.0 * minute, 1e9 * (1 + 0.01 * (minute % 20)), [7])
    assert grown is not None
    assert steady is not None
    assert 0.12 < grown < 0.2
    assert abs(steady) < 0.01
    assert line.observe(60.0 * 151, 5e9, [8]) is None


def test_a_process_says_what_it_holds() -> None:
    """This one has memory and a thread; one that is gone says nothing."""
    used = host_use([os.getpid(), 2**22 + 1])
    assert used is not None
    assert used.memory_bytes > 1e6
    assert used.threads >= 1
    assert host_use([2**22 + 1]) is None


def test_answers_that_refuse_are_told_with_the_parameters_that_speculation_refuses() -> None:
    """Forty of a hundred."""
    rules = Evaluator(builtin.rules(SETTINGS))
    readings = {
        key("specserve_http_error_ratio", status="4xx", window="5m"): 0.4,
        key("specserve_window_http_answers", window="5m"): 100.0,
    }
    rules.evaluate(readings, now=0, at=0)
    active = rules.evaluate(readings, now=301, at=301).active
    (alert,) = [alert for alert in active if alert.state.value == "firing"]
    assert alert.name == "ClientErrorShareHigh"
    assert "`min_p`" in alert.causes[0]
