"""Differences of counters -> every windowed reading. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.metric_families import MetricKey, key, window_label
from specserve.sidecar.window import Span, Window

HISTOGRAMS = {
    "time_to_first_token": "specserve_time_to_first_token_seconds",
    "time_per_output_token": "specserve_time_per_output_token_seconds",
    "inter_token_latency": "specserve_inter_token_latency_seconds",
    "request_latency": "specserve_request_latency_seconds",
    "queue_time": "specserve_queue_time_seconds",
    "request_prompt_tokens": "specserve_request_prompt_tokens",
    "request_generation_tokens": "specserve_request_generation_tokens",
}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ENGINE_MIN_DRAFT_TOKENS = 200
"""Draft tokens of one engine in a window below which it says nothing about the spread."""


RECENT_SECONDS = 60.0
RECENT_DRAFTS = 50.0
"""Drafts that say something about position 0: of 50 with a usual rate of 0.3, three or fewer are
accepted by chance once in 30,000 times."""


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """The q-quantile of a cumulative histogram, linear inside a bucket as Prometheus does it.

    None without observations; the highest finite bound when the quantile lies beyond it.

    >>> quantile((0.1, 0.2, float("inf")), (0.0, 10.0, 10.0), 0.5)
    0.15000000000000002
    """
    total = counts[-1]
    if total <= 0:
        return None
    rank = q * total
    start, below = 0.0, 0.0
    for bound, count in zip(bounds[:-1], counts, strict=False):
        if count >= rank:
            return start + (bound - start) * ((rank - below) / (count - below))
        start, below = bound, count
    if len(bounds) == 1:
        return None
    return start


def share_above(bounds: Sequence[float], counts: Sequence[float], limit: float) -> float:
    """The share of a cumulative histogram's observations beyond a limit, linear inside a bucket;
    all of those beyond the last finite bound count where the limit is under it.

    >>> share_above((100.0, 200.0, float("inf")), (0.0, 10.0, 10.0), 150.0)
    0.5
    """
    start, below = 0.0, 0.0
    for bound, count in zip(bounds[:-1], counts, strict=False):
        if bound >= limit:
            inside = below + (count - below) * (limit - start) / (bound - start)
            return max(0.0, 1 - inside / counts[-1])
        start, below = bound, count
    return max(0.0, 1 - below / counts[-1])


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where either is unknown or the whole is nothing."""
    if part is None or not whole:
        return None
    return part / whole


def readings(
    window: Window, seconds: float, draft_context_tokens: int | None = None
) -> dict[MetricKey, float]:
    """Every windowed reading of one window; what cannot be known is left out."""
    span = window.span(seconds)
    if span is None:
        return {}
    label = window_label(seconds)
    found = {"window_seconds": span.seconds} | _speculation(span) | _traffic(span)
    out = {
        key(f"specserve_{name}", window=label): value
        for name, value in found.items()
        if value is not None
    }
    # Without traffic the latencies are those of our own canaries.
    if found["window_requests"] or found["window_generation_tokens"]:
        out |= _histograms(span, label)
        prompts = span.histogram("request_prompt_tokens")
        if draft_context_tokens is not None and prompts is not None and prompts.count > 0:
            share = share_above(prompts.bounds, prompts.counts, draft_context_tokens)
            out[key("specserve_prompts_over_draft_context_ratio", window=label)] = share
    return out | _positions(span, label) | _http(span, label) | _engines(span, label)


def recent(window: Window) -> dict[MetricKey, float]:
    """Position 0 of the newest drafts: what a collapse is seen in first.

    A minute, or the time of `RECENT_DRAFTS` drafts where that is longer; nothing while nothing is
    drafted.
    """
    minute = window.newest("drafts", 1, at_least_seconds=RECENT_SECONDS)
    if minute is None or minute.seconds > 2 * RECENT_SECONDS:
        return {}
    span = window.newest("drafts", RECENT_DRAFTS, at_least_seconds=RECENT_SECONDS)
    if span is None:
        return {}
    for position, accepted in span.by_number("position"):
        value = ratio(accepted, span.added("drafts"))
        if position == 0 and value is not None:
            return {key("specserve_recent_position0_acceptance_rate"): value}
    return {}


