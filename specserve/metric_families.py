"""Every metric that specserve exports: name, kind, labels, unit, and what it means.

The table is the contract between the sidecar that measures, the alert rules that refer to it, and
the documentation that is generated from it. Each sample on the wire carries one more label,
``model_name`` (the name that clients send), so that a fleet can be summed by model; readings leave
it out.

A family of which nothing is known has no sample. Zero means measured zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Labels = tuple[tuple[str, str], ...]
"""Label pairs sorted by name: hashable, and with a family's or an alert's name an identity."""


class MetricKey(NamedTuple):
    """What one reading is of: a family and its labels.

    >>> str(key("specserve_acceptance_rate", window="5m"))
    'specserve_acceptance_rate{window="5m"}'
    >>> str(key("specserve_requests_running"))
    'specserve_requests_running'
    """

    family: str
    labels: Labels = ()

    def __str__(self) -> str:
        """The name as Prometheus writes it, for people."""
        if not self.labels:
            return self.family
        return self.family + "{" + ",".join(f'{n}="{v}"' for n, v in self.labels) + "}"


def key(family: str, /, **labels: str) -> MetricKey:
    """The key of one reading.

    >>> key("specserve_gpu_throttled", reason="power", gpu="0").labels
    (('gpu', '0'), ('reason', 'power'))
    """
    return MetricKey(family, tuple(sorted(labels.items())))


Readings = Mapping[MetricKey, float]
"""What is known now. Absent means unknown."""

WINDOWS: tuple[float, ...] = (60.0, 300.0, 1800.0)
"""Seconds of the windows that always exist: labels 1m, 5m, 30m."""
STATES = ("stopped", "starting", "running", "backoff", "stopping", "fatal")
CONDITIONS = (
    "starting",
    "idle",
    "progressing",
    "suspect",
    "stalled",
    "starved",
    "blind",
    "down",
    "draining",
)
"""What the engine is doing, exactly one at a time. ``suspect``: work, no progress, not yet long
enough."""


@dataclass(frozen=True, slots=True)
class Family:
    """One exported metric family."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    help: str
    """One sentence; with the formula where there is one."""
    labels: tuple[str, ...] = ()


def window_label(seconds: float) -> str:
    """The ``window`` label of a window.

    >>> window_label(60), window_label(1800), window_label(90)
    ('1m', '30m', '90s')
    """
    minutes, rest = divmod(seconds, 60)
    if minutes and not rest:
        return f"{minutes:.0f}m"
    return f"{seconds:g}s"


def _gauges(*rows: tuple[str, str, str], labels: tuple[str, ...] = ()) -> list[Family]:
    return [Family("specserve_" + name, "gauge", unit, text, labels) for name, unit, text in rows]


def _counters(*rows: tuple[str, str, str], labels: tuple[str, ...] = ()) -> list[Family]:
    return [Family("specserve_" + name, "counter", unit, text, labels) for name, unit, text in rows]


def _health() -> Iterable[Family]:
    yield Family(
        "specserve_info",
        "gauge",
        "info",
        "Versions and method in force; always 1.",
        ("version", "engine_version", "method"),
    )
    yield from _gauges(
        ("state", "0 or 1", "State of the supervisor; 1 for the one in force."), labels=("state",)
    )
    yield from _gauges(
        ("engine_condition", "0 or 1", "What the engine is doing; 1 for the one in force."),
        labels=("condition",),
    )
    yield from _gauges(
        (
            "started",
            "0 or 1",
            "Whether a completion has succeeded since the engine started (/startupz).",
        ),
        ("live", "0 or 1", "Whether the engine makes progress, or has none to make (/livez)."),
        ("ready", "0 or 1", "Whether a completion asked now would make progress (/readyz)."),
        ("speculation_configured", "0 or 1", "Whether the configuration asks for speculation."),
        (
            "seconds_since_progress",
            "seconds",
            "Time since tokens, finished requests or steps last advanced.",
        ),
        (
            "unscheduled_seconds",
            "seconds",
            "Time for which requests have waited while none ran and none advanced; else 0.",
        ),
        (
            "recent_restarts",
            "restarts",
            "Starts of another engine process, or losses of it, in the last hour.",
        ),
        (
            "engine_host_memory_bytes",
            "bytes",
            "Private host memory of the engine's processes; beside `launch` only.",
        ),
        (
            "engine_threads",
            "threads",
            "Threads of the engine's processes; beside `launch` only.",
        ),
        ("scrape_age_seconds", "seconds", "Time since the engine's metrics were last read."),
        (
            "scrape_duration_seconds",
            "seconds",
            "Duration of the last read of the engine's metrics.",
        ),
        ("canary_success", "0 or 1", "Whether the last canary completion produced a token."),
        (
            "canary_duration_seconds",
            "seconds",
            "Duration of the last successful canary completion.",
        ),
        (
            "canary_position0_acceptance_rate",
            "ratio",
            "Acceptance at position 0 on the repetitive start-up canary.",
        ),
        (
            "canary_default_position0_acceptance_rate",
            "ratio",
            "The same at the server's default sampling (temperature of generation_config.json).",
        ),
        (
            "output_mismatch",
            "0 or 1",
            "Whether drafted text was last proven not to be the target's own.",
        ),
        (
            "output_suspect",
            "0 or 1",
            "Whether most of the usual acceptance is lost, and wrong output explains it best.",
        ),
    )
    yield from _gauges(
        (
            "engine_host_growth_ratio",
            "ratio",
            "Growth of host memory or threads per hour, as part of what they were two hours ago.",
        ),
        labels=("of",),
    )
    yield from _counters(
        ("scrapes_total", "scrapes", "Reads of the engine's metrics by result."), labels=("result",)
    )
    yield from _counters(
        ("canaries_total", "canaries", "Canary completions by result."), labels=("result",)
    )
    yield from _counters(
        ("engine_restarts_total", "restarts", "Changes of the engine's process start time.")
    )


