"""A small blocking client of the engine's HTTP API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import urllib3

from specserve.engine.command.environment import RUN_HEADER
from specserve.engine.http.metrics import MAX_BYTES
from specserve.engine.http.transport import (
    Answer,
    Choice,
    EngineError,
    EngineNotListening,
    EngineRefused,
    EngineUnreachable,
    Json,
    TokenScore,
    Transport,
)

if TYPE_CHECKING:
    from specserve.config.schema import Settings

__all__ = [
    "Chunk",
    "Completion",
    "EngineClient",
    "EngineError",
    "EngineNotListening",
    "EngineRefused",
    "EngineUnreachable",
    "Streamed",
]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Prompt = str | Sequence[int]
Message = Mapping[str, Json]
T = TypeVar("T")
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Completion:
    """One finished completion."""

    text: str
    finish_reason: str | None
    completion_tokens: int | None
    """Tokens of the whole answer: of all prompts where a request has several."""
    token_ids: tuple[int, ...] | None = None
    """The generated tokens; None unless ``return_token_ids`` was asked for and is known."""
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[Mapping[str, TokenScore] | None, ...] | None = None
    """Per prompt token what ``prompt_logprobs`` asked for: token id -> logprob, rank.

    The first is None.
    """
    thoughts: str = ""
    """The beginning of ``text`` that a reasoning parser took for thoughts."""


@dataclass(frozen=True)
class Chunk:
    """One piece of a stream.

    Pieces without text are dropped, except the last, which closes the stream.
    """

    text: str
    seconds: float
    """Since the request was sent."""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    """Tokens of the whole answer; known only in the last chunk."""


@dataclass(frozen=True)
class Streamed:
    """A streamed answer, put together."""

    text: str
    completion_tokens: int | None


def collect(chunks: Iterable[Chunk]) -> Streamed:
    """Read a stream to its end."""
    text = ""
    tokens = None
    for chunk in chunks:
        text += chunk.text
        tokens = chunk.completion_tokens
    return Streamed(text, tokens)


class EngineClient:
    """Calls one engine. May be shared between threads.

    ``sampling`` goes into the request body as it is; ``timeout`` bounds the whole answer.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: bool = True,
        model: str | None = None,
        timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``verify``: whether its certificate is checked.

        ``model`` None asks /v1/models once.
        """
        self._http = Transport(
            base_url, api_key, verify=verify, timeout_seconds=timeout_seconds, clock=clock
        )
        self._model = model

    @property
    def base_url(self) -> str:
        """Without a trailing slash."""
        return self._http.base_url

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether /health returns 200.

        It does so even while generation hangs: never take it for readiness.
        """
        try:
            self._http.call("GET", "/health", timeout=timeout)
        except EngineRefused:
            return False
        return True

    def run_id(self, *, timeout: float | None = None) -> str | None:
        """Which start of an engine answers; None when it does not say."""
        return self._http.header("/health", RUN_HEADER, timeout=timeout)

    def models(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """The served model names."""
        body = self._http.json("GET", "/v1/models", timeout=timeout)
        try:
            return tuple(str(entry["id"]) for entry in body["data"])
        except (KeyError, TypeError) as error:
            raise self._http.unexpected("/v1/models", body) from error

    def owner(self, *, timeout: float | None = None) -> str | None:
        """Which program says that it owns the served model (``vllm``); None when none does."""
        body = self._http.json("GET", "/v1/models", timeout=timeout)
        try:
            return body["data"][0].get("owned_by")
        except (KeyError, IndexError, TypeError, AttributeError):
            return None

    def clock_seconds(self, *, timeout: float | None = None) -> float | None:
        """The Unix time on the server's own clock; None when it does not say."""
        said = self._http.header("/health", "Date", timeout=timeout)
        if said is None:
            return None
        try:
            return parsedate_to_datetime(said).timestamp()
        except ValueError:
            return None

    def version(self, *, timeout: float | None = None) -> str | None:
        """What the engine calls its version; None when it does not say."""
        return self._http.json("GET", "/version", timeout=timeout).get("version")

    def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Json,
    ) -> Completion:
        """POST /v1/completions with one prompt, text or token ids."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, **sampling}
        return self._choices(_COMPLETIONS, asked, timeout)[0]

    def complete_each(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Json,
    ) -> tuple[Completion, ...]:
        """POST /v1/completions with several prompts in one request; the answers in their order."""
        asked = {"prompt": prompts, "max_tokens": max_tokens, **sampling}
        answers = self._choices(_COMPLETIONS, asked, timeout)
        if len(answers) != len(prompts):
            counts = f"{len(answers)} choices for {len(prompts)} prompts"
            raise self._http.unexpected(_COMPLETIONS, counts)
        return answers

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Json,
    ) -> Completion:
        """POST /v1/chat/completions.

        For a model without a chat template vLLM returns 400, raised as EngineRefused.
        """
        asked = {"messages": messages, "max_tokens": max_tokens, **sampling}
        return self._choices(_CHAT, asked, timeout)[0]

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Json,
    ) -> Iterator[Chunk]:
        """Stream a completion, or a chat when ``messages`` are given."""
        asked: dict[str, Json] = {"max_tokens": max_tokens, **sampling, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if messages is None:
            path = _COMPLETIONS
            asked["prompt"] = prompt
        else:
            path = _CHAT
            asked["messages"] = messages
        body = self._with_model(asked, timeout)
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
                text = _text(choice)
                if text:
                    yield Chunk(text, clock() - started)
        yield Chunk("", clock() - started, finish, tokens)

    def post(self, path: str, body: Mapping[str, Json], *, timeout: float | None = None) -> Answer:
        """Any call of the API, and its JSON object as it came; the body's model is filled in where
        it names none."""
        return self._http.json("POST", path, self._with_model(body, timeout), timeout=timeout)

    def metrics_text(self, *, timeout: float | None = None, max_bytes: int = MAX_BYTES) -> str:
        """The exposition text of /metrics."""
        raw = self._http.call("GET", "/metrics", timeout=timeout, max_bytes=max_bytes)
        return raw.decode("utf-8", "replace")

    def _choices(
        self, path: str, asked: Mapping[str, Json], timeout: float | None
    ) -> tuple[Completion, ...]:
        """The choices of one answer, at least one, in the order of the prompts."""
        body = self._with_model(asked, timeout)
        answer = self._http.json("POST", path, body, timeout=timeout)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
            found = tuple(_completion(answer, choice) for choice in choices)
        except (KeyError, TypeError, AttributeError) as error:
            raise self._http.unexpected(path, answer) from error
        if not found:
            raise self._http.unexpected(path, answer)
        return found

    def _with_model(self, asked: Mapping[str, Json], timeout: float | None) -> dict[str, Json]:
        if self._model is None:
            names = self.models(timeout=timeout)
            if not names:
                raise EngineRefused(200, "no model is served", where=f"{self.base_url}/v1/models")
            self._model = names[0]
        return {"model": self._model, **asked}


def _completion(answer: Answer, choice: Choice) -> Completion:
    """Completions have the prompt's part inside each choice, chats beside the choices."""
    return Completion(
        text=_text(choice),
        finish_reason=choice.get("finish_reason"),
        completion_tokens=(answer.get("usage") or {}).get("completion_tokens"),
        token_ids=_tuple(choice.get("token_ids")),
        prompt_token_ids=_tuple(choice.get("prompt_token_ids") or answer.get("prompt_token_ids")),
        prompt_logprobs=_tuple(choice.get("prompt_logprobs") or answer.get("prompt_logprobs")),
        thoughts=_message(choice, _THOUGHTS),
    )


