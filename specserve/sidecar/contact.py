"""Every call that the sidecar makes to the engine, with a name for every way to fail."""

from __future__ import annotations

from collections.abc import Callable

import requests

from specserve.engine.http.client import (
    EngineClient,
    EngineError,
    EngineNotListening,
    EngineRefused,
    EngineUnreachable,
)
from specserve.engine.http.metrics import MetricsError, parse
from specserve.sidecar.probe import CanaryOutcome, Scrape

PROMPT = "Hello"
VERSION_SECONDS = 3.0
AT_ONCE_SECONDS = 5.0
"""A queue that is full says so at once. A 503 that comes later ended a request that had been
taken."""
BROKEN = (requests.ConnectionError, ConnectionError)
"""Closed or reset by whoever took it, or no way there: the engine may serve all the same."""
CUT = (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)


def scrape(
    client: EngineClient, *, now: float, timeout: float, clock: Callable[[], float]
) -> Scrape:
    """One attempt to read the metrics. Tried again at once when the connection broke: an API server
    closes connections that were idle for five seconds (uvicorn's default), and a read that meets
    the closing is no failure."""
    found = _scrape(client, now, timeout, clock)
    if found.result in ("unreachable", "broken"):
        return _scrape(client, now, timeout, clock)
    return found


def _scrape(client: EngineClient, now: float, timeout: float, clock: Callable[[], float]) -> Scrape:
    """Every way to fail has a name."""
    started = clock()
    try:
        snapshot = parse(client.metrics_text(timeout=timeout), at_seconds=now)
    except EngineRefused as error:
        why = str(error)
        if error.status >= 400:
            why = f"/metrics answered {error.status}"
        return Scrape("status", why)
    except EngineNotListening as error:
        return Scrape("unreachable", str(error))
    except EngineUnreachable as error:
        cause = error.__cause__
        if isinstance(cause, CUT):
            return Scrape("malformed", "/metrics was cut off")
        if isinstance(cause, BROKEN):
            return Scrape("broken", str(error))
        return Scrape("timeout", f"/metrics did not answer within {timeout:g} s")
    except MetricsError as error:
        return Scrape("malformed", str(error))
    return Scrape("ok", snapshot=snapshot, seconds=clock() - started)


def complete_one(
    client: EngineClient, *, timeout: float, clock: Callable[[], float]
) -> CanaryOutcome:
    """One token, greedy. A queue that is full, or a request that is not allowed, says nothing about
    progress; a watchdog of the engine's that aborts what it took (vllm-project/vllm#36130) says a
    lot."""
    sent = clock()
    try:
        answer = client.complete(PROMPT, max_tokens=1, temperature=0, timeout=timeout)
    except EngineRefused as error:
        seconds = clock() - sent
        full = error.status == 503 and seconds < AT_ONCE_SECONDS
        why = f"answered {error.status}"
        if error.status < 500 or full:
            return CanaryOutcome("refused", sent, seconds, why, full)
        return CanaryOutcome("failed", sent, seconds, why)
    except EngineUnreachable as error:
        return CanaryOutcome("failed", sent, clock() - sent, str(error.problems[0].message))
    if answer.completion_tokens == 0:
        return CanaryOutcome("failed", sent, clock() - sent, "no token in the answer")
    return CanaryOutcome("ok", sent, clock() - sent)


def engine_version(client: EngineClient) -> str:
    """``/version`` of the engine; ``unknown`` when it does not say."""
    try:
        return str(client.version(timeout=VERSION_SECONDS) or "unknown")[:40]
    except EngineError:
        return "unknown"
