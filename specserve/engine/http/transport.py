"""HTTP to one engine: every call has a deadline and a bound on what it reads, every failure one of
two classes.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias, TypedDict

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from specserve.errors import ConfigError, ExitCode, SpecserveError
from specserve.log import printable
from specserve.units import MIB

BODY_EXCERPT = 500
"""Characters of a refusal's body that are kept."""

MAX_ANSWER_BYTES = 32 * MIB

IDLE_SECONDS = 2.0
"""A connection that rested longer is not used again. vLLM closes one after 5 s
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE), which is the sidecar's interval as well: a request that meets the
closing is lost, and would look like an engine that is lost."""

AGAIN_SECONDS = 0.1
"""Pause between two attempts to shut the socket of a call that is over its deadline: the connection
may only just be made."""

Json: TypeAlias = "str | float | Sequence[Json] | Mapping[str, Json] | None"
"""What a request may hold."""


class TokenScore(TypedDict):
    """How probable a token was."""

    logprob: float


class Choice(TypedDict, total=False):
    """One completion in an answer, or a piece of it in a stream."""

    index: int
    text: str | None
    message: Mapping[str, str | None] | None
    delta: Mapping[str, str | None] | None
    finish_reason: str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[Mapping[str, TokenScore] | None] | None


class Answer(TypedDict, total=False):
    """The keys of OpenAI's and vLLM's JSON that are read here. Nothing checks their types."""

    choices: list[Choice]
    usage: Mapping[str, int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[Mapping[str, TokenScore] | None] | None
    error: Json
    data: list[Mapping[str, str]]
    version: str


class EngineError(SpecserveError):
    """Raised when a call to the engine brought no usable answer."""

    exit_code = ExitCode.ENGINE_LOST


class EngineUnreachable(EngineError):
    """Raised when there was no answer, it broke off, or it took longer than the deadline."""


class EngineNotListening(EngineUnreachable):
    """Raised when the connection was refused: nobody listens there."""


class EngineRefused(EngineError):
    """Raised when the engine answered with an error status, or with something that is not its API
    (status 200).
    """

    def __init__(
        self, status: int, body: str, *, where: str, retry_after_seconds: float | None = None
    ) -> None:
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        """What its Retry-After says; None without one."""
        self.body = printable(body[:BODY_EXCERPT])
        super().__init__(f"answered {status}: {self.body.strip() or '(empty body)'}", where=where)


class _Deadline:
    """The deadline of one call, from the first byte of the headers to the last of the body.

    Then the socket is shut, which ends whatever reads from it. The timeout of a socket bounds the
    wait for one packet only: an answer of a byte now and then would never end.
    """

    current = threading.local()
    """``call`` is the deadline of the request that this thread sends."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self.sock: socket.socket | None = None
        self._seconds = seconds
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.current.call = self
        threading.Thread(target=self._wait, name="deadline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _wait(self) -> None:
        pause = self._seconds
        while not self._over.wait(pause):
            self.passed = True
            pause = AGAIN_SECONDS
            if self.sock is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # under TLS, too


class _Connection(HTTPConnection):
    """Tells the deadline which socket the request uses."""

    def request(self, *args: Any, **kwargs: Any) -> None:
        super().request(*args, **kwargs)
        _Deadline.current.call.sock = self.sock


class _TlsConnection(_Connection, HTTPSConnection):
    """The same over TLS."""


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class Transport:
    """Calls one base URL. May be shared between threads: each gets its own connection."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: bool = True,
        timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``verify``: whether its certificate is checked.

        ``timeout_seconds`` is for calls without one.
        """
        self.base_url = base_url.rstrip("/")
        self.clock = clock
        self._headers = {}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
            if not api_key.isascii():
                raise ConfigError(
                    "has a character beyond ASCII, which no HTTP header carries",
                    where="the API key",
                    fix="make one with: openssl rand -hex 32",
                )
        self._verify = verify
        self._timeout = timeout_seconds
        self._local = threading.local()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Json] | None = None,
        *,
        timeout: float | None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """One request, read to its end or to the first bound that it breaks."""
        raw = bytearray()
        for piece in self._pieces(method, path, body, timeout):
            raw += piece
            if len(raw) > max_bytes:
                raise self._refused(path, f"more than {max_bytes} bytes")
        return bytes(raw)

    def header(self, path: str, name: str, *, timeout: float | None) -> str | None:
        """A header of the answer to one GET; None when it has none of that name."""
        self.call("GET", path, timeout=timeout)
        value: str | None = self._local.headers.get(name)
        return value

    def json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Json] | None = None,
        *,
        timeout: float | None,
    ) -> Answer:
        """One request whose answer is a JSON object."""
        return self._object(path, self.call(method, path, body, timeout=timeout))

    def events(
        self, path: str, body: Mapping[str, Json], *, timeout: float | None
    ) -> Iterator[Answer]:
        """The JSON objects of a server-sent event stream, up to ``[DONE]``."""
        rest = b""
        for piece in self._pieces("POST", path, body, timeout):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield self._object(path, data)
            if len(rest) > MAX_ANSWER_BYTES:
                raise self._refused(path, f"a line of more than {MAX_ANSWER_BYTES} bytes")
        raise EngineUnreachable("the stream ended before it was done", where=self.base_url + path)

    def _object(self, path: str, raw: bytes) -> Answer:
        answer: Answer | None = None
        with contextlib.suppress(ValueError):
            answer = json.loads(raw)
        if not isinstance(answer, dict):
            raise self.unexpected(path, raw[:BODY_EXCERPT].decode("utf-8", "replace"))
        return answer

    def unexpected(self, path: str, body: object) -> EngineRefused:
        """The error for an answer that is not what this path returns."""
        return self._refused(path, f"not an answer of the OpenAI API: {body}")

    def _refused(self, path: str, why: str) -> EngineRefused:
        return EngineRefused(200, why, where=self.base_url + path)

    def _pieces(
        self, method: str, path: str, body: Mapping[str, Json] | None, timeout: float | None
    ) -> Iterator[bytes]:
        """The body as it arrives.

        The deadline holds for the whole answer, not only between two packets.
        """
        url = self.base_url + path
        if timeout is None:
            timeout = self._timeout
        late = f"no complete answer within {timeout:g} s"
        headers = self._headers | {"X-Request-Id": f"specserve-{uuid.uuid4().hex[:16]}"}
        with _Deadline(timeout) as deadline:
            try:
                with self._session().request(
                    method,
                    url,
                    json=body,
                    headers=headers,
                    timeout=timeout,
                    verify=self._verify,
                    stream=True,
                    # An engine sends nobody elsewhere, and numbers from elsewhere are not its own.
                    allow_redirects=False,
                ) as response:
                    if response.is_redirect:
                        to = response.headers.get("Location", "")[:BODY_EXCERPT]
                        raise EngineRefused(
                            response.status_code,
                            f"a redirect to {to!r}, which is not followed",
                            where=url,
                        )
                    self._local.headers = response.headers
                    if response.status_code >= 400:
                        excerpt = next(response.iter_content(BODY_EXCERPT * 4), b"")
                        text = excerpt.decode("utf-8", "replace")
                        after = _seconds(response.headers.get("Retry-After"))
                        raise EngineRefused(
                            response.status_code, text, where=url, retry_after_seconds=after
                        )
                    size: int | None = 65536
                    if "chunked" in response.headers.get("Transfer-Encoding", ""):
                        size = None  # each chunk as it comes
                    yield from response.iter_content(size)
                if deadline.passed:
                    raise EngineUnreachable(late, where=url)
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                cause = _innermost(error)
                # The wait for a packet has the same limit, and on a busy machine may end first.
                if deadline.passed or (isinstance(cause, TimeoutError) and cause.errno is None):
                    raise EngineUnreachable(late, where=url) from None
                reason = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
                kind = EngineUnreachable
                if isinstance(cause, ConnectionRefusedError):
                    kind = EngineNotListening
                raise kind(f"no answer ({reason})", where=url) from error
            finally:
                self._local.used_at = self.clock()

    def _session(self) -> requests.Session:
        """This thread's connection, a new one after a rest.

        The proxies that the environment names are not used: the engine is ours.
        """
        session = getattr(self._local, "session", None)
        if not isinstance(session, requests.Session):
            session = self._local.session = requests.Session()
            session.trust_env = False
            adapter = HTTPAdapter()
            adapter.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
            session.mount("http://", adapter)
            session.mount("https://", adapter)
        elif self.clock() - self._local.used_at > IDLE_SECONDS:
            session.close()
        return session


def _seconds(retry_after: str | None) -> float | None:
    """The seconds of a Retry-After; None for a date, which no engine sends, and for nonsense.

    >>> _seconds("2"), _seconds("Tue, 1 Dec 2026 05:00:00 GMT"), _seconds(None)
    (2.0, None, None)
    """
    if retry_after is None or not re.fullmatch(r"\d{1,6}", retry_after.strip(), re.ASCII):
        return None
    return float(retry_after)


def _innermost(error: BaseException) -> BaseException:
    """What caused it all: the wrappers of requests and urllib3 repeat host and port."""
    inner = error.__cause__ or error.__context__
    if inner is None:
        return error
    return _innermost(inner)
