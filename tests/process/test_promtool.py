"""The Prometheus rules, run by promtool: each alert fires, not early, not on an idle fleet, and resolves."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.alert.builtin import definitions, thresholds
from specserve.alert.prometheus import rule_file
from specserve.config.alerting import Alerts

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.needs("promtool")
ALL_ON = Alerts.model_validate(
    {
        "rules": {
            "AcceptanceLengthLow": {"fire_below": 2, "resolve_above": 2.2},
            "LatencySLOTTFT": {"fire_above": 0.5, "resolve_below": 0.4},
            "LatencySLOTPOT": {"fire_above": 0.05, "resolve_below": 0.04},
            "GPUPowerHigh": {"fire_above": 0.98},
        }
    }
)
GPU = ', gpu="0"'


@dataclass(frozen=True)
class Series:
    """One series in three phases: good, bad, good. Gauges give values, counters an increase per minute."""

    name: str
    good: float
    bad: float
    labels: str = ""
    gauge: bool = False
    """Give values although the name ends in _total."""

    def text(
        self, minutes: tuple[int, int, int], identity: str, *, share: float = 1.0
    ) -> dict[str, str]:
        steps = [self.good] * minutes[0] + [self.bad] * minutes[1] + [self.good] * minutes[2]
        if self.name.endswith("_total") and not self.gauge:
            steps = list(accumulate(step * share for step in steps))
        values = " ".join(f"{v:.10g}" for v in steps)
        return {"series": f"{self.name}{{{identity}{self.labels}}}", "values": values}


def traffic(accepted: float) -> list[Series]:
    """Ten thousand draft tokens a minute in drafts of four, of which a part is accepted."""
    return [
        Series("specserve_draft_tokens_total", 10000, 10000),
        Series("specserve_drafts_total", 2500, 2500),
        Series("specserve_accepted_tokens_total", 7000, 10000 * accepted),
    ]


def position(n: int, good: float, bad: float) -> Series:
    labels = f', position="{n}"'
    return Series("specserve_accepted_tokens_per_position_total", 2500 * good, 2500 * bad, labels)


def finished(good_length: float, bad_length: float) -> list[Series]:
    return [
        Series(
            "specserve_requests_finished_total",
            100 * good_length,
            100 * bad_length,
            ', reason="length"',
        ),
        Series(
            "specserve_requests_finished_total",
            100 * (1 - good_length),
            100 * (1 - bad_length),
            ', reason="stop"',
        ),
    ]


def condition(name: str) -> list[Series]:
    return [
        Series("specserve_engine_condition", 0, 1, f', condition="{name}"'),
        Series("specserve_engine_condition", 1, 0, ', condition="progressing"'),
    ]


def gauge(name: str, good: float, bad: float, labels: str = "") -> list[Series]:
    return [Series("specserve_" + name, good, bad, labels)]


P90 = ', stat="p90", window="5m"'
CASES: Mapping[str, list[Series]] = {
    "AcceptanceRateLow": traffic(0.4),
    "AcceptanceDrift": traffic(0.55),
    "AcceptanceCollapsed": [*traffic(0.01), position(0, 0.9, 0.03)],
    "SpecOutputMismatch": gauge("output_mismatch", 0, 1),
    "OutputSuspect": gauge("output_suspect", 0, 1),
    "AcceptanceLengthLow": traffic(0.2),
    "DraftHeadIneffective": gauge("canary_position0_acceptance_rate", 0.9, 0.05),
    "DraftPositionsWasted": [*traffic(0.5), position(0, 0.9, 0.9), position(3, 0.4, 0.02)],
    "SpeculationInactive": [
        Series("specserve_draft_tokens_total", 10000, 0),
        Series("specserve_generation_tokens_total", 9000, 3000),
        Series("specserve_speculation_configured", 1, 1),
    ],
    "BelowBreakEven": [*traffic(0.6), *gauge("break_even_margin", 0.2, -0.1, ', window="5m"')],
    "EngineDown": condition("down"),
    "EngineStalled": condition("stalled"),
    "EngineRankStalled": [
        Series("specserve_engines", 4, 4),
        Series("specserve_seconds_since_progress", 0, 0),
        Series("specserve_engine_seconds_since_progress", 0, 0, ', engine="0"'),
        Series("specserve_engine_seconds_since_progress", 0, 300, ', engine="3"'),
    ],
    "EngineStarved": condition("starved"),
    "MetricsBlind": condition("blind"),
    "RequestsNeverScheduled": gauge("unscheduled_seconds", 0, 300),
    "EngineRestarting": gauge("recent_restarts", 1, 4),
    "HostMemoryGrowing": gauge("engine_host_growth_ratio", 0.01, 0.3, ', of="memory"'),
    "ThreadsGrowing": gauge("engine_host_growth_ratio", 0.01, 0.3, ', of="threads"'),
    "QueueBacklog": gauge("requests_waiting", 2, 40),
    "KVCachePressure": gauge("kv_cache_usage_ratio", 0.5, 0.99),
    "LatencySLOTTFT": [*finished(0, 0), *gauge("time_to_first_token_seconds", 0.2, 0.6, P90)],
    "LatencySLOTPOT": [*finished(0, 0), *gauge("time_per_output_token_seconds", 0.02, 0.06, P90)],
    "ErrorShareHigh": [
        Series("specserve_http_requests_total", 100, 70, ', status="2xx"'),
        Series("specserve_http_requests_total", 0, 30, ', status="5xx"'),
    ],
    "ClientErrorShareHigh": [
        Series("specserve_http_requests_total", 100, 60, ', status="2xx"'),
        Series("specserve_http_requests_total", 0, 40, ', status="4xx"'),
    ],
    "PrefixHitDrop": [
        *finished(0, 0),
        Series("specserve_prefix_cache_queries_total", 5000, 5000),
        Series("specserve_prefix_cache_hits_total", 4000, 500),
    ],
    "LengthFinishJump": finished(0.1, 0.7),
    "GPUTemperatureHigh": gauge("gpu_temperature_celsius", 70, 92, GPU),
    "GPUMemoryHigh": gauge("gpu_memory_used_ratio", 0.9, 0.99, GPU),
    "GPUPowerHigh": gauge("gpu_power_ratio", 0.9, 0.99, GPU),
    "GPUThrottled": gauge("gpu_throttled", 0, 1, GPU + ', reason="thermal"'),
    "GPUECCErrors": [
        Series("specserve_gpu_ecc_errors_total", 0, 3, GPU + ', type="uncorrected"', gauge=True)
    ],
}
FLEET_ONLY = {"AcceptanceSpread", "SidecarAbsent"}
"""Not about one server: they have tests of their own."""
HISTORY = 40
"""Minutes of good behaviour before the bad phase."""


def identity(instance: str) -> str:
    return f'job="llm", instance="{instance}", model_name="m"'


@functools.cache
def groups() -> list[dict[str, Any]]:
    """The groups of the rule file."""
    return yaml.safe_load(rule_file(ALL_ON))["groups"]


def rules_of(names: Collection[str]) -> str:
    """The rule file with these alerts alone and every recording; all alerts where none is named."""
    kept = [
        {
            **group,
            "rules": [
                r for r in group["rules"] if "record" in r or not names or r["alert"] in names
            ],
        }
        for group in groups()
    ]
    return json.dumps({"groups": kept})


def run_promtool(
    folder: Path,
    series: list[dict[str, str]],
    expected: list[dict[str, Any]],
    *,
    only: Collection[str] = (),
) -> None:
    """Run promtool on the rules with these series; its report is the failure.

    ``only`` names the alerts that are asked about: what is not asked about costs time and changes nothing.
    """
    (folder / "rules.yaml").write_text(rules_of(only))
    case = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (folder / "test.yaml").write_text(json.dumps(document))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def firing(name: str, minute: float, count: int) -> dict[str, Any]:
    """That this many instances of the alert fire at the minute."""
    samples = [{"labels": "{}", "value": count}] if count else []
    return {
        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
        "eval_time": f"{int(minute)}m",
        "exp_samples": samples,
    }


def timing(name: str) -> tuple[int, int, int]:
    """Minutes: the window of the fleet's expression, for, keep_firing_for."""
    definition = next(d for d in definitions() if d.name == name)
    window = definition.fleet.window.replace("$acceptance_window", "5m").rstrip("m")
    limits = thresholds(ALL_ON, name).timing
    return (
        int(window),
        -(-int(limits.for_seconds) // 60),
        -(-int(limits.keep_firing_for_seconds) // 60),
    )


def test_every_alert_has_a_case() -> None:
    """No built-in alert is without a promtool test."""
    assert CASES.keys() | FLEET_ONLY == {d.name for d in definitions()}


@pytest.mark.parametrize("name", CASES)
def test_fires_not_early_and_resolves(name: str, tmp_path: Path) -> None:
    """On one of two replicas, or on both for fleet-wide rules, the alert fires after `for`, then resolves."""
    window, wait, keep = timing(name)
    per_instance = next(d for d in definitions() if d.name == name).fleet.by == "instance"
    bad = window + wait + 10
    minutes = (HISTORY, bad, window + keep + 30)
    series = [s.text(minutes, identity("a")) for s in CASES[name]]
    if per_instance:
        healthy = [Series(s.name, s.good, s.good, s.labels) for s in CASES[name]]
        series += [s.text(minutes, identity("b")) for s in healthy]
    else:
        series += [
            s.text(minutes, identity("b"), share=0.5)
            for s in CASES[name]
            if s.name.endswith("_total")
        ]
    end = HISTORY + bad
    run_promtool(
        tmp_path,
        series,
        [
            firing(name, HISTORY - 1, 0),
            *([firing(name, HISTORY + wait - 1, 0)] if wait else []),
            firing(name, end - 1, 1),
            firing(name, end + window + keep + 25, 0),
        ],
        only={name},
    )


NEEDS_TRAFFIC = [
    name for name in CASES if next(d for d in definitions() if d.name == name).fleet.traffic
]


@pytest.mark.parametrize("name", NEEDS_TRAFFIC)
def test_a_trickle_does_not_fire(name: str, tmp_path: Path) -> None:
    """The same bad ratio on too little traffic to judge, and on none, never fires."""
    window, wait, _ = timing(name)
    minutes = (HISTORY, window + wait + 10, 0)
    least = thresholds(ALL_ON, name).min_samples
    share = 0.5 * least / (window * max(s.bad for s in CASES[name] if s.name.endswith("_total")))
    trickle = [s.text(minutes, identity("a"), share=share) for s in CASES[name]]
    still = [s.text(minutes, identity("b"), share=0.0) for s in CASES[name]]
    run_promtool(tmp_path, trickle + still, [firing(name, sum(minutes) - 1, 0)], only={name})


def test_hysteresis_over_the_fleet(tmp_path: Path) -> None:
    """52 % never starts AcceptanceRateLow, and keeps it once 40 % has started it; 60 % ends it."""
    phases = [0.52] * 30 + [0.40] * 15 + [0.52] * 30 + [0.60] * 30
    accepted = accumulate(10000 * p for p in phases)
    series = [
        {
            "series": f"specserve_accepted_tokens_total{{{identity('a')}}}",
            "values": " ".join(f"{v:.10g}" for v in accepted),
        },
        Series("specserve_draft_tokens_total", 10000, 10000).text(
            (len(phases), 0, 0), identity("a")
        ),
    ]
    name = "AcceptanceRateLow"
    run_promtool(
        tmp_path,
        series,
        [firing(name, 29, 0), firing(name, 44, 1), firing(name, 74, 1), firing(name, 100, 0)],
    )


def test_ratio_of_sums(tmp_path: Path) -> None:
    """A busy replica at 30 % outweighs an idle one at 90 %: the mean of the two would be 60 % and would not fire."""
    minutes = (0, 30, 0)
    busy = [s.text(minutes, identity("a")) for s in traffic(0.3)]
    idle = [s.text(minutes, identity("b"), share=0.05) for s in traffic(0.9)]
    run_promtool(tmp_path, busy + idle, [firing("AcceptanceRateLow", 29, 1)])


def test_counter_reset_is_no_alert(tmp_path: Path) -> None:
    """A sidecar that restarts and counts from zero neither fires nor produces a negative rate."""
    series = []
    for s in traffic(0.7):
        first = [s.good * n for n in range(60)]
        values = " ".join(f"{v:.10g}" for v in first + first)
        series.append({"series": f"{s.name}{{{identity('a')}}}", "values": values})
    names = ("AcceptanceRateLow", "AcceptanceDrift", "SpeculationInactive")
    run_promtool(
        tmp_path, series, [firing(name, minute, 0) for name in names for minute in (60, 65, 119)]
    )


def test_spread_between_replicas(tmp_path: Path) -> None:
    """One replica of two that accepts far less than the other is an alert of the model; equal replicas are none."""
    minutes = (60, 30, 60)
    worse = [s.text(minutes, identity("a")) for s in traffic(0.3)]
    steady = [s.text(minutes, identity("b")) for s in traffic(0.7)]
    name = "AcceptanceSpread"
    run_promtool(
        tmp_path,
        worse + steady,
        [firing(name, 59, 0), firing(name, 69, 0), firing(name, 89, 1), firing(name, 140, 0)],
    )


def test_a_position_that_is_rarely_drafted_is_not_wasted(tmp_path: Path) -> None:
    """A schedule that drafts two tokens at this load leaves the third position without any acceptance."""
    made = [
        Series("specserve_drafts_total", 2500, 2500),
        Series("specserve_draft_tokens_total", 5000, 5000),
        *(position(n, rate, rate) for n, rate in enumerate((0.8, 0.6, 0))),
    ]
    series = [s.text((100, 0, 0), identity("a")) for s in made]
    run_promtool(
        tmp_path, series, [firing("DraftPositionsWasted", 99, 0)], only={"DraftPositionsWasted"}
    )


def test_sidecar_absent(tmp_path: Path) -> None:
    """When the last sidecar stops to report, the alert fires after its time, and resolves with the first."""
    live = {"series": f"specserve_live{{{identity('a')}}}", "values": "1+0x29 _x30 1+0x29"}
    run_promtool(
        tmp_path,
        [live],
        [
            firing("SidecarAbsent", minute, count)
            for minute, count in ((29, 0), (34, 0), (50, 1), (80, 0))
        ],
    )


def test_healthy_fleet_is_quiet(tmp_path: Path) -> None:
    """Two healthy replicas under load: nothing fires at all."""
    series = [
        s.text((180, 0, 0), identity(instance))
        for instance in ("a", "b")
        for s in {(s.name, s.labels): s for case in CASES.values() for s in case}.values()
    ]
    series.append({"series": f"specserve_live{{{identity('a')}}}", "values": "1+0x180"})
    expected = [
        {"expr": 'count(ALERTS{alertstate="firing"})', "eval_time": f"{minute}m", "exp_samples": []}
        for minute in (10, 60, 179)
    ]
    run_promtool(tmp_path, series, expected)


def test_the_shipped_file_is_valid_and_speaks(tmp_path: Path) -> None:
    """promtool accepts the chart's file; the notification names model, value, limit, causes and runbook."""
    shipped = ROOT / "helm" / "specserve" / "alerts" / "specserve.rules.yaml"
    subprocess.run(["promtool", "check", "rules", str(shipped)], check=True, capture_output=True)
    alert = {
        "exp_labels": {"severity": "warning", "job": "llm", "model_name": "m"},
        "exp_annotations": {
            "summary": "The target rejects too much of what the draft proposes",
            "description": "m: 0.4 (fires below 0.5). Likely: traffic moved away from what the draft is good at "
            "(open chat, high temperature, another language); the draft was made for other weights or another chat "
            "template than the target that is served; `num_speculative_tokens` is larger than the draft can predict.",
            "runbook_url": "docs/runbooks/AcceptanceRateLow.md",
        },
    }
    case = {
        "interval": "1m",
        "input_series": [s.text((0, 30, 0), identity("a")) for s in traffic(0.4)],
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": "AcceptanceRateLow", "exp_alerts": [alert]}
        ],
    }
    document = {"rule_files": [str(shipped)], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
