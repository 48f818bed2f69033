"""The go-live list as a program: is this server fit for traffic? Every check says what it saw."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import requests

from specserve.config.schema import Settings
from specserve.engine.canary.corruption import is_other_script, looping, unprintable_reason
from specserve.engine.http import metrics
from specserve.engine.http.client import (
    Completion,
    EngineClient,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    collect,
)
from specserve.engine.http.transport import Json
from specserve.units import percent

Status = Literal["PASS", "FAIL", "SKIP"]

PROMPT = "List the numbers from one to ten in words, separated by commas: one, two, three,"
SENTENCE = "The quick brown fox jumps over the lazy dog. "
REPETITIVE = "Repeat this line exactly, again and again:\n" + SENTENCE * 4
BURST = 8
MIN_DRAFT_TOKENS = 50
"""Fewer drafted tokens than this say nothing about acceptance."""
DRAIN_SECONDS = 120.0
"""Longest time for the answer during which the server is stopped."""


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    name: str
    status: Status
    message: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Subject:
    """The server under test."""

    client: EngineClient
    settings: Settings | None
    """None when only a URL is known: checks that need the configuration are skipped."""
    timeout_seconds: float = 60.0
    has_key: bool = False
    runs_seconds: float = 0.1
    """An answer that is complete this soon after its first token cannot be interrupted."""


class _Failed(Exception):
    """Raised by a check with what it saw."""


class _Skipped(Exception):
    """Raised by a check that does not apply, with the reason."""


def run(subject: Subject, told: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
    """Every check in order; none stops the others.

    Where no OpenAI API answers, nothing more is asked.
    """
    out = []
    answers = _answers(subject)
    for name, check in CHECKS:
        if not answers and check is not _models:
            check = _not_asked  # noqa: PLW2901
        outcome = _one(name, check, subject)
        told(outcome)
        out.append(outcome)
    return out


def _one(name: str, check: Callable[[Subject], str], subject: Subject) -> Outcome:
    began = time.monotonic()
    status: Status = "PASS"
    try:
        message = check(subject)
    except _Failed as failed:
        status, message = "FAIL", str(failed)
    except _Skipped as skipped:
        status, message = "SKIP", str(skipped)
    except (EngineError, metrics.MetricsError, requests.RequestException) as error:
        status, message = "FAIL", _first_line(error)
    return Outcome(name, status, message, time.monotonic() - began)


def _answers(subject: Subject) -> bool:
    try:
        subject.client.models(timeout=subject.timeout_seconds)
    except EngineUnreachable:
        return False
    except EngineRefused as refused:
        return refused.status != 404
    return True


def _not_asked(_: Subject) -> str:
    raise _Skipped("no OpenAI API answers")


def _complete(
    subject: Subject, prompt: str = PROMPT, *, temperature: float = 0.0, **sampling: Any
) -> Completion:
    """A completion in one piece, greedy unless told otherwise."""
    return subject.client.complete(
        prompt, temperature=temperature, timeout=subject.timeout_seconds, **sampling
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _models(subject: Subject) -> str:
    names = subject.client.models(timeout=subject.timeout_seconds)
    if not names:
        raise _Failed("/v1/models lists nothing")
    if subject.settings:
        missing = [name for name in subject.settings.served_model_names if name not in names]
        if missing:
            raise _Failed(f"/v1/models lists {', '.join(names)}; must list {', '.join(missing)}")
    return f"serves {', '.join(names)}"


def _coherent(text: str, tokens: int | None) -> str:
    """What is wrong with a text, by signs that no model in order shows on these prompts."""
    if not text.strip():
        raise _Failed("the answer is empty")
    reason, loop = unprintable_reason(text), looping(text)
    if reason:
        raise _Failed(f"the answer is not text: {reason}: {text[:60]!r}")
    if loop:
        raise _Failed(f"the answer loops on {loop!r}")
    return f"{tokens} tokens: {text.strip()[:60]!r}"


def _completion(subject: Subject) -> str:
    answer = _complete(subject, max_tokens=32)
    if is_other_script(answer.text):
        raise _Failed(f"the answer to an English prompt is in another script: {answer.text[:60]!r}")
    return _coherent(answer.text, answer.completion_tokens)


def _chat(subject: Subject) -> str:
    try:
        answer = subject.client.chat(
            [{"role": "user", "content": "Say hello."}],
            max_tokens=32,
            temperature=0.0,
            timeout=subject.timeout_seconds,
        )
    except EngineRefused as refused:
        if "chat template" in str(refused):
            raise _Skipped("the model has no chat template") from None
        raise
    return _coherent(answer.text, answer.completion_tokens)


SCHEMA: Json = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
"""So small that any model ends it in time."""


def structured(subject: Subject) -> Outcome:
    """The check of an answer under a JSON Schema, for the benchmark."""
    return _one("structured", _structured, subject)


def _structured(subject: Subject) -> str:
    """An answer under a JSON Schema obeys it.

    Drafts have broken this before (vllm-project/vllm#44006, #46118).
    """
    shape: Json = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    question = [{"role": "user", "content": "Is water wet? Answer as JSON."}]
    try:
        answer = subject.client.chat(
            question,
            max_tokens=64,
            temperature=0.0,
            response_format=shape,
            timeout=subject.timeout_seconds,
        )
    except EngineRefused as refused:
        if refused.status == 400:
            reason = _first_line(refused)[:80]
            raise _Skipped(f"the server takes no JSON Schema: {reason}") from None
        raise
    text = answer.text.removeprefix(answer.thoughts)  # a grammar begins where the thoughts end
    if not text and answer.thoughts and answer.finish_reason == "length":
        raise _Skipped("the model was still thinking after 64 tokens")
    try:
        value = json.loads(text)
    except ValueError:
        raise _Failed(f"asked for JSON, got {text[:60]!r}") from None
    if (
        not isinstance(value, dict)
        or value.keys() != {"answer"}
        or value["answer"] not in ("yes", "no")
    ):
        raise _Failed(f"the JSON does not obey its schema: {text[:60]!r}")
    return f"obeys its schema: {text.strip()!r}"


def _streaming(subject: Subject) -> str:
    """Chunk by chunk, and together what the same request gives in one piece.

    Two right answers may part at a near-tie, so a different text fails only when it parts at once.
    """
    whole = _complete(subject, max_tokens=32)
    chunks = list(
        subject.client.stream(
            PROMPT, max_tokens=32, temperature=0.0, timeout=subject.timeout_seconds
        )
    )
    pieces = [c for c in chunks if c.text]
    streamed = collect(chunks)
    if len(pieces) < 2 and (whole.completion_tokens or 0) > 8:
        raise _Failed(
            f"{whole.completion_tokens} tokens came in {len(pieces)} chunk; must come one by one"
        )
    if streamed.text[:8] != whole.text[:8]:
        raise _Failed(
            f"streamed {streamed.text[:40]!r}, in one piece {whole.text[:40]!r}; must be equal"
        )
    same = "the same start as"
    if streamed.text == whole.text:
        same = "equal to"
    return f"{len(pieces)} chunks, {same} the answer in one piece"


def _max_tokens(subject: Subject) -> str:
    answer = _complete(subject, max_tokens=5)
    if answer.completion_tokens is None or answer.completion_tokens > 5:
        raise _Failed(f"max_tokens 5 gave {answer.completion_tokens} tokens")
    if answer.completion_tokens == 5 and answer.finish_reason != "length":
        raise _Failed(
            f"cut at max_tokens with finish_reason {answer.finish_reason!r}; must be 'length'"
        )
    return f"{answer.completion_tokens} tokens, finish_reason {answer.finish_reason}"


def _stop(subject: Subject) -> str:
    plain = _complete(subject, max_tokens=32)
    word = plain.text[len(plain.text) // 2 :][:3]
    if len(word) < 3:
        raise _Skipped("the answer is too short to be stopped in its middle")
    answer = _complete(subject, max_tokens=32, stop=[word])
    if word in answer.text:
        raise _Failed(f"stop {word!r} stands in the answer")
    if len(answer.text) >= len(plain.text):
        raise _Failed(f"stop {word!r} did not end the answer")
    return f"stopped at {word!r}, finish_reason {answer.finish_reason}"


@contextmanager
def _threads(number: int) -> Iterator[futures.ThreadPoolExecutor]:
    """A pool that an interruption does not wait for: the server may hang until it is ended."""
    pool = futures.ThreadPoolExecutor(number)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _burst(subject: Subject) -> str:
    def ask(i: int) -> str | None:
        try:
            answer = _complete(subject, f"{PROMPT} ({i})", max_tokens=16, temperature=0.7, seed=i)
        except EngineError as error:
            return _first_line(error)
        if not answer.text and answer.finish_reason != "stop":
            return "an empty answer"
        return None

    with _threads(BURST) as pool:
        bad = [reason for reason in pool.map(ask, range(BURST)) if reason]
    if bad:
        raise _Failed(f"{len(bad)} of {BURST} requests at once failed: {bad[0]}")
    return f"{BURST} requests at once answered"


def _metrics(subject: Subject) -> str:
    snapshot = _snapshot(subject)
    if not snapshot.engines:
        raise _Failed("/metrics names no engine; start the server with its statistics on")
    return f"{len(snapshot.engines)} engine(s) report"


def _snapshot(subject: Subject) -> metrics.EngineSnapshot:
    return metrics.parse(
        subject.client.metrics_text(timeout=subject.timeout_seconds), at_seconds=time.monotonic()
    )


def _speculation(subject: Subject) -> str:
    """Text that is easy to draft is drafted, and acceptance is above the alert's threshold."""
    if subject.settings and subject.settings.method is None:
        raise _Skipped("speculation is not configured")
    before = _snapshot(subject)
    if not before.speculates:
        if subject.settings is None:
            raise _Skipped("the server does not speculate")
        raise _Failed("speculation is configured, but the engine counts no drafts")
    for _ in range(3):
        _complete(subject, REPETITIVE, max_tokens=64)
    after = _snapshot(subject)
    drafted, accepted = (
        (after.total(name) or 0.0) - (before.total(name) or 0.0)
        for name in ("draft_tokens", "accepted_tokens")
    )
    if drafted <= 0:
        raise _Failed("no token was drafted for a repetitive text; speculation is inactive")
    rate = accepted / drafted
    seen = f"acceptance {percent(rate)} of {drafted:.0f} drafted tokens"
    if subject.settings and drafted >= MIN_DRAFT_TOKENS:
        floor = subject.settings.alerts.acceptance_rate.fire_below
        if rate < floor:
            must = f"must be at least {percent(floor)} (alerts.acceptance_rate.fire_below)"
            raise _Failed(f"{seen}; {must}")
    return seen


def _keys(subject: Subject) -> str:
    """Requests without a key are refused: by 401, 403, 404, 405, or a redirect to a login.

    400 and 422 are answers: the request was read before the key was asked for. Anything else (429,
    5xx) says nothing about keys.
    """
    if not subject.has_key:
        raise _Skipped("no API key is set")
    paths = ("/v1/models", "/v1/completions", "/invocations")
    answers = [(_without_key(subject, path), path) for path in paths]
    read = [f"{p} ({s})" for s, p in answers if s < 300 or s in (400, 422)]
    if read:
        raise _Failed(f"answers without a key: {', '.join(read)}")
    unsure = [f"{p} ({s})" for s, p in answers if s >= 400 and s not in (401, 403, 404, 405)]
    if unsure:
        raise _Skipped(f"no verdict, without a key: {', '.join(unsure)}")
    return "requests without a key are refused"


def _without_key(subject: Subject, path: str) -> int:
    """The status of a request that has no key."""
    method, body = "POST", {"prompt": "x", "max_tokens": 1}
    if path.endswith("models"):
        method, body = "GET", {}
    answer = requests.request(
        method,
        subject.client.base_url + path,
        json=body or None,
        timeout=subject.timeout_seconds,
        verify=False,  # noqa: S501  the engine's certificate has its own name, not 127.0.0.1
        allow_redirects=False,
    )
    return answer.status_code


CHECKS: Sequence[tuple[str, Callable[[Subject], str]]] = (
    ("models", _models),
    ("completion", _completion),
    ("chat", _chat),
    ("streaming", _streaming),
    ("max-tokens", _max_tokens),
    ("stop", _stop),
    ("structured", _structured),
    ("burst", _burst),
    ("metrics", _metrics),
    ("speculation", _speculation),
    ("api-key", _keys),
)


def drain(subject: Subject, terminate: Callable[[], None], wait: Callable[[], int]) -> Outcome:
    """The last check ends the server: a running request survives SIGTERM, the exit status is 0."""
    return _one("drain", lambda _: _drains(subject, terminate, wait), subject)


def _drains(subject: Subject, terminate: Callable[[], None], wait: Callable[[], int]) -> str:
    try:
        got = _interrupted_answer(subject, terminate, 200) or _interrupted_answer(
            subject, terminate, 800
        )
    except EngineRefused as refused:
        if refused.status != 400:
            raise
        reason = _first_line(refused)[:80]
        raise _Skipped(f"the server refuses so long an answer: {reason}") from None
    if got is None:
        raise _Skipped(
            "800 tokens had come before the server could be stopped: nothing was running"
        )
    status = wait()
    if got[0] != got[1]:
        raise _Failed(
            f"a request that ran when the server was stopped got {got[0]} of {got[1]} tokens"
        )
    if status != 0:
        raise _Failed(f"the server ended with status {status} after draining; must be 0")
    return "a running request finished, then the server ended"


def _interrupted_answer(
    subject: Subject, terminate: Callable[[], None], tokens: int
) -> tuple[int | None, int] | None:
    """Stop the server in the middle of an answer: tokens received and asked for.

    None where all of them had come before.
    """
    chunks = subject.client.stream(
        PROMPT, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout=DRAIN_SECONDS
    )
    next(chunks)  # it runs
    with _threads(1) as pool:
        answer = pool.submit(collect, chunks)
        if futures.wait([answer], timeout=subject.runs_seconds).done:
            answer.result()  # raises what went wrong
            return None
        terminate()
        return answer.result().completion_tokens, tokens
