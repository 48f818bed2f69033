"""Texts for the canary, and what the same server says after the same prefixes without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.config.schema import Settings
from specserve.engine.canary.corruption import Judged
from specserve.engine.http.client import Completion, EngineClient, EngineRefused, Prompt

TOKENS = 32
"""Of a greedy text."""
COMPARED = 16
"""Of them are compared: each costs a prefill of its prefix."""
SAMPLED_TOKENS = 4
"""Short, but many: broken text stops repeating, and a lookup method then drafts, and breaks, no
more.
"""
FEW_AT_ONCE = 4
"""In a large batch, memory that was never written often holds the right value by chance."""
MOST_AT_ONCE = 16
LINE = "The quick brown fox jumps over the lazy dog. "
RAW = LINE * 2 + "The quick brown"
SHORT = "1 2 1 2 1 2"
CHAT = (
    {
        "role": "user",
        "content": f"Write this sentence five times, and nothing else: {LINE.strip()}",
    },
)

PLAIN: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
}
"""Said out loud, because a checkpoint's generation_config.json changes the defaults."""
GREEDY = {**PLAIN, "temperature": 0.0}
FULL = {**GREEDY, "ignore_eos": True}
DEFAULT: Mapping[str, Any] = {"ignore_eos": True}
"""As a client that says nothing about sampling."""
COOL = {**PLAIN, "temperature": 0.3, "ignore_eos": True}
WARM = {**PLAIN, "temperature": 1.0, "top_p": 0.95, "top_k": 20, "ignore_eos": True}


class OutOfTime(Exception):
    """Raised when the canary's time is up."""


@dataclass
class Asker:
    """Asks one engine, within a deadline."""

    client: EngineClient
    settings: Settings
    clock: Callable[[], float]
    deadline: float
    compared: int = 0
    """Tokens that were compared."""
    _raw: str = RAW

    def chat_or_raw(self, sampling: Mapping[str, Any]) -> Completion:
        """A chat where there is a chat template: draft heads are trained on those."""
        try:
            return self.client.chat(CHAT, max_tokens=TOKENS, timeout=self.left(), **sampling)
        except EngineRefused as error:
            if error.status == 503:  # full or ending; anything else may be the template
                raise
        return self.ask_raw(sampling)

    def ask_raw(self, sampling: Mapping[str, Any]) -> Completion:
        """The repetitive text; a short one where the model's context has no room for it."""
        if self._raw == RAW:
            try:
                return self.ask(RAW, sampling)
            except EngineRefused as error:
                if error.status != 400:
                    raise
            self._raw = SHORT
        return self.ask(SHORT, sampling, tokens=TOKENS // 2)

    def ask(
        self, prompt: Prompt, sampling: Mapping[str, Any], *, tokens: int = TOKENS, **extra: Any
    ) -> Completion:
        """One text."""
        return self.client.complete(
            prompt, max_tokens=tokens, timeout=self.left(), **sampling, **extra
        )

    def left(self) -> float:
        """Seconds until the deadline; OutOfTime when it has passed."""
        seconds = self.deadline - self.clock()
        if seconds <= 0:
            raise OutOfTime
        return seconds

    def judge(self, texts: Sequence[Completion], sampling: Mapping[str, Any] | None) -> Judged:
        """Ask for one token after each prefix.

        The first token is left out: it follows the prefill, undrafted.
        """
        made: list[int] = []
        prefixes: list[tuple[int, ...]] = []
        for text in texts:
            ids, tokens = text.prompt_token_ids or (), (text.token_ids or ())[:COMPARED]
            made += tokens[1:]
            prefixes += [(*ids, *tokens[:i]) for i in range(1, len(tokens))]
        self.compared += len(made)
        distinct = list(dict.fromkeys(prefixes))
        first = dict(zip(distinct, self._next_tokens(distinct, FULL), strict=True))
        if sampling:
            sampled = self._next_tokens(prefixes, sampling)
        else:
            sampled = ()
        return Judged(tuple(made), tuple(first[p] for p in prefixes), sampled)

    def _next_tokens(
        self, prefixes: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """One token after each: such a request ends before anything is drafted.

        The salt keeps KV entries that were written while drafting out of the reference.
        """
        reference = {**sampling, "max_tokens": 1, "cache_salt": "specserve-canary"}
        found: list[int] = []
        width = min([MOST_AT_ONCE, *self._limit()])
        for start in range(0, len(prefixes), width):
            answers = self.client.complete_each(
                prefixes[start : start + width], timeout=self.left(), **reference
            )
            found += [answer.token_ids[0] if answer.token_ids else -1 for answer in answers]
        return tuple(found)

    def samples(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], wanted: int
    ) -> list[Completion]:
        """Short texts after the repetitive one, in batches that the engine still drafts for."""
        widest = [FEW_AT_ONCE, *self._limit()]
        if self.settings.largest_drafting_batch is not None:
            widest.append(self.settings.largest_drafting_batch)
        # One more runs beside them.
        width = max(1, min(widest) - 1)
        found: list[Completion] = []
        while len(found) < wanted:
            prompts = [list(prompt)] * min(width, wanted - len(found))
            found += self.client.complete_each(
                prompts, max_tokens=SAMPLED_TOKENS, timeout=self.left(), **sampling
            )
        return found

    def _limit(self) -> list[int]:
        limit = self.settings.server.max_concurrent_requests
        if limit is None:
            return []
        return [limit]
