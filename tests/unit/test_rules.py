"""Alerts as a state machine: every transition, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specserve.alert.builtin import definitions, rules
from specserve.alert.evaluate import Evaluation, Evaluator
from specserve.alert.rules import (
    AlertState,
    Guard,
    Instance,
    Reason,
    Rule,
    RuleInput,
    advance,
    observe,
)
from specserve.config.alerting import Alerts, Rules
from specserve.config.schema import Settings
from specserve.metric_families import FAMILIES, MetricKey, key

LOW = Rule(
    "Low",
    "specserve_acceptance_rate",
    "below",
    0.5,
    0.55,
    for_seconds=60,
    keep_firing_for_seconds=30,
)
HOT = Rule("Hot", "specserve_gpu_temperature_celsius", "above", 88, 83)


def settings(**alerts: Any) -> Settings:
    return Settings.model_validate(
        {"models": {"target_model": {"path": "target"}}, "alerts": alerts}
    )


def run(rule: Rule, *steps: tuple[float, float | None]) -> list[tuple[str, Reason]]:
    """AlertState and reason after each (time, value)."""
    instance, seen = Instance(), []
    for now, value in steps:
        instance = advance(rule, instance, RuleInput(value), now)
        seen.append((instance.state.value, instance.reason))
    return seen


def states(rule: Rule, *steps: tuple[float, float | None]) -> list[str]:
    return [state for state, _ in run(rule, *steps)]


def test_fires_only_after_for() -> None:
    """A breach is pending until it has lasted for_seconds, then it fires."""
    assert states(LOW, (0, 0.4), (59.9, 0.4), (60, 0.4)) == ["pending", "pending", "firing"]


def test_a_break_starts_the_wait_over() -> None:
    """One good value, or one between the thresholds, in the pending time resets it."""
    assert states(LOW, (0, 0.4), (30, 0.52), (60, 0.4), (119, 0.4), (120, 0.4)) == [
        "pending",
        "inactive",
        "pending",
        "pending",
        "firing",
    ]


def test_without_for_it_fires_at_once() -> None:
    """for_seconds 0 fires on the first breach; the threshold itself is not a breach."""
    assert states(HOT, (0, 88.0), (1, 88.1)) == ["inactive", "firing"]


def test_the_thresholds_themselves() -> None:
    """fire_below itself does not fire; resolve_above itself resolves."""
    assert states(LOW, (0, 0.5), (1, 0.4), (61, 0.4), (200, 0.55)) == [
        "inactive",
        "pending",
        "firing",
        "resolved",
    ]


def test_hysteresis_holds_between_the_thresholds() -> None:
    """A firing alert stays while the value is between the thresholds, however long."""
    steps = [(0.0, 0.4), (60.0, 0.4), (100.0, 0.52), (5000.0, 0.549)]
    assert run(LOW, *steps)[2:] == [("firing", Reason.BETWEEN), ("firing", Reason.BETWEEN)]


def test_keeps_firing_then_resolves() -> None:
    """Above resolve_above the alert is kept for keep_firing_for after the last breach, then resolves, then is quiet."""
    seen = run(LOW, (0, 0.4), (60, 0.4), (70, 0.6), (89, 0.6), (90, 0.6), (95, 0.6))
    assert seen[2:] == [
        ("firing", Reason.KEEPING),
        ("firing", Reason.KEEPING),
        ("resolved", Reason.CLEAR),
        ("inactive", Reason.CLEAR),
    ]


def test_a_relapse_while_kept_is_one_alert() -> None:
    """A breach during keep_firing_for continues the same alert, and the keeping starts over."""
    assert states(
        LOW, (0, 0.4), (60, 0.4), (80, 0.6), (89, 0.4), (110, 0.6), (118, 0.6), (119, 0.6)
    ) == [
        "pending",
        "firing",
        "firing",
        "firing",
        "firing",
        "firing",
        "resolved",
    ]


def test_absent_never_fires() -> None:
    """Without a value nothing becomes pending, and a pending alert starts over."""
    assert run(LOW, (0, None), (1, 0.4), (30, None), (61, 0.4)) == [
        ("inactive", Reason.NO_DATA),
        ("pending", Reason.WAITING),
        ("inactive", Reason.NO_DATA),
        ("pending", Reason.WAITING),
    ]


def test_absent_does_not_clear_at_once() -> None:
    """A firing alert without data is kept, and then resolves for the stated reason; its last value stays known."""
    assert run(LOW, (0, 0.4), (60, 0.4), (89, None), (90, None))[2:] == [
        ("firing", Reason.KEEPING_NO_DATA),
        ("resolved", Reason.NO_DATA),
    ]
    fired = advance(LOW, Instance(AlertState.FIRING, held_at=0.0, value=0.4), RuleInput(None), 10)
    assert fired.value == 0.4


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=60))
def test_never_fires_before_for(values: list[float | None]) -> None:
    """Whatever the values, an alert that begins to fire has seen breaches without a break for for_seconds."""
    instance, breaches = Instance(), 0
    for n, value in enumerate(values):
        before = instance.state
        instance = advance(LOW, instance, RuleInput(value), 10.0 * n)
        breaches = breaches + 1 if value is not None and value < 0.5 else 0
        if instance.state is AlertState.FIRING and before is not AlertState.FIRING:
            assert breaches >= 7


def test_sample_and_guards_silence_a_rule() -> None:
    """Too few samples, an unknown sample, or a guard that does not hold: no value, and the reason why."""
    rule = Rule(
        "Low",
        "specserve_acceptance_rate",
        "below",
        0.5,
        0.55,
        labels={"window": ("5m",)},
        sample=key("n"),
        min_samples=1000,
        guards=(Guard("specserve_requests_running", at_most=8),),
    )
    rate = {
        key("specserve_acceptance_rate", window="5m"): 0.1,
        key("specserve_requests_running"): 8.0,
    }

    def only(readings: dict[MetricKey, float]) -> RuleInput:
        (seen,) = observe(rule, readings).values()
        return seen

    assert only({**rate, key("n"): 1000}) == RuleInput(0.1)
    assert only({**rate, key("n"): 999}).absent is Reason.TOO_FEW_SAMPLES
    assert only(rate) == RuleInput(None, Reason.TOO_FEW_SAMPLES)
    assert only({**rate, key("n"): 1000, key("specserve_requests_running"): 9.0}) == RuleInput(
        None, Reason.GUARDED
    )
    assert only({key("n"): 1000}) == RuleInput(None, Reason.GUARDED)


def test_one_alert_for_each_device() -> None:
    """Labels that the rule leaves open make one instance each; other families of a longer name do not match."""
    evaluator = Evaluator([HOT])
    celsius = "specserve_gpu_temperature_celsius"
    readings = {
        key(celsius, gpu="0"): 90.0,
        key(celsius, gpu="1"): 70.0,
        key(celsius): 90.0,
        key(celsius, host="a"): 99.0,
    }
    first, second = (evaluator.evaluate(readings, now=now, at=1000 + now) for now in (0, 5))
    assert [(a.labels, a.value) for a in first.active] == [((("gpu", "0"),), 90.0)]
    assert (first.changed, second.changed, second.to_send) == (first.active, (), second.active)


def test_an_instance_that_vanished_resolves() -> None:
    """When the device's reading goes, its alert resolves without data and is forgotten."""
    evaluator = Evaluator([HOT])
    evaluator.evaluate({key("specserve_gpu_temperature_celsius", gpu="0"): 90.0}, now=0, at=1000)
    (gone,) = evaluator.evaluate({}, now=5, at=1005).to_send
    assert (gone.state, gone.reason, gone.started_at, gone.ended_at) == (
        AlertState.RESOLVED,
        Reason.NO_DATA,
        1000,
        1005,
    )
    assert evaluator.evaluate({}, now=10, at=1010) == Evaluation()


