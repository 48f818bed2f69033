"""The engine's ``/metrics`` text -> `EngineSnapshot`.

The only place that knows vLLM's metric names.

Names read in vLLM 0.8 to 0.33 (``vllm/engine/metrics.py``, ``vllm/v1/metrics/loggers.py``,
``vllm/v1/spec_decode/metrics.py``; 2026-11-29). What the text does not say is None, never 0.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import SpecserveError
from specserve.log import printable
from specserve.units import MIB

MAX_BYTES = 16 * MIB
MAX_LINES = 200_000
MAX_POSITIONS = 1024
"""vLLM drafts a few tokens; what is beyond this is a damaged label, and would cost memory."""
MAX_SERIES = 1024
"""Engines, buckets of a histogram: more of them than this are no engine's."""
MAX_REASONS = 32
"""Reasons for which requests finish; vLLM has six. What comes beyond counts as ``other``."""
MAX_LABEL = 256
"""Characters of a label that is kept."""
MOST = 2.0**63
"""No counter or gauge of an engine gets there, and arithmetic on what is larger overflows."""

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

PREFIX = "vllm:"
"""Of everything that the engine itself counts."""
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
    # To 0.12: the same gaps, badly named.
    "vllm:time_per_output_token_seconds": _OLD + "inter_token_latency",
    "vllm:e2e_request_latency_seconds": "request_latency",
    "vllm:request_queue_time_seconds": "queue_time",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_generation_tokens",
}
_OTHERS: dict[str, tuple[SampleRole, str]] = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("position", ""),
    "vllm:request_success_total": ("reason", ""),
    # A histogram whose name ends in _total.
    "vllm:iteration_tokens_total_count": ("counter", "steps"),
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


T = TypeVar("T")


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
    """KV cache size in tokens, summed over engines: the engine's own count where it gives one,
    blocks times block size where it does not."""

    def total(self, name: str) -> float | None:
        """The sum of a gauge or counter over engines; None when no engine reports it."""
        return _sum(sample.values.get(name) for sample in self.engines)

    @property
    def kv_cache_usage_ratio(self) -> float | None:
        """The fullest engine's KV cache usage."""
        name = "kv_cache_usage_ratio"
        return max((s.values[name] for s in self.engines if name in s.values), default=None)

    @property
    def accepted_per_position(self) -> tuple[float, ...] | None:
        """Accepted tokens by position, summed over engines."""
        rows = [s.accepted_per_position or () for s in self.engines]
        return tuple(map(sum, zip_longest(*rows, fillvalue=0.0))) or None

    @property
    def finished_requests(self) -> float | None:
        """Finished requests, whatever the reason, summed over engines."""
        return _sum(sum(s.finished.values()) for s in self.engines if s.finished)

    @property
    def asleep(self) -> bool:
        """Whether an engine was put to sleep (``/sleep``): it takes requests and keeps them until
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
def _labels(series: str) -> Mapping[str, str]:
    """Remembered: the parser needs 0.1 ms for a series, and the same ones come at each read."""
    (family,) = text_string_to_metric_families(f"{series} 0\n")
    (sample,) = family.samples
    labels: Mapping[str, str] = sample.labels
    return labels


def _sums() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class _Draft:
    """An `EngineSample` while lines come in."""

    values: dict[str, float] = field(default_factory=_sums)
    positions: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    finished: dict[str, float] = field(default_factory=_sums)
    buckets: dict[str, dict[float, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    sums: dict[str, float] = field(default_factory=_sums)

    def done(self, engine: str, model_name: str | None) -> EngineSample:
        """The sample; a histogram without its infinite bucket or its sum is left out."""
        sums = _settled(self.sums)
        positions = None
        if self.positions:
            positions = tuple(self.positions[i] for i in range(max(self.positions) + 1))
        histograms = {}
        for name, buckets in _settled(self.buckets).items():
            if math.inf in buckets and name in sums:
                bounds, counts = zip(*sorted(buckets.items()), strict=True)
                histograms[name] = Histogram(bounds, counts, sums[name])
        return EngineSample(
            engine,
            model_name,
            _settled(self.values),
            positions,
            dict(self.finished) or None,
            histograms,
        )


def _settled(found: Mapping[str, T]) -> dict[str, T]:
    """What came under an old name under its present one, unless that was reported too."""
    renamed = {name.removeprefix(_OLD): value for name, value in found.items()}
    return renamed | {name: value for name, value in found.items() if not name.startswith(_OLD)}


@dataclass(slots=True)
class _Reading:
    """An `EngineSnapshot` while lines come in."""

    drafts: dict[tuple[str, str | None], _Draft] = field(
        default_factory=lambda: defaultdict(_Draft)
    )
    starts: list[float] = field(default_factory=list)
    http: dict[str, float] = field(default_factory=_sums)
    caches: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Several series of one thing (``pid`` of several API servers): counters add up, of gauges
        the largest counts, since idle processes report 0.

        Raises ValueError for labels that cannot be meant.
        """
        engine = _short(labels.get("engine", "0"))
        role, to = NAMES[name]
        if role == "start":
            self.starts.append(value)
        elif role == "http":
            if re.fullmatch(r"[1-5](\d\d|xx)", labels["status"], re.ASCII):
                self.http[labels["status"][0] + "xx"] += value
        elif role == "cache":
            self.caches.setdefault(engine, labels)
        else:
            draft = self._draft(engine, labels.get("model_name"))
            match role:
                case "gauge":
                    draft.values[to] = max(draft.values.get(to, value), value)
                case "counter":
                    draft.values[to] += value
                case "position":
                    draft.positions[_position(labels["position"])] += value
                case "reason":
                    reason = printable(labels.get("finished_reason", "unknown")[:MAX_LABEL])
                    if len(draft.finished) >= MAX_REASONS and reason not in draft.finished:
                        reason = "other"
                    draft.finished[reason] += value
                case "bucket":
                    buckets = draft.buckets[to]
                    buckets[_number(labels["le"])] += value
                    if len(buckets) > MAX_SERIES:
                        raise ValueError("more buckets than a histogram has")
                case "sum":
                    draft.sums[to] += value
                case "sleep" if labels.get("sleep_state") == "awake":
                    draft.values["awake"] = value
                case _:
                    # A histogram's count is its infinite bucket; other sleep states add nothing.
                    pass

    def _draft(self, engine: str, model_name: str | None) -> _Draft:
        if model_name is not None:
            model_name = _short(model_name)
        draft = self.drafts[engine, model_name]
        if len(self.drafts) > MAX_SERIES:
            raise ValueError("more engines than there can be")
        return draft

    def cache_tokens(self) -> float | None:
        """The capacity of all engines together.

        ``kv_cache_size_tokens`` (0.29 on) is the capacity of one data parallel engine, under each
        engine's label. Blocks times block size is wrong where requests occupy several cache groups,
        so it counts only where no engine gives the other. ``num_gpu_blocks`` is summed over the
        engines before each label gets the sum (``core_client.py``, 0.32): equal products are one.
        """
        own = [_whole(labels.get("kv_cache_size_tokens")) for labels in self.caches.values()]
        total = _sum(own)
        if total is not None:
            return total
        sizes = set()
        for labels in self.caches.values():
            blocks, size = _whole(labels.get("num_gpu_blocks")), _whole(labels.get("block_size"))
            if blocks is not None and size is not None:
                sizes.add(blocks * size)
        return _sum(sizes)


