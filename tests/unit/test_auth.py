"""The middleware as a plain ASGI callable."""

from __future__ import annotations

import asyncio

import pytest

from specserve.engine.inside.auth import RequireKey


async def app(scope, receive, send) -> None:
    """An engine that answers whoever reaches it."""
    await send({"type": "reached"})


def call(key: str | None, **scope) -> list[dict]:
    """The messages that a client gets."""
    sent: list[dict] = []

    async def send(message) -> None:
        sent.append(message)

    whole = {
        "type": "http",
        "method": "POST",
        "path": "/invocations",
        "root_path": "",
        "headers": [],
    } | scope
    asyncio.run(RequireKey(app, key)(whole, None, send))
    return sent


REACHED = [{"type": "reached"}]


@pytest.mark.parametrize(
    "path", ["/invocations", "/v1/completions", "/load", "/tokenize", "/", "/metrics/x", "//health"]
)
def test_paths_want_the_key(path):
    """Everything but the four open paths answers 401, with the scheme it wants."""
    start, body = call("k3y", path=path)
    assert (start["status"], body["body"]) == (401, b'{"error": "Unauthorized"}')
    assert (b"www-authenticate", b"Bearer") in start["headers"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version"])
def test_probes_need_no_key(path):
    """Load balancers and Prometheus ask without one, also behind a prefix."""
    assert call("k3y", path=path) == REACHED
    assert call("k3y", path=f"/llm{path}", root_path="/llm") == REACHED


@pytest.mark.parametrize("value", [b"Bearer k3y", b"bearer k3y", b"Bearer  k3y "])
def test_right_key_passes(value):
    """The scheme is written in any case."""
    assert call("k3y", headers=[(b"host", b"x"), (b"authorization", value)]) == REACHED


@pytest.mark.parametrize(
    "value", [b"Bearer k3", b"Bearer k3yy", b"Basic k3y", b"k3y", b"", b"Bearer", b"Bearer \xff"]
)
def test_wrong_key_does_not(value):
    """A part of the key, another scheme, or nothing."""
    assert call("k3y", headers=[(b"authorization", value)])[0]["status"] == 401


def test_key_may_be_any_text():
    """The header carries bytes, the key text beyond ASCII."""
    assert call("schlüssel", headers=[(b"authorization", "Bearer schlüssel".encode())]) == REACHED


def test_start_up_and_preflight_pass():
    """The server's own messages have no headers; browsers send OPTIONS without a key."""
    assert call("k3y", type="lifespan") == REACHED
    assert call("k3y", method="OPTIONS") == REACHED


def test_websocket_is_closed():
    """A websocket without the key is closed with the policy code."""
    assert call("k3y", type="websocket", method=None) == [{"type": "websocket.close", "code": 1008}]


def test_no_key_no_check(monkeypatch):
    """Without a key the middleware is not there; with one it is the engine's own variable."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert call(None) == REACHED
    monkeypatch.setenv("VLLM_API_KEY", "k3y")
    assert call(None)[0]["status"] == 401


@pytest.mark.parametrize(("given", "passes"), [("one", True), ("two", True), ("one\ntwo", False)])
def test_any_of_several_keys_passes(monkeypatch, given, passes):
    """The engine's environment may hold several keys, one a line."""
    monkeypatch.setenv("SPECSERVE_API_KEYS", "one\ntwo")
    headers = [(b"authorization", b"Bearer " + given.encode())]
    assert (call(None, headers=headers) == REACHED) == passes
