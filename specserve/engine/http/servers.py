"""Which server is behind an address: vLLM, or one whose metrics are not read here.

Names read in the servers' own pages: TGI (huggingface.co/docs/text-generation-inference,
reference/metrics), SGLang (docs.sglang.io, references/production_metrics; only with
--enable-metrics), llama.cpp (tools/server/README.md; only with --metrics); 2026-12-01.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from specserve.engine.http.client import EngineClient
from specserve.engine.http.metrics import PREFIX
from specserve.engine.http.transport import EngineError, EngineRefused

_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?[ \t]+(?P<value>[0-9][0-9.eE+-]*)(?:[ \t]|$)",
    re.ASCII | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class OtherServer:
    """A server that is not vLLM, and what still works there."""

    name: str
    prefix: str
    """Of its metrics; empty: it is not told by them."""
    owner: str
    """``owned_by`` in its /v1/models; empty: it says nothing of its own there."""
    running: str
    waiting: str
    """Its gauges of requests."""
    works: str
    """What can be done with it."""
    switch: str = ""
    """What turns its metrics on."""


SIDECAR = OtherServer(
    "a specserve sidecar",
    "specserve_",
    "",
    "specserve_requests_running",
    "specserve_requests_waiting",
    "it has the numbers of its engine already",
)
UNKNOWN = OtherServer(
    "no server that is known here",
    "",
    "",
    "",
    "",
    "name the address of vLLM's API server, the one that clients use",
)
_INIT = "`specserve init --from FILE` turns the command that starts it into a config for vLLM"
OTHER_SERVERS = (
    SIDECAR,
    OtherServer(
        "TGI (text-generation-inference)",
        "tgi_",
        "",
        "tgi_batch_current_size",
        "tgi_queue_size",
        f"requests and queue are read below, its speculation is not; {_INIT}",
    ),
    OtherServer(
        "SGLang",
        "sglang:",
        "sglang",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        f"requests and queue are read below, its speculation is not; {_INIT}",
        "--enable-metrics",
    ),
    OtherServer(
        "llama.cpp",
        "llamacpp:",
        "llamacpp",
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        f"requests and queue are read below, its speculation is not; {_INIT}",
        "--metrics",
    ),
)
_VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Recognised:
    """Another server that was seen, with the little of it that can be read."""

    server: OtherServer
    has_metrics: bool = True
    running: float | None = None
    waiting: float | None = None

    @property
    def sentence(self) -> str:
        """What it is, and what works.

        >>> Recognised(SIDECAR).sentence
        'this is a specserve sidecar, not vLLM: it has the numbers of its engine already'
        """
        works = self.server.works
        if not self.has_metrics:
            works = f"its metrics are off ({self.server.switch} turns them on); {_INIT}"
        if self.server == UNKNOWN:
            return f"this is {self.server.name}: {works}"
        return f"this is {self.server.name}, not vLLM: {works}"


def by_metrics(text: str) -> Recognised | None:
    """The server whose metrics these are; None for vLLM's, and for metrics that name no server.

    >>> by_metrics("tgi_queue_size 3\\n").server.name
    'TGI (text-generation-inference)'
    """
    sums: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        with contextlib.suppress(ValueError):
            sums[match["name"]] = sums.get(match["name"], 0.0) + float(match["value"])
    if any(name.startswith(PREFIX) for name in sums):
        return None
    for server in OTHER_SERVERS:
        if any(name.startswith(server.prefix) for name in sums):
            return Recognised(
                server, running=sums.get(server.running), waiting=sums.get(server.waiting)
            )
    return None


def recognise(client: EngineClient, *, timeout: float) -> Recognised | None:
    """The server at an address whose /metrics are not vLLM's; None where it is vLLM all the same.

    Raises EngineUnreachable where nothing answers.
    """
    with contextlib.suppress(EngineRefused):
        found = by_metrics(client.metrics_text(timeout=timeout))
        if found is not None:
            return found
    owner = None
    with contextlib.suppress(EngineError):
        owner = client.owner(timeout=timeout)
    if owner == _VLLM:
        return None
    for server in OTHER_SERVERS:
        if server.owner and owner == server.owner:
            return Recognised(server, has_metrics=False)
    return Recognised(UNKNOWN)