def _short(label: str) -> str:
    """A label that names something. Raises ValueError where it is too long for a name."""
    if len(label) > MAX_LABEL:
        raise ValueError(f"a name of {len(label)} characters")
    return printable(label)


def _position(label: str) -> int:
    """The place in a draft. Raises ValueError for what is none.

    >>> _position("3")
    3
    """
    if not re.fullmatch(r"\d{1,4}", label, re.ASCII) or int(label) >= MAX_POSITIONS:
        raise ValueError(f"position {label[:20]!r}")
    return int(label)


def _number(text: str) -> float:
    """A number as the format writes it: Python also reads ``1_0`` and digits of other scripts."""
    if "_" in text or not text.isascii():
        raise ValueError(f"{text[:20]!r} is not a number")
    return float(text)


def _is_believable(name: str, value: float) -> bool:
    """Whether a number can be what its series means: nothing counted is negative, nothing is used
    more than whole.
    """
    role, to = NAMES[name]
    if role in ("start", "sum"):
        return abs(value) < MOST
    if to.endswith("usage_ratio"):
        # A little over 1 is rounding.
        return 0 <= value <= 1.01
    return 0 <= value < MOST


def _whole(text: str | None) -> float | None:
    """A label's number; None where it is absent or ``None``, as before the cache exists."""
    if text is None or not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        return None
    return float(text)


_LINE = re.compile(r"(?P<series>(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?)\s*(?P<value>\S*)")
"""A line with a sample; a timestamp after the value is ignored."""


def parse(text: str, *, at_seconds: float) -> EngineSnapshot:
    """Read one exposition.

    Raises `MetricsError` for a text that is too large, cut off (the format ends with a line feed),
    or malformed where it matters. A number that cannot be meant, such as -1 requests, counts as not
    reported. Lines of other names cost one look-up each.

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
        match = _LINE.match(line)
        if match is None or match["name"] not in NAMES:
            continue
        try:
            value = _number(match["value"])
            if math.isfinite(value) and _is_believable(match["name"], value):
                reading.add(match["name"], _labels(match["series"]), value)
        except (ValueError, KeyError) as error:
            raise MetricsError(f"cannot read this line of the metrics: {line[:200]}") from error
    if not reading.drafts:
        raise MetricsError("the answer holds none of vLLM's metrics")
    process_start = None
    if len(reading.starts) == 1:
        process_start = reading.starts[0]
    return EngineSnapshot(
        at_seconds=at_seconds,
        engines=tuple(
            draft.done(engine, model)
            for (engine, model), draft in sorted(reading.drafts.items(), key=str)
        ),
        process_start_seconds=process_start,
        http=dict(reading.http) or None,
        cache_tokens=reading.cache_tokens(),
    )
