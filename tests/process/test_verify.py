"""The go-live list against a real server that is in order, or is not."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from programs import DRIVER, Program, marked, start, wait_until

from specserve.app.golive import Subject, drain, run
from specserve.engine.http.client import EngineClient
from tests import checkpoints

Stub = Callable[..., Program]

DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
CONFIG = "server: {served_model_name: stub}\nmodels: {target_model: {path: /m}}\nspeculative_decoding: {method: ngram}\n"

PYTHON = r"""#!/bin/sh
# python, but `python -m specserve launch` is that of the driver, with the stub in the engine's place. vLLM may not be
# here and takes long to import: it does not say what it supports, and its benchmark client sends nothing.
case "$2 $3" in
"specserve launch") shift 3; exec {python} {driver} "$@" {flags};;
*/probe_vllm.py\ *) echo "[]" > "$3";;
"specserve.engine.inside.client_worker ") echo "{{}}"; exec cat;;
*) exec {python} "$@";;
esac
"""
LAUNCHING = "import sys; sys.executable = sys.argv.pop(1); from specserve import cli; cli.main()"
LAUNCHED = """
server: {{port: {port}, served_model_name: tiny}}
models: {{target_model: {{path: {target}}}}}
speculative_decoding: {{method: ngram, num_speculative_tokens: 3}}
engine: {{max_model_len: 512}}
"""


def verify(*arguments: object) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and status and message by check."""
    argv = [sys.executable, "-m", "specserve", "verify", *map(str, arguments), "--format", "json"]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in out.stderr
    return out.returncode, {
        c["name"]: (c["status"], c["message"]) for c in json.loads(out.stdout)["checks"]
    }


