"""A small HTTP server that answers like the Hub: the model API, files with ranges, tokens, redirects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it serves and what it was asked for."""

    root: Path
    """``<root>/<org>/<name>/`` are the repositories."""
    url: str = ""
    token: str | None = None
    """Repositories below ``private/`` want it."""
    ranges: bool = True
    requests: list[str] = field(default_factory=list)
    sent_bytes: int = 0


@contextmanager
def serve(root: Path) -> Iterator[Hub]:
    """Run it for the time of the block."""
    hub = Hub(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            hub.requests.append(self.path)
            status, headers, data = _respond(hub, self.path, dict(self.headers))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                hub.sent_bytes += len(data)
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Answer = tuple[int, dict[str, str], bytes]


def _respond(hub: Hub, path: str, headers: dict[str, str]) -> Answer:
    route = path.split("?", maxsplit=1)[0].strip("/")
    api = route.startswith("api/models/")
    parts = route.removeprefix("api/models/").split("/")
    folder = hub.root.joinpath(*parts[:2])
    sent = headers.get("Authorization", "").removeprefix("Bearer ")
    if parts[0] == "private" and (not hub.token or sent != hub.token):
        return 401 if not sent else 403, {"X-Error-Code": "GatedRepo"}, b""
    if not folder.is_dir():
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    revision = parts[3] if len(parts) > 3 else "main"
    if revision not in ("main", COMMIT):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    if api and parts[2:3] == ["tree"]:
        files = sorted(folder.iterdir())
        tree = [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
    if api:
        siblings = [
            {"rfilename": f.name, "size": f.stat().st_size} for f in sorted(folder.iterdir())
        ]
        return (
            200,
            {"Content-Type": "application/json"},
            json.dumps(_info(parts, siblings)).encode(),
        )
    return _file(hub, folder.joinpath(*parts[4:]), headers.get("Range"))


def _info(parts: list[str], siblings: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "/".join(parts[:2]),
        "modelId": "/".join(parts[:2]),
        "sha": COMMIT,
        "siblings": siblings,
    }


def _file(hub: Hub, path: Path, wanted: str | None) -> Answer:
    if not path.is_file():
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    data = path.read_bytes()
    headers = {
        "ETag": f'"{path.name}-{len(data)}"',
        "X-Repo-Commit": COMMIT,
        "Accept-Ranges": "bytes",
    }
    if wanted is None or not hub.ranges:
        return 200, headers, data
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    part = data[int(first) : int(last) + 1 if last else None]
    return 206, headers, part
