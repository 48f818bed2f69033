"""One look at a running server by its address alone: no config, no sidecar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specserve.config.load import Loaded, load_text
from specserve.engine.http.client import (
    EngineClient,
    EngineError,
    EngineRefused,
    EngineUnreachable,
)
from specserve.engine.http.metrics import EngineSnapshot, MetricsError, parse
from specserve.engine.http.servers import Recognised, recognise
from specserve.errors import EngineLost
from specserve.sidecar.look import EngineLook, look
from specserve.sidecar.presentation import METHOD_NOT_TOLD, Numbers

if TYPE_CHECKING:
    from pydantic import JsonValue

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LookReport:
    """What was found at an address."""

    url: str
    version: str | None
    seen: EngineLook

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served, as far as metrics tell."""
        return self.seen.diagnosis.word != "down"

    @property
    def follows(self) -> str:
        """The next command to type."""
        advice = self.seen.diagnosis.advice
        if advice is not None and advice.startswith("specserve "):
            return advice.replace("URL", self.url)
        return f"specserve sidecar --engine-url {self.url}"

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        seen = self.seen
        usual: JsonValue = None
        if seen.usual is not None:
            usual = {"since": seen.usual.since, "numbers": _rounded(seen.usual.numbers)}
        return {
            "engine_url": self.url,
            "server": "vLLM",
            "version": self.version,
            "model_names": list(seen.model_names),
            "engines": seen.engines,
            "speculates": seen.num_speculative_tokens is not None,
            "num_speculative_tokens": seen.num_speculative_tokens,
            "covered_seconds": round(seen.covered_seconds, 3),
            "age_seconds": seen.age_seconds,
            "now": _rounded(seen.now),
            "usual": usual,
            "no_usual": seen.no_usual,
            "diagnosis": asdict(seen.diagnosis),
            "next": self.follows,
        }


def _rounded(numbers: Numbers) -> JsonValue:
    """Six digits: more are noise of the arithmetic."""
    out: dict[str, JsonValue] = {}
    for name, value in numbers.items():
        if isinstance(value, float):
            out[name] = float(f"{value:.6g}")
        else:
            out[name] = _rounded(value)
    return out


def look_at(
    url: str,
    api_key: str | None = None,
    *,
    interval_seconds: float,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> LookReport:
    """Two reads of a server's metrics. Raises EngineLost where no vLLM answers."""
    client = EngineClient(url, api_key, clock=clock)
    first = _read(client, clock)
    age = _age(client, first, wall)
    version = None
    with suppress(EngineError):
        version = client.version(timeout=TIMEOUT_SECONDS)
    pause(interval_seconds)
    return LookReport(url, version, look(first, _read(client, clock), age_seconds=age))


@dataclass(frozen=True, slots=True)
class Discovered:
    """A config made of what a server says about itself."""

    loaded: Loaded
    method: str | None
    """What to call the method; None where the server does not speculate."""


def discover(
    url: str,
    *,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Discovered:
    """What the sidecar needs to know of a server that it has no config of.

    The method is not told by any server. Assumed is the one of which the checks expect least
    (ngram: it may draft nothing where a text repeats nothing), and it is never shown as known.
    Raises EngineLost as `look_at`, and EngineNotListening while nobody listens.
    """
    client = EngineClient(url, clock=clock)
    try:
        snapshot = parse(client.metrics_text(timeout=TIMEOUT_SECONDS), at_seconds=clock())
    except (EngineRefused, MetricsError) as error:
        raise not_vllm(client, error) from None
    names = sorted({s.model_name for s in snapshot.engines if s.model_name})
    if not names:
        names = list(client.models(timeout=TIMEOUT_SECONDS))
    if not names:
        raise EngineLost("serves no model", where=url, fix="specserve sidecar CONFIG")
    speculation: dict[str, str | int | bool] = {"enabled": False}
    method = None
    if snapshot.speculates:
        method = METHOD_NOT_TOLD
        tokens = max(1, len(snapshot.accepted_per_position or ()))
        speculation = {"method": "ngram", "num_speculative_tokens": tokens}
    server: dict[str, str | int] = {"served_model_name": names[0]}
    port = urlsplit(url).port
    if port is not None:
        server["port"] = port
    made = {
        "server": server,
        "models": {"target_model": {"path": names[0]}},
        "speculative_decoding": speculation,
    }
    text = json.dumps(made).replace("$", "$$")
    return Discovered(load_text(text, url, environ=environ, overrides=overrides), method)


def _age(client: EngineClient, snapshot: EngineSnapshot, wall: Callable[[], float]) -> float | None:
    """Seconds since the engine started, by its own clock where it tells that."""
    start = snapshot.process_start_seconds
    if start is None:
        return None
    now = None
    with suppress(EngineError):
        now = client.clock_seconds(timeout=TIMEOUT_SECONDS)
    if now is None:
        now = wall()
    return max(0.0, now - start)


def _read(client: EngineClient, clock: Callable[[], float]) -> EngineSnapshot:
    """One read. Raises EngineLost with what is there instead."""
    try:
        return parse(client.metrics_text(timeout=TIMEOUT_SECONDS), at_seconds=clock())
    except EngineUnreachable as error:
        raise EngineLost(
            f"{error.problems[0].message}; must be the address of a running server",
            where=client.base_url,
            fix="specserve status --engine-url http://HOST:PORT",
        ) from None
    except (EngineRefused, MetricsError) as error:
        raise not_vllm(client, error) from None


def not_vllm(client: EngineClient, error: EngineRefused | MetricsError) -> EngineLost:
    """Why an address that answers has no metrics of vLLM's: which server it is, what works."""
    try:
        found = recognise(client, timeout=TIMEOUT_SECONDS)
    except EngineUnreachable as lost:
        return EngineLost(lost.problems[0].message, where=client.base_url)
    if found is None:
        return EngineLost(
            f"vLLM is here, but {error.problems[0].message}",
            where=client.base_url,
            fix="start it without --disable-log-stats, and name its own address, not a proxy's",
        )
    message = found.sentence
    return EngineLost(f"{message}{_load(found)}", where=client.base_url, fix=_fix(found, client))


def _load(found: Recognised) -> str:
    """The requests of another server."""
    if found.running is None and found.waiting is None:
        return ""
    running, waiting = found.running, found.waiting
    parts = []
    if running is not None:
        parts.append(f"{running:.0f} running")
    if waiting is not None:
        parts.append(f"{waiting:.0f} waiting")
    return f"; now {', '.join(parts)}"


def _fix(found: Recognised, client: EngineClient) -> str:
    if found.server.name == "a specserve sidecar":
        return f"specserve status --url {client.base_url}"
    if found.server.prefix:
        return "specserve init --from FILE, with the command that starts it in FILE"
    return "specserve status --engine-url http://HOST:PORT"
