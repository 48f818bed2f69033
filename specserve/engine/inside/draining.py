"""ASGI middleware for vLLM's ``--middleware``: from the stop signal on, new requests get 503 and a
Retry-After. The answer to /health says which start of an engine it is.

vLLM 0.32 lets running requests finish, but shuts its tokenizer down first, so that a request which
comes then is answered with 500 (``AsyncLLM.shutdown``, read 2026-11-29): load balancers and clients
try 503 elsewhere, and count 500 as a failure. Runs inside the engine: the standard library and
nothing heavy.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from specserve.engine.command import environment
from specserve.engine.inside.asgi import App, Message, Receive, Scope, Send

RETRY_SECONDS = 5
_ERROR = {
    "message": "The server is shutting down",
    "type": "ServiceUnavailableError",
    "param": None,
    "code": 503,
}
_BODY = json.dumps({"error": _ERROR}).encode()


class RefuseWhileDraining:
    """Passes everything through until SIGTERM or SIGINT; then refuses each POST. A GET, as for
    /health and /metrics, still passes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._draining = False
        self._run = environment.run_id()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            # Not before: vLLM sets its own handlers when its event loop runs, just before this.
            listen((signal.SIGTERM, signal.SIGINT), self._drain)
        if self._draining and scope["type"] == "http" and scope["method"] == "POST":
            headers = [
                (b"content-type", b"application/json"),
                (b"retry-after", str(RETRY_SECONDS).encode()),
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
            return
        if self._run is not None and scope["type"] == "http" and scope["path"] == "/health":
            send = _with_run(send, self._run)
        await self._app(scope, receive, send)

    def _drain(self) -> None:
        self._draining = True


def _with_run(send: Send, run: str) -> Send:
    """The same, with the run id among the headers of the answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            header = (environment.RUN_HEADER.lower().encode(), run.encode())
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return sending


def listen(numbers: Iterable[signal.Signals], heard: Callable[[], None]) -> None:
    """Call ``heard`` on each of the signals, before the handlers of now. For code inside the
    engine: an event loop still gets its signals, through the file descriptor that the interpreter
    writes them to."""
    for number in numbers:
        previous = signal.getsignal(number)

        def handler(n: int, frame: FrameType | None, previous: Any = previous) -> None:
            heard()
            if callable(previous):
                previous(n, frame)

        signal.signal(number, handler)