def test_a_clock_that_was_set_back_moves_the_start() -> None:
    """An alert never ends before it began, for which Alertmanager would refuse the end, nor begins later than now."""
    evaluator = Evaluator([HOT])
    hot = {key("specserve_gpu_temperature_celsius", gpu="0"): 90.0}
    starts = [
        evaluator.evaluate(hot, now=n, at=at).active[0].started_at
        for n, at in enumerate((4600, 1000, 1005))
    ]
    (ended,) = evaluator.evaluate({}, now=5, at=900).to_send
    assert (starts, ended.started_at, ended.ended_at) == ([4600, 1000, 1000], 900, 900)


def condition(name: str) -> dict[MetricKey, float]:
    return {key("specserve_engine_condition", condition=name): 1.0}


def test_inhibited_alerts_are_shown_not_sent() -> None:
    """While the engine is down a queue alert that fires is not sent; when it is up again and the queue stays, it is."""
    rules_ = {
        "QueueBacklog": {"for_seconds": 0},
        "EngineDown": {"for_seconds": 0, "keep_firing_for_seconds": 0},
    }
    evaluator = Evaluator(rules(settings(rules=rules_)))
    queue = {key("specserve_requests_waiting"): 100.0}
    first = evaluator.evaluate({**queue, **condition("down")}, now=0, at=0)
    assert [(a.name, a.inhibited_by) for a in first.active] == [
        ("EngineDown", None),
        ("QueueBacklog", "EngineDown"),
    ]
    assert [a.name for a in first.to_send] == ["EngineDown"]
    second = evaluator.evaluate({**queue, **condition("progressing")}, now=5, at=5)
    assert [(a.name, a.state.value) for a in second.to_send] == [
        ("EngineDown", "resolved"),
        ("QueueBacklog", "firing"),
    ]


