"""A small blocking client of the engine's HTTP API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import urllib3

from specserve.engine.http.transport import EngineError, EngineRefused, EngineUnreachable, Transport
from specserve.units import MIB

if TYPE_CHECKING:
    from specserve.config.schema import Settings

__all__ = [
    "Chunk",
    "Completion",
    "EngineClient",
    "EngineError",
    "EngineRefused",
    "EngineUnreachable",
    "Streamed",
]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Completion:
    """One finished completion."""

    text: str
    finish_reason: str | None
    completion_tokens: int | None
    """Of the whole answer: for several prompts in one request, of all of them."""
    latency_seconds: float
    token_ids: tuple[int, ...] | None = None
    """The generated tokens; None unless ``return_token_ids`` was asked for and is known."""
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[Mapping[str, Mapping[str, Any]] | None, ...] | None = None
    """Per prompt token what ``prompt_logprobs`` asked for: token id -> logprob, rank.

    The first is None.
    """
    thoughts: str = ""
    """How ``text`` begins where a reasoning parser told thoughts and answer apart."""


@dataclass(frozen=True)
class Chunk:
    """One streamed piece.

    Pieces without text are dropped, except the last, which closes the stream.
    """

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
        if (
            self.ttft_seconds is None
            or self.completion_tokens is None
            or self.completion_tokens <= 1
        ):
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
    """Calls one engine. May be shared between threads.

    ``sampling`` everywhere goes into the request body as it is; ``timeout`` bounds the whole
    answer.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: bool | str = True,
        model: str | None = None,
        timeout_seconds: float = 30.0,
        max_bytes: int = 32 * MIB,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``verify`` as in requests: False, or the path of a CA bundle.

        ``model`` None asks /v1/models once.
        """
        self._http = Transport(
            base_url,
            api_key,
            verify=verify,
            timeout_seconds=timeout_seconds,
            max_bytes=max_bytes,
            clock=clock,
        )
        self._model = model

    @property
    def base_url(self) -> str:
        """Without a trailing slash."""
        return self._http.base_url

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether /health answers 200.

        It does so even while generation hangs: never take it for readiness.
        """
        try:
            self._http.call("GET", "/health", timeout=timeout)
        except EngineRefused:
            return False
        return True

    def models(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """The served model names."""
        body = self._http.json("GET", "/v1/models", timeout=timeout)
        try:
            return tuple(str(entry["id"]) for entry in body["data"])
        except (KeyError, TypeError) as error:
            raise self._http.strange("/v1/models", body) from error

    def complete(
        self, prompt: Prompt, *, max_tokens: int = 16, timeout: float | None = None, **sampling: Any
    ) -> Completion:
        """POST /v1/completions with one prompt, text or token ids."""
        given = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        return self._choices(_COMPLETIONS, given, max_tokens, timeout, sampling)[0]

    def complete_each(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Any,
    ) -> tuple[Completion, ...]:
        """POST /v1/completions with several prompts in one request; the answers in their order."""
        answers = self._choices(
            _COMPLETIONS, {"prompt": [list(p) for p in prompts]}, max_tokens, timeout, sampling
        )
        if len(answers) != len(prompts):
            raise self._http.strange(
                _COMPLETIONS, f"{len(answers)} choices for {len(prompts)} prompts"
            )
        return answers

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Completion:
        """POST /v1/chat/completions.

        A model without a chat template answers 400, raised as EngineRefused.
        """
        return self._choices(_CHAT, {"messages": list(messages)}, max_tokens, timeout, sampling)[0]

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """Stream a completion, or a chat when ``messages`` are given."""
        if messages is None:
            path = _COMPLETIONS
            given: dict[str, Any] = {"prompt": prompt}
        else:
            path = _CHAT
            given = {"messages": list(messages)}
        body = self._body(given, max_tokens, timeout, sampling)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        clock = self._http.clock
        started = clock()
        finish: str | None = None
        tokens: int | None = None
        for event in self._http.events(path, body, timeout=timeout):
            if "error" in event:
                raise EngineRefused(200, json.dumps(event["error"]), where=self.base_url + path)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                if text := _text(choice):
                    yield Chunk(text, clock() - started)
        yield Chunk("", clock() - started, finish, tokens)

    def metrics_text(self, *, timeout: float | None = None, max_bytes: int | None = None) -> str:
        """The exposition text of /metrics."""
        return self._http.call("GET", "/metrics", timeout=timeout, max_bytes=max_bytes).decode(
            "utf-8", "replace"
        )

    def _choices(
        self,
        path: str,
        given: dict[str, Any],
        max_tokens: int,
        timeout: float | None,
        sampling: Mapping[str, Any],
    ) -> tuple[Completion, ...]:
        """The choices of one answer, at least one, in the order of the prompts."""
        body = self._body(given, max_tokens, timeout, sampling)
        started = self._http.clock()
        answer = self._http.json("POST", path, body, timeout=timeout)
        latency = self._http.clock() - started
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
            found = tuple(_completion(answer, choice, latency) for choice in choices)
        except (KeyError, TypeError, AttributeError) as error:
            raise self._http.strange(path, answer) from error
        if not found:
            raise self._http.strange(path, answer)
        return found

    def _body(
        self,
        given: dict[str, Any],
        max_tokens: int,
        timeout: float | None,
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        if self._model is None:
            names = self.models(timeout=timeout)
            if not names:
                raise EngineRefused(200, "no model is served", where=f"{self.base_url}/v1/models")
            self._model = names[0]
        return {"model": self._model, **given, "max_tokens": max_tokens, **sampling}


def _completion(answer: Mapping[str, Any], choice: Mapping[str, Any], latency: float) -> Completion:
    """Completions say the prompt's part inside each choice, chats beside the choices."""
    ids, prompt_ids, logprobs = (
        choice.get("token_ids"),
        choice.get("prompt_token_ids") or answer.get("prompt_token_ids"),
        choice.get("prompt_logprobs") or answer.get("prompt_logprobs"),
    )
    return Completion(
        text=_text(choice),
        finish_reason=choice.get("finish_reason"),
        completion_tokens=(answer.get("usage") or {}).get("completion_tokens"),
        latency_seconds=latency,
        token_ids=None if ids is None else tuple(ids),
        prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
        prompt_logprobs=None if logprobs is None else tuple(logprobs),
        thoughts=_text(choice, _THOUGHTS) if "message" in choice else "",
    )


_THOUGHTS = ("reasoning", "reasoning_content")


def _text(choice: Mapping[str, Any], keys: tuple[str, ...] = (*_THOUGHTS, "content")) -> str:
    """The text of a choice, whatever the endpoint; a reasoning model's thoughts count as text."""
    part = choice.get("delta") or choice.get("message")
    if part is None:
        return str(choice.get("text") or "")
    return "".join(str(part.get(key) or "") for key in keys)


def own_client(
    settings: Settings, url: str | None = None, *, key: str | None = None
) -> EngineClient:
    """A client of the engine that this config starts; ``url`` where it is not at the config's own
    address.

    The certificate is not checked at the config's own address and on loopback, where the name in it
    is another; anywhere else it is. An engine at another address is asked for its model, unless the
    config says the name that it serves. ``key`` None is the config's.
    """
    if key is None and settings.server.api_key is not None:
        key = settings.server.api_key.get_secret_value()
    model = settings.server.served_model_name
    if url is None:
        url = settings.base_url
        model = settings.served_model_name
    verify = not certificate_is_ours(settings, url)
    if not verify and url.startswith("https:"):
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return EngineClient(url, key, verify=verify, model=model)


def certificate_is_ours(settings: Settings, url: str) -> bool:
    """Whether the engine of this config shows its certificate at this address.

    >>> from specserve.config.schema import Settings
    >>> settings = Settings(
    ...     models={"target_model": {"path": "m"}}, speculative_decoding={"method": "ngram"}
    ... )
    >>> certificate_is_ours(settings, "https://localhost:1")
    True
    >>> certificate_is_ours(settings, "https://10.0.0.5:8000")
    False
    """
    return url == settings.base_url or urlsplit(url).hostname in LOOPBACK
