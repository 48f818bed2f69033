"""The client against real sockets that answer, stall, lie and break off."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specserve.config.schema import Settings
from specserve.engine.http.client import (
    Completion,
    EngineClient,
    EngineRefused,
    EngineUnreachable,
    certificate_is_ours,
    collect,
    own_client,
)
from specserve.errors import ConfigError, ExitCode

Reply = Callable[[BaseHTTPRequestHandler, bytes], None]


class Server(ThreadingHTTPServer):
    """Answers each path with a function; keeps the requests."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: dict[str, Reply] = {}
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.leave = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.path, dict(self.headers), body))
        self.server.replies[self.path](self, body)

    def do_POST(self) -> None:
        self.do_GET()


def body(text: str | bytes, status: int = 200) -> Reply:
    """A whole answer."""
    raw = text.encode() if isinstance(text, str) else text

    def reply(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return reply


def chunks(*pieces: str, pause: float = 0.0, end: bool = True) -> Reply:
    """A chunked answer, one HTTP chunk a piece; without ``end`` the connection is cut."""

    def reply(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            raw = piece.encode()
            handler.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            handler.wfile.flush()
            time.sleep(pause)
        if end:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return reply


def events(*items: object) -> list[str]:
    """As server-sent events."""
    return [f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in items]


@pytest.fixture
def server() -> Iterator[Server]:
    """An engine whose answers a test chooses."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.replies["/v1/models"] = body('{"data": [{"id": "llm"}, {"id": "lora"}]}')
    yield server
    server.leave.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(server: Server) -> EngineClient:
    """Short of patience, so that tests are quick."""
    return EngineClient(server.url + "/", "k3y", timeout_seconds=5)


def test_health_and_models(server, client):
    """/health is a yes or a no; an error status is a no, not an error."""
    server.replies["/health"] = body("")
    assert client.health()
    server.replies["/health"] = body("", 503)
    assert not client.health()
    assert client.models() == ("llm", "lora")


def test_the_answer_to_health_names_the_start_of_the_engine(server, client):
    """None where the engine does not say, as any vLLM that specserve did not launch."""
    server.replies["/health"] = body("")
    assert client.run_id() is None

    def ours(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response(200)
        handler.send_header("x-specserve-run", "3f")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server.replies["/health"] = ours
    assert client.run_id() == "3f"


def test_a_connection_that_rested_is_not_used_again(server):
    """The engine closes an idle connection when it likes; a request that meets the closing would be lost."""
    ports: list[int] = []

    def reply(handler: BaseHTTPRequestHandler, got: bytes) -> None:
        ports.append(handler.client_address[1])
        body("up 1")(handler, got)

    server.replies["/metrics"] = reply
    now = 0.0
    client = EngineClient(server.url, clock=lambda: now)
    for pause in (0.0, 1.9, 2.1, 1.9):
        now += pause
        assert client.metrics_text() == "up 1"
    first, second, third, fourth = ports
    assert first == second != third == fourth


def test_completion_says_what_came(server, client):
    """The request carries key, request id, model and sampling; the answer is read whole."""
    choice = {
        "text": "a b",
        "finish_reason": "length",
        "token_ids": [5, 6],
        "prompt_token_ids": [1, 2],
    }
    server.replies["/v1/completions"] = body(
        json.dumps({"choices": [choice], "usage": {"completion_tokens": 2}})
    )
    found = client.complete([1, 2], max_tokens=2, temperature=0)
    assert found == Completion("a b", "length", 2, (5, 6), (1, 2))
    path, headers, sent = server.seen[-1]
    assert json.loads(sent) == {"model": "llm", "prompt": [1, 2], "max_tokens": 2, "temperature": 0}
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer k3y")
    assert headers["X-Request-Id"].startswith("specserve-")


def test_chat_keeps_reasoning_and_reads_tokens_beside_the_choices(server, client):
    """A chat lists its prompt's tokens outside of the choices; thoughts are text too."""
    message = {"role": "assistant", "reasoning": "hm ", "content": "yes"}
    answer = {
        "prompt_token_ids": [9],
        "choices": [{"message": message, "finish_reason": "stop", "token_ids": [4]}],
    }
    server.replies["/v1/chat/completions"] = body(json.dumps(answer))
    found = client.chat([{"role": "user", "content": "?"}])
    assert (found.text, found.finish_reason, found.prompt_token_ids, found.token_ids) == (
        "hm yes",
        "stop",
        (9,),
        (4,),
    )
    assert found.completion_tokens is None


def test_several_prompts_come_back_in_order(server, client):
    """Choices are sorted by index; a missing one is an error."""
    choices = [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]
    server.replies["/v1/completions"] = body(json.dumps({"choices": choices}))
    assert [c.text for c in client.complete_each([[1], [2]])] == ["a", "b"]
    with pytest.raises(EngineRefused, match="2 choices for 3 prompts"):
        client.complete_each([[1], [2], [3]])


def test_stream_times_the_first_text(server):
    """Chunks without text are dropped, whatever the packets' edges; the times are those of the texts."""
    lines = "".join(
        events(
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "Hé"}}]},
            {"choices": [{"delta": {"content": "llo"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
            "[DONE]",
        )
    )
    server.replies["/v1/chat/completions"] = chunks(
        *(lines[i : i + 7] for i in range(0, len(lines), 7))
    )
    ticks = iter(range(1000))
    client = EngineClient(
        server.url, model="llm", timeout_seconds=10_000, clock=lambda: float(next(ticks))
    )
    found = list(client.stream(messages=[{"role": "user", "content": "hi"}]))
    assert [c.text for c in found] == ["Hé", "llo", ""]
    assert 0 < found[0].seconds < found[1].seconds < found[2].seconds
    assert (found[-1].finish_reason, found[-1].completion_tokens) == ("stop", 3)
    assert json.loads(server.seen[-1][2])["stream_options"] == {"include_usage": True}
    whole = collect(found)
    assert (whole.text, whole.completion_tokens) == ("Héllo", 3)


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (
            body('{"error": "overloaded"}', 503),
            EngineRefused,
            'answered 503: {"error": "overloaded"}',
        ),
        (body("", 401), EngineRefused, r"answered 401: \(empty body\)"),
        (body("<html>"), EngineRefused, "not an answer of the OpenAI API: <html>"),
        (body("[1]"), EngineRefused, r"not an answer of the OpenAI API: \[1\]"),
        (body('{"choices": []}'), EngineRefused, "not an answer of the OpenAI API"),
        (body('{"choices": [3]}'), EngineRefused, "not an answer of the OpenAI API"),
        (chunks('{"choi', end=False), EngineUnreachable, "no answer"),
    ],
)
def test_bad_answers_are_one_of_two_errors(server, client, reply, error, words):
    """Whatever comes back, the caller sees a refusal or an unreachable engine, with its address."""
    server.replies["/v1/completions"] = reply
    with pytest.raises(error, match=words) as caught:
        client.complete("x")
    assert caught.value.problems[0].where == f"{server.url}/v1/completions"
    assert caught.value.exit_code is ExitCode.ENGINE_LOST


