"""Differences of counters -> every windowed reading. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.metric_families import key, window_label
from specserve.sidecar.window import Span, Window

LATENCIES = {
    "time_to_first_token": "specserve_time_to_first_token_seconds",
    "time_per_output_token": "specserve_time_per_output_token_seconds",
    "inter_token_latency": "specserve_inter_token_latency_seconds",
    "request_latency": "specserve_request_latency_seconds",
    "queue_time": "specserve_queue_time_seconds",
}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ENGINE_MIN_DRAFT_TOKENS = 200
"""Draft tokens of one engine in a window below which it says nothing about the spread."""


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
    index = next(i for i, count in enumerate(counts) if count >= rank)
    if index == len(bounds) - 1:
        return bounds[-2] if len(bounds) > 1 else None
    below = counts[index - 1] if index else 0.0
    start = bounds[index - 1] if index else 0.0
    inside = counts[index] - below
    return start + (bounds[index] - start) * ((rank - below) / inside if inside else 1.0)


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where either is unknown or the whole is nothing."""
    return None if part is None or not whole else part / whole


def readings(window: Window, seconds: float) -> dict[str, float]:
    """Every windowed reading of one window; what cannot be known is left out."""
    span = window.span(seconds)
    if span is None:
        return {}
    label = window_label(seconds)
    found: dict[str, float | None] = {
        "window_seconds": span.seconds,
        **_speculation(span),
        **_traffic(span),
    }
    out = {
        key(f"specserve_{name}", window=label): value
        for name, value in found.items()
        if value is not None
    }
    if (
        found["window_requests"] or found["window_generation_tokens"]
    ):  # else the latencies are our own canaries'
        out |= _latencies(span, label)
    return out | _positions(span, label) | _http(span, label) | _engines(span, label)


def _speculation(span: Span) -> dict[str, float | None]:
    drafts, drafted, accepted = span["drafts"], span["draft_tokens"], span["accepted_tokens"]
    generated = span.generated
    length = ratio(accepted, drafts)
    return {
        "window_draft_tokens": drafted,
        "window_drafts": drafts,
        "acceptance_rate": ratio(accepted, drafted),
        "mean_acceptance_length": None if length is None else 1 + length,
        "verified_token_yield_ratio": ratio(
            accepted, None if drafts is None else (drafted or 0.0) + drafts
        ),
        "draft_tokens_per_second": span.rate("draft_tokens"),
        "accepted_tokens_per_second": span.rate("accepted_tokens"),
        "accepted_output_ratio": ratio(accepted, generated),
        "tokens_per_step": None
        if accepted is None
        else ratio(generated, max(0.0, (generated or 0.0) - accepted)),
    }


def _traffic(span: Span) -> dict[str, float | None]:
    finished = span.starting("finished/")
    requests = (
        max(0.0, sum(finished.values()) - (span["own/requests"] or 0.0)) if finished else None
    )
    generated = span.generated
    at_limit = (
        max(0.0, finished.get("length", 0.0) - (span["own/requests"] or 0.0)) if finished else None
    )
    return {
        "window_generation_tokens": generated,
        "window_requests": requests,
        "requests_per_second": None if requests is None else requests / span.seconds,
        "generation_tokens_per_second": None if generated is None else generated / span.seconds,
        "prompt_tokens_per_second": span.rate("prompt_tokens"),
        "steps_per_second": span.rate("steps"),
        "preemptions_per_second": span.rate("preemptions"),
        "prefix_cache_hit_ratio": ratio(span["prefix_cache_hits"], span["prefix_cache_queries"]),
        "length_finish_ratio": ratio(at_limit, requests),
    }


def _positions(span: Span, label: str) -> dict[str, float]:
    """Unconditional: of all drafts. Conditional: of the drafts whose token before was accepted."""
    out: dict[str, float] = {}
    before = span["drafts"]
    drafts = before
    accepted = sorted((int(p), n) for p, n in span.starting("position/").items())
    for position, count in accepted:
        for name, whole in (("", drafts), ("conditional_", before)):
            if (value := ratio(count, whole)) is not None:
                family = f"specserve_{name}acceptance_rate_per_position"
                out[key(family, position=str(position), window=label)] = value
        before = count
    return out


def _latencies(span: Span, label: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, family in LATENCIES.items():
        histogram = span.histogram(name)
        if histogram is None or histogram.count <= 0:
            continue
        out[key(family, stat="mean", window=label)] = histogram.sum / histogram.count
        for stat, q in QUANTILES.items():
            value = quantile(histogram.bounds, histogram.counts, q)
            if value is not None:
                out[key(family, stat=stat, window=label)] = value
    return out


def _http(span: Span, label: str) -> dict[str, float]:
    answers = span.starting("http/")
    everything = sum(answers.values())
    if everything <= 0:
        return {}
    shares = {
        key("specserve_http_error_ratio", status=status, window=label): answers.get(status, 0.0)
        / everything
        for status in ("4xx", "5xx")
    }
    return {key("specserve_window_http_answers", window=label): everything, **shares}


def _engines(span: Span, label: str) -> dict[str, float]:
    """Per engine, and how far apart the engines are, among those that drafted enough to tell."""
    out: dict[str, float] = {}
    rates: list[float] = []
    engines = sorted({name.split("/")[0] for name in span.starting("engine/")})
    for engine in engines:
        drafted = span[f"engine/{engine}/draft_tokens"]
        rate = ratio(span[f"engine/{engine}/accepted_tokens"], drafted)
        if rate is None:
            continue
        out[key("specserve_engine_acceptance_rate", engine=engine, window=label)] = rate
        if (drafted or 0.0) >= ENGINE_MIN_DRAFT_TOKENS:
            rates.append(rate)
    if len(rates) > 1:
        out[key("specserve_acceptance_rate_spread", window=label)] = max(rates) - min(rates)
    return out
