"""HTTP to one engine: every call has a deadline and a bound on what it reads, every failure one of
two classes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from specserve.errors import ConfigError, ExitCode, SpecserveError
from specserve.units import MIB

BODY_EXCERPT = 500
"""Characters of a refusal's body that are kept."""


IDLE_SECONDS = 2.0
"""A connection that rested longer is not used again. vLLM closes one after 5 s
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE), which is the sidecar's interval as well: a request that meets the
closing is lost, and would look like an engine that is."""


AGAIN_SECONDS = 0.1
"""After a deadline, until the call has noticed: the connection may have been in the making."""


class EngineError(SpecserveError):
    """Raised when a call to the engine brought no usable answer."""

    exit_code = ExitCode.ENGINE_LOST


class EngineUnreachable(EngineError):
    """Raised when nothing answered, the answer broke off, or it took longer than the deadline."""


class EngineRefused(EngineError):
    """Raised when the engine answered with an error status, or with something that is not its API
    (status 200).
    """

    def __init__(self, status: int, body: str, *, where: str) -> None:
        self.status = status
        self.body = body[:BODY_EXCERPT]
        super().__init__(f"answered {status}: {self.body.strip() or '(empty body)'}", where=where)


class _Deadline:
    """Of one call, from the first byte of the headers to the last of the body: then its socket is
    shut, which ends whatever reads it. Time-outs of sockets bound the wait for one packet: a byte
    now and then would go on for ever."""

    current = threading.local()
    """``call`` is the one of the request that this thread sends."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self.sock: socket.socket | None = None
        self._seconds, self._over = seconds, threading.Event()

    def __enter__(self) -> Self:
        self.current.call = self
        threading.Thread(target=self._wait, name="deadline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _wait(self) -> None:
        pause = self._seconds
        while not self._over.wait(pause):
            self.passed, pause = True, AGAIN_SECONDS
            if self.sock is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # under TLS, too


class _Connection(HTTPConnection):
    """Says to the deadline which socket it is."""

    def request(self, *args: Any, **kwargs: Any) -> None:
        super().request(*args, **kwargs)
        _Deadline.current.call.sock = self.sock


class _TlsConnection(_Connection, HTTPSConnection):
    """The same over TLS."""


class _Adapter(HTTPAdapter):
    """Uses these two."""

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        if isinstance(pool, urllib3.HTTPSConnectionPool):
            pool.ConnectionCls = _TlsConnection
        else:
            pool.ConnectionCls = _Connection
        return pool


class Transport:
    """Calls one base URL. May be shared between threads: each gets its own connection."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: bool | str = True,
        timeout_seconds: float = 30.0,
        max_bytes: int = 32 * MIB,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``verify`` as in requests: False, or the path of a CA bundle.

        ``timeout_seconds`` where a call has none.
        """
        self.base_url = base_url.rstrip("/")
        if api_key:
            self._headers = {"Authorization": f"Bearer {api_key}"}
        else:
            self._headers = {}
        if not (api_key or "").isascii():
            raise ConfigError(
                "has a character beyond ASCII, which no HTTP header carries",
                where="the API key",
                fix="make one with: openssl rand -hex 32",
            )
        self._verify, self._timeout, self._max_bytes, self.clock = (
            verify,
            timeout_seconds,
            max_bytes,
            clock,
        )
        self._local = threading.local()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None,
        max_bytes: int | None = None,
    ) -> bytes:
        """One request, read to its end or to the first bound that it breaks."""
        raw = bytearray()
        limit = max_bytes or self._max_bytes
        for piece in self._pieces(method, path, body, timeout):
            raw += piece
            if len(raw) > limit:
                raise EngineRefused(200, f"more than {limit} bytes", where=self.base_url + path)
        return bytes(raw)

    def json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None,
    ) -> dict[str, Any]:
        """One request whose answer is a JSON object."""
        raw = self.call(method, path, body, timeout=timeout)
        try:
            parsed = json.loads(raw)
        except ValueError as error:
            raise self.strange(path, raw[:BODY_EXCERPT].decode("utf-8", "replace")) from error
        if not isinstance(parsed, dict):
            raise self.strange(path, parsed)
        return parsed

    def events(
        self, path: str, body: Mapping[str, Any], *, timeout: float | None
    ) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream, up to ``[DONE]``."""
        rest = b""
        for piece in self._pieces("POST", path, body, timeout):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                else:
                    data = b""
                if data == b"[DONE]":
                    return
                if data:
                    yield self._event(path, data)
            if len(rest) > self._max_bytes:
                raise EngineRefused(
                    200, f"a line of more than {self._max_bytes} bytes", where=self.base_url + path
                )
        raise EngineUnreachable("the stream ended before it was done", where=self.base_url + path)

    def _event(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(data)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise self.strange(path, data[:BODY_EXCERPT].decode("utf-8", "replace"))
        return parsed

    def strange(self, path: str, body: object) -> EngineRefused:
        """The error for an answer that parses but is not what this path answers."""
        return EngineRefused(
            200, f"not an answer of the OpenAI API: {body}", where=self.base_url + path
        )

    def _pieces(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> Iterator[bytes]:
        """The body as it arrives.

        The deadline holds for the whole answer, not only between two packets.
        """
        url = self.base_url + path
        if timeout is None:
            seconds = self._timeout
        else:
            seconds = timeout
        late = f"no whole answer within {seconds:g} s"
        headers = self._headers | {"X-Request-Id": f"specserve-{uuid.uuid4().hex[:16]}"}
        with _Deadline(seconds) as deadline:
            try:
                with self._session(self.clock()).request(
                    method,
                    url,
                    json=body,
                    headers=headers,
                    timeout=seconds,
                    verify=self._verify,
                    stream=True,
                ) as response:
                    if response.status_code >= 400:
                        excerpt = next(response.iter_content(BODY_EXCERPT * 4), b"").decode(
                            "utf-8", "replace"
                        )
                        raise EngineRefused(response.status_code, excerpt, where=url)
                    chunked = "chunked" in response.headers.get("Transfer-Encoding", "")
                    yield from response.iter_content(None if chunked else 65536)
                if deadline.passed:
                    raise EngineUnreachable(late, where=url)
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if deadline.passed or isinstance(error, requests.Timeout):
                    raise EngineUnreachable(late, where=url) from None
                raise EngineUnreachable(_reason(error), where=url) from error
            finally:
                self._local.used_at = self.clock()

    def _session(self, now: float) -> requests.Session:
        """This thread's connection, a new one after a rest.

        Proxies of the environment are not for an engine here.
        """
        session = getattr(self._local, "session", None)
        if not isinstance(session, requests.Session):
            session = self._local.session = requests.Session()
            session.trust_env = False
            session.mount("http://", _Adapter())
            session.mount("https://", _Adapter())
        elif now - self._local.used_at > IDLE_SECONDS:
            session.close()
        return session


def _reason(error: BaseException) -> str:
    """The innermost cause in plain words: the wrappers of requests and urllib3 repeat host and
    port.
    """
    seen = error
    while (inner := seen.__cause__ or seen.__context__) is not None:
        seen = inner
    return f"no answer ({getattr(seen, 'strerror', None) or f'{type(seen).__name__}: {seen}'})"
