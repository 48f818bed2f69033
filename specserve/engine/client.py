"""A small blocking client of the engine's HTTP API. Every call has a deadline and a bound on what it reads."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests
import urllib3

from specserve.errors import ExitCode, SpecserveError

BODY_EXCERPT = 500
"""Characters of a refusal's body that are kept."""
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class EngineError(SpecserveError):
    """Raised when a call to the engine brought no usable answer."""

    exit_code = ExitCode.ENGINE_LOST


class EngineUnreachable(EngineError):
    """Raised when nothing answered, the answer broke off, or it took longer than the deadline."""


class EngineRefused(EngineError):
    """Raised when the engine answered with an error status, or with something that is not its API."""

    def __init__(self, status: int, body: str, *, where: str) -> None:
        self.status = status
        self.body = body[:BODY_EXCERPT]
        super().__init__(f"answered {status}: {self.body.strip() or '(empty body)'}", where=where)


@dataclass(frozen=True)
class Completion:
    """One finished completion."""

    text: str
    finish_reason: str | None
    completion_tokens: int | None
    latency_seconds: float
    token_ids: tuple[int, ...] | None = None
    """The generated tokens; None when the engine did not list them."""
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[Mapping[str, Mapping[str, Any]] | None, ...] | None = None
    """Per prompt token what ``prompt_logprobs`` asked for: token id -> logprob, rank. The first is None."""


@dataclass(frozen=True)
class Chunk:
    """One streamed piece. Pieces without text are dropped, except the last, which closes the stream."""

    text: str
    seconds: float
    """Since the request was sent."""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    """Of the whole answer; known only in the last chunk."""