def test_who_was_told_hears_the_end() -> None:
    """An alert that was sent and then inhibited goes on being sent, and its end too; one never sent ends silently."""
    rules_ = {
        "QueueBacklog": {"for_seconds": 0, "keep_firing_for_seconds": 0},
        "KVCachePressure": {"for_seconds": 0, "keep_firing_for_seconds": 0},
        "EngineDown": {"for_seconds": 0, "keep_firing_for_seconds": 600},
    }
    evaluator = Evaluator(rules(settings(rules=rules_)))
    queue, full = (
        {key("specserve_requests_waiting"): 100.0},
        {key("specserve_kv_cache_usage_ratio"): 0.99},
    )
    evaluator.evaluate(queue, now=0, at=0)
    down = evaluator.evaluate({**queue, **full, **condition("down")}, now=5, at=5)
    assert [a.name for a in down.to_send] == ["EngineDown", "QueueBacklog"]
    ended = evaluator.evaluate(condition("down"), now=10, at=10)
    assert [(a.name, a.state.value) for a in ended.to_send] == [
        ("EngineDown", "firing"),
        ("QueueBacklog", "resolved"),
    ]


def test_speculation_inactive_knows_the_schedule() -> None:
    """No drafts while text is generated fires, unless the batch is larger than the config lets speculate."""
    output = {
        key("specserve_window_generation_tokens", window="5m"): 5000.0,
        key("specserve_speculation_configured"): 1.0,
    }
    config = settings(rules={"SpeculationInactive": {"for_seconds": 0}}).model_dump(
        exclude_unset=True
    )
    config["speculative_decoding"] = {"schedule": [[1, 8, 5], [9, 256, 0]]}
    alone = Evaluator(rules(Settings.model_validate(config)))

    def names(running: float, **drafted: float) -> list[str]:
        readings = {**output, key("specserve_requests_running"): running}
        if drafted:
            readings[key("specserve_window_draft_tokens", window="5m")] = drafted["drafted"]
        return [a.name for a in alone.evaluate(readings, now=0, at=0).to_send]

    assert names(running=9) == []
    assert names(running=8, drafted=50) == []
    assert names(running=8) == ["SpeculationInactive"]


@pytest.mark.parametrize(
    ("speculation", "judged"),
    [
        ({}, True),
        ({"schedule": [[1, 8, 5], [9, 64, 0]]}, True),
        ({"schedule": [[1, 8, 5], [9, 64, 2]]}, False),
        ({"method": "ngram"}, False),
        ({"method": "suffix"}, False),
    ],
)
def test_the_last_position_is_judged_where_drafts_reach_it(
    speculation: dict[str, Any], judged: bool
) -> None:
    """DraftPositionsWasted has no rule where drafts are shorter by design: lookup, several lengths."""
    models = {"target_model": {"path": "target"}, "draft_model": {"path": "draft"}}
    made = rules(Settings.model_validate({"models": models, "speculative_decoding": speculation}))
    assert ("DraftPositionsWasted" in {rule.name for rule in made}) is judged


def test_every_alert_is_consistent() -> None:
    """Each built-in alert has a setting, and each reading it names is of a family that is exported."""
    assert {d.name for d in definitions()} == {"AcceptanceRateLow", *Rules.model_fields}
    for definition in definitions():
        named = [
            definition.metric,
            definition.sample,
            *(guard.family for guard in definition.guards),
        ]
        assert {name for name in named if name} <= FAMILIES.keys(), definition.name
        assert set(definition.labels) <= set(
            FAMILIES[definition.metric].labels if definition.metric else ()
        )
        assert definition.inhibited_by <= {d.name for d in definitions()} - {definition.name}


def test_nothing_fires_on_an_idle_server() -> None:
    """With no readings, and with those of an idle healthy server, every built-in alert stays inactive."""
    on = {name: {"for_seconds": 0} for name in Rules.model_fields}
    evaluator = Evaluator(rules(settings(rules=on, acceptance_rate={"for_seconds": 0})))
    idle = {
        **condition("idle"),
        key("specserve_requests_running"): 0.0,
        key("specserve_requests_waiting"): 0.0,
        key("specserve_kv_cache_usage_ratio"): 0.0,
        key("specserve_speculation_configured"): 1.0,
        **{
            key(f"specserve_window_{n}", window="5m"): 0.0
            for n in ("draft_tokens", "drafts", "generation_tokens")
        },
    }
    assert evaluator.evaluate({}, now=0, at=0) == Evaluation()
    assert evaluator.evaluate(idle, now=5, at=5) == Evaluation()
    assert set(evaluator.readings(Evaluation()).values()) == {0.0}


