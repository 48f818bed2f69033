"""The engine's ``/metrics`` text -> `EngineSnapshot`. The only place that knows vLLM's metric
names.

Names read in vLLM 0.8 to 0.33 (``vllm/engine/metrics.py``, ``vllm/v1/metrics/loggers.py``,
``vllm/v1/spec_decode/metrics.py``; 2026-11-29). What the text does not say is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import SpecserveError
from specserve.units import MIB

MAX_BYTES = 16 * MIB
MAX_LINES = 200_000

SampleRole = Literal[
    "gauge",
    "counter",
    "position",
    "reason",
    "bucket",
    "sum",
    "count",
    "http",
    "start",
    "cache",
    "sleep",
]

_OLD = "old:"
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
    "vllm:gpu_cache_usage_perc": _OLD + "kv_cache_usage_ratio",  # to 0.11
}
_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    "vllm:gpu_prefix_cache_queries_total": _OLD + "prefix_cache_queries",  # to 0.11
    "vllm:gpu_prefix_cache_hits_total": _OLD + "prefix_cache_hits",  # to 0.11
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "time_to_first_token",
    "vllm:request_time_per_output_token_seconds": "time_per_output_token",
    "vllm:inter_token_latency_seconds": "inter_token_latency",
    "vllm:time_per_output_token_seconds": _OLD
    + "inter_token_latency",  # to 0.12: the same gaps, badly named
    "vllm:e2e_request_latency_seconds": "request_latency",
    "vllm:request_queue_time_seconds": "queue_time",
}
_OTHERS: dict[str, tuple[SampleRole, str]] = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("position", ""),
    "vllm:request_success_total": ("reason", ""),
    "vllm:iteration_tokens_total_count": (
        "counter",
        "steps",
    ),  # a histogram whose name ends in _total
    "vllm:cache_config_info": ("cache", ""),
    "vllm:engine_sleep_state": ("sleep", ""),
    "http_requests_total": ("http", ""),
    "process_start_time_seconds": ("start", ""),
}
NAMES: Mapping[str, tuple[SampleRole, str]] = {
    **{name: ("gauge", to) for name, to in _GAUGES.items()},
    **{name: ("counter", to) for name, to in _COUNTERS.items()},
    **{f"{name}_bucket": ("bucket", to) for name, to in _HISTOGRAMS.items()},
    **{f"{name}_sum": ("sum", to) for name, to in _HISTOGRAMS.items()},
    **{f"{name}_count": ("count", to) for name, to in _HISTOGRAMS.items()},
    **_OTHERS,
}
"""Name on the wire -> what it is here. An engine that reports a thing under both names (0.9.2 to
0.12 do) counts once, under the new one."""


class MetricsError(SpecserveError):
    """Raised when a text is no usable exposition: cut off, too large, or not metrics at all."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram: ``counts[i]`` observations at or under ``bounds[i]``; the last bound
    is infinite.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """All observations."""
        return self.counts[-1]


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one engine (data parallel rank) of one served model reports."""

    engine: str
    """The ``engine`` label; ``0`` in versions without one."""
    model_name: str | None
    values: Mapping[str, float]
    """Gauges and counters under our names (`_GAUGES`, `_COUNTERS`, ``steps``); absent when not
    reported.
    """
    accepted_per_position: tuple[float, ...] | None = None
    """Accepted tokens at position 0, 1, ...; a counter each."""
    finished: Mapping[str, float] | None = None
    """Finished requests by reason (stop, length, abort, ...)."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One read of the engine's metrics."""

    at_seconds: float
    """When it was read, on the reader's clock."""
    engines: tuple[EngineSample, ...]
    process_start_seconds: float | None = None
    """Start of the API server, Unix time; None with several API servers."""
    http: Mapping[str, float] | None = None
    """HTTP answers by status class (``2xx``, ``4xx``, ``5xx``), a counter each."""
    cache_tokens: float | None = None
    """KV cache size in tokens, blocks times block size, summed over engines."""

    def total(self, name: str) -> float | None:
        """The sum of a gauge or counter over engines; None when no engine reports it."""
        return _sum(sample.values.get(name) for sample in self.engines)

    @property
    def kv_cache_usage_ratio(self) -> float | None:
        """The fullest engine's KV cache usage."""
        found = [
            s.values["kv_cache_usage_ratio"]
            for s in self.engines
            if "kv_cache_usage_ratio" in s.values
        ]
        return max(found, default=None)

    @property
    def accepted_per_position(self) -> tuple[float, ...] | None:
        """Accepted tokens by position, summed over engines."""
        rows = [s.accepted_per_position for s in self.engines if s.accepted_per_position]
        if not rows:
            return None
        return tuple(sum(r[i] for r in rows if i < len(r)) for i in range(max(map(len, rows))))

    @property
    def finished_requests(self) -> float | None:
        """Finished requests, whatever the reason, summed over engines."""
        return _sum(sum(s.finished.values()) for s in self.engines if s.finished)

    @property
    def asleep(self) -> bool:
        """Whether an engine was put to sleep (``/sleep``): it takes requests and answers none until
        it is woken.
        """
        return any(s.values.get("awake") == 0 for s in self.engines)

    @property
    def speculates(self) -> bool:
        """Whether the engine was started with speculation: its counters exist, at zero, from the
        start.
        """
        return any("draft_tokens" in s.values for s in self.engines)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if known:
        return sum(known)
    return None


