"""The sidecar's HTTP server: probes, metrics, status and the page. Small, bounded, and never busy
with the engine."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

from specserve.errors import ConfigError
from specserve.sidecar.collector import CONTENT_TYPE
from specserve.sidecar.presentation import ProbeJson, ProbeName, StatusJson

LOG = logging.getLogger("specserve.sidecar")
MAX_CONNECTIONS = 32
IDLE_SECONDS = 5.0
_JSON = "application/json; charset=utf-8"
_PROBES: dict[str, ProbeName] = {"/livez": "live", "/readyz": "ready", "/startupz": "started"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status, content type and body of one answer."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Pages:
    """What the paths return."""

    metrics: Callable[[], bytes]
    status: Callable[[], StatusJson]
    probe: Callable[[ProbeName], ProbeJson]
    page: Callable[[], str]

    def get(self, path: str) -> HttpAnswer:
        """The answer to a GET."""
        status, content_type = 200, _JSON
        match path.partition("?")[0]:
            case "/metrics":
                content_type, body = CONTENT_TYPE, self.metrics()
            case "/status":
                body = _json(self.status())
            case "/livez" | "/readyz" | "/startupz" as asked:
                found = self.probe(_PROBES[asked])
                body = _json(found)
                if not found["ok"]:
                    status = 503
            case "/":
                content_type, body = "text/html; charset=utf-8", self.page().encode()
            case _:
                status, content_type = 404, "text/plain; charset=utf-8"
                body = b"not found; there is /livez /readyz /startupz /metrics /status /\n"
        return HttpAnswer(status, content_type, body)


def _json(value: StatusJson | ProbeJson) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode() + b"\n"


Address: TypeAlias = tuple[str, int]
Connection: TypeAlias = socket.socket | tuple[bytes, socket.socket]
"""What socketserver calls a request; of a TCP server it is a socket."""


class SidecarServer(ThreadingHTTPServer):
    """Listens from the start; answers in threads, `MAX_CONNECTIONS` at once."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Pages, token: str | None = None) -> None:
        """With a ``token`` all but the probes is for those who send it.

        Raises ConfigError when the address cannot be listened on.
        """
        self.pages = pages
        self._token = token
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        """Connections, oldest first."""
        self._thread = threading.Thread(target=self.serve_forever, name="sidecar-http", daemon=True)
        if ":" in host:
            self.address_family = socket.AF_INET6
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
        host, port = str(self.server_address[0]), self.server_address[1]
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{port}"

    def admits(self, path: str, authorization: str | None) -> bool:
        """Whether a request may have the path: probes are for all, the rest for who has the token.

        It comes as ``Bearer TOKEN``, as Prometheus sends it, or as the password of ``Basic``, for
        which a browser asks.
        """
        if self._token is None or path.partition("?")[0] in _PROBES:
            return True
        scheme, _, given = (authorization or "").strip().partition(" ")
        given = given.strip()
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:  # not base64, or not UTF-8 in it
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.encode(), self._token.encode())

    def start(self) -> None:
        """Begin to answer, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and give the port back."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def process_request(self, request: Connection, client_address: Address) -> None:
        """Beyond the limit the oldest connection ends: an answer takes milliseconds, and clients
        that are slow, or say nothing, do not shut out a probe."""
        while len(self._open) >= MAX_CONNECTIONS:
            with contextlib.suppress(OSError, KeyError):  # it has just ended by itself
                self._open.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        assert isinstance(request, socket.socket)
        self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Connection, client_address: Address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            if isinstance(request, socket.socket):
                self._open.pop(request, None)

    def handle_error(self, request: Connection, client_address: Address) -> None:
        """A client that went away is no news; a bug of ours in a page is. Nothing else stops."""
        level = logging.ERROR
        if isinstance(sys.exc_info()[1], OSError):
            level = logging.DEBUG
        LOG.log(level, "a request was not answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS
    server: SidecarServer
    server_version = "specserve"
    sys_version = ""

    def do_GET(self) -> None:
        if not self.server.admits(self.path, self.headers.get("Authorization")):
            self._refuse()
            return
        answer = self.server.pages.get(self.path)
        self.send_response(answer.status)
        for name, value in {**_HEADERS, "Content-Type": answer.content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _refuse(self) -> None:
        body = b"this needs the token of sidecar.token_file: Authorization: Bearer TOKEN\n"
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="specserve"')
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: str | int) -> None:
        LOG.debug("%s " + format, self.address_string(), *args)
