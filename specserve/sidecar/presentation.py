"""What /status says, and how its numbers and alerts are written for people, on the page and on a
terminal alike.

Imports little: `specserve status` starts with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from specserve.units import duration, percent

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.alert.causes import CauseJson
    from specserve.alert.evaluate import AlertJson

METHOD_NOT_TOLD = "unknown"
"""In place of a method: a server's metrics say that it speculates, and not how."""
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


class LastNumbersJson(TypedDict):
    """The numbers of the last read, while the engine cannot be read."""

    at: float
    """Unix time of that read."""
    age_seconds: float
    now: dict[str, float]
    windows: dict[str, dict[str, float | dict[str, float]]]


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
    asked_against_stated: NotRequired[list[dict[str, JsonValue]]]
    canary: CanaryJson | None
    comparison: CanaryJson | None
    repairs: list[str]
    now: dict[str, float]
    windows: dict[str, dict[str, float | dict[str, float]]]
    last_numbers: NotRequired[LastNumbersJson]
    """Only while ``now`` and ``windows`` have none, and there were some."""
    baseline: dict[str, float]
    causes: NotRequired[list[CauseJson]]
    """What explains the present best, first; empty while nothing is wrong."""
    alerts: list[AlertJson]


@dataclass(frozen=True, slots=True)
class StatusRow:
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

    def cell(self, numbers: Numbers) -> str:
        """Its value with its unit; empty when it is not known."""
        value = self.value(numbers)
        if value is None:
            return ""
        return self.text(value)

    def text(self, value: float) -> str:
        """A value with its unit.

        >>> StatusRow("estimated speedup", "estimated_speedup_ratio", "times").text(1.5)
        '1.50x'
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
    StatusRow("time covered", "window_seconds", "seconds"),
    StatusRow("acceptance rate", "acceptance_rate", "ratio", tile=True),
    StatusRow("  of draft tokens", "window_draft_tokens", "0f"),
    StatusRow("mean acceptance length", "mean_acceptance_length", "2f", tile=True),
    StatusRow("tokens per step", "tokens_per_step", "2f", tile=True),
    StatusRow("estimated speedup", "estimated_speedup_ratio", "times", tile=True),
    StatusRow("output tokens/s", "generation_tokens_per_second", "0f", tile=True),
    StatusRow("requests/s", "requests_per_second", "2f", tile=True),
    StatusRow("TTFT P50", "time_to_first_token_seconds", "seconds", "p50"),
    StatusRow("TTFT P90", "time_to_first_token_seconds", "seconds", "p90", tile=True),
    StatusRow("TPOT P50", "time_per_output_token_seconds", "seconds", "p50"),
    StatusRow("TPOT P90", "time_per_output_token_seconds", "seconds", "p90", tile=True),
    StatusRow("prefix cache hits", "prefix_cache_hit_ratio", "ratio"),
    StatusRow("running", "requests_running", "0f", tile=True),
    StatusRow("waiting", "requests_waiting", "0f", tile=True),
    StatusRow("KV cache in use", "kv_cache_usage_ratio", "ratio", tile=True),
)
LOOK_ROWS = (
    *(row for row in ROWS if row.name != "window_seconds"),
    StatusRow("gap between chunks", "inter_token_latency_seconds", "seconds", "mean"),
)
"""What one look shows. The gap between chunks is the time of a step, and is there before a request
has finished."""
PROBES: tuple[ProbeName, ...] = ("ready", "live", "started")
"""In the order of their weight."""
NO_ALERT = "no alert is pending or firing"


def seconds(value: float) -> str:
    """A latency, with three digits when it is short.

    >>> seconds(0.0893), seconds(1.5)
    ('89.3 ms', '1.5 s')
    """
    if value < 0.1:
        return f"{value * 1000:.3g} ms"
    return duration(value)


OverallWord = Literal["OK", "DEGRADED", "NOT READY", "DOWN"]


def overall(status: StatusJson) -> OverallWord:
    """The one verdict on a server."""
    if status["condition"] in ("down", "stalled") or not status["live"]["ok"]:
        return "DOWN"
    if not status["ready"]["ok"]:
        return "NOT READY"
    if any(alert["state"] == "firing" for alert in status["alerts"]):
        return "DEGRADED"
    return "OK"


def numbers(status: StatusJson) -> tuple[Numbers, Mapping[str, Numbers]]:
    """The gauges, and the numbers by window: those of now, or while there are none the last."""
    last = status.get("last_numbers")
    if last is None:
        return status["now"], status["windows"]
    return last["now"], last["windows"]


def silence(status: StatusJson) -> str | None:
    """Since when there are no numbers, in words; None while there are."""
    last = status.get("last_numbers")
    if last is None:
        return None
    at = time.strftime("%H:%M:%S UTC", time.gmtime(last["at"]))
    return f"no numbers since {at} ({duration(round(last['age_seconds']))}); the last ones:"


def method(status: StatusJson) -> str:
    """The method in force."""
    if not status["method"]:
        return "no speculation"
    if status["method"] == METHOD_NOT_TOLD:
        tokens = status["num_speculative_tokens"]
        return f"speculates (the server does not say how), {tokens} tokens per draft"
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


def cause_lines(cause: CauseJson) -> list[str]:
    """What stands below a cause."""
    lines = [f"for it: {'; '.join(cause['supports'])}"]
    if cause["against"]:
        lines.append(f"against it: {'; '.join(cause['against'])}")
    return lines