@lru_cache(maxsize=32_768)
def _series(identity: str) -> tuple[str, str, Mapping[str, str]]:
    """Name, engine and labels of one series.

    Remembered: the parser needs 0.1 ms each, and they recur at each read.
    """
    (family,) = text_string_to_metric_families(identity + " 0\n")
    (sample,) = family.samples
    labels = sample.labels
    return sample.name, labels.get("engine", "0"), labels


@dataclass(slots=True)
class _Draft:
    """An `EngineSample` while lines come in."""

    values: dict[str, float] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)

    def done(self, engine: str, model_name: str | None) -> EngineSample:
        for found in (self.values, self.buckets, self.sums):
            _settle(found)
        if self.positions:
            positions = tuple(self.positions.get(i, 0.0) for i in range(max(self.positions) + 1))
        else:
            positions = None
        histograms = {
            n: h
            for n, b in self.buckets.items()
            if (h := _histogram(b, self.sums.get(n))) is not None
        }
        return EngineSample(
            engine, model_name, self.values, positions, self.finished or None, histograms
        )


def _settle(found: dict[str, Any]) -> None:
    """Give what came under an old name its present one, unless that was reported too."""
    for old in [name for name in found if name.startswith(_OLD)]:
        found.setdefault(old.removeprefix(_OLD), found.pop(old))


def _histogram(buckets: Mapping[float, float], total: float | None) -> Histogram | None:
    """None when it is incomplete: no infinite bucket or no sum."""
    if math.inf not in buckets or total is None:
        return None
    bounds = tuple(sorted(buckets))
    return Histogram(bounds, tuple(buckets[b] for b in bounds), total)


@dataclass(slots=True)
class _Reading:
    """An `EngineSnapshot` while lines come in."""

    drafts: dict[tuple[str, str | None], _Draft] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    http: dict[str, float] = field(default_factory=dict)
    caches: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def add(self, identity: str, value: float) -> None:
        """Several series of one thing (``pid`` of several API servers): counters add up, of gauges
        the largest counts, since idle processes report 0."""
        name, engine, labels = _series(identity)
        role, to = NAMES[name]
        if role == "start":
            self.starts.append(value)
            return
        if role == "http":
            _add(self.http, labels["status"][:1] + "xx", value)
            return
        if role == "cache":
            self.caches.setdefault(engine, labels)
            return
        draft = self.drafts.setdefault((engine, labels.get("model_name")), _Draft())
        match role:
            case "gauge":
                draft.values[to] = max(draft.values.get(to, value), value)
            case "counter":
                _add(draft.values, to, value)
            case "position":
                position = int(labels["position"])
                draft.positions[position] = draft.positions.get(position, 0.0) + value
            case "reason":
                _add(draft.finished, labels.get("finished_reason", "unknown"), value)
            case "bucket":
                buckets = draft.buckets.setdefault(to, {})
                bound = float(labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
            case "sum":
                _add(draft.sums, to, value)
            case "sleep" if labels.get("sleep_state") == "awake":
                draft.values["awake"] = value
            case _:
                pass  # a histogram's count is its infinite bucket; other sleep states say no more


def _add(to: dict[str, float], name: str, value: float) -> None:
    to[name] = to.get(name, 0.0) + value


def _cache_tokens(caches: Mapping[str, Mapping[str, str]]) -> float | None:
    """``num_gpu_blocks`` x ``block_size`` (vLLM's labels) over engines."""
    sizes = [
        float(blocks) * float(size)
        for c in caches.values()
        if (blocks := c.get("num_gpu_blocks", "")).isdigit()
        and (size := c.get("block_size", "")).isdigit()
    ]
    if sizes:
        return sum(sizes)
    return None


def _split(line: str) -> tuple[str, str]:
    """One sample line -> its series and the text of its value; a timestamp after the value is
    dropped.
    """
    if (end := line.rfind("}")) >= 0:
        identity, rest = line[: end + 1], line[end + 1 :]
    else:
        identity, _, rest = line.partition(" ")
    parts = rest.split(None, 1)
    return identity, parts[0] if parts else ""


def _name(line: str) -> str:
    brace = line.find("{")
    if brace >= 0:
        return line[:brace]
    return line.partition(" ")[0]


def parse(text: str, *, at_seconds: float) -> EngineSnapshot:
    """Read one exposition.

    Raises `MetricsError` for a text that is too large, cut off (the format ends with a line feed),
    or malformed where it matters. Lines of other names cost one look-up each.

    >>> text = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\\n'
    >>> parse(text, at_seconds=0.0).total("running")
    3.0
    """
    if len(text) > MAX_BYTES:
        raise MetricsError(
            f"the metrics are {len(text)} characters long; at most {MAX_BYTES} are read"
        )
    if text and not text.endswith("\n"):
        raise MetricsError("the metrics end in the middle of a line; the answer was cut off")
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        raise MetricsError(f"the metrics have {len(lines)} lines; at most {MAX_LINES} are read")
    reading = _Reading()
    for line in lines:
        if line and line[0] != "#" and _name(line) in NAMES:
            identity, number = _split(line)
            try:
                value = float(number)
                if math.isfinite(value):
                    reading.add(identity, value)
            except (ValueError, KeyError) as error:
                raise MetricsError(f"cannot read this line of the metrics: {line[:200]}") from error
    if not reading.drafts:
        raise MetricsError("the answer holds none of vLLM's metrics")
    return EngineSnapshot(
        at_seconds=at_seconds,
        engines=tuple(
            d.done(engine, model) for (engine, model), d in sorted(reading.drafts.items(), key=str)
        ),
        process_start_seconds=reading.starts[0] if len(reading.starts) == 1 else None,
        http=reading.http or None,
        cache_tokens=_cache_tokens(reading.caches),
    )