@pytest.mark.parametrize(
    ("pieces", "error", "words"),
    [
        (events({"error": {"message": "died"}}), EngineRefused, "died"),
        (events("not json"), EngineRefused, "not json"),
        (
            events({"choices": [{"text": "a"}]}),
            EngineUnreachable,
            "the stream ended before it was done",
        ),
    ],
)
def test_broken_streams_are_errors(server, client, pieces, error, words):
    """A stream that ends without [DONE] has lost its end: that is no short answer."""
    server.replies["/v1/completions"] = chunks(*pieces)
    with pytest.raises(error, match=words):
        list(client.stream("x"))


def test_silence_ends_at_the_timeout(server, client):
    """An engine that accepts and says nothing is unreachable after the timeout."""
    server.replies["/v1/completions"] = lambda handler, _: server.leave.wait(5) and None
    with pytest.raises(EngineUnreachable, match=r"no complete answer within 0.1 s"):
        client.complete("x", timeout=0.1)


def drip(head: bytes) -> Reply:
    """A status line, what is given, and then a byte now and then until the other end goes."""

    def reply(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + head)
            while not handler.server.leave.wait(0.02):
                handler.wfile.write(b"x")

    return reply


@pytest.mark.parametrize(
    "reply",
    [
        drip(b"X-Header: "),
        drip(b"Content-Length: 9999\r\n\r\n"),
        drip(b"\r\n"),
        chunks(*["x"] * 60, pause=0.02),
    ],
    ids=["headers", "length", "to-the-end", "chunks"],
)
def test_dripping_ends_at_the_timeout_too(server, client, reply):
    """A byte now and then does not extend the deadline of the whole answer, and the next call is well."""
    server.replies["/metrics"] = reply
    with pytest.raises(EngineUnreachable, match=r"no complete answer within 0.3 s") as caught:
        client.metrics_text(timeout=0.3)
    assert caught.value.__cause__ is None
    assert client.models() == ("llm", "lora")