def _tuple(items: Iterable[T] | None) -> tuple[T, ...] | None:
    if items is None:
        return None
    return tuple(items)


_THOUGHTS = ("reasoning", "reasoning_content")


def _text(choice: Choice) -> str:
    """The text of a choice, whatever the endpoint; a reasoning model's thoughts count as text."""
    return _message(choice, (*_THOUGHTS, "content")) or str(choice.get("text") or "")


def _message(choice: Choice, keys: Iterable[str]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return "".join(str(part.get(key) or "") for key in keys)


def own_client(
    settings: Settings, url: str | None = None, *, key: str | None = None
) -> EngineClient:
    """A client of the engine that this config starts. ``url`` None is the address in the config.

    The certificate is checked unless the address is the config's own or a loopback address: the
    certificate is made for the name that clients use, not for those. An engine at another address
    is asked for its model, unless the config has the name that it serves. ``key`` None takes the
    config's.
    """
    if key is None:
        key = settings.server.own_key
    model = None
    if url is None or settings.server.served_model_name is not None:
        model = settings.served_model_name
    if url is None:
        url = settings.base_url
    verify = not certificate_is_ours(settings, url)
    if not verify and url.startswith("https:"):
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return EngineClient(url, key, verify=verify, model=model)


def certificate_is_ours(settings: Settings, url: str) -> bool:
    """Whether the certificate at this address is the one of the config's own engine.

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