def _speculation(span: Span) -> dict[str, float | None]:
    drafts, drafted = span.added("drafts"), span.added("draft_tokens")
    accepted, generated = span.added("accepted_tokens"), span.generated
    length = ratio(accepted, drafts)
    if length is not None:
        length += 1
    verified = per_step = None
    if drafts is not None:
        verified = (drafted or 0.0) + drafts
    sequences = None
    if accepted is not None:
        per_step = ratio(generated, max(0.0, (generated or 0.0) - accepted))
    if generated is not None:
        sequences = ratio(max(0.0, generated - (accepted or 0.0)), span.added("steps"))
    return {
        "window_draft_tokens": drafted,
        "window_drafts": drafts,
        "acceptance_rate": ratio(accepted, drafted),
        "mean_acceptance_length": length,
        "verified_token_yield_ratio": ratio(accepted, verified),
        "draft_tokens_per_second": span.rate("draft_tokens"),
        "accepted_tokens_per_second": span.rate("accepted_tokens"),
        "accepted_output_ratio": ratio(accepted, generated),
        "tokens_per_step": per_step,
        "sequences_per_step": sequences,
    }


def _traffic(span: Span) -> dict[str, float | None]:
    """Our own canaries are left out: each ends at its limit of one token."""
    finished = span.by_label("finished")
    own = span.added("own_requests") or 0.0
    requests = at_limit = None
    if finished:
        requests = max(0.0, sum(finished.values()) - own)
        at_limit = max(0.0, finished.get("length", 0.0) - own)
    generated = span.generated
    return {
        "window_generation_tokens": generated,
        "window_requests": requests,
        "requests_per_second": ratio(requests, span.seconds),
        "generation_tokens_per_second": ratio(generated, span.seconds),
        "prompt_tokens_per_second": span.rate("prompt_tokens"),
        "steps_per_second": span.rate("steps"),
        "preemptions_per_second": span.rate("preemptions"),
        "prefix_cache_hit_ratio": ratio(
            span.added("prefix_cache_hits"), span.added("prefix_cache_queries")
        ),
        "length_finish_ratio": ratio(at_limit, requests),
    }


def _positions(span: Span, label: str) -> dict[MetricKey, float]:
    """Unconditional: of all drafts. Conditional: of the drafts whose token before was accepted."""
    out: dict[MetricKey, float] = {}
    drafts = before = span.added("drafts")
    for position, accepted in span.by_number("position"):
        for name, whole in (("", drafts), ("conditional_", before)):
            value = ratio(accepted, whole)
            if value is not None:
                family = f"specserve_{name}acceptance_rate_per_position"
                out[key(family, position=f"{position:.0f}", window=label)] = value
        before = accepted
    return out


def _histograms(span: Span, label: str) -> dict[MetricKey, float]:
    out: dict[MetricKey, float] = {}
    for name, family in HISTOGRAMS.items():
        histogram = span.histogram(name)
        if histogram is None or histogram.count <= 0:
            continue
        out[key(family, stat="mean", window=label)] = histogram.sum / histogram.count
        for stat, q in QUANTILES.items():
            value = quantile(histogram.bounds, histogram.counts, q)
            if value is not None:
                out[key(family, stat=stat, window=label)] = value
    return out


def _http(span: Span, label: str) -> dict[MetricKey, float]:
    answers = span.by_label("http")
    everything = sum(answers.values())
    if everything <= 0:
        return {}
    out = {key("specserve_window_http_answers", window=label): everything}
    for status in ("4xx", "5xx"):
        share = answers.get(status, 0.0) / everything
        out[key("specserve_http_error_ratio", status=status, window=label)] = share
    return out


def _engines(span: Span, label: str) -> dict[MetricKey, float]:
    """Per engine, and how far apart those engines are that drafted enough to tell."""
    out: dict[MetricKey, float] = {}
    rates: list[float] = []
    accepted = span.by_label("engine_accepted_tokens")
    for engine, drafted in sorted(span.by_label("engine_draft_tokens").items()):
        rate = ratio(accepted.get(engine), drafted)
        if rate is None:
            continue
        out[key("specserve_engine_acceptance_rate", engine=engine, window=label)] = rate
        out[key("specserve_engine_window_draft_tokens", engine=engine, window=label)] = drafted
        if drafted >= ENGINE_MIN_DRAFT_TOKENS:
            rates.append(rate)
    if len(rates) > 1:
        out[key("specserve_acceptance_rate_spread", window=label)] = max(rates) - min(rates)
    return out
