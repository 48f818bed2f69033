"""The sidecar's HTTP server: probes, metrics, status and the page. Small, bounded, and never busy with the engine."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from specserve.errors import ConfigError
from specserve.sidecar.collector import CONTENT_TYPE

LOG = logging.getLogger("specserve.sidecar")
MAX_CONNECTIONS = 32
IDLE_SECONDS = 5.0
_JSON = "application/json; charset=utf-8"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, content type and body of one answer."""

    status: int
    content_type: str
    body: bytes

    @classmethod
    def of_json(cls, value: Mapping[str, Any], *, ok: bool = True) -> Answer:
        """200 or 503 with a JSON body."""
        return cls(
            200 if ok else 503,
            _JSON,
            json.dumps(value, ensure_ascii=False, default=str).encode() + b"\n",
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """What the paths answer."""

    metrics: Callable[[], bytes]
    status: Callable[[], Mapping[str, Any]]
    probe: Callable[[str], Mapping[str, Any]]
    """Name of a probe (live, ready, started) -> ``{"ok": ..., "reason": ...}``."""
    page: Callable[[], str]

    def get(self, path: str) -> Answer:
        """The answer to a GET."""
        match path.partition("?")[0]:
            case "/metrics":
                return Answer(200, CONTENT_TYPE, self.metrics())
            case "/status":
                return Answer.of_json(self.status())
            case "/livez" | "/readyz" | "/startupz" as asked:
                found = self.probe(
                    {"/livez": "live", "/readyz": "ready", "/startupz": "started"}[asked]
                )
                return Answer.of_json(found, ok=bool(found["ok"]))
            case "/":
                return Answer(200, "text/html; charset=utf-8", self.page().encode())
            case _:
                paths = "/livez /readyz /startupz /metrics /status /"
                return Answer(
                    404, "text/plain; charset=utf-8", f"not found; there is {paths}\n".encode()
                )


class Server(ThreadingHTTPServer):
    """Listens from the start; answers in threads, `MAX_CONNECTIONS` at once."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Raises ConfigError when the address cannot be listened on."""
        self.pages = pages
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        """Connections, oldest first."""
        self._thread = threading.Thread(target=self.serve_forever, name="sidecar-http", daemon=True)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror}; must be a free port",
                where="sidecar.port",
                fix="--set sidecar.port=N",
            ) from error

    @property
    def url(self) -> str:
        """Where it listens, without a trailing slash."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def start(self) -> None:
        """Answer, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and give the port back."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Beyond the limit the oldest connection ends: an answer takes milliseconds, and clients that are slow, or say
        nothing, do not shut out a probe."""
        while len(self._open) >= MAX_CONNECTIONS:
            with contextlib.suppress(OSError, KeyError):  # it has just ended by itself
                self._open.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; our own mistake in a page is. Nothing else stops."""
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.ERROR
        LOG.log(level, "a request was not answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS
    server: Server
    server_version = "specserve"
    sys_version = ""

    def do_GET(self) -> None:
        answer = self.server.pages.get(self.path)
        self.send_response(answer.status)
        for name, value in {**_HEADERS, "Content-Type": answer.content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        LOG.debug("%s " + format, self.address_string(), *args)