def test_a_key_that_no_header_carries_is_a_config_error():
    """Not an error of its encoding at some later call."""
    with pytest.raises(ConfigError, match="the API key: has a character beyond ASCII"):
        EngineClient("http://127.0.0.1:9", "ключ")


def test_size_is_bounded(server, client):
    """An endless answer is refused at the bound."""
    server.replies["/metrics"] = body("a" * 2000)
    assert len(client.metrics_text(max_bytes=2000)) == 2000
    with pytest.raises(EngineRefused, match="more than 1999 bytes"):
        client.metrics_text(max_bytes=1999)


def test_nobody_there_is_said_once(client):
    """A refused connection is one plain sentence, not three wrapped ones."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineUnreachable) as caught:
        EngineClient(url).health()
    assert str(caught.value) == f"{url}/health: no answer (Connection refused)"


def test_proxies_of_the_environment_are_ignored(server, client, monkeypatch):
    """The engine is beside us: a proxy that the shell names must not see its traffic."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert client.models() == ("llm", "lora")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, client, status):
    """Numbers from elsewhere are not the engine's, and its key is for the engine alone."""

    def elsewhere(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Location", f"{server.url}/other")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server.replies["/metrics"] = elsewhere
    server.replies["/health"] = elsewhere
    server.replies["/other"] = body("up 1\n")
    with pytest.raises(EngineRefused, match=r"a redirect to '.*/other', which is not followed"):
        client.metrics_text()
    assert not client.health()
    assert [path for path, _, _ in server.seen] == ["/metrics", "/health"]


def test_threads_share_one_client(server, client):
    """Eight threads at a time, each with its own connection, all served."""
    server.replies["/health"] = body("")
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.extend(client.health() for _ in range(5)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 40


CERTIFIED = {"cert_file": "c.pem", "key_file": "k.pem"}


@pytest.mark.parametrize(
    ("host", "tls", "url", "base_url", "is_checked"),
    [
        ("127.0.0.1", False, None, "http://127.0.0.1:8000", False),
        ("127.0.0.1", True, None, "https://127.0.0.1:8000", False),
        ("0.0.0.0", True, None, "https://127.0.0.1:8000", False),
        ("10.0.0.5", True, None, "https://10.0.0.5:8000", False),
        ("10.0.0.5", True, "https://10.0.0.5:8000", "https://10.0.0.5:8000", False),
        ("10.0.0.5", True, "https://10.0.0.6:8000", "https://10.0.0.6:8000", True),
        ("127.0.0.1", False, "https://localhost:9000", "https://localhost:9000", False),
        ("127.0.0.1", False, "https://[::1]:9000", "https://[::1]:9000", False),
        ("127.0.0.1", False, "https://llm.example:9000", "https://llm.example:9000", True),
    ],
)
def test_the_certificate_of_our_own_engine_is_not_checked(
    host: str, tls: bool, url: str | None, base_url: str, is_checked: bool
) -> None:
    """At the config's own address and on loopback the name in a certificate is another; elsewhere it counts."""
    server = {"host": host, "api_key": "secret", "tls": CERTIFIED if tls else {}}
    settings = Settings.model_validate(
        {
            "server": server,
            "models": {"target_model": {"path": "m"}},
            "speculative_decoding": {"method": "ngram"},
        }
    )
    client = own_client(settings, url)
    assert client.base_url == base_url
    assert certificate_is_ours(settings, client.base_url) is not is_checked


def test_one_place_decides_about_certificates() -> None:
    """No second module reads the TLS settings or compares with loopback to decide whether to check one."""
    package = Path(__file__).parents[2] / "specserve"
    reading = re.compile(r"verify ?= ?.*(tls|LOOPBACK|cert_file|certificate_is_ours)")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if reading.search(path.read_text())
    }
    assert found == {"engine/http/client.py"}
