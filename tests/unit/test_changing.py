"""Alerts that change in the config file while its server runs."""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from specserve.alert.evaluate import Evaluator
from specserve.alert.rules import AlertState, Rule
from specserve.app.changing import ChangingAlerts
from specserve.app.sidecar import Watch
from specserve.config.alerting import Alerts
from specserve.config.load import load
from specserve.config.schema import Settings
from specserve.metric_families import key

CONFIG = {
    "models": {"target_model": {"path": "m"}},
    "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 3},
}
HEAT = "specserve_gpu_temperature_celsius"


def write(path: Path, **sections: object) -> None:
    path.write_text(yaml.safe_dump(CONFIG | sections))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config without alerts of its own."""
    path = tmp_path / "config.yaml"
    write(path)
    return path


def test_each_change_is_told_once(file: Path) -> None:
    """Other alerts come once, with the rest of the settings as they were; what else changed does not."""
    changing = ChangingAlerts(load(file, environ={}), {})
    assert changing.changed() is None
    write(file, alerts={"acceptance_rate": {"fire_below": 0.2}}, server={"port": 9001})
    settings = changing.changed()
    assert settings is not None
    assert settings.alerts.acceptance_rate.fire_below == 0.2
    assert settings.server.port == 8000
    assert changing.changed() is None
    write(file, server={"port": 9002}, alerts={"acceptance_rate": {"fire_below": 0.2}})
    assert changing.changed() is None


def test_a_file_that_cannot_be_used_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once in the log, and the next good one is taken; a file that is gone is none."""
    changing = ChangingAlerts(load(file, environ={}), {})
    with caplog.at_level(logging.WARNING, logger="specserve.sidecar"):
        write(file, alerts={"acceptance_rate": {"fire_below": 7}})
        assert [changing.changed(), changing.changed()] == [None, None]
        file.unlink()
        assert changing.changed() is None
    (record,) = caplog.records
    assert "cannot be used; alerts stay as they are" in record.getMessage()
    write(file, alerts={"acceptance_rate": {"fire_below": 0.1}})
    assert changing.changed() is not None


def test_what_fires_goes_on_under_other_limits() -> None:
    """A rule of the same name keeps its alerts; one that is gone takes its alerts along."""
    hot = {key(HEAT, gpu="0"): 90.0}
    evaluator = Evaluator([Rule("Hot", HEAT, "above", 88, 83)])
    (first,) = evaluator.evaluate(hot, now=0, at=100).active
    assert first.state is AlertState.FIRING
    other = Rule("Queue", "specserve_requests_waiting", "above", 8, 4)
    evaluator.take([other, Rule("Hot", HEAT, "above", 95, 85, for_seconds=600)])
    (again,) = evaluator.evaluate(hot, now=5, at=105).active
    assert (again.state, again.started_at) == (AlertState.FIRING, 100)
    evaluator.take([other])
    assert evaluator.evaluate(hot, now=10, at=110).active == ()


def test_the_sidecar_takes_rules_and_receivers_while_it_watches(tmp_path: Path) -> None:
    """A rule that is switched on and a receiver that is new are there without a restart."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = Settings.model_validate(
        CONFIG | {"sidecar": {"port": port, "scrape_interval_seconds": 0.05}}
    )
    receiver = {"type": "webhook", "url": "http://127.0.0.1:9/"}
    alerts = {"rules": {"LatencySLOTTFT": {"fire_above": 2}}, "notify": [receiver]}
    after = before.model_copy(update={"alerts": Alerts.model_validate(alerts)})
    changes: queue.SimpleQueue[Settings] = queue.SimpleQueue()

    def changed() -> Settings | None:
        if changes.empty():
            return None
        return changes.get()

    watch = Watch(
        before,
        engine_url="http://127.0.0.1:9",
        state_dir=tmp_path,
        changed_alerts=changed,
    ).start()
    rule = key("specserve_alert_firing", alert="LatencySLOTTFT", severity="warning")
    told = key("specserve_notification_queue_length")
    try:
        wait(lambda: bool(watch.readings()))
        assert rule not in watch.readings()
        assert told not in watch.readings()
        changes.put(after)
        wait(lambda: {rule, told} <= watch.readings().keys())
    finally:
        watch.stop()


def wait(met: Callable[[], bool]) -> None:
    """Until it is met; a minute at most."""
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)
