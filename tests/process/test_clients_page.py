"""The snippets of docs/clients.md, against the stub engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from programs import Program

PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
CURL = [
    block for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) if "curl" in block
]


def adapted(snippet: str, port: int) -> str:
    """For this server and its model."""
    return snippet.replace(":8000", f":{port}").replace('"MODEL"', '"stub"')


def run_python(port: int) -> subprocess.CompletedProcess[str]:
    """The client of the page in a process of its own."""
    argv = [sys.executable, "-c", adapted(PYTHON[0], port)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_client_counts_tokens_by_usage(stub: Callable[..., Program], free_port: int) -> None:
    """All tokens that were asked for, in fewer pieces than tokens where several come at once."""
    stub("--stub-tokens-per-chunk", 4)
    done = run_python(free_port)
    assert done.returncode == 0, done.stderr
    count = re.search(r"^(\d+) tokens in (\d+) pieces$", done.stdout, re.M)
    assert count is not None
    assert count[1] == "16"
    assert int(count[2]) < 16


def test_curl_gets_the_usage_last(stub: Callable[..., Program], free_port: int) -> None:
    """The last event before the end has the usage and no choices."""
    stub()
    argv = ["bash", "-c", adapted(CURL[0], free_port)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    events = [line for line in done.stdout.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("headers", [{"Retry-After": "0"}, {}], ids=["draining", "full"])
def test_the_client_tries_again_after_503(free_port: int, headers: dict[str, str]) -> None:
    """After the time that the server names, or after its own pause; then it takes the answer."""
    asked: list[str] = []

    class Once(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            if len(asked) == 1:
                self.send_response(503)
                for header in headers.items():
                    self.send_header(*header)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            for event in (
                {"choices": [{"text": "Hello there"}], "usage": None},
                {"choices": [], "usage": {"completion_tokens": 2}},
            ):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", free_port), Once) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = run_python(free_port)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Hello there", "2 tokens in 1 pieces"]
    assert asked == ["/v1/completions"] * 2