def _load() -> Iterable[Family]:
    yield from _gauges(
        ("engines", "engines", "Engines that report (data parallel ranks)."),
        ("requests_running", "requests", "Requests in execution, summed over engines."),
        ("requests_waiting", "requests", "Requests that wait, summed over engines."),
        ("kv_cache_usage_ratio", "ratio", "KV cache in use, the fullest engine."),
        (
            "kv_cache_tokens",
            "tokens",
            (
                "KV cache size as the engine counts it, summed over engines; blocks times block "
                "size where it does not say."
            ),
        ),
    )
    yield from _gauges(
        ("engine_requests_running", "requests", "Requests in execution on one engine."),
        ("engine_requests_waiting", "requests", "Requests that wait on one engine."),
        ("engine_kv_cache_usage_ratio", "ratio", "KV cache in use on one engine."),
        (
            "engine_seconds_since_progress",
            "seconds",
            "Time since one engine advanced, while it has requests.",
        ),
        labels=("engine",),
    )


def _totals() -> Iterable[Family]:
    yield from _counters(
        ("drafts_total", "drafts", "Drafts proposed; survives engine restarts."),
        ("draft_tokens_total", "tokens", "Draft tokens proposed; survives engine restarts."),
        ("accepted_tokens_total", "tokens", "Draft tokens accepted; survives engine restarts."),
        ("generation_tokens_total", "tokens", "Output tokens; survives engine restarts."),
        ("prompt_tokens_total", "tokens", "Prompt tokens; survives engine restarts."),
        ("steps_total", "steps", "Engine steps that processed tokens; survives engine restarts."),
        (
            "preemptions_total",
            "preemptions",
            "Requests pushed out of the KV cache; survives engine restarts.",
        ),
        ("prefix_cache_queries_total", "tokens", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits_total", "tokens", "Prompt tokens found in the prefix cache."),
    )
    yield from _counters(
        (
            "accepted_tokens_per_position_total",
            "tokens",
            "Draft tokens accepted at a position, counted from 0.",
        ),
        labels=("position",),
    )
    yield from _counters(
        ("requests_finished_total", "requests", "Finished requests by reason."), labels=("reason",)
    )
    yield from _counters(
        (
            "http_requests_total",
            "requests",
            "HTTP answers of the engine by status class (2xx, 4xx, 5xx).",
        ),
        labels=("status",),
    )


def _windowed_speculation() -> Iterable[Family]:
    yield from _gauges(
        ("window_seconds", "seconds", "Time that the window really covers; shorter after a start."),
        (
            "window_draft_tokens",
            "tokens",
            "Draft tokens in the window: the sample size of the acceptance rate.",
        ),
        (
            "window_drafts",
            "drafts",
            "Drafts in the window: the sample size of lengths and positions.",
        ),
        ("window_generation_tokens", "tokens", "Output tokens in the window."),
        ("window_requests", "requests", "Finished requests in the window."),
        (
            "window_http_answers",
            "answers",
            "HTTP answers in the window: the sample size of the error ratio.",
        ),
        (
            "acceptance_rate",
            "ratio",
            "Accepted / draft tokens, weighted by tokens; absent when nothing was drafted.",
        ),
        (
            "mean_acceptance_length",
            "tokens",
            "1 + accepted tokens / drafts (the bonus token counts).",
        ),
        (
            "acceptance_rate_spread",
            "ratio",
            "Highest minus lowest acceptance rate among engines that drafted.",
        ),
        (
            "verified_token_yield_ratio",
            "ratio",
            "Accepted tokens / (draft tokens + drafts): yield of verified positions.",
        ),
        ("draft_tokens_per_second", "tokens/s", "Draft tokens proposed per second."),
        ("accepted_tokens_per_second", "tokens/s", "Draft tokens accepted per second."),
        (
            "accepted_output_ratio",
            "ratio",
            "Accepted tokens / output tokens: share of the output that drafts brought.",
        ),
        (
            "tokens_per_step",
            "tokens",
            "Output tokens / (output tokens - accepted): tokens a sequence gains per step.",
        ),
        (
            "sequences_per_step",
            "sequences",
            "(Output tokens - accepted) / engine steps: sequences that a step moves on.",
        ),
        (
            "estimated_speedup_ratio",
            "ratio",
            "tokens_per_step x baseline step time / speculative step time of the profile.",
        ),
        labels=("window",),
    )


def _windowed_traffic() -> Iterable[Family]:
    yield from _gauges(
        ("requests_per_second", "requests/s", "Finished requests per second."),
        ("generation_tokens_per_second", "tokens/s", "Output tokens per second."),
        ("prompt_tokens_per_second", "tokens/s", "Prompt tokens per second."),
        ("steps_per_second", "steps/s", "Engine steps per second."),
        (
            "preemptions_per_second",
            "preemptions/s",
            "Requests pushed out of the KV cache per second.",
        ),
        ("prefix_cache_hit_ratio", "ratio", "Prefix cache hits / queries, in tokens."),
        (
            "length_finish_ratio",
            "ratio",
            "Requests that ended at their token limit / finished requests.",
        ),
        (
            "prompts_over_draft_context_ratio",
            "ratio",
            "Finished requests whose prompt is longer than the draft's own context / all.",
        ),
        (
            "acceptance_rate_drift",
            "ratio",
            "acceptance_rate minus acceptance_rate_baseline; negative is worse.",
        ),
        (
            "prefix_cache_hit_drift",
            "ratio",
            "prefix_cache_hit_ratio minus its baseline; negative is worse.",
        ),
        (
            "length_finish_drift",
            "ratio",
            "length_finish_ratio minus its baseline; positive is worse.",
        ),
        (
            "break_even_margin",
            "ratio",
            (
                "acceptance_rate minus its break-even, at the measured time per output token where "
                "there is one; negative is slower than off."
            ),
        ),
        labels=("window",),
    )
    yield from _gauges(
        (
            "acceptance_rate_per_position",
            "ratio",
            "Accepted at the position / drafts (unconditional, from 0).",
        ),
        (
            "conditional_acceptance_rate_per_position",
            "ratio",
            "Accepted at the position / accepted at the one before.",
        ),
        labels=("position", "window"),
    )
    yield from _gauges(
        (
            "time_to_first_token_seconds",
            "seconds",
            "Time to first token, from the engine's histogram.",
        ),
        (
            "time_per_output_token_seconds",
            "seconds",
            "(Latency - TTFT) / (output tokens - 1) of finished requests.",
        ),
        (
            "inter_token_latency_seconds",
            "seconds",
            "Gap between streamed chunks; under speculation not per token.",
        ),
        ("request_latency_seconds", "seconds", "End-to-end latency of finished requests."),
        ("queue_time_seconds", "seconds", "Time that finished requests spent waiting."),
        ("request_prompt_tokens", "tokens", "Prompt length of finished requests."),
        ("request_generation_tokens", "tokens", "Answer length of finished requests."),
        labels=("stat", "window"),
    )
    yield from _gauges(
        ("http_error_ratio", "ratio", "Answers of the status class (4xx, 5xx) / all answers."),
        labels=("status", "window"),
    )
    yield from _gauges(
        ("engine_acceptance_rate", "ratio", "Accepted / draft tokens of one engine."),
        (
            "engine_window_draft_tokens",
            "tokens",
            "Draft tokens of one engine in the window: the sample size of its acceptance rate.",
        ),
        labels=("engine", "window"),
    )


def _references() -> Iterable[Family]:
    yield from _gauges(
        (
            "acceptance_rate_baseline",
            "ratio",
            "Own acceptance rate of the recent good period; survives restarts.",
        ),
        (
            "recent_position0_acceptance_rate",
            "ratio",
            (
                "Accepted at position 0 / drafts, of the last minute, or of the last 50 drafts "
                "where a minute has fewer; absent without a draft in the last minute."
            ),
        ),
        (
            "usual_position0_acceptance_rate",
            "ratio",
            (
                "Own acceptance rate at position 0: the median of the recent good period; before "
                "there is one, that of the longest window."
            ),
        ),
        (
            "usual_position1_conditional_acceptance_rate",
            "ratio",
            "Own acceptance at position 1 of the drafts whose first token was accepted.",
        ),
        (
            "mean_acceptance_length_baseline",
            "tokens",
            "Own mean acceptance length of the recent good period.",
        ),
        (
            "prefix_cache_hit_baseline",
            "ratio",
            "Own prefix cache hit ratio of the recent good period.",
        ),
        (
            "length_finish_baseline",
            "ratio",
            "Own share of requests that ended at their token limit.",
        ),
        (
            "request_prompt_tokens_baseline",
            "tokens",
            "Own mean prompt length of the last day.",
        ),
        (
            "request_generation_tokens_baseline",
            "tokens",
            "Own mean answer length of the last day.",
        ),
        (
            "prompts_over_draft_context_baseline",
            "ratio",
            "Own share of prompts longer than the draft's context, of the last day.",
        ),
        (
            "inter_token_latency_seconds_baseline",
            "seconds",
            "Own mean gap between streamed chunks (a step) of the last day.",
        ),
        (
            "sequences_per_step_baseline",
            "sequences",
            "Own mean number of sequences in a step of the last day.",
        ),
        (
            "break_even_acceptance_rate",
            "ratio",
            "Acceptance rate at which speculation neither helps nor hurts; absent where none pays.",
        ),
    )


def _gpu() -> Iterable[Family]:
    yield from _gauges(
        ("gpu_info", "info", "Device that the engine uses; always 1."),
        labels=("gpu", "name", "uuid"),
    )
    yield from _gauges(
        ("gpu_utilization_ratio", "ratio", "Part of the last sample period in which a kernel ran."),
        ("gpu_memory_used_bytes", "bytes", "Memory in use by all processes."),
        ("gpu_memory_total_bytes", "bytes", "Memory of the device."),
        ("gpu_memory_used_ratio", "ratio", "Memory in use / memory of the device."),
        ("gpu_temperature_celsius", "°C", "Temperature of the device."),
        ("gpu_temperature_limit_celsius", "°C", "Temperature at which the device slows down."),
        ("gpu_power_watts", "W", "Power drawn."),
        ("gpu_power_limit_watts", "W", "Power limit in force."),
        ("gpu_power_ratio", "ratio", "Power drawn / power limit in force."),
        ("gpu_processes", "processes", "Processes that compute on the device."),
        labels=("gpu",),
    )
    yield from _gauges(
        (
            "gpu_throttled",
            "0 or 1",
            "Whether clocks are held down, by reason (power, thermal, hardware).",
        ),
        labels=("gpu", "reason"),
    )
    yield from _counters(
        (
            "gpu_ecc_errors_total",
            "errors",
            "ECC errors since the driver was loaded (corrected, uncorrected).",
        ),
        labels=("gpu", "type"),
    )


def _alerts() -> Iterable[Family]:
    yield from _gauges(
        ("alert_firing", "0 or 1", "Whether the alert fires."),
        (
            "alert_pending",
            "0 or 1",
            "Whether the alert's condition is met, but not yet for long enough.",
        ),
        labels=("alert", "severity"),
    )
    yield from _counters(
        (
            "notifications_total",
            "notifications",
            "Notifications by receiver and outcome (sent, failed, dropped).",
        ),
        labels=("receiver", "outcome"),
    )
    yield from _gauges(
        ("notification_queue_length", "notifications", "Notifications that wait for a receiver.")
    )


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for section in (
        _health,
        _load,
        _totals,
        _windowed_speculation,
        _windowed_traffic,
        _references,
        _gpu,
        _alerts,
    )
    for family in section()
}
"""Name -> family, in the order of the documentation."""