def test_settings_reach_the_rules() -> None:
    """Thresholds, windows and switches of the file are those of the rules; an alert without a number has no rule."""
    made = {
        rule.name: rule
        for rule in rules(
            settings(
                acceptance_rate={"fire_below": 0.3, "resolve_above": 0.4, "window_seconds": 90},
                rules={"QueueBacklog": {"enabled": False}, "LatencySLOTTFT": {"fire_above": 0.5}},
            )
        )
    }
    low = made["AcceptanceRateLow"]
    assert (low.fire, low.resolve, low.labels, low.min_samples) == (
        0.3,
        0.4,
        {"window": ("90s",)},
        1000,
    )
    assert low.sample == key("specserve_window_draft_tokens", window="90s")
    assert (made["LatencySLOTTFT"].fire, made["LatencySLOTTFT"].resolve) == (0.5, 0.5)
    assert made["DraftPositionsWasted"].labels["position"] == ("4",)
    assert "QueueBacklog" not in made
    assert "LatencySLOTPOT" not in made


def test_custom_rule() -> None:
    """A user's rule fires over any exported number, one alert for each label value it leaves open."""
    mine = {
        "name": "EngineBusy",
        "metric": "specserve_engine_requests_running",
        "fire_above": 10,
        "for_seconds": 0,
    }
    evaluator = Evaluator(rules(settings(custom=[{**mine, "severity": "info"}])))
    readings = {
        key("specserve_engine_requests_running", engine=str(n)): 8.0 + 2 * n for n in range(3)
    }
    (alert,) = evaluator.evaluate(readings, now=0, at=0).to_send
    assert (alert.name, alert.severity, alert.labels, alert.value) == (
        "EngineBusy",
        "info",
        (("engine", "2"),),
        12.0,
    )
    assert alert.summary == "Requests in execution on one engine."


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ({"metric": "specserve_acceptence_rate"}, "did you mean 'specserve_acceptance_rate'?"),
        (
            {"metric": "specserve_requests_running", "labels": {"engine": "0"}},
            "has no label 'engine'; it has no labels",
        ),
        ({"fire_above": 1.0}, "exactly one of fire_below and fire_above"),
        ({"resolve_above": 0.4}, "fire_below is 0.5; must be at most resolve_above (0.4)"),
        ({"resolve_below": 0.4}, "resolve_below with fire_above"),
        ({"name": "EngineDown"}, "'EngineDown' exists already"),
        ({"labels": {"window": "7m"}}, "there is no window '7m'; there are 1m, 5m, 30m"),
    ],
)
def test_custom_rule_refused(custom: dict[str, Any], message: str) -> None:
    """A rule that could never mean what its writer wants is an error of the config."""
    whole = {"name": "Mine", "metric": "specserve_acceptance_rate", "fire_below": 0.5, **custom}
    with pytest.raises(ValidationError) as refused:
        Alerts.model_validate({"custom": [whole]})
    assert message in str(refused.value)


def test_a_part_of_a_rule_keeps_the_rest() -> None:
    """Setting one key of a built-in alert leaves its other defaults; thresholds in the wrong order are refused."""
    changed = Alerts.model_validate(
        {"rules": {"KVCachePressure": {"fire_above": 0.9}}}
    ).rules.KVCachePressure
    assert (changed.fire_above, changed.resolve_below, changed.for_seconds) == (0.9, 0.85, 300)
    with pytest.raises(
        ValidationError, match=r"resolve_below is 0\.9; must be at most fire_above \(0\.8\)"
    ):
        Alerts.model_validate(
            {"rules": {"KVCachePressure": {"fire_above": 0.8, "resolve_below": 0.9}}}
        )


def test_a_firing_threshold_takes_the_other_along() -> None:
    """One threshold alone, past the default of the other: that keeps its distance, and stays where values can be."""
    given = {
        "QueueBacklog": {"fire_above": 4},
        "AcceptanceDrift": {"fire_below": -0.04},
        "KVCachePressure": {"fire_above": "0.8"},
    }
    alerts = Alerts.model_validate({"acceptance_rate": {"fire_below": 0.7}, "rules": given})
    rules = alerts.rules
    assert alerts.acceptance_rate.resolve_above == 0.75
    assert (rules.QueueBacklog.resolve_below, rules.AcceptanceDrift.resolve_above) == (1, -0.02)
    assert rules.KVCachePressure.resolve_below == pytest.approx(0.8 - 0.1 * 0.8 / 0.95, abs=1e-6)
    assert (
        Alerts.model_validate(
            {"acceptance_rate": {"fire_below": 0.99}}
        ).acceptance_rate.resolve_above
        == 1
    )
