"""Texts for the canary, and what the same server says after the same prefixes without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specserve.config.schema import Settings
from specserve.engine.canary.corruption import Judged
from specserve.engine.http.client import Completion, EngineClient, EngineRefused, Prompt
from specserve.engine.http.transport import Json

TOKENS = 32
"""The length of a greedy text."""
COMPARED = 16
"""How many of those tokens are compared: each costs a prefill of its prefix."""
SAMPLED_TOKENS = 4
"""Short texts, but many: broken text stops repeating, and then a lookup method no longer drafts."""
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

Sampling = Mapping[str, Json]

PLAIN: Sampling = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
}
"""Named, because a checkpoint's generation_config.json changes the defaults."""
GREEDY: Sampling = {**PLAIN, "temperature": 0.0}
FULL: Sampling = {**GREEDY, "ignore_eos": True}
DEFAULT: Sampling = {"ignore_eos": True}
"""What a client gets that asks for no sampling."""
COOL: Sampling = {**PLAIN, "temperature": 0.3, "ignore_eos": True}
WARM: Sampling = {
    **PLAIN,
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 20,
    "ignore_eos": True,
}


class OutOfTime(Exception):
    """Raised when the canary's time is up."""


@dataclass
class CanaryClient:
    """The canary's requests to one engine, within a deadline."""

    engine: EngineClient
    settings: Settings
    clock: Callable[[], float]
    deadline: float
    compared: int = 0
    """How many tokens were compared."""
    _raw: str = RAW

    def chat_or_raw(self, sampling: Sampling) -> Completion:
        """A chat where there is a chat template: draft heads are trained on those."""
        try:
            return self.engine.chat(CHAT, max_tokens=TOKENS, timeout=self.left(), **sampling)
        except EngineRefused as error:
            if error.status == 503:  # full, or about to end; anything else may be the template
                raise
        return self.ask_raw(sampling)

    def ask_raw(self, sampling: Sampling) -> Completion:
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
        self, prompt: Prompt, sampling: Sampling, *, tokens: int = TOKENS, **extra: Json
    ) -> Completion:
        """One text."""
        return self.engine.complete(
            prompt, max_tokens=tokens, timeout=self.left(), **sampling, **extra
        )

    def left(self) -> float:
        """Seconds until the deadline; OutOfTime when it has passed."""
        seconds = self.deadline - self.clock()
        if seconds <= 0:
            raise OutOfTime
        return seconds

    def judge(self, texts: Sequence[Completion], sampling: Sampling | None) -> Judged:
        """Ask for one token after each prefix.

        The first token is left out: it follows the prefill, undrafted.
        """
        made: list[int] = []
        prefixes: list[tuple[int, ...]] = []
        for text in texts:
            ids = text.prompt_token_ids or ()
            tokens = (text.token_ids or ())[:COMPARED]
            made += tokens[1:]
            prefixes += [(*ids, *tokens[:i]) for i in range(1, len(tokens))]
        self.compared += len(made)
        distinct = list(dict.fromkeys(prefixes))
        first = dict(zip(distinct, self._next_tokens(distinct, FULL), strict=True))
        sampled: tuple[int, ...] = ()
        if sampling:
            sampled = self._next_tokens(prefixes, sampling)
        return Judged(tuple(made), tuple(first[p] for p in prefixes), sampled)

    def _next_tokens(
        self, prefixes: Sequence[Sequence[int]], sampling: Sampling
    ) -> tuple[int, ...]:
        """One token after each: such a request ends before anything is drafted.

        The salt keeps KV entries that were written while drafting out of the reference.
        """
        reference = {**sampling, "cache_salt": "specserve-canary"}
        found: list[int] = []
        width = _least(MOST_AT_ONCE, self.settings.server.max_concurrent_requests)
        for start in range(0, len(prefixes), width):
            answers = self.engine.complete_each(
                prefixes[start : start + width], max_tokens=1, timeout=self.left(), **reference
            )
            found += [(answer.token_ids or (-1,))[0] for answer in answers]
        return tuple(found)

    def samples(self, prompt: Sequence[int], sampling: Sampling, wanted: int) -> list[Completion]:
        """Short texts after the repetitive one, in batches that the engine still drafts for."""
        settings = self.settings
        widest = _least(
            FEW_AT_ONCE, settings.server.max_concurrent_requests, settings.largest_drafting_batch
        )
        width = max(1, widest - 1)  # one more request runs beside them
        found: list[Completion] = []
        while len(found) < wanted:
            prompts = [prompt] * min(width, wanted - len(found))
            found += self.engine.complete_each(
                prompts, max_tokens=SAMPLED_TOKENS, timeout=self.left(), **sampling
            )
        return found


def _least(*limits: int | None) -> int:
    return min(limit for limit in limits if limit is not None)