@dataclass(frozen=True)
class Streamed:
    """A streamed answer, put together."""

    text: str
    finish_reason: str | None
    completion_tokens: int | None
    latency_seconds: float
    ttft_seconds: float | None
    """Request sent to first non-empty chunk; None when no text came."""

    @property
    def tpot_seconds(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1); None for at most one token.

        >>> Streamed("abc", "stop", 5, latency_seconds=1.0, ttft_seconds=0.2).tpot_seconds
        0.2
        """
        if self.ttft_seconds is None or self.completion_tokens is None or self.completion_tokens <= 1:
            return None
        return (self.latency_seconds - self.ttft_seconds) / (self.completion_tokens - 1)


def collect(chunks: Iterable[Chunk]) -> Streamed:
    """Drain a stream. The latency is the time of its last chunk."""
    text: list[str] = []
    ttft: float | None = None
    last = Chunk("", 0.0)
    for last in chunks:
        if last.text and ttft is None:
            ttft = last.seconds
        text.append(last.text)
    return Streamed("".join(text), last.finish_reason, last.completion_tokens, last.seconds, ttft)


class EngineClient:
    """Calls one engine. May be shared between threads: each gets its own connection."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: bool | str = True,
        model: str | None = None,
        timeout_seconds: float = 30.0,
        max_bytes: int = 32 * 1024**2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``verify`` as in requests: False, or the path of a CA bundle. ``model`` None asks /v1/models once."""
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._verify, self._model = verify, model
        self._timeout, self._max_bytes, self._clock = timeout_seconds, max_bytes, clock
        self._local = threading.local()

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether /health answers 200. It does so even while generation hangs: never take it for readiness."""
        try:
            self._call("GET", "/health", None, timeout)
        except EngineRefused:
            return False
        return True

    def models(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """The served model names."""
        body = self._json("GET", "/v1/models", None, timeout)
        try:
            return tuple(str(entry["id"]) for entry in body["data"])
        except (KeyError, TypeError) as error:
            raise self._strange("/v1/models", body) from error

    def complete(
        self, prompt: Prompt, *, max_tokens: int = 16, timeout: float | None = None, **sampling: Any
    ) -> Completion:
        """POST /v1/completions. ``prompt`` is text or token ids; ``sampling`` goes into the body as it is."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        return self._completion("/v1/completions", {"prompt": given}, max_tokens, timeout, sampling)

    def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 16, timeout: float | None = None, **sampling: Any
    ) -> Completion:
        """POST /v1/chat/completions. A model without a chat template answers 400, raised as EngineRefused."""
        given = {"messages": list(messages)}
        return self._completion("/v1/chat/completions", given, max_tokens, timeout, sampling)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """Stream a completion, or a chat when ``messages`` are given. ``timeout`` bounds the whole answer."""
        chat = messages is not None
        path = "/v1/chat/completions" if chat else "/v1/completions"
        given = {"messages": list(messages or ())} if chat else {"prompt": prompt}
        body = self._body(given, max_tokens, timeout, sampling)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started = self._clock()
        finish: str | None = None
        tokens: int | None = None
        for event in self._events(path, body, timeout):
            if "error" in event:
                raise EngineRefused(200, json.dumps(event["error"]), where=self.base_url + path)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                if text := _text(choice):
                    yield Chunk(text, self._clock() - started)
        yield Chunk("", self._clock() - started, finish, tokens)

    def metrics_text(self, *, timeout: float | None = None, max_bytes: int | None = None) -> str:
        """The exposition text of /metrics."""
        return self._call("GET", "/metrics", None, timeout, max_bytes).decode("utf-8", "replace")

    def _completion(
        self, path: str, given: dict[str, Any], max_tokens: int, timeout: float | None, sampling: Mapping[str, Any]
    ) -> Completion:
        body = self._body(given, max_tokens, timeout, sampling)
        started = self._clock()
        answer = self._json("POST", path, body, timeout)
        latency = self._clock() - started
        try:
            choice = answer["choices"][0]
            ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            logprobs = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
            return Completion(
                text=_text(choice),
                finish_reason=choice.get("finish_reason"),
                completion_tokens=(answer.get("usage") or {}).get("completion_tokens"),
                latency_seconds=latency,
                token_ids=None if choice.get("token_ids") is None else tuple(choice["token_ids"]),
                prompt_token_ids=None if ids is None else tuple(ids),
                prompt_logprobs=None if logprobs is None else tuple(logprobs),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._strange(path, answer) from error

    def _body(
        self, given: dict[str, Any], max_tokens: int, timeout: float | None, sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self._model is None:
            names = self.models(timeout=timeout)
            if not names:
                raise EngineRefused(200, "no model is served", where=f"{self.base_url}/v1/models")
            self._model = names[0]
        return {"model": self._model, **given, "max_tokens": max_tokens, **sampling}

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> dict[str, Any]:
        raw = self._call(method, path, body, timeout)
        try:
            parsed = json.loads(raw)
        except ValueError as error:
            raise self._strange(path, raw[:BODY_EXCERPT].decode("utf-8", "replace")) from error
        if not isinstance(parsed, dict):
            raise self._strange(path, parsed)
        return parsed

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
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

    def _events(self, path: str, body: Mapping[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream, up to ``[DONE]``."""
        rest = b""
        for piece in self._pieces("POST", path, body, timeout):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    try:
                        yield json.loads(data)
                    except ValueError as error:
                        raise self._strange(path, data.decode("utf-8", "replace")) from error
            if len(rest) > self._max_bytes:
                raise EngineRefused(200, f"a line of more than {self._max_bytes} bytes", where=self.base_url + path)

    def _pieces(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> Iterator[bytes]:
        """The body as it arrives. The deadline holds for the whole answer, not only between two packets."""
        url = self.base_url + path
        seconds = self._timeout if timeout is None else timeout
        deadline = self._clock() + seconds
        headers = self._headers | {"X-Request-Id": f"specserve-{uuid.uuid4().hex[:16]}"}
        try:
            with self._session().request(
                method, url, json=body, headers=headers, timeout=seconds, verify=self._verify, stream=True
            ) as response:
                if response.status_code >= 400:
                    excerpt = next(response.iter_content(BODY_EXCERPT * 4), b"").decode("utf-8", "replace")
                    raise EngineRefused(response.status_code, excerpt, where=url)
                chunked = "chunked" in response.headers.get("Transfer-Encoding", "")
                for piece in response.iter_content(None if chunked else 65536):
                    if self._clock() > deadline:
                        raise EngineUnreachable(f"no whole answer within {seconds:g} s", where=url)
                    yield piece
        except requests.Timeout as error:
            raise EngineUnreachable(f"no answer within {seconds:g} s", where=url) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise EngineUnreachable(_reason(error), where=url) from error

    def _session(self) -> requests.Session:
        """This thread's connection. Proxies of the environment are not for an engine beside us."""
        session = getattr(self._local, "session", None)
        if not isinstance(session, requests.Session):
            session = self._local.session = requests.Session()
            session.trust_env = False
        return session

    def _strange(self, path: str, body: object) -> EngineRefused:
        return EngineRefused(200, f"not an answer of the OpenAI API: {body}", where=self.base_url + path)


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, whatever the endpoint; a reasoning model's thoughts count as text."""
    part = choice.get("delta") or choice.get("message")
    if part is None:
        return str(choice.get("text") or "")
    return "".join(str(part.get(key) or "") for key in ("reasoning", "reasoning_content", "content"))


def _reason(error: BaseException) -> str:
    """The innermost cause in plain words: the wrappers of requests and urllib3 repeat host and port."""
    seen = error
    while (inner := seen.__cause__ or seen.__context__) is not None:
        seen = inner
    return f"no answer ({type(seen).__name__}: {seen})"
