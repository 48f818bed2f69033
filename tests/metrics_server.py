"""A small HTTP server that plays whatever serves models: its metrics, its models, its refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class PlayedServer:
    """What is answered at which path: status and body. A list is answered one after another, its
    last entry again and again."""

    url: str = ""
    answers: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def says(self, path: str, *bodies: str, status: int = 200) -> None:
        """Answer a path from now on."""
        self.answers[path] = [(status, body) for body in bodies]

    def owned_by(self, owner: str) -> None:
        """Answer /v1/models as OpenAI's servers do."""
        self.says("/v1/models", json.dumps({"data": [{"id": "m", "owned_by": owner}]}))

    def answer(self, path: str) -> tuple[int, str]:
        """The next answer of a path."""
        waiting = self.answers.get(path, [(404, '{"detail":"Not Found"}')])
        if len(waiting) > 1:
            return waiting.pop(0)
        return waiting[0]


@contextmanager
def played() -> Iterator[PlayedServer]:
    """A running server."""
    server = PlayedServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = server.answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.daemon_threads = True
    server.url = f"http://127.0.0.1:{web.server_port}"
    thread = threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        web.shutdown()
        web.server_close()
