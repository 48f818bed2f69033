"""What /status says, and how its numbers and alerts are written for people, on the page and on a
terminal alike.

Imports little: `specserve status` starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from specserve.units import duration, percent

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.alert.evaluate import AlertJson

ProbeName = Literal["started", "live", "ready"]
Numbers = Mapping[str, float | dict[str, float]]
"""Short name of a family -> its value, or its values by a label."""


class ProbeJson(TypedDict):
    """One verdict."""

    ok: bool
    reason: str
    condition: NotRequired[str]
    age_seconds: NotRequired[float]


class CanaryJson(TypedDict):
    """A `specserve.engine.canary.run.CanaryResult`."""

    verdict: str
    reasons: list[str]
    position0_acceptance: float | None
    default_position0_acceptance: float | None
    drafts: int | None
    compared_tokens: int
    seconds: float
    failed: bool


class StatusJson(TypedDict):
    """What /status returns."""

    model_name: str
    method: str | None
    num_speculative_tokens: int | None
    engine_url: str
    state: str | None
    condition: str
    started: ProbeJson
    live: ProbeJson
    ready: ProbeJson
    age_seconds: float
    versions: dict[str, str | None]
    command: str | None
    plan: Mapping[str, JsonValue] | None
    actual: dict[str, JsonValue]
    plan_against_actual: Mapping[str, JsonValue] | None
    canary: CanaryJson | None
    comparison: CanaryJson | None
    repairs: list[str]
    now: dict[str, float]
    windows: dict[str, dict[str, float | dict[str, float]]]
    baseline: dict[str, float]
    alerts: list[AlertJson]


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity that people are shown."""

    title: str
    name: str
    """Of the family, without its prefix."""
    unit: Literal["ratio", "seconds", "times", "0f", "2f"]
    stat: str = ""
    tile: bool = False
    """Whether it is also a tile of the page."""

    def value(self, numbers: Numbers) -> float | None:
        """Its value; None when it is not known."""
        found = numbers.get(self.name)
        if isinstance(found, Mapping):
            return found.get(self.stat)
        return found

    def text(self, value: float) -> str:
        """A value with its unit.

        >>> Row("TTFT P90", "x", "seconds").text(0.0893), Row("speedup", "x", "times").text(1.5)
        ('89.3 ms', '1.50x')
        """
        match self.unit:
            case "ratio":
                return percent(value)
            case "seconds":
                return seconds(value)
            case "times":
                return f"{value:.2f}x"
            case _:
                return f"{value:,.{self.unit}}"


ROWS = (
    Row("time covered", "window_seconds", "seconds"),
    Row("acceptance rate", "acceptance_rate", "ratio", tile=True),
    Row("  of draft tokens", "window_draft_tokens", "0f"),
    Row("mean acceptance length", "mean_acceptance_length", "2f", tile=True),
    Row("tokens per step", "tokens_per_step", "2f", tile=True),
    Row("estimated speedup", "estimated_speedup_ratio", "times", tile=True),
    Row("output tokens/s", "generation_tokens_per_second", "0f", tile=True),
    Row("requests/s", "requests_per_second", "2f", tile=True),
    Row("TTFT P50", "time_to_first_token_seconds", "seconds", "p50"),
    Row("TTFT P90", "time_to_first_token_seconds", "seconds", "p90", tile=True),
    Row("TPOT P50", "time_per_output_token_seconds", "seconds", "p50"),
    Row("TPOT P90", "time_per_output_token_seconds", "seconds", "p90", tile=True),
    Row("prefix cache hits", "prefix_cache_hit_ratio", "ratio"),
    Row("running", "requests_running", "0f", tile=True),
    Row("waiting", "requests_waiting", "0f", tile=True),
    Row("KV cache in use", "kv_cache_usage_ratio", "ratio", tile=True),
)
NO_ALERT = "no alert is pending or firing"


def seconds(value: float) -> str:
    """A latency: three digits where it is short."""
    if value < 0.1:
        return f"{value * 1000:.3g} ms"
    return duration(value)


def method(status: StatusJson) -> str:
    """The method in force."""
    if not status["method"]:
        return "no speculation"
    return f"{status['method']}, {status['num_speculative_tokens']} tokens per draft"


def versions(status: StatusJson) -> str:
    """The versions that are known."""
    return ", ".join(f"{name} {version}" for name, version in status["versions"].items() if version)


def alert_words(alert: AlertJson, now: float | None = None) -> list[str]:
    """What stands beside an alert's name. ``now`` is the sidecar's Unix time; None on another
    machine."""
    words = [alert["severity"], alert["state"]]
    if now is not None and alert["started_at"]:
        words.append(f"for {duration(max(0.0, now - alert['started_at']))}")
    words += [f"{name} {value}" for name, value in alert["labels"].items()]
    if alert["inhibited_by"]:
        words.append(f"explained by {alert['inhibited_by']}")
    return words


def alert_lines(alert: AlertJson) -> list[str]:
    """What stands below its summary: the numbers, and the usual causes."""
    lines = [alert["description"]]
    if alert["causes"]:
        lines.append(f"Likely: {'; '.join(alert['causes'])}")
    return lines