def config(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_a_server_in_order_passes(stub: Stub, tmp_path: Path) -> None:
    """Every check passes or says why it does not apply, and CI can read the JUnit file."""
    server = stub(*DRAFTS, "--stub-acceptance", "0.9,0.8,0.7,0.6")
    code, checks = verify(config(tmp_path), "--url", server.url, "--junit", tmp_path / "junit.xml")
    assert code == 0
    assert {name for name, (status, _) in checks.items() if status != "PASS"} == {"api-key"}
    assert checks["api-key"] == ("SKIP", "no API key is set")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("11", "0", "1")


@pytest.mark.parametrize(
    ("thoughts", "found"),
    [
        (20, ("PASS", """obeys its schema: '{"answer": "yes"}'""")),
        (500, ("SKIP", "the model was still thinking after 64 tokens")),
    ],
)
def test_thoughts_are_no_answer(stub: Stub, thoughts: int, found: tuple[str, str]) -> None:
    """What a reasoning parser sets apart is not held against a schema, nor a model that is still thinking."""
    _, checks = verify("--url", stub("--stub-thoughts", thoughts).url)
    assert checks["structured"] == found


def test_nonsense_fails(stub: Stub) -> None:
    """A server that answers unprintable text is not fit, though it answers 200."""
    code, checks = verify("--url", stub("--stub-corrupt", "always").url)
    assert code == 6
    assert checks["completion"][0] == "FAIL"
    assert "unprintable" in checks["completion"][1]
    assert checks["structured"][0] == "FAIL"
    assert checks["structured"][1].startswith("asked for JSON, got ")


def test_a_loop_fails(stub: Stub) -> None:
    """A server that says one word for ever is not fit."""
    _, checks = verify("--url", stub("--stub-corrupt", "loop").url)
    assert checks["completion"][0] == "FAIL"
    assert "loops on" in checks["completion"][1]


def test_speculation_that_is_not_there_fails(stub: Stub, tmp_path: Path) -> None:
    """Configured speculation without a drafted token fails; without a configuration it does not apply."""
    server = stub()
    code, checks = verify(config(tmp_path), "--url", server.url)
    assert code == 6
    assert checks["speculation"] == (
        "FAIL",
        "speculation is configured, but the engine counts no drafts",
    )
    assert verify("--url", server.url)[1]["speculation"][0] == "SKIP"


def test_low_acceptance_fails(stub: Stub, tmp_path: Path) -> None:
    """Acceptance under the alert's threshold on repetitive text is no go, with both numbers."""
    server = stub(*DRAFTS, "--stub-acceptance", "0.1,0.1,0.1,0.1")
    _, checks = verify(config(tmp_path), "--url", server.url)
    assert checks["speculation"][0] == "FAIL"
    assert "must be at least 50.0 % (alerts.acceptance_rate.fire_below)" in checks["speculation"][1]


def test_another_model_name_fails(stub: Stub, tmp_path: Path) -> None:
    """A server that lists another name than the configuration's is named."""
    server = stub()
    text = CONFIG.replace("served_model_name: stub", "served_model_name: other")
    _, checks = verify(config(tmp_path, text), "--url", server.url)
    assert checks["models"] == ("FAIL", "/v1/models lists stub; must list other")


def test_an_open_path_fails(stub: Stub, tmp_path: Path) -> None:
    """With a key configured, a server that answers without it fails."""
    (tmp_path / "key").write_text("k3y")
    text = CONFIG.replace(
        "served_model_name: stub", f"served_model_name: stub, api_key_file: {tmp_path}/key"
    )
    _, checks = verify(config(tmp_path, text), "--url", stub().url)
    assert checks["api-key"] == (
        "FAIL",
        "answers without a key: /v1/models (200), /v1/completions (200)",
    )


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (401, ("PASS", "requests without a key are refused")),
        (405, ("PASS", "requests without a key are refused")),
        (302, ("PASS", "requests without a key are refused")),
        (204, ("FAIL", "answers without a key: /invocations (204)")),
        (422, ("FAIL", "answers without a key: /invocations (422)")),
        (429, ("SKIP", "no verdict, without a key: /invocations (429)")),
        (503, ("SKIP", "no verdict, without a key: /invocations (503)")),
    ],
)
def test_only_an_answer_is_an_open_path(answer: int, found: tuple[str, str]) -> None:
    """What a proxy says of a path that it does not pass on, or of its load, is no answer without a key."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status = answer if self.path == "/invocations" else 401
            self.send_response(status)
            self.send_header("Location", "/login")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == "Bearer k" or self.path == "/login"
            body = b'{"data": [{"id": "m"}]}' if known else b"{}"
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = EngineClient(f"http://127.0.0.1:{server.server_port}", "k")
        outcome = next(o for o in run(Subject(client, None, has_key=True)) if o.name == "api-key")
        server.shutdown()
    assert (outcome.status, outcome.message) == found


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, ("verify", "--launch")),
        (signal.SIGHUP, ("verify", "--launch")),
        (signal.SIGTERM, ("bench",)),
    ],
)
def test_what_was_launched_ends_with_us(
    number: signal.Signals,
    command: tuple[str, ...],
    *,
    tmp_path: Path,
    free_port: int,
    records: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop by CI, systemd or Kubernetes, or a terminal that goes away, leaves no server behind: that is 130."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    name, *flags = command
    flags += ["--out", str(tmp_path / "out")] if name == "bench" else []
    program = start([*launching(tmp_path, name, free_port), *flags], tmp_path / "log", free_port)
    wait_until(lambda: records() or program.process.poll() is not None)
    program.signal(number)
    assert program.ends() == 130, program.output
    assert records() == []


@pytest.mark.parametrize("grown", ["loading", "ready", "hangs"])
@pytest.mark.parametrize("command", [("verify", "--launch"), ("bench",)], ids=lambda c: c[0])
def test_what_was_launched_ends_with_us_when_we_are_killed(
    command: tuple[str, ...],
    grown: str,
    *,
    tmp_path: Path,
    free_port: int,
    mark: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL, as of a time-out of whoever started us: launch and engine are gone with us."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    name, *flags = command
    if name == "bench":
        flags += ["--out", str(tmp_path / "out")]
    stub: list[object] = ["--stub-step", 1, "--stub-grandchild"]
    if grown == "loading":
        stub = ["--stub-ready-after", 300]
    argv = [*launching(tmp_path, name, free_port, *stub), *flags]
    program = start(argv, tmp_path / "log", free_port)

    def engines() -> list[psutil.Process]:
        found = []
        for process in marked(mark):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if any("stub_engine.py" in part for part in process.cmdline()):
                    found.append(process)
        return found

    wait_until(lambda: engines() or program.process.poll() is not None)
    if grown != "loading":
        answers = functools.partial(socket.create_connection, ("127.0.0.1", free_port), 1)
        wait_until(lambda: refused(answers) is None)
    if grown == "hangs":
        engines()[0].suspend()
    program.process.kill()
    program.process.wait()
    wait_until(lambda: not marked(mark), what="no process of ours is left")


def refused(ask: Callable[[], socket.socket]) -> str | None:
    """Why a connection cannot be made; None when it can."""
    try:
        ask().close()
    except OSError as error:
        return str(error)
    return None


def launching(folder: Path, command: str, port: int, *stub: object) -> list[str]:
    """A command that launches its server, with the stub as the engine."""
    python, target = (
        folder / "python",
        checkpoints.write(folder / "target", checkpoints.small_llama()),
    )
    told = {
        "python": shlex.quote(sys.executable),
        "driver": shlex.quote(str(DRIVER)),
        "flags": shlex.join(map(str, stub)),
    }
    python.write_text(PYTHON.format(**told))
    python.chmod(0o755)
    path = config(folder, LAUNCHED.format(port=port, target=target))
    return [sys.executable, "-c", LAUNCHING, str(python), command, str(path)]


def test_a_drain_is_proven_by_a_request_that_runs(
    stub: Stub, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is stopped in the middle of an answer; where none lasts, nothing is said of how it drains."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    argv = [
        *launching(tmp_path, "verify", free_port, "--stub-step", 0.02),
        "--launch",
        "--format",
        "json",
    ]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    checks = {c["name"]: (c["status"], c["message"]) for c in json.loads(out.stdout)["checks"]}
    assert checks["drain"] == ("PASS", "a running request finished, then the server ended")
    stopped: list[bool] = []
    fast = Subject(EngineClient(stub().url), None, runs_seconds=30)
    outcome = drain(fast, lambda: stopped.append(True), lambda: 0)
    assert (outcome.status, stopped) == ("SKIP", [])
    assert outcome.message.startswith("800 tokens had come before the server could be stopped")
